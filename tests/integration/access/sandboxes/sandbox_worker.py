"""An env worker without a bus, for environments in sandboxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sandboxes import Sandboxes
from opentinker.envs.runtime.sessions import Sessions
from opentinker.sdk.environments import pack
from opentinker.services.scheduler.environments.upload import Uploads
from opentinker.shared.config import Settings
from opentinker.shared.data import uploads
from opentinker.shared.types.env_protocol import CloseSession, SessionReply
from tests.conftest import until
from tests.samples.upload_samples import receive
from tests.support.playing import opening, step


class Worker:
    """An env worker without a bus: what it holds, and sessions to play."""

    def __init__(self, settings: Settings, sandboxes: Sandboxes) -> None:
        self.data = settings.data_dir
        self.sandboxes = sandboxes
        self.host = ChildPool(children=3, per_child=4, modules=settings.env_modules, sandboxes=sandboxes)
        self.sessions = Sessions("w", limit=20, resolver=Resolver(modules=settings.env_modules), host=self.host)
        self.isolation: Literal["process", "sandbox"] = "sandbox"
        self._count = 0

    def push(self, directory: Path) -> str:
        held = Uploads(self.data, 32)
        package, version, _ = receive(held, pack(directory))
        return str(uploads.Reference(package.name, version.version, version.digest))

    async def open(
        self, name: str, job: str = "j", deadline_s: float = 60.0, **config: Any
    ) -> tuple[str, SessionReply]:
        self._count += 1
        session = f"s{self._count}"
        request = opening(name, session, job=job, row=3, seed=4, deadline_s=deadline_s, **config)
        return session, await self.sessions.open(msgspec.structs.replace(request, isolation=self.isolation))

    async def step(self, session: str, text: str = "x", turn: int = 0) -> SessionReply:
        return await self.sessions.step(step(turn, text, session))

    async def said(self, name: str, job: str = "j", **config: Any) -> str:
        session, opened = await self.open(name, job, **config)
        assert opened.failure is None, opened.error
        reply = await self.step(session)
        assert reply.failure is None, reply.error
        await self.sessions.close(CloseSession(session=session))
        await until(lambda: not self.sessions._closing)
        return str(reply.messages[0].content)
