"""The Tinker API on the scheduler's HTTP server: its handlers and background tasks.

    client --HTTP--> handlers --COMMAND, SAMPLE--> trainer, rollout worker --ANSWERED--> futures --> client

It is stateless: any scheduler answers any request.
"""

from __future__ import annotations

import asyncio

from opentinker.services.scheduler.tinker.access import Access
from opentinker.services.scheduler.tinker.billing_api import BillingApi
from opentinker.services.scheduler.tinker.commands import Commands
from opentinker.services.scheduler.tinker.downloads_api import DownloadsApi
from opentinker.services.scheduler.tinker.endings import Endings
from opentinker.services.scheduler.tinker.expiry import expire
from opentinker.services.scheduler.tinker.futures import Futures
from opentinker.services.scheduler.tinker.futures_api import HOLD_S, FuturesApi
from opentinker.services.scheduler.tinker.large_bodies import Places
from opentinker.services.scheduler.tinker.runs_api import RunsApi
from opentinker.services.scheduler.tinker.sampling_api import SamplingApi
from opentinker.services.scheduler.tinker.sessions_api import TinkerSessionsApi
from opentinker.services.scheduler.tinker.training_api import TrainingApi
from opentinker.shared.runtime.service import Context


class TinkerGateway:
    def __init__(self, ctx: Context) -> None:
        access = Access(ctx)
        self._access, self._futures = access, Futures(ctx, access.store)
        commands = Commands(access)
        self._endings = Endings(access, commands)
        bodies = Places()
        self.handlers: tuple[object, ...] = (
            TinkerSessionsApi(access, self._endings),
            TrainingApi(access, commands, self._endings, bodies),
            FuturesApi(access, self._futures, HOLD_S),
            SamplingApi(access, bodies),
            RunsApi(access),
            DownloadsApi(access),
            BillingApi(access),
        )

    async def run(self) -> None:
        """Hear of answers, delete expired checkpoints and close sessions that were left, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._futures.run())
            tasks.create_task(expire(self._access))
            tasks.create_task(self._endings.run())
