"""A problem, programs that the policy writes on the way, and an answer in a box."""

from __future__ import annotations

import re
from typing import Any

from opentinker.environment.game_tools import Backend, Python
from opentinker.environment.math.math_game import MathGame
from opentinker.environment.math.sandbox_client import SandboxClient
from opentinker.envs.game import StepResult

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
NOTHING = "Write a program between ```python and ```, or put your final answer into \\boxed{}."
KEPT = {"monty": "Variables stay from program to program.", "sandbox": "Every program begins anew."}


class CodeInterpreterMathGame(MathGame):
    """Fenced Python is run, and its output is what the policy sees next; a box outside of it is the answer.

    `max_turns` answers of the policy, the last one included; 0: any number. Programs run in the tool `python` of a job
    (docs/environments/tools.md): `backend` is an interpreter without an operating system, or a sandbox. With
    `sandbox_url` they run there instead (opentinker.server.sandbox). A program may take `timeout` seconds.
    """

    concurrent = True

    def __init__(
        self,
        sandbox_url: str | None = None,
        max_turns: int = 10,
        timeout: float = 30.0,
        backend: Backend = "monty",
    ) -> None:
        super().__init__()
        if max_turns < 0:
            raise ValueError(f"max_turns = {max_turns}: must not be negative")
        self.sandbox_url, self.max_turns, self.timeout = sandbox_url, max_turns, timeout
        self._python = SandboxClient(sandbox_url, timeout) if sandbox_url else Python(backend, timeout)
        self.kept = KEPT["sandbox" if sandbox_url else backend]
        self.turns = self.programs = self.failed = 0

    def reset(self, ground_truth: Any = None, data_source: str = "math", extra_info: Any = None, **kwargs: Any) -> str:
        self._python.close()
        self.turns = self.programs = self.failed = 0
        return super().reset(ground_truth, data_source, extra_info, **kwargs)

    def step(self, action: str) -> StepResult:
        self.turns += 1
        words, programs = FENCED.sub("\n", action), FENCED.findall(action)
        if "\\boxed" in words:
            return self._with_counts(self.graded(words))
        seen = self._run(programs) if programs else NOTHING
        if not self.max_turns or self.turns < self.max_turns:
            return self._with_counts(StepResult(seen, 0.0, False, {}))
        unanswered = {"result": "timeout", "exact": 0.0, "answered": 0.0, "ungraded": 0.0}
        return self._with_counts(StepResult(seen, self.REWARD_INCORRECT, True, unanswered))

    def _run(self, programs: list[str]) -> str:
        outcome = self._python.run("\n".join(programs))
        self.programs += 1
        self.failed += outcome.failed
        return f"```output\n{outcome.text.rstrip()}\n```"

    def _with_counts(self, result: StepResult) -> StepResult:
        result.info |= {"programs": float(self.programs), "failed_programs": float(self.failed)}
        return result

    def get_system_prompt(self) -> str | None:
        return (
            "Solve the problem. You may write Python programs between ```python and ```; you are then shown what they "
            f"print. {self.kept} Put your final answer into \\boxed{{}}."
        )

    def get_interaction_name(self) -> str:
        return "math_code_interpreter"

    def close(self) -> None:
        self._python.close()
