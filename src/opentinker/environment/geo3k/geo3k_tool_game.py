"""A problem with a figure, and several tries at its answer."""

from __future__ import annotations

from typing import Any

from opentinker.environment.game_tools import graded
from opentinker.environment.geo3k.geo3k_game import Geo3KGame
from opentinker.envs.game import StepResult


class Geo3KToolGame(Geo3KGame):
    """A wrong answer is answered with what was read and what it was worth, never with the right one. Each try after
    the first that is no better costs PENALTY_NO_IMPROVEMENT. `max_retries`: tries after the first."""

    concurrent = True
    PENALTY_NO_IMPROVEMENT = -0.05

    def __init__(self, max_retries: int = 3) -> None:
        super().__init__()
        if max_retries < 0:
            raise ValueError(f"max_retries = {max_retries}: must not be negative")
        self.max_retries = max_retries
        self.tries = 0

    def reset(
        self, ground_truth: Any = None, data_source: str = "geometry3k", extra_info: Any = None, **kwargs: Any
    ) -> str:
        self.tries = 0
        return super().reset(ground_truth, data_source, extra_info, **kwargs)

    def step(self, action: str) -> StepResult:
        self.tries += 1
        grade = graded(self.ground_truth, action, self.data_source)
        over = grade.right or self.tries > self.max_retries
        info: dict[str, Any] = {
            "tries": float(self.tries),
            "exact": float(grade.right),
            "answered": float(grade.answered),
            "ungraded": float(grade.late),
        }
        if over:
            info["result"] = "win" if grade.right else "loss"
        missed = self.REWARD_INCORRECT if self.tries == 1 else self.PENALTY_NO_IMPROVEMENT
        reward = self.REWARD_CORRECT if grade.right else missed
        return StepResult("" if over else self._feedback(action, reward), reward, over, info)

    def _feedback(self, action: str, reward: float) -> str:
        answer = boxed(action)
        read = "No answer in \\boxed{} was found" if answer is None else f"Your answer was read as {answer}"
        left = self.max_retries + 1 - self.tries
        return f"{read}. Its reward is {reward:g}: it is not right. You have {left} more; look at the figure again."

    def get_interaction_name(self) -> str:
        return "geo3k_tool"


def boxed(text: str) -> str | None:
    """Return the content of the last box, with balanced braces."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for at, character in enumerate(text[start:], start):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[start:at].strip()
    return None
