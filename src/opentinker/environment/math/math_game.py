"""One problem, one answer, right or wrong by its value."""

from __future__ import annotations

import re
from typing import Any

from opentinker.environment.game_tools import graded
from opentinker.envs.builtin.math import INSTRUCTION
from opentinker.envs.game import AbstractGame, StepResult

HINT = "rows of a data set say it: play it with MathGameEnvironment"
UNREAD = "No answer was found. Put your final answer into \\boxed{}."


class MathGame(AbstractGame):
    """The answer is what stands in the last box, else what reads like one; of `gsm8k` data what stands after `####`.

    The problem itself is the prompt of the data set's row.
    """

    concurrent = True
    REWARD_CORRECT = 1.0
    REWARD_INCORRECT = 0.0
    REWARD_FORMAT_ERROR = 0.0
    """Nothing in the response reads like an answer."""

    def __init__(self, max_retries: int = 0, answer_pattern: str | None = None) -> None:
        """`max_retries`: how often a response without an answer is asked again. `answer_pattern`: a regular expression;
        the answer is its last match (the first group of it, if it has groups), and nothing else is looked at."""
        if max_retries < 0:
            raise ValueError(f"max_retries = {max_retries}: must not be negative")
        try:
            self._pattern = None if answer_pattern is None else re.compile(answer_pattern)
        except re.error as error:
            raise ValueError(f"answer_pattern = {answer_pattern!r:.100}: {error}") from None
        self.max_retries, self.answer_pattern = max_retries, answer_pattern
        self.attempts = 0
        self.ground_truth = ""
        self.data_source = "math"
        self.extra_info: dict[str, Any] = {}

    def reset(self, ground_truth: Any = None, data_source: str = "math", extra_info: Any = None, **kwargs: Any) -> str:
        """Raises ValueError without an answer that could be compared."""
        if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int | float) or ground_truth == "":
            raise ValueError(f"{type(self).__name__}: ground_truth must be a text, not {ground_truth!r:.40}; {HINT}")
        self.ground_truth, self.data_source = str(ground_truth), str(data_source or "math")
        self.extra_info = dict(extra_info or {})
        self.attempts = 0
        return ""

    def step(self, action: str) -> StepResult:
        self.attempts += 1
        result = self.graded(action)
        if result.info["answered"] or result.info["ungraded"] or self.attempts > self.max_retries:
            return result
        del result.info["result"]
        return StepResult(UNREAD, result.reward, False, result.info)

    def graded(self, said: str) -> StepResult:
        """The end of the episode."""
        grade = graded(self.ground_truth, self._answer_in(said), self.data_source)
        info = {
            "result": "win" if grade.right else "loss",
            "exact": float(grade.right),
            "answered": float(grade.answered),
            "ungraded": float(grade.late),
        }
        unread = not grade.answered and not grade.late
        missed = self.REWARD_FORMAT_ERROR if unread else self.REWARD_INCORRECT
        return StepResult("", self.REWARD_CORRECT if grade.right else missed, True, info)

    def _answer_in(self, said: str) -> str:
        if self._pattern is None:
            return said
        found = [match[1] if self._pattern.groups else match[0] for match in self._pattern.finditer(said)]
        written = "#### {}" if "gsm8k" in self.data_source else "\\boxed{{{}}}"
        return written.format(found[-1]) if found else ""

    def get_system_prompt(self) -> str | None:
        return INSTRUCTION

    def get_initial_user_message(self) -> str:
        return ""

    def get_state(self) -> dict[str, Any]:
        return {"ground_truth": self.ground_truth, "data_source": self.data_source}

    def get_interaction_name(self) -> str:
        return "math"
