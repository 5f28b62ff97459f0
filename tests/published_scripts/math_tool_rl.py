"""Mathematics with programs on the way, over several turns."""

from omegaconf import OmegaConf
from utils.http_training_client import SchedulerClient, ServiceClient  # type: ignore[import-not-found]
from utils.scheduler_client_lifecycle import get_lifecycle_manager  # type: ignore[import-not-found]

from opentinker.environment.math import CodeInterpreterMathGame
from opentinker.environment.math.math_tool_env import MathCodeInterpreterEnvironment

DEFAULTS = {
    "adv_estimator": "grpo",
    "rollout_n": 2,
    "batch_size": 2,
    "num_steps": 2,
    "max_prompt_tokens": 2048,
    "max_new_tokens": 2048,
    "multi_turn": {"max_user_turns": 2, "max_assistant_turns": 2, "max_tokens_per_turn": 4},
}


def main() -> None:
    args = OmegaConf.merge(DEFAULTS, OmegaConf.from_cli())
    scheduler = SchedulerClient(scheduler_url=args.scheduler_url)
    job = scheduler.submit_job(config=OmegaConf.to_container(args, resolve=True), enable_agent_loop=True)
    get_lifecycle_manager().register_job(scheduler, job["job_id"])
    env = MathCodeInterpreterEnvironment(
        game_class=CodeInterpreterMathGame,
        config=args,
        data_paths=args.data_path,
        val_data_paths=None,
        game_kwargs={"max_turns": 2},
        job_id=job["job_id"],
    )
    client = ServiceClient(server_url=job["server_url"], project_name="opentinker", experiment_name="math_tool")
    client.set_config(args, env)
    metrics = client.fit(env, num_steps=args.num_steps)
    print("final", metrics["training/global_step"])


if __name__ == "__main__":
    main()
