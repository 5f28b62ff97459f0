"""One problem, one answer, right or wrong by its value."""

from __future__ import annotations

from typing import Any

from opentinker.environment.beside import graded
from opentinker.envs.game import AbstractGame, StepResult
from opentinker.envs.math import INSTRUCTION

HINT = "rows of a data set say it: play it with MathGameEnvironment"


class MathGame(AbstractGame):
    """The answer is what stands in the last box, else what reads like one; of `gsm8k` data what stands after `####`.

    The problem itself is the prompt of the data set's row.
    """

    concurrent = True
    REWARD_CORRECT = 1.0
    REWARD_INCORRECT = 0.0

    def __init__(self) -> None:
        self.ground_truth = ""
        self.data_source = "math"
        self.extra_info: dict[str, Any] = {}

    def reset(self, ground_truth: Any = None, data_source: str = "math", extra_info: Any = None, **kwargs: Any) -> str:
        """Raises ValueError without an answer that could be compared."""
        if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int | float) or ground_truth == "":
            raise ValueError(f"{type(self).__name__}: ground_truth must be a text, not {ground_truth!r:.40}; {HINT}")
        self.ground_truth, self.data_source = str(ground_truth), str(data_source or "math")
        self.extra_info = dict(extra_info or {})
        return ""

    def step(self, action: str) -> StepResult:
        return self.graded(action)

    def graded(self, said: str) -> StepResult:
        """The end of the episode."""
        grade = graded(self.ground_truth, said, self.data_source)
        info = {
            "result": "win" if grade.right else "loss",
            "exact": float(grade.right),
            "answered": float(grade.answered),
            "ungraded": float(grade.late),
        }
        return StepResult("", self.REWARD_CORRECT if grade.right else self.REWARD_INCORRECT, True, info)

    def get_system_prompt(self) -> str | None:
        return INSTRUCTION

    def get_initial_user_message(self) -> str:
        return ""

    def get_state(self) -> dict[str, Any]:
        return {"ground_truth": self.ground_truth, "data_source": self.data_source}

    def get_interaction_name(self) -> str:
        return "math"
