"""Grades an episode: the task's tests run in new processes on the agent's files, after its last process ended.

`tests/` is not in the sandbox before that. Files that the agent has left at its place, and in /logs/verifier, are
removed first. The reward is what `tests/test.sh` writes to /logs/verifier/reward.txt, a number, or to reward.json, a
table of numbers, of which `reward` counts, or the only one. Its exit status does not matter. A verifier that runs too
long, or writes no reward, has failed: the episode is void and has no reward.
"""

from __future__ import annotations

import json
import math
from typing import Any

from opentinker.envs.harbor.box import SHARED, Answer, BoxError, BoxLost
from opentinker.envs.harbor.image import Shell
from opentinker.envs.harbor.task import SOLUTION, SOLVE_SCRIPT, TEST_SCRIPT, TESTS, Task
from opentinker.envs.harbor.workspace import Workspace
from opentinker.shared.sandbox.sandbox import Unavailable
from opentinker.shared.types.errors import OpenTinkerError

LOGS = "/logs/verifier"
REWARD, REWARDS = f"{LOGS}/reward.txt", f"{LOGS}/reward.json"
MAX_REWARD_BYTES = 1 << 16
MAX_REWARDS = 64
SHOWN = 1000
"""Characters of a failed verifier's output."""


class VerifierFailed(OpenTinkerError):
    """The tests gave no reward; the text says why."""


async def verify(workspace: Workspace, task: Task) -> tuple[float, dict[str, float]]:
    """Run the task's tests. Return the reward, and the other numbers in reward.json.

    Raises VerifierFailed; Unavailable and OSError if no sandbox can be started.
    """
    try:
        await workspace.restart({TESTS: task.folder / TESTS})
        for path in (LOGS, f"/{TESTS}"):
            await workspace.ask("remove", path=path)
        await workspace.ask("make", path=LOGS)
        await _bring(workspace, TESTS)
        shell = _shell(workspace, task.config.verifier.env)
        script = f"/{TESTS}/{TEST_SCRIPT}"
        limit = task.config.verifier.timeout_sec
        answer = await workspace.run(f"chmod +x {script}; {script}", limit, shell)
        if answer.late:
            raise VerifierFailed(f"{task.name}: the tests took longer than verifier.timeout_sec = {limit:g}")
        return await _reward(workspace, task, answer)
    except (BoxLost, BoxError) as error:
        if isinstance(error, BoxLost) and error.by_host:
            raise Unavailable(f"the sandbox of its tests was lost: {error}") from None
        raise VerifierFailed(f"{task.name}: the tests could not be run to their end: {error}") from None
    finally:
        await workspace.stop()


async def solve(workspace: Workspace, task: Task) -> Answer:
    """Run the task's own solution. Raises BoxLost, BoxError, Unavailable, OSError."""
    await workspace.restart({SOLUTION: task.folder / SOLUTION})
    await _bring(workspace, SOLUTION)
    script = f"/{SOLUTION}/{SOLVE_SCRIPT}"
    shell = _shell(workspace, task.config.solution.env)
    return await workspace.run(f"chmod +x {script}; {script}", task.config.agent.timeout_sec, shell)


async def _bring(workspace: Workspace, name: str) -> None:
    """Copy a folder of the task into the sandbox, which was started with it."""
    await workspace.ask("copy", base=f"{SHARED}/{name}", sources=["."], target=f"/{name}", directory=True)


def _shell(workspace: Workspace, variables: dict[str, str]) -> Shell:
    """The shell that the image begins with: the agent's variables do not reach the tests."""
    first = workspace.image.shell
    return Shell(first.cwd, {**first.variables, **variables})


async def _reward(workspace: Workspace, task: Task, answer: Answer) -> tuple[float, dict[str, float]]:
    for path, read in REWARD_READERS.items():
        try:
            found = await workspace.ask("read", path=path, most=MAX_REWARD_BYTES)
        except BoxError:
            continue
        try:
            return read(found.text)
        except (ValueError, RecursionError) as error:
            raise VerifierFailed(f"{task.name}: {path}: {error}") from None
    said = answer.output.strip()[-SHOWN:]
    raise VerifierFailed(
        f"{task.name}: the tests wrote neither {REWARD} nor {REWARDS} (exit status {answer.status}): {said}"
    )


def _number(text: str) -> tuple[float, dict[str, float]]:
    try:
        return _finite(float(text.strip())), {}
    except ValueError:
        raise ValueError(f"{text.strip()[:40]!r} is not a number") from None


def _table(text: str) -> tuple[float, dict[str, float]]:
    given = json.loads(text)
    if not isinstance(given, dict) or not 1 <= len(given) <= MAX_REWARDS:
        raise ValueError(f"must be a table of 1 to {MAX_REWARDS} numbers")
    numbers = {str(name)[:64]: _finite(value) for name, value in given.items()}
    if "reward" not in numbers and len(numbers) > 1:
        raise ValueError("holds several numbers, and none is named `reward`")
    reward = numbers.pop("reward") if "reward" in numbers else numbers.popitem()[1]
    return reward, numbers


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} is not a number")
    return float(value)


REWARD_READERS = {REWARD: _number, REWARDS: _table}
"""Each returns the reward and the other numbers, and raises ValueError or RecursionError."""
