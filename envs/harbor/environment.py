"""Harbor tasks as an environment: the policy works in a sandbox with a terminal and file tools, and the task's tests
grade what it leaves.

    env worker: open --> HarborEpisode.start (a warm sandbox or a new one) --> tools --> step: its grade --> reward

Every row is a task of the set. An episode whose sandbox or verifier fails is void: it has no reward, least of all 0.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, Field

from opentinker.envs.base import Action, Environment, Opening, Step, Unreachable, call
from opentinker.envs.harbor.box import Answer, BoxError, BoxLost
from opentinker.envs.harbor.episode import HarborEpisode, TaskRows, TasksConfig, check_set
from opentinker.envs.harbor.task import SOLUTION, SOLVE_SCRIPT
from opentinker.envs.tools import ToolError, ToolFailed, tool
from opentinker.shared.sandbox.sandbox import Unavailable
from opentinker.shared.types.core import Message, ToolCall

INSTRUCTION = (
    "You work in a Linux sandbox without network. Use the tools to do the task. When it is done, answer with a short"
    " sentence and without a tool call: the task is graded then."
)
SHOWN_CHARACTERS = 18_000
"""Characters of a file that the policy sees at a time."""
FILE_BYTES = 1 << 20
"""Bytes of a file that are read for the policy."""
MAX_COMMAND = 100_000
"""Characters of a command, or of a file that is written."""


class Harbor(Environment):
    """Tasks of a set that `opentinker env add harbor:PATH` has added."""

    class Config(TasksConfig):
        instruction: str = INSTRUCTION
        """System message; empty: none."""
        command_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
        """Time limit of a command that asks for none, and the longest that it may ask for."""

    config: Config
    cost = 16.0
    can_fork = slow_fork = True

    @classmethod
    def rehearse(cls, config: BaseModel) -> None:
        assert isinstance(config, cls.Config)
        check_set(config.tasks)

    @classmethod
    def data_rows(cls, config: BaseModel) -> TaskRows:
        assert isinstance(config, cls.Config)
        return TaskRows(config.tasks, config.instruction)

    async def open(self, row: int, seed: int) -> Opening:
        self.void = ""
        """Why the episode can have no reward."""
        self.tool_s = 0.0
        self.first_turn = True
        self.episode: HarborEpisode | None = None
        self.episode = await HarborEpisode.start(self.config.tasks, row)
        task = self.episode.task
        self.due = time.monotonic() + task.config.agent.timeout_sec
        told = [Message(role="system", content=self.config.instruction)] if self.config.instruction else []
        return Opening(messages=[*told, Message(role="user", content=task.instruction)])

    def __deepcopy__(self, _: dict[int, Any]) -> Harbor:
        """An episode in the same state: the files are copied, the processes are not."""
        other = Harbor(self.config)
        other.__dict__.update(self.__dict__)
        if self.episode is not None:
            other.episode = replace(self.episode, workspace=self.episode.workspace.fork())
        return other

    # --- tools ----------------------------------------------------------------------------------------------------

    @tool(timeout_s=None)
    async def bash(self, command: str, timeout_s: float | None = None) -> str:
        """Run a shell command. The directory and exported variables stay for the next one, background processes too.

        Args:
            command: what to run; it gets no input
            timeout_s: seconds after which it is ended
        """
        longest = self.config.command_timeout_s
        limit = min(longest, max(0.1, timeout_s)) if timeout_s is not None else longest
        left = self.due - time.monotonic()
        if left <= 0:
            raise ToolError("the time for this task is over: answer now")
        answer = await self._ask("run", command=_bounded(command), timeout_s=min(limit, left))
        if answer.late:
            raise ToolFailed(f"{answer.output}\n(ended: it took longer than {min(limit, left):g} s)".lstrip())
        if answer.status:
            raise ToolFailed(f"{answer.output}\n(exit status {answer.status})".lstrip())
        return answer.output or "(no output)"

    @tool(timeout_s=None)
    async def read_file(self, path: str, first_line: int = 1, lines: int = 400) -> str:
        """Return lines of a text file.

        Args:
            path: absolute, or relative to the terminal's directory
        """
        answer = await self._ask("read", path=self._absolute(path), most=FILE_BYTES)
        found = answer.text.splitlines(keepends=True)[max(0, first_line - 1) :][: max(0, lines)]
        return "".join(found)[:SHOWN_CHARACTERS] or "(nothing there)"

    @tool(timeout_s=None)
    async def write_file(self, path: str, content: str) -> str:
        """Write a text file, and the directories above it; what was there is replaced."""
        await self._ask("write", path=self._absolute(path), text=_bounded(content))
        return "written"

    @tool(timeout_s=None)
    async def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file.

        Args:
            old: the text, with as many lines around it as make it unique
            new: what stands there afterwards
        """
        answer = await self._ask("read", path=self._absolute(path), most=FILE_BYTES)
        if answer.size > FILE_BYTES:
            raise ToolError("the file is too large: use the terminal")
        if "\ufffd" in answer.text:
            raise ToolError("the file is not UTF-8 text: use the terminal")
        if not old or (count := answer.text.count(old)) != 1:
            raise ToolError(f"`old` occurs {count if old else 0} times; it must occur exactly once")
        await self._ask("write", path=self._absolute(path), text=answer.text.replace(old, new))
        return "replaced"

    def _absolute(self, path: str) -> str:
        assert self.episode is not None
        return path if path.startswith("/") else f"{self.episode.workspace.shell.cwd.rstrip('/')}/{path}"

    async def _ask(self, op: str, **arguments: Any) -> Answer:
        """Raises ToolError. Notes a sandbox that cannot be started: the episode is void then."""
        assert self.episode is not None
        workspace, began = self.episode.workspace, time.perf_counter()
        if self.void:
            raise ToolError("the sandbox is gone: answer now")
        try:
            if op == "run":
                return await workspace.run(arguments["command"], arguments["timeout_s"])
            return await workspace.ask(op, **arguments)
        except BoxError as error:
            raise ToolError(str(error)) from None
        except BoxLost as error:
            raise ToolError(f"the sandbox was ended: {error}; its files are still there, its processes not") from None
        except (Unavailable, OSError) as error:
            self.void = str(error)
            raise ToolError("the sandbox is gone: answer now") from None
        finally:
            self.tool_s += time.perf_counter() - began

    # --- the end --------------------------------------------------------------------------------------------------

    async def step(self, action: Action) -> Step:
        """Grade the episode: a turn without a tool call is its last."""
        assert self.episode is not None
        if self.void:
            raise Unreachable(f"the sandbox of {self.episode.task.name} is gone: {self.void}")
        reward, metrics = await self.episode.grade()
        return Step(reward=reward, done=True, metrics={**metrics, "time/tool_s": self.tool_s})

    async def close(self) -> None:
        episode, self.episode = getattr(self, "episode", None), None
        if episode is not None:
            await episode.workspace.close()

    def gold(self) -> Message | None:
        """The task's solution, written and run by the tools, then the last turn. None without one, or if it is not
        text."""
        if self.episode is None or not self.episode.task.has_solution:
            return None
        folder = self.episode.task.folder / SOLUTION
        if not self.first_turn:
            return Message(role="assistant", content="Done.")
        self.first_turn = False
        try:
            files = {path: path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}
        except UnicodeDecodeError:
            return None
        calls = [
            ToolCall(id=f"t00000n{number:02}", name="write_file", arguments={
                "path": f"/{SOLUTION}/{path.relative_to(folder)}", "content": text})
            for number, (path, text) in enumerate(files.items())
        ]  # fmt: skip
        script = f"/{SOLUTION}/{SOLVE_SCRIPT}"
        calls += call("bash", command=f"chmod +x {script}; {script}").tool_calls
        calls[-1] = ToolCall(id=f"t00000n{len(calls) - 1:02}", name="bash", arguments=calls[-1].arguments)
        return Message(role="assistant", tool_calls=calls)


def _bounded(text: str) -> str:
    if len(text) > MAX_COMMAND:
        raise ToolError(f"that is too long: at most {MAX_COMMAND:,} characters")
    return text
