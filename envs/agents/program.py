"""`agent_program`: runs a program that calls a model server, as OpenAI's or Anthropic's clients do, as an episode.

The program finds the server in OPENAI_BASE_URL or ANTHROPIC_BASE_URL; the last line of its output is a JSON object with
a `reward`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
from pydantic import Field, field_validator

from opentinker.envs.agent import AgentEnvironment, AgentError, Result
from opentinker.envs.base import EnvironmentConfig
from opentinker.shared.runtime.parent_death import hold_command
from opentinker.shared.runtime.reexec import kill_group

KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Environment variables of the env worker that the program inherits; its credentials are not among them."""
API_KEY = "opentinker"
"""Placeholder that clients require; the URL is the secret."""
OUTPUT_BYTES = 1024 * 1024
"""Bytes kept from the end of stdout and of stderr."""
MAX_QUOTED = 1500
"""Characters of output that an error quotes."""


class AgentProgram(AgentEnvironment):
    class Config(EnvironmentConfig):
        command: Annotated[list[str], Field(min_length=1)]
        """The program and its arguments; no shell expands them."""
        directory: str = ""
        """Working directory, relative to that of the env worker; default: an empty one, removed afterwards."""
        variables: dict[str, str] = {}  # noqa: RUF012 - pydantic copies defaults
        """Additional environment variables."""

        @field_validator("command")
        @classmethod
        def _can_be_found(cls, command: list[str]) -> list[str]:
            if shutil.which(command[0]) is None:
                raise ValueError(f"no program {command[0]!r} on the env worker's machine")
            return command

        @field_validator("directory")
        @classmethod
        def _is_there(cls, directory: str) -> str:
            if directory and not Path(directory).is_dir():
                raise ValueError(f"no directory {directory!r} on the env worker's machine")
            return directory

    config: Config

    async def run(self, base_url: str, row: int, seed: int) -> Result:
        with tempfile.TemporaryDirectory(prefix="agent-") as place:
            process = await asyncio.create_subprocess_exec(
                *hold_command(self.config.command),
                cwd=self.config.directory or place,
                env=self._variables(base_url, row, seed),
                start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None and process.stderr is not None
            reading = [asyncio.create_task(_end_of(stream)) for stream in (process.stdout, process.stderr)]
            try:
                status = await process.wait()
                kill_group(process.pid)  # processes left behind would keep the pipes open
                out, err = await asyncio.gather(*reading)
            finally:
                kill_group(process.pid)
                for task in reading:
                    task.cancel()
                await process.wait()
        return _result(status, out, err)

    def _variables(self, base_url: str, row: int, seed: int) -> dict[str, str]:
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        return {**kept, **self.config.variables, **model_variables(base_url, self.policy.model, row, seed)}


def model_variables(base_url: str, model: str, row: int, seed: int) -> dict[str, str]:
    """Return the environment variables that tell an agent where its model is and what it plays."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": API_KEY,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": API_KEY,
        "OPENTINKER_ROW": str(row),
        "OPENTINKER_SEED": str(seed),
    }


async def _end_of(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while chunk := await stream.read(64 * 1024):
        kept = (kept + chunk)[-OUTPUT_BYTES:]
    return kept


def _result(status: int, out: bytes, err: bytes) -> Result:
    """Return the program's result. Raise AgentError if it failed or printed no reward."""
    if status != 0:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        output = (err.strip() or out.strip()).decode(errors="replace")[-MAX_QUOTED:]
        raise AgentError(f"the program {how}: {output or 'it printed nothing'}")
    lines = out.strip().splitlines()
    if not lines:
        raise AgentError('the program printed no reward: its last line must be like {"reward": 1.0}')
    return result_of(lines[-1])


def result_of(line: bytes) -> Result:
    """Parse a JSON object of a reward and optional components and metrics. Raise AgentError for anything else."""
    try:
        return msgspec.json.decode(line, type=Result)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        shown = line.decode(errors="replace")[-MAX_QUOTED:]
        raise AgentError(
            f'the program\'s last line must be like {{"reward": 1.0, "components": {{}}, "metrics": {{}}}}; it is '
            f"{shown!r}: {error}"
        ) from None
