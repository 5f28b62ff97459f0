"""A game of one's own: repeat a number."""

import random

from opentinker.environment.base_game import AbstractGame, StepResult


class NumberGame(AbstractGame):
    def __init__(self, digits: int = 2):
        self.digits = digits

    def reset(self, ground_truth="", **kwargs):  # type: ignore[no-untyped-def]
        self.text = str(ground_truth)
        return f"{self.text}="

    def step(self, action):  # type: ignore[no-untyped-def]
        right = sum(a == b for a, b in zip(action, self.text, strict=False))
        return StepResult("", right / self.digits, True, {"exact": float(action == self.text)})

    def get_system_prompt(self):  # type: ignore[no-untyped-def]
        return None

    def get_initial_user_message(self):  # type: ignore[no-untyped-def]
        return ""

    def generate_initial_state(self):  # type: ignore[no-untyped-def]
        return {"ground_truth": "".join(random.choice("0123456789") for _ in range(self.digits))}
