"""From the stream to the models: every COMMAND of the job is consumed through a consumer of the lease's epoch, from the
first that no stored state covers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from opentinker.services.trainer.bank.limits import NAME
from opentinker.services.trainer.epoch_consumer import deliveries, open_epoch_consumer
from opentinker.shared.messaging.bus import Consumer, Delivery
from opentinker.shared.messaging.subjects import COMMAND, COMMANDS
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.codec import WireError
from opentinker.shared.types.core import Lease
from opentinker.shared.types.tinker import Command

log = structlog.get_logger()

REQUEST = re.compile(r"(?P<model>[^#]+)#(?P<seq>[0-9]{1,9})")
HELD_BYTES = 256 * 2**20
"""Commands beyond it are read from the stream a second time when it is their turn."""
FETCHED = 16
"""Largest number of commands in transit."""
STREAM = str(COMMANDS.name)


@dataclass
class Arrived:
    """A command that waits for its turn."""

    model: str
    seq: int
    stream: int
    """Its place in the stream."""
    size: int
    command: Command | None
    """None: it is in the stream alone."""
    at: float = field(default_factory=time.monotonic)


class CommandIntake:
    def __init__(self, ctx: Context, lease: Lease, offer: Callable[[Arrived], None]) -> None:
        self._ctx, self._lease, self._offer = ctx, lease, offer
        self._consumer: Consumer[Command] | None = None
        self.replay_until = 0
        """Commands up to this place in the stream may have been answered by an earlier trainer."""
        self._held_bytes = 0
        self._purged = 0

    async def open(self) -> None:
        """Create the consumer of this epoch."""
        self._consumer = await open_epoch_consumer(
            self._ctx.bus, COMMAND, self._lease, _consumer, batch=FETCHED, start_seq=1
        )
        self.replay_until = await self._ctx.bus.newest(STREAM)

    async def close(self) -> None:
        if self._consumer is not None:
            await self._consumer.close()

    async def run(self) -> None:
        """Consume COMMAND. Raises Fenced if a newer trainer has taken over."""
        assert self._consumer is not None
        async for delivery in deliveries(self._consumer, self.guard):
            self._receive(delivery)

    def _receive(self, delivery: Delivery[Command]) -> None:
        command = delivery.noun
        named = REQUEST.fullmatch(delivery.key) if command is None else None
        if command is not None:
            model, seq = command.model, command.seq
        elif named is not None:
            model, seq = named["model"], int(named["seq"])
        else:
            model, seq = "", 0
        if not NAME.fullmatch(model):
            log.error("command_dropped", request=delivery.key, error=delivery.error or "no name of a model")
            return
        if self._held_bytes + delivery.size > HELD_BYTES:
            command = None
        else:
            self._held_bytes += delivery.size
        self._offer(Arrived(model, seq, delivery.seq, delivery.size, command))

    async def command(self, arrived: Arrived) -> Command | None:
        """Return the command, whose turn it is, and forget it; None if it cannot be read."""
        command, arrived.command = arrived.command, None
        if command is not None:
            self._held_bytes -= arrived.size
            return command
        try:
            return await self._ctx.bus.stored_at(COMMAND, arrived.stream)
        except WireError as error:
            log.error("command_unreadable", model=arrived.model, seq=arrived.seq, error=str(error))
            return None

    def drop(self, arrived: Arrived) -> None:
        """Forget a command that has come a second time."""
        if arrived.command is not None:
            arrived.command = None
            self._held_bytes -= arrived.size

    async def purge(self, uncovered: Callable[[], Iterable[int]]) -> None:
        """Remove from the stream what comes before all of these places. Raises Fenced."""
        assert self._consumer is not None
        settled = await self._consumer.settled()
        # After it: what has been acknowledged until then was offered before.
        floor = min(uncovered(), default=settled + 1)
        if (below := min(floor, settled + 1)) > self._purged:
            await self.guard()
            await self._ctx.bus.purge(STREAM, COMMAND.at(job=self._lease.job), below=below)
            self._purged = below

    async def guard(self) -> None:
        """Raise Fenced if a newer epoch owns the job."""
        await self._ctx.store.require_epoch(self._lease.job, self._lease.epoch)


def _consumer(job: str, epoch: int) -> str:
    return f"commands-{job}-{epoch}"
