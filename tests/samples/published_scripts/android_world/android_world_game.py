"""A phone without a phone: it breaks when two episodes use it at the same time."""

from typing import ClassVar

from opentinker.environment.android_world.prompts import GOAL  # type: ignore[import-not-found]

from opentinker.environment.base_game import AbstractGame, StepResult


class AndroidWorldGame(AbstractGame):
    taken_by: ClassVar[list[object]] = []

    def __init__(self, config_path=None, max_steps=20, split="train", num_games=-1, emulator_console_port=None):  # type: ignore[no-untyped-def]
        self.max_steps, self.port = max_steps, emulator_console_port

    def reset(self, task_type=None, seed=None, **kwargs):  # type: ignore[no-untyped-def]
        if any(other is not self for other in self.taken_by):
            raise RuntimeError("two episodes use one phone")
        self.taken_by[:] = [self]
        self.left = self.max_steps
        return f"{GOAL} Port {self.port}."

    def step(self, action):  # type: ignore[no-untyped-def]
        self.left -= 1
        return StepResult(
            "Nothing opened.", float("contacts" in action), self.left == 0, {"steps": self.max_steps - self.left}
        )

    def close(self) -> None:
        self.taken_by.clear()

    def get_system_prompt(self) -> str:
        return "You use a phone."

    def get_initial_user_message(self) -> str:
        return ""
