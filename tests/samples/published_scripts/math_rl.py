"""Single-turn mathematics: rows of files, answers in a box."""

from pathlib import Path

from omegaconf import OmegaConf
from utils.http_training_client import SchedulerClient, ServiceClient  # type: ignore[import-not-found]
from utils.own_helper import HELPS  # type: ignore[import-not-found]
from utils.scheduler_client_lifecycle import get_lifecycle_manager  # type: ignore[import-not-found]
from utils.utils import resolve_paths_in_config  # type: ignore[import-not-found]

from opentinker.environment.game_stats_client import GameStatsClient
from opentinker.environment.math import MathGame
from opentinker.environment.math.math_env import MathGameEnvironment


def main() -> None:
    config = Path(__file__).parent / "client_config" / "math_param.yaml"
    args = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_cli())
    args = resolve_paths_in_config(args)
    lifecycle = get_lifecycle_manager()
    scheduler = SchedulerClient(scheduler_url=args.scheduler_url, api_key=args.get("scheduler_api_key"))
    job = scheduler.submit_job(
        config=OmegaConf.to_container(args, resolve=True),
        enable_agent_loop=True,
        wandb_key=args.get("wandb_key"),
        num_gpus=args.get("num_gpus"),
    )
    lifecycle.register_job(scheduler, job["job_id"])
    endpoint = args.interaction.config.env_endpoint
    env = MathGameEnvironment(
        game_class=MathGame,
        config=args,
        data_paths=[args.data_path],
        val_data_paths=[args.val_data_path] if args.val_data_path else None,
        job_id=job["job_id"],
    )
    print("interaction", env.get_interaction_config_path(), HELPS)
    stats: GameStatsClient | None = GameStatsClient(endpoint, job_id=env.job_id)
    if stats and not stats.health_check():
        stats = None
    client = ServiceClient(
        server_url=job["server_url"],
        project_name=args.project_name,
        experiment_name=args.experiment_name,
        logger_backends=args.logger_backends,
    )
    client.set_config(args, env)
    try:
        metrics = client.fit(
            env=env,
            num_epochs=args.get("num_epochs"),
            num_steps=args.get("num_steps"),
            save_freq=args.save_freq,
            test_freq=args.test_freq,
            verbose=True,
            validate_before_training=True,
            game_stats_client=stats,
        )
    finally:
        env.cleanup()
    print("final", metrics["training/global_step"])


if __name__ == "__main__":
    main()
