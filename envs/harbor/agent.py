"""`harbor_agent`: the user's own agent in the sandbox of a Harbor task, as an environment.

    env worker: endpoint on a Unix socket <-- relay of box_runner.py, a port of loopback in the sandbox <-- the agent

The sandbox has no network: the model is all that the agent reaches. When it has ended, the task's tests grade the files
as they are. How it ended says nothing, unless it never asked the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from opentinker.envs.agent import AgentEnvironment, AgentError, Result
from opentinker.envs.agents.endpoint import Endpoint
from opentinker.envs.agents.program import model_variables
from opentinker.envs.base import ELSEWHERE, MODULES, Opening, Unreachable
from opentinker.envs.harbor.box import SHARED, Answer, BoxError, BoxLost
from opentinker.envs.harbor.episode import HarborEpisode, TasksConfig, check_set
from opentinker.envs.harbor.image import Shell
from opentinker.envs.harbor.workspace import check_size, copy_readable
from opentinker.shared.sandbox.sandbox import Unavailable

SOCKET, AGENT = "model.sock", "agent"
PLACE = f"/{AGENT}"
INSTRUCTION_FILE = f"{PLACE}/instruction.md"
MAX_QUOTED = 1500
"""Characters of the agent's output that an error quotes."""


@contextlib.contextmanager
def losses() -> Iterator[None]:
    """Turn failures of the sandbox itself, which are no fault of the agent, into Unreachable."""
    try:
        yield
    except (BoxLost, BoxError, Unavailable, OSError) as error:
        raise Unreachable(f"the sandbox of a Harbor task was lost: {error}") from None


class HarborAgent(AgentEnvironment):
    """Tasks of a set that `opentinker env add harbor:PATH` has added."""

    class Config(TasksConfig):
        command: Annotated[str, Field(min_length=1, max_length=10_000)]
        """Starts the agent, in a shell in the task's working directory."""
        files: str = ""
        """Folder of the env worker's machine that the sandbox gets as /agent, if the operator allows it (setting
        env_modules); empty: the image holds the agent."""
        variables: Annotated[dict[str, str], Field(max_length=100)] = {}  # noqa: RUF012 - pydantic copies defaults
        """Additional environment variables of the agent."""

        @field_validator("files")
        @classmethod
        def _files_are_there(cls, files: str, info: ValidationInfo) -> str:
            context = info.context or {}
            if not files or context.get(ELSEWHERE):
                return files
            if not context.get(MODULES):
                raise ValueError("reads files of the env worker's machine, which is off here (setting env_modules)")
            if not Path(files).is_dir():
                raise ValueError(f"no directory {files!r:.200} on the env worker's machine")
            check_size(Path(files))
            return files

    config: Config
    cost = 16.0
    episode: HarborEpisode | None = None

    @classmethod
    def rehearse(cls, config: BaseModel) -> None:
        assert isinstance(config, cls.Config)
        check_set(config.tasks)

    async def open(self, row: int, seed: int) -> Opening:
        self.episode = await HarborEpisode.start(self.config.tasks, row)
        try:
            return await super().open(row, seed)
        except (Unavailable, OSError) as error:
            raise Unreachable(f"no sandbox for a Harbor task: {error}") from None

    async def serve(self, endpoint: Endpoint) -> str:
        assert self.episode is not None
        workspace = self.episode.workspace
        with losses():
            route = await endpoint.start_on(workspace.shared / SOCKET)
            port = (await workspace.ask("relay", path=f"{SHARED}/{SOCKET}")).count
        return f"http://127.0.0.1:{port}{route}"

    async def run(self, base_url: str, row: int, seed: int) -> Result:
        assert self.episode is not None
        episode, workspace = self.episode, self.episode.workspace
        with losses():
            if self.config.files:
                await asyncio.to_thread(check_size, Path(self.config.files))
                await asyncio.to_thread(copy_readable, Path(self.config.files), workspace.shared / AGENT)
                await workspace.ask("copy", base=f"{SHARED}/{AGENT}", sources=["."], target=PLACE, directory=True)
            await workspace.ask("write", path=INSTRUCTION_FILE, text=episode.task.instruction)
        told = {"OPENTINKER_INSTRUCTION": INSTRUCTION_FILE}
        variables = model_variables(base_url, self.policy.model, row, seed) | told | self.config.variables
        began = time.perf_counter()
        with losses():
            ended = await self._play(Shell(workspace.shell.cwd, {**workspace.shell.variables, **variables}))
        agent_s = time.perf_counter() - began
        if ended.status and not self.has_asked:
            said = ended.output.strip()[-MAX_QUOTED:] or "it printed nothing"
            raise AgentError(f"the agent ended with exit status {ended.status} before it asked the model: {said}")
        reward, metrics = await episode.grade()
        failed = {"agent_failed": float(ended.status != 0), "agent_late": float(ended.late)}
        return Result(reward=reward, metrics={**metrics, **failed, "time/agent_s": agent_s})

    async def _play(self, shell: Shell) -> Answer:
        """Run the agent to its end, its time limit, or that of its sandbox."""
        assert self.episode is not None
        try:
            limit_s = self.episode.task.config.agent.timeout_sec
            return await self.episode.workspace.run(self.config.command, limit_s, shell)
        except BoxLost as error:
            if error.by_host:
                raise
            return Answer(status=1, output=str(error))
        except BoxError as error:
            return Answer(status=1, output=str(error))

    async def close(self) -> None:
        episode, self.episode = self.episode, None
        try:
            await super().close()
        finally:
            if episode is not None:
                await episode.workspace.close()
