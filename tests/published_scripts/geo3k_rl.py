"""Geometry; of rows that show nothing, or with a model that sees."""

from omegaconf import OmegaConf
from utils.http_training_client import SchedulerClient, ServiceClient  # type: ignore[import-not-found]
from utils.scheduler_client_lifecycle import get_lifecycle_manager  # type: ignore[import-not-found]

from opentinker.environment.geo3k import Geo3KGameEnvironment, Geo3KToolEnvironment

DEFAULTS = {
    "adv_estimator": "grpo",
    "rollout_n": 2,
    "batch_size": 2,
    "num_steps": 2,
    "max_prompt_tokens": 512,
    "max_new_tokens": 512,
    "tool": False,
    "multi_turn": {"max_assistant_turns": 2, "max_tokens_per_turn": 4},
}


def main() -> None:
    args = OmegaConf.merge(DEFAULTS, OmegaConf.from_cli())
    scheduler = SchedulerClient(scheduler_url=args.scheduler_url)
    job = scheduler.submit_job(config=OmegaConf.to_container(args, resolve=True), enable_agent_loop=True)
    get_lifecycle_manager().register_job(scheduler, job["job_id"])
    data = {"data_paths": [args.data_path], "val_data_paths": [args.val_data_path], "job_id": job["job_id"]}
    env = Geo3KToolEnvironment(args, **data, max_retries=1) if args.tool else Geo3KGameEnvironment(args, **data)
    client = ServiceClient(server_url=job["server_url"], project_name="opentinker", experiment_name="geo3k")
    client.set_config(args, env)
    metrics = client.fit(env, num_steps=args.num_steps, test_freq=2)
    print("final", metrics["training/global_step"])


if __name__ == "__main__":
    main()
