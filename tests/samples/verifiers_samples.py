"""Environments of the verifiers library as their authors write them, for both of its interfaces; and a stand-in for the
library itself, for what needs none of it."""

from __future__ import annotations

from pathlib import Path

OLD = '''
import verifiers as vf
from datasets import Dataset


def right(completion, answer, **_):
    return float(completion[-1]["content"].strip() == answer)


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "again="}]

    @vf.stop
    async def said_twice(self, state, **_):
        return len(state["trajectory"]) >= 2


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def load_environment(kind: str = "single", count: int = 4):
    rows = Dataset.from_list([{"question": f"{n}=", "answer": str(n)} for n in range(count)])
    rubric = vf.Rubric(funcs=[right])
    if kind == "multi":
        return Twice(dataset=rows, rubric=rubric)
    if kind == "tool":
        return vf.ToolEnv(dataset=rows, rubric=rubric, tools=[add], max_turns=3)
    return vf.SingleTurnEnv(dataset=rows, rubric=rubric, system_prompt="copy ")
'''

NEW = """
import verifiers.v1 as vf


class CopyData(vf.TaskData):
    answer: str


class CopyTask(vf.Task[CopyData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class CopySet(vf.Taskset[CopyTask]):
    def load(self):
        for n in range(4):
            yield CopyTask(CopyData(prompt=f"{n}=", answer=str(n)), self.config.task)


__all__ = ["CopySet"]
"""

STAND_IN = '''
import asyncio, json, os, time, urllib.request


class Misbehaving:
    """Of the library's 0.1 interface, what is used; plays as `how` says."""

    requires_group_rollouts = False
    sampling_args = None

    def __init__(self, how):
        self.how = how
        if how == "load":
            raise ValueError("the data is not there")

    def get_dataset(self):
        return [{"example_id": n, "prompt": f"{n}="} for n in range(4)]

    async def run_rollout(self, row, client, model, sampling_args):
        body = {"model": model, "messages": [{"role": "user", "content": row["prompt"]}]}
        request = urllib.request.Request(client.url + "/chat/completions", json.dumps(body).encode())
        answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
        if self.how == "crash":
            os._exit(7)
        if self.how == "hang":
            await asyncio.Event().wait()
        if self.how == "block":
            open(os.path.join(os.path.dirname(__file__), "blocked"), "w").close()
            time.sleep(600)
        if self.how == "error":
            return {"error": "ModelError: it said no", "reward": 0.0}
        text = answer["choices"][0]["message"]["content"]
        return {"reward": float(text == "yes"), "metrics": {"pid": float(os.getpid()), "odd": float("nan")}}

    async def _teardown(self):
        pass


def load_environment(id, how="work"):
    return Misbehaving(how)
'''
CLIENTS = """
class resolve_client:
    def __init__(self, config):
        self.url = config["api_base_url"]

    async def close(self):
        pass
"""


def write_stand_in(directory: Path) -> Path:
    package = directory / "verifiers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "clients.py").write_text(CLIENTS)
    (package / "types.py").write_text("ClientConfig = dict\n")
    metadata = directory / "verifiers-0.1.14.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.1.14\n")
    return directory


def write_samples(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "copy_old.py").write_text(OLD)
    (directory / "copy_new.py").write_text(NEW)
    return directory


def write_package(directory: Path, source: str) -> Path:
    """A package `copy-hub` 1.2 with an environment, as the Environments Hub has them."""
    directory.mkdir(parents=True)
    (directory / "copy_hub.py").write_text(source)
    (directory / "pyproject.toml").write_text(PACKAGE)
    return directory


PACKAGE = """
[project]
name = "copy-hub"
version = "1.2"

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
only-include = ["copy_hub.py"]
"""
