"""Phones: the game is the checkout's own, on game servers that take one episode at a time."""

from pathlib import Path

from omegaconf import OmegaConf
from utils.http_training_client import SchedulerClient, ServiceClient  # type: ignore[import-not-found]
from utils.scheduler_client_lifecycle import get_lifecycle_manager  # type: ignore[import-not-found]

from opentinker.environment.android_world import AndroidWorldGame
from opentinker.environment.base_game_environment import GameEnvironment


def main() -> None:
    config = Path(__file__).parent / "client_config" / "android_world_param.yaml"
    args = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_cli())
    scheduler = SchedulerClient(scheduler_url=args.scheduler_url, api_key=args.get("scheduler_api_key"))
    job = scheduler.submit_job(
        config=OmegaConf.to_container(args, resolve=True),
        wandb_key=args.get("wandb_key"),
        num_gpus=args.get("num_gpus"),
    )
    get_lifecycle_manager().register_job(scheduler, job["job_id"])
    options = args.interaction.config
    game_kwargs = {"max_steps": options.get("max_total_steps", 50), "split": options.get("split", "train")}
    env = GameEnvironment(game_class=AndroidWorldGame, config=args, game_kwargs=game_kwargs, job_id=job["job_id"])  # type: ignore[arg-type]
    client = ServiceClient(server_url=job["server_url"], experiment_name=args.experiment_name)
    client.set_config(args, env)
    metrics = client.fit(env=env, num_steps=args.num_steps, save_freq=args.save_freq, test_freq=args.test_freq)
    print("final", metrics["training/global_step"])


if __name__ == "__main__":
    main()
