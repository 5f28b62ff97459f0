"""Weight versions: trainer -> rollout workers, by one torch.distributed group per job.

    publish loop   consumes the newest snapshot and the workers' heartbeats; produces SWAP commands and the tensors;
                   waits for a new snapshot or a changed membership; woken by `offer` and WAKE

Membership follows heartbeats: a worker that comes (or comes back) makes a new group and gets the current version;
one that fails is left out and tried again later. A version counts for admission once at least one worker has it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from opentinker.services.trainer.learner import BUCKET_BYTES, SnapshotLike
from opentinker.shared.bus import NoReply
from opentinker.shared.codec import WireError
from opentinker.shared.service import Context
from opentinker.shared.subjects import SWAP, WAKE
from opentinker.shared.types import Lease, Pool, SwapCommand, SwapReply, WeightVersion, WorkerInfo
from opentinker.shared.waiting import set_within

log = structlog.get_logger()

LOOK_S = 0.5
AGAIN_S = 2.0
"""A worker that failed is not tried again earlier."""


class Publisher:
    """`served(version, seconds)` is awaited each time a version has reached the workers."""

    def __init__(
        self,
        ctx: Context,
        lease: Lease,
        device: str,
        served: Callable[[WeightVersion, dict[str, float]], Awaitable[None]],
    ) -> None:
        self.ctx, self.lease, self.device, self._served = ctx, lease, device, served
        self._snapshot: SnapshotLike | None = None
        self._wake = asyncio.Event()
        self.sending = asyncio.Lock()
        """Held while a snapshot travels: its buffers must not be reused meanwhile."""
        self._generation = 0
        self._group: Any = None
        self._members: list[WorkerInfo] = []
        self._has: dict[str, WeightVersion] = {}
        self._failed_at: dict[str, float] = {}
        self.failures = 0

    def offer(self, snapshot: SnapshotLike) -> None:
        """Call with `sending` held or before `run`: from now on this is the version to have."""
        self._snapshot = snapshot
        self._wake.set()

    @property
    def workers(self) -> int:
        return len(self._members)

    async def run(self) -> None:
        async def wake(_: dict[str, Any]) -> None:
            self._wake.set()

        subscription = await self.ctx.bus.listen(WAKE, wake, who=f"trainer-{self.lease.job}")
        try:
            while True:
                async with self.sending:
                    wanted = await self._wanted()
                    if {_name(w) for w in wanted} != {_name(w) for w in self._members}:
                        await self._rebuild(wanted)
                    if self._behind():
                        await self._send()
                if await set_within(self._wake, LOOK_S):
                    self._wake.clear()
        finally:
            await subscription.unsubscribe()
            self._leave()

    async def _wanted(self) -> list[WorkerInfo]:
        now = time.monotonic()
        return [
            w
            for w in await self.ctx.store.workers()
            if w.pool == Pool.ROLLOUT
            and w.job == self.lease.job
            and w.status == "ready"
            and now - self._failed_at.get(_name(w), -AGAIN_S) >= AGAIN_S
        ]

    def _behind(self) -> bool:
        version = None if self._snapshot is None else self._snapshot.version
        return version is not None and any(self._has.get(_name(w)) != version for w in self._members)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _drop(self, worker: WorkerInfo, why: str) -> None:
        log.warning("rollout_worker_left_out", rollout_worker=worker.id, why=why)
        self.failures += 1
        self._failed_at[_name(worker)] = time.monotonic()
        self._has.pop(_name(worker), None)
        self._members = [w for w in self._members if _name(w) != _name(worker)]
        self._wake.set()

    async def _ask(self, worker: WorkerInfo, command: SwapCommand) -> SwapReply | str:
        """The worker's reply, or why there is none."""
        try:
            reply = await self.ctx.bus.request(SWAP, command, self._timeout_s, worker=_name(worker))
        except (NoReply, WireError) as error:
            return str(error)
        return reply if reply.ok else reply.error

    @property
    def _timeout_s(self) -> float:
        return self.ctx.settings.swap_timeout_s

    # --- membership ---------------------------------------------------------------------------------------------

    async def _rebuild(self, members: list[WorkerInfo]) -> None:
        """A new group of exactly these workers. Whoever does not join is left out and the rest tries again later."""
        self._leave()
        self._generation += 1
        self._members = members
        if not members:
            return
        world = 1 + len(members)
        store, port, joining = None, 0, None
        if self.device != "none":
            from opentinker.shared.nn import transport

            store, port = transport.host_store(self.ctx.settings.advertise_host, world, self._timeout_s)
            joining = asyncio.create_task(asyncio.to_thread(self._join, store, port, world))
        replies = await asyncio.gather(
            *(
                self._ask(
                    worker,
                    SwapCommand(
                        job=self.lease.job,
                        epoch=self.lease.epoch,
                        action="join",
                        generation=self._generation,
                        address=self.ctx.settings.advertise_host,
                        port=port,
                        rank=rank,
                        world=world,
                        device=self.device,
                    ),
                )
                for rank, worker in enumerate(members, start=1)
            )
        )
        problem = None if joining is None else await joining
        failed = [(w, r) for w, r in zip(members, replies, strict=True) if isinstance(r, str)]
        if not failed and problem is None:
            log.info("weight_group", generation=self._generation, rollout_workers=[w.id for w in members])
            return
        for worker, why in failed or [(w, problem or "") for w in members]:
            self._drop(worker, why)
        self._members = []
        self._wake.set()

    def _join(self, store: Any, port: int, world: int) -> str | None:
        """Blocking. None, or what went wrong."""
        from opentinker.shared.nn import transport

        try:
            self._group = transport.WeightGroup.join(
                address=self.ctx.settings.advertise_host,
                port=port,
                rank=0,
                world=world,
                device=self.device,
                timeout_s=self._timeout_s,
                store=store,
            )
        except transport.TransportError as error:
            return str(error)
        return None

    # --- one version --------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        """pause -> transfer -> checksum -> stamp -> resume on every worker at once; one that fails stays behind."""
        snapshot, members = self._snapshot, self._members
        assert snapshot is not None
        started = time.monotonic()
        command = SwapCommand(
            job=self.lease.job,
            epoch=self.lease.epoch,
            action="receive",
            generation=self._generation,
            device=self.device,
            version=snapshot.version,
            manifest=snapshot.manifest,
            fingerprints=snapshot.fingerprints,
            bucket_bytes=BUCKET_BYTES,
        )
        asking = asyncio.gather(*(self._ask(worker, command) for worker in members))
        problem = None if self._group is None else await asyncio.to_thread(self._transfer, snapshot)
        replies = await asking
        good = [(w, r) for w, r in zip(members, replies, strict=True) if isinstance(r, SwapReply)]
        for worker, reply in good:
            if reply.version == snapshot.version:
                self._has[_name(worker)] = snapshot.version
        if problem is not None or len(good) < len(members):
            log.warning("swap_incomplete", version=str(snapshot.version), problem=problem)
            for worker, why in zip(members, replies, strict=True):
                if isinstance(why, str):
                    self._drop(worker, why)
            self._members = []  # the group is broken for all: the next turn of the loop makes a new one
            self._wake.set()
        if good:
            phases = {f"swap/{name}_s": value for name, value in _slowest([r for _, r in good]).items()}
            await self._served(snapshot.version, {**phases, "swap/seconds": time.monotonic() - started})

    def _transfer(self, snapshot: SnapshotLike) -> str | None:
        """Blocking. None, or what went wrong."""
        from opentinker.shared.nn import transport

        try:
            self._group.send(snapshot.buckets)
        except transport.TransportError as error:
            return str(error)
        return None


def _name(worker: WorkerInfo) -> str:
    """The worker's address on SWAP (`LeasedWorker.address`)."""
    return f"{worker.id}-{worker.incarnation}"


def _slowest(replies: list[SwapReply]) -> dict[str, float]:
    phases: dict[str, float] = {}
    for reply in replies:
        for name, value in reply.seconds.items():
            phases[name] = max(phases.get(name, 0.0), value)
    return phases
