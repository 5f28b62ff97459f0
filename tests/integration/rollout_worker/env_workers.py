"""Env worker processes of a test, and requests to them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.env_protocol import OpenSession, SessionReply, StepSession
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import Server, until
from tests.support.cluster import PYTHONPATH
from tests.support.service_forks import Fork, fork_server


class Workers:
    """Env worker processes of one test."""

    def __init__(self, nats: Server, valkey: Server, store: Store) -> None:
        self.nats, self.valkey, self.store = nats, valkey, store
        self.processes: dict[str, Fork] = {}

    async def start(self, name: str, log: Path | None = None, **variables: str) -> None:
        environ = {
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "OPENTINKER_NATS_URL": self.nats.url,
            "OPENTINKER_REDIS_URL": self.valkey.url,
            "OPENTINKER_WORKER_ID": name,
            "OPENTINKER_ENV_MODULES": "1",
            "OPENTINKER_DRAIN_S": "5",
            "OPENTINKER_HEARTBEAT_S": "0.1",
            "OPENTINKER_WORKER_TTL_S": "3",
            **variables,
        }
        place = log or Path(os.devnull)
        self.processes[name] = fork_server("light").start("opentinker.services.env_worker", environ, Path.cwd(), place)
        await until(lambda: self.beats(name))

    async def beats(self, name: str) -> bool:
        info = await self.info(name)
        return info is not None and info.pid == self.processes[name].pid and info.status == "ready"

    async def info(self, name: str) -> WorkerInfo | None:
        return next((info for info in await self.store.workers() if info.id == name), None)

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    async def end(self, name: str) -> int:
        await until(lambda: self.processes[name].poll() is not None)
        return self.processes[name].wait()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
async def workers(nats_server: Server, valkey_server: Server, store: Store) -> AsyncIterator[Workers]:
    workers = Workers(nats_server, valkey_server, store)
    yield workers
    workers.close()


@pytest.fixture
def client(bus: Bus) -> EnvClient:
    return EnvClient(bus, ask_s=1.0, gone_s=0.5)


def opening(session: str, environment: str = "guess_number", deadline_s: float = 20.0, **config: Any) -> OpenSession:
    return OpenSession(
        job="j", session=session, environment=environment, config=config, row=1, seed=2, deadline_s=deadline_s
    )


def guess(reply: SessionReply, session: str, turn: int = 0, text: str = "?") -> tuple[str, StepSession]:
    return reply.worker, StepSession(session=session, turn=turn, text=text, stop=StopReason.EOS)
