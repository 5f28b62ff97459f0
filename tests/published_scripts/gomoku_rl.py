"""Gomoku on a game server of its own, whose statistics are logged."""

from omegaconf import OmegaConf
from utils.http_training_client import SchedulerClient, ServiceClient  # type: ignore[import-not-found]
from utils.scheduler_client_lifecycle import get_lifecycle_manager  # type: ignore[import-not-found]

from opentinker.environment.base_game_environment import GameEnvironment
from opentinker.environment.game_stats_client import GameStatsClient
from opentinker.environment.gomoku import GomokuGame

DEFAULTS = {
    "adv_estimator": "grpo_per_step",
    "rollout_n": 2,
    "batch_size": 2,
    "num_steps": 2,
    "val_batch_size": 2,
    "board_size": 5,
    "max_prompt_tokens": 2048,
    "max_new_tokens": 2048,
    "multi_turn": {"max_user_turns": 3, "max_assistant_turns": 3, "max_tokens_per_turn": 3},
    "interaction": {"name": "gomoku", "config": {"env_endpoint": None, "max_steps": 3}},
}


def main() -> None:
    args = OmegaConf.merge(DEFAULTS, OmegaConf.from_cli())
    scheduler = SchedulerClient(scheduler_url=args.scheduler_url)
    job = scheduler.submit_job(config=OmegaConf.to_container(args, resolve=True), enable_agent_loop=True)
    get_lifecycle_manager().register_job(scheduler, job["job_id"])
    game_kwargs = {"board_size": args.board_size, "max_total_steps": 3}
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
