"""Harbor tasks as an environment: the policy works in a sandbox with a terminal and file tools, and the task's tests
grade what it leaves.

    env worker: open --> Boxes.take (warm or new) --> tools --> step: the agent's processes end --> verifier --> reward

Every row is a task of the set. An episode whose sandbox or verifier fails is void: it has no reward, least of all 0.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationInfo, model_validator

from opentinker.envs.base import ELSEWHERE, Action, Environment, EnvironmentConfig, Opening, Step, Unreachable, call
from opentinker.envs.harbor.box import Answer, BoxError, BoxLost
from opentinker.envs.harbor.boxes import HOME, boxes
from opentinker.envs.harbor.image import Image
from opentinker.envs.harbor.library import MAX_TASKS, load_set, load_task
from opentinker.envs.harbor.task import SOLUTION, SOLVE_SCRIPT, Task
from opentinker.envs.harbor.verifier import verify
from opentinker.envs.harbor.workspace import Workspace
from opentinker.envs.tools import ToolError, ToolFailed, tool
from opentinker.shared.sandbox.sandbox import Unavailable
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.types.core import Message, ToolCall

INSTRUCTION = (
    "You work in a Linux sandbox without network. Use the tools to do the task. When it is done, answer with a short"
    " sentence and without a tool call: the task is graded then."
)
FILE_BYTES = 18_000
READ_BYTES = 1 << 20
MAX_COMMAND = 100_000
"""Characters of a command, or of a file that is written."""


class Harbor(Environment):
    """Tasks of a set that `opentinker env add harbor:PATH` has added."""

    class Config(EnvironmentConfig):
        tasks: Annotated[str, Field(min_length=1, max_length=63)]
        """Name of the set."""
        instruction: str = INSTRUCTION
        """System message; empty: none."""
        command_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
        """Time limit of a command that asks for none, and the longest that it may ask for."""

        @model_validator(mode="after")
        def _is_there(self, info: ValidationInfo) -> Self:
            if not (info.context or {}).get(ELSEWHERE):
                load_set(load_settings().data_dir.resolve() / HOME, self.tasks)
            return self

    config: Config
    cost = 16.0
    can_fork = True

    @classmethod
    def rehearse(cls, config: BaseModel) -> None:
        """Read the first task, and see that every image is there."""
        assert isinstance(config, cls.Config)
        settings = load_settings()
        home = settings.data_dir.resolve() / HOME
        entries = load_set(home, config.tasks).tasks
        load_task(home, settings, entries[0])
        for entry in entries:
            Image.load(home, entry.image)

    async def open(self, row: int, seed: int) -> Opening:
        began = time.perf_counter()
        settings = load_settings()
        self.void = ""
        """Why the episode can have no reward."""
        self.tool_s = 0.0
        self.first_turn = True
        self.workspace: Workspace | None = None
        try:
            plane = await boxes()
            found = await asyncio.to_thread(load_set, plane.home, self.config.tasks)
            entry = found.tasks[row % len(found.tasks)]
            key = (entry.digest, entry.image)
            if key not in plane.loaded:
                if len(plane.loaded) >= MAX_TASKS:
                    plane.loaded.clear()
                plane.loaded[key] = await asyncio.to_thread(load_task, plane.home, settings, entry)
            task, image = plane.loaded[key]
            self.task: Task = task
            self.workspace = await plane.take(image, task.config.environment)
        except (Unavailable, OSError) as error:
            raise Unreachable(f"no sandbox for a Harbor task: {error}") from None
        self.start_s = time.perf_counter() - began
        self.due = time.monotonic() + task.config.agent.timeout_sec
        told = [Message(role="system", content=self.config.instruction)] if self.config.instruction else []
        return Opening(messages=[*told, Message(role="user", content=task.instruction)])

    def __deepcopy__(self, _: dict[int, Any]) -> Harbor:
        """An episode in the same state: the files are copied, the processes are not."""
        other = Harbor(self.config)
        other.__dict__.update(self.__dict__)
        if self.workspace is not None:
            other.workspace = self.workspace.fork()
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
        answer = await self._ask("read", path=self._absolute(path), most=READ_BYTES)
        found = answer.text.splitlines(keepends=True)[max(0, first_line - 1) :][: max(0, lines)]
        return "".join(found)[:FILE_BYTES] or "(nothing there)"

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
        answer = await self._ask("read", path=self._absolute(path), most=READ_BYTES)
        if answer.size > READ_BYTES:
            raise ToolError("the file is too large: use the terminal")
        if "\ufffd" in answer.text:
            raise ToolError("the file is not UTF-8 text: use the terminal")
        if not old or (count := answer.text.count(old)) != 1:
            raise ToolError(f"`old` occurs {count if old else 0} times; it must occur exactly once")
        await self._ask("write", path=self._absolute(path), text=answer.text.replace(old, new))
        return "replaced"

    def _absolute(self, path: str) -> str:
        assert self.workspace is not None
        return path if path.startswith("/") else f"{self.workspace.shell.cwd.rstrip('/')}/{path}"

    async def _ask(self, op: str, **arguments: Any) -> Answer:
        """Raises ToolError. Notes a sandbox that cannot be started: the episode is void then."""
        workspace, began = self.workspace, time.perf_counter()
        assert workspace is not None
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
        assert self.workspace is not None
        if self.void:
            raise Unreachable(f"the sandbox of {self.task.name} is gone: {self.void}")
        try:
            verdict = await verify(self.workspace, self.task)
        except (Unavailable, OSError) as error:
            raise Unreachable(f"{self.task.name} could not be graded: {error}") from None
        phases = {"time/start_s": self.start_s, "time/tool_s": self.tool_s, "time/verify_s": verdict.seconds}
        solved = {"exact": float(verdict.reward >= 1.0)}
        return Step(reward=verdict.reward, done=True, metrics={**verdict.numbers, **solved, **phases})

    async def close(self) -> None:
        workspace, self.workspace = getattr(self, "workspace", None), None
        if workspace is not None:
            await workspace.close()

    def gold(self) -> Message | None:
        """The task's solution, written and run by the tools, then the last turn. None without one, or if it is not
        text."""
        folder = self.task.folder / SOLUTION
        if not self.task.has_solution:
            return None
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
