"""Single-turn mathematics: rows of files, answers in a box."""

from omegaconf import OmegaConf
from utils.http_training_client import SchedulerClient, ServiceClient  # type: ignore[import-not-found]
from utils.scheduler_client_lifecycle import get_lifecycle_manager  # type: ignore[import-not-found]
from utils.utils import resolve_paths_in_config  # type: ignore[import-not-found]

from opentinker.environment.math import MathGame
from opentinker.environment.math.math_env import MathGameEnvironment

DEFAULTS = {
    "project_name": "opentinker",
    "experiment_name": "math_training",
    "logger_backends": ["console"],
    "algorithm": "agent_loop",
    "adv_estimator": "grpo",
    "rollout_n": 2,
    "batch_size": 2,
    "num_workers": 4,
    "num_epochs": None,
    "num_steps": 3,
    "save_freq": 20000,
    "test_freq": 2,
    "val_batch_size": 2,
    "temperature": 0.7,
    "top_p": 1,
    "max_prompt_tokens": 2048,
    "max_new_tokens": 4,
    "multi_turn": {"max_user_turns": 0, "max_assistant_turns": 1},
    "interaction": {"name": "math", "config": {"max_steps": 1, "observation_template": "{observation}"}},
    "scheduler_api_key": None,
}


def main() -> None:
    args = OmegaConf.merge(DEFAULTS, OmegaConf.from_cli())
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
    env = MathGameEnvironment(
        game_class=MathGame,
        config=args,
        data_paths=[args.data_path],
        val_data_paths=[args.val_data_path] if args.val_data_path else None,
        job_id=job["job_id"],
    )
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
        )
    finally:
        env.cleanup()
    print("final", metrics["training/global_step"])


if __name__ == "__main__":
    main()
