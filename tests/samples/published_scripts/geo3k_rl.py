"""Geometry; of rows that show nothing, or with a model that sees."""

from pathlib import Path

from omegaconf import OmegaConf
from utils.http_training_client import SchedulerClient, ServiceClient  # type: ignore[import-not-found]
from utils.scheduler_client_lifecycle import get_lifecycle_manager  # type: ignore[import-not-found]

from opentinker.environment.geo3k import Geo3KGameEnvironment, Geo3KToolEnvironment


def main() -> None:
    config = Path(__file__).parent / "client_config" / "geo3k_param.yaml"
    args = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_cli())
    scheduler = SchedulerClient(scheduler_url=args.scheduler_url, api_key=args.get("scheduler_api_key"))
    job = scheduler.submit_job(
        config=OmegaConf.to_container(args, resolve=True),
        wandb_key=args.get("wandb_key"),
        num_gpus=args.get("num_gpus"),
    )
    get_lifecycle_manager().register_job(scheduler, job["job_id"])
    data = {"data_paths": [args.data_path], "val_data_paths": [args.val_data_path], "job_id": job["job_id"]}
    env = Geo3KToolEnvironment(args, **data, max_retries=1) if args.get("tool") else Geo3KGameEnvironment(args, **data)
    client = ServiceClient(server_url=job["server_url"], project_name="opentinker", experiment_name="geo3k")
    client.set_config(args, env)
    metrics = client.fit(env, num_steps=args.num_steps, save_freq=args.save_freq, test_freq=2)
    print("final", metrics["training/global_step"])


if __name__ == "__main__":
    main()
