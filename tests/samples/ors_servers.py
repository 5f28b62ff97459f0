"""Servers of the Open Reward Standard, by its two SDKs, each in a Python of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from uv import find_uv_bin

from tests.conftest import free_port
from tests.samples.openenv_servers import running

SDKS = {"ors": "ors-sdk==0.1.0", "openreward": "openreward==0.1.167"}
"""Packages by the name of their module."""


@contextmanager
def real(place: Path, module: str) -> Iterator[str]:
    """Give the URL of a server with two environments: sums by a tool, and sums by a turn without a call where the SDK
    has terminal tools."""
    python = place / "venv" / "bin" / "python"
    imports = "ors" if module == "ors" else "openreward.environments"
    (place / "served.py").write_text(SERVED.replace("SDK", imports))
    port = free_port()
    for command in (
        [find_uv_bin(), "venv", "--quiet", "--no-project", "--python", sys.executable, str(place / "venv")],
        [find_uv_bin(), "pip", "install", "--quiet", "--python", str(python), SDKS[module]],
    ):
        subprocess.run(command, check=True, timeout=500, cwd=place, stdout=subprocess.DEVNULL)
    with running([str(python), "served.py", str(port)], place, port) as url:
        yield url


SERVED = '''
import sys

from pydantic import BaseModel
from SDK import Environment, Server, Split, TextBlock, ToolOutput, tool

try:
    from SDK import terminal
except ImportError:
    terminal = None


class Answer(BaseModel):
    answer: str


class Sums(Environment):
    @classmethod
    def list_splits(cls):
        return [Split(name="train", type="train"), Split(name="test", type="test")]

    @classmethod
    def list_tasks(cls, split):
        return [{"a": number, "b": 2 if split == "train" else 3} for number in range(5)]

    def get_prompt(self):
        return [TextBlock(text=f"{self.task_spec['a']}+{self.task_spec['b']}=")]

    def grade(self, answer):
        return float(answer.strip() == str(self.task_spec["a"] + self.task_spec["b"]))

    @tool
    async def hint(self) -> ToolOutput:
        """Tell whether the sum is even."""
        even = (self.task_spec["a"] + self.task_spec["b"]) % 2 == 0
        return ToolOutput(blocks=[TextBlock(text="even" if even else "odd")], reward=-0.1, finished=False)

    @tool
    async def submit(self, params: Answer) -> ToolOutput:
        """Hand in the sum."""
        reward = self.grade(params.answer)
        return ToolOutput(blocks=[TextBlock(text="right" if reward else "wrong")], reward=reward, finished=True)


served = [Sums]
if terminal is not None:

    class Said(Sums):
        @terminal
        @tool
        async def graded(self, params: Answer) -> ToolOutput:
            """Grade what is said."""
            return ToolOutput(blocks=[TextBlock(text="")], reward=self.grade(params.answer), finished=True)

    served.append(Said)

Server(served).run(host="127.0.0.1", port=int(sys.argv[1]))
'''
