"""A server of the Open Reward Standard with one environment, for `environment.name = "ors"`: sums, answered by a tool.

uv venv ors && uv pip install --python ors ors-sdk==0.1.0
ors/bin/python examples/libraries/ors_sums.py        # http://127.0.0.1:8001
"""

from __future__ import annotations

from ors import (  # type: ignore[import-not-found]  # has a Python of its own
    Environment,
    Server,
    Split,
    TextBlock,
    ToolOutput,
    tool,
)
from pydantic import BaseModel


class Answer(BaseModel):
    number: int


class Sums(Environment):  # type: ignore[misc]  # the SDK has no types
    @classmethod
    def list_splits(cls) -> list[Split]:
        return [Split(name="train", type="train")]

    @classmethod
    def list_tasks(cls, split: str) -> list[dict[str, int]]:
        return [{"a": a, "b": b} for a in range(10, 20) for b in range(10, 20)]

    def get_prompt(self) -> list[TextBlock]:
        return [TextBlock(text=f"What is {self.task_spec['a']} + {self.task_spec['b']}? Hand your answer in.")]

    @tool  # type: ignore[untyped-decorator]
    async def hint(self) -> ToolOutput:
        """Tell the last digit of the sum. A hint costs 0.2."""
        last = (self.task_spec["a"] + self.task_spec["b"]) % 10
        return ToolOutput(blocks=[TextBlock(text=f"It ends in {last}.")], reward=-0.2, finished=False)

    @tool  # type: ignore[untyped-decorator]
    async def answer(self, params: Answer) -> ToolOutput:
        """Hand in the sum."""
        right = params.number == self.task_spec["a"] + self.task_spec["b"]
        return ToolOutput(blocks=[TextBlock(text="right" if right else "wrong")], reward=float(right), finished=True)


if __name__ == "__main__":
    Server([Sums]).run(host="127.0.0.1", port=8001)
