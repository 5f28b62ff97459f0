"""A program as the published interface has it, in the spelling of scripts that lie beside `utils`; run by the tests.

python -m opentinker.client tests/published_program.py URL MODEL STEPS
"""

import random
import sys

from utils.http_training_client import SchedulerClient, ServiceClient  # type: ignore[import-not-found]
from utils.scheduler_client_lifecycle import get_lifecycle_manager  # type: ignore[import-not-found]

from opentinker.environment.base_game import AbstractGame, StepResult
from opentinker.environment.base_game_environment import GameEnvironment


class NumberGame(AbstractGame):
    def __init__(self, digits: int = 2):
        self.digits = digits

    def reset(self, text: str = "", **kwargs):  # type: ignore[no-untyped-def]
        self.text = text
        return f"{text}="

    def step(self, action):  # type: ignore[no-untyped-def]
        right = sum(a == b for a, b in zip(action, self.text, strict=False))
        return StepResult("", right / self.digits, True, {"exact": float(right == self.digits)})

    def get_system_prompt(self):  # type: ignore[no-untyped-def]
        return None

    def get_initial_user_message(self):  # type: ignore[no-untyped-def]
        return ""

    def generate_initial_state(self):  # type: ignore[no-untyped-def]
        return {"text": "".join(random.choice("0123456789") for _ in range(self.digits))}


def main() -> None:
    url, model, steps = sys.argv[1:]
    config = {
        "experiment_name": "number game",
        "tokenizer_path": model,
        "adv_estimator": "grpo",
        "rollout_n": 4,
        "batch_size": 2,
        "max_prompt_tokens": 16,
        "max_new_tokens": 4,
        "val_batch_size": 4,
        "ppo_mini_batch_size": 16,
        "opentinker": {
            "model": {"chat_template": "plain"},
            "rollout": {"engine": "toy"},
            "train": {"learner": "simulated", "simulated_step_s": 0.02},
        },
    }
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
