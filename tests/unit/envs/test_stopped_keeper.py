"""A keeper that was stopped cannot end what an environment has started: the env worker does."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from opentinker.envs.runtime import child_process
from opentinker.shared.runtime.reexec import below
from tests.conftest import soon, until


async def test_what_a_stopped_keeper_keeps_is_killed_by_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "KILL_S", 0.2)
    process = await asyncio.create_subprocess_exec("sh", "-c", "setsid sleep 60 & wait", start_new_session=True)
    await until(lambda: any(os.getsid(pid) == pid for pid in below(process.pid)))
    kept = below(process.pid)
    process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    plain = child_process.Plain(process)
    plain.kill("it is over")
    assert await soon(plain.wait()) == -signal.SIGKILL
    await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in kept))
