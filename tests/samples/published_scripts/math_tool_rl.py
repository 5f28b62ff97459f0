"""Mathematics with programs on the way, over several turns."""

from pathlib import Path

from omegaconf import OmegaConf
from utils.http_training_client import SchedulerClient, ServiceClient  # type: ignore[import-not-found]
from utils.scheduler_client_lifecycle import get_lifecycle_manager  # type: ignore[import-not-found]

from opentinker.environment.math import CodeInterpreterMathGame
from opentinker.environment.math.math_tool_env import MathCodeInterpreterEnvironment


def main() -> None:
    config = Path(__file__).parent / "client_config" / "math_param.yaml"
    args = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_cli())
    scheduler = SchedulerClient(scheduler_url=args.scheduler_url, api_key=args.get("scheduler_api_key"))
    job = scheduler.submit_job(
        config=OmegaConf.to_container(args, resolve=True),
        wandb_key=args.get("wandb_key"),
        num_gpus=args.get("num_gpus"),
    )
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
