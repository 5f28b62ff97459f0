"""Gomoku on a game server of its own, whose statistics are logged."""

from pathlib import Path

from omegaconf import OmegaConf
from utils.http_training_client import SchedulerClient, ServiceClient  # type: ignore[import-not-found]
from utils.scheduler_client_lifecycle import get_lifecycle_manager  # type: ignore[import-not-found]

from opentinker.environment.base_game_environment import GameEnvironment
from opentinker.environment.game_stats_client import GameStatsClient
from opentinker.environment.gomoku import GomokuGame


def main() -> None:
    config = Path(__file__).parent / "client_config" / "gomoku_param.yaml"
    args = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_cli())
    scheduler = SchedulerClient(scheduler_url=args.scheduler_url, api_key=args.get("scheduler_api_key"))
    job = scheduler.submit_job(
        config=OmegaConf.to_container(args, resolve=True),
        wandb_key=args.get("wandb_key"),
        num_gpus=args.get("num_gpus"),
    )
    get_lifecycle_manager().register_job(scheduler, job["job_id"])
    options = args.interaction.config
    game_kwargs = {"board_size": options.get("board_size", 9), "max_total_steps": options.get("max_total_steps", 40)}
    env = GameEnvironment(game_class=GomokuGame, config=args, game_kwargs=game_kwargs, job_id=job["job_id"])
    assert env.env_endpoint is not None
    stats = GameStatsClient(env.env_endpoint, job_id=env.job_id)
    assert stats.health_check()
    stats.reset_all()
    client = ServiceClient(server_url=job["server_url"], project_name="opentinker", experiment_name="gomoku")
    client.set_config(args, env)
    metrics = client.fit(env, num_steps=args.num_steps, test_freq=2, game_stats_client=stats, game_stats_log_freq=1)
    env.cleanup()
    print("final", metrics["training/global_step"], "timeouts", metrics["game/total_timeouts"] > 0)


if __name__ == "__main__":
    main()
