"""Training, in the spelling of scripts that lie beside `utils`.

python -m opentinker.client train.py URL MODEL STEPS ['{"rollout": {"engine": "toy"}}']
"""

import json
import sys

from number_game import NumberGame  # type: ignore[import-not-found]
from utils.http_training_client import SchedulerClient, ServiceClient  # type: ignore[import-not-found]
from utils.scheduler_client_lifecycle import get_lifecycle_manager  # type: ignore[import-not-found]

from opentinker.environment.base_game_environment import GameEnvironment


def main() -> None:
    url, model, steps, *overrides = sys.argv[1:]
    config = {
        "experiment_name": "number game",
        "tokenizer_path": model,
        "adv_estimator": "grpo",
        "rollout_n": 4,
        "batch_size": 2,
        "max_prompt_tokens": 64,
        "max_new_tokens": 4,
        "val_batch_size": 4,
        "ppo_mini_batch_size": 16,
    }
    if overrides:
        config["opentinker"] = json.loads(overrides[0])
    scheduler = SchedulerClient(url=url)
    job = scheduler.submit_job(config=config, enable_agent_loop=True)
    get_lifecycle_manager().register_job(scheduler, job["job_id"])
    env = GameEnvironment(game_class=NumberGame, config=config, game_kwargs={"digits": 2}, job_id=job["job_id"])
    client = ServiceClient(server_url=job["server_url"], project_name="games", logger_backends=["console"])
    client.set_config(config, env)
    metrics = client.fit(env, num_steps=int(steps), save_freq=10, test_freq=5)
    print("last", sorted(metrics)[:3], scheduler.get_job_status(job["job_id"])["status"])


if __name__ == "__main__":
    main()
