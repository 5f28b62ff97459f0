"""Processes of a vLLM engine that end while vLLM kills them."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.conftest import until
from tests.support.vllm_engines import MARKS

pytestmark = MARKS

PARENT = """
import subprocess, sys, time
for _ in range(3):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("started", flush=True)
time.sleep(600)
"""


def family() -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A process with three children."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout as lines:
        assert lines.readline() == b"started\n"
    children = psutil.Process(parent.pid).children()
    assert len(children) == 3
    return parent, children


async def test_a_child_that_has_just_ended_saves_neither_the_others_nor_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import vllm.v1.utils

    from opentinker.services.rollout_worker.engines import ended_children

    parent, children = family()
    name = psutil.Process.name
    raised: list[int] = []

    def ends_now(self: psutil.Process) -> str:
        if not raised:
            raised.append(self.pid)
            raise psutil.NoSuchProcess(self.pid)
        return str(name(self))

    monkeypatch.setattr(psutil.Process, "name", ends_now)
    ended_children.repair()
    vllm.v1.utils.kill_process_tree(parent.pid)
    assert raised
    await until(lambda: parent.poll() is not None)
    await until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
