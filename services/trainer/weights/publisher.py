"""Swaps weights: publishes each version to the rollout workers through one torch.distributed group per job.

    publish loop   consumes the newest snapshot and the workers' heartbeats; produces SWAP commands and the tensors;
                   waits for a new snapshot or a changed membership; woken by `offer` and WAKE

Membership follows heartbeats: when a worker joins (or returns), a new group forms and the worker gets the current
version. A worker that dies or fails breaks the group for all members; the next group forms immediately without it. A
dead worker is a member again when it answers a ping, a failed one after a pause. A version counts for admission once
at least one of the job's own workers has it; workers of inference jobs that follow its live policy are members too.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import structlog

from opentinker.services.trainer.learners.base import BUCKET_BYTES, SnapshotLike
from opentinker.services.trainer.weights.step_room import StepRoom, release_unused
from opentinker.services.trainer.weights.swap_requests import SwapCalls, SwapFailure, at_fault, slowest
from opentinker.services.trainer.weights.transport_choice import place_of, transports
from opentinker.shared.asyncio_tools import wait_event
from opentinker.shared.backoff import exponential_delay_s
from opentinker.shared.messaging.subjects import WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.timeline import Lanes
from opentinker.shared.types.core import Lease, WeightVersion
from opentinker.shared.types.errors import JobFailed, TransportError
from opentinker.shared.types.swap import SIMULATED, SwapReply, Transport
from opentinker.shared.types.workers import WorkerInfo

if TYPE_CHECKING:
    from opentinker.shared.nn.transport import WeightGroup

log = structlog.get_logger()


class Publisher:
    """`served(version, seconds)` is awaited each time a version has reached the workers. `retry_s`: first and longest
    pause before a failed worker is tried again; it doubles with each further failure. After `max_attempts` in a row,
    plus one per worker, that reached no worker, the job fails."""

    def __init__(
        self,
        ctx: Context,
        lease: Lease,
        device: str,
        served: Callable[[WeightVersion, dict[str, float]], Awaitable[None]],
        lanes: Lanes,
        policy: str = "",
        *,
        poll_s: float = 0.5,
        retry_s: tuple[float, float] = (2.0, 60.0),
        max_attempts: int = 5,
    ) -> None:
        self.ctx, self.lease, self.device, self._served, self._lanes = ctx, lease, device, served, lanes
        self._poll_s, self._retry_s, self.max_attempts = poll_s, retry_s, max_attempts
        self._calls = SwapCalls(ctx, lease, policy)
        self._snapshot: SnapshotLike | None = None
        self._wake = asyncio.Event()
        self._generation = 0
        self._store: Any = None
        self._secret = ""
        self._group: WeightGroup | None = None
        self._members: list[WorkerInfo] = []
        self._loaded: dict[str, WeightVersion] = {}
        self._failures: dict[str, int] = {}
        """Consecutive failures by worker."""
        self._not_before: dict[str, float] = {}
        self._failed_attempts = 0
        """Consecutive attempts that reached no worker."""
        self.room = StepRoom(self._calls)
        self._knows_workers = False
        """Every worker has answered: before that, any of them may have an engine that must sleep."""
        self._moving = asyncio.Lock()
        """Held while the group forms, while weights move, and while engines sleep."""

    def offer(self, snapshot: SnapshotLike) -> None:
        """Make this the version to publish; a transfer under way completes first."""
        self._snapshot = snapshot
        self._wake.set()

    @property
    def workers(self) -> int:
        return sum(self._is_own(worker) for worker in self._members)

    async def run(self) -> None:
        """Publish versions until cancelled. Raises JobFailed when no worker can take the weights."""

        async def wake(_: dict[str, Any]) -> None:
            self._wake.set()

        subscription = await self.ctx.bus.listen(WAKE, wake, who=f"trainer-{self.lease.job}")
        try:
            while True:
                if self.ctx.bus.nc.is_connected:
                    async with self._moving:
                        await self._update()
                if await wait_event(self._wake, self._poll_s):
                    self._wake.clear()
        finally:
            await subscription.unsubscribe()
            self._leave()

    @asynccontextmanager
    async def room_for_step(self) -> AsyncIterator[None]:
        """Run the body, an optimizer step, while engines sleep that have no room next to it on the trainer's GPU. One
        that does not obey is excluded until it joins again, which wakes it; a step without room fails and says so."""
        async with self._moving if self.room.sleepers or not self._knows_workers else nullcontext():
            if not self._knows_workers:
                with self._lanes.busy("swap", "find"):
                    await self._look_for_workers()
            sleepers = self.room.sleepers
            try:
                await self._tell(sleepers, "sleep")
                yield
            finally:
                if self.room.had_sleepers:
                    await asyncio.to_thread(release_unused, self.device)
                    await self._tell(sleepers, "wake")

    async def _tell(self, sleepers: list[WorkerInfo], action: str) -> None:
        if not sleepers:
            return
        now, members = time.monotonic(), _addresses(self._members)
        excluded = {name for name, end in self._not_before.items() if now < end}
        with self._lanes.busy("swap", action):
            failures = await self.room.tell(sleepers, action, self._generation, self._load_s(), excluded)
        for worker, failure in failures:
            if worker.address not in members:
                self._back_off(worker, failure)
        if own := [(worker, failure) for worker, failure in failures if worker.address in members]:
            workers, answers = zip(*own, strict=True)
            self._break_group(workers, answers, "")

    async def _look_for_workers(self) -> None:
        """Return when every worker has reported whether it sleeps, or after the time limit of a swap."""
        deadline = time.monotonic() + self._timeout_s
        while not self._knows_workers and time.monotonic() < deadline:
            if self.ctx.bus.nc.is_connected:
                await self._find_members()
            if not self._knows_workers:
                await asyncio.sleep(self._poll_s)

    async def _update(self) -> None:
        wanted = await self._find_members()
        if _addresses(wanted) != _addresses(self._members):
            with self._lanes.busy("swap", "join"):
                await self._rebuild(wanted)
        if self._has_outdated():
            await self._send()

    async def _find_members(self) -> list[WorkerInfo]:
        """Return the members that the group should have. If membership changes, every member must answer a ping."""
        now, alive = time.monotonic(), await self.ctx.store.workers()
        self.room.forget_others(_addresses(alive))
        ready = [
            worker
            for worker in alive
            if worker.takes_weights_of(self.lease.job) and now >= self._not_before.get(worker.address, now)
        ]
        if _addresses(ready) == _addresses(self._members):
            self._knows_workers = True
            return ready
        answers = await self._calls.ping_all(ready)
        self.room.note(ready, answers)
        self._knows_workers |= not any(isinstance(a, SwapFailure) and a.absent and not a.gone for a in answers)
        refused = [(w, a) for w, a in zip(ready, answers, strict=True) if isinstance(a, SwapFailure) and not a.absent]
        for worker, failure in refused:
            self._back_off(worker, failure)
        wanted = [worker for worker, answer in zip(ready, answers, strict=True) if isinstance(answer, SwapReply)]
        if (vain := [(w, f) for w, f in refused if self._is_own(w)]) and not any(self._is_own(w) for w in wanted):
            self._count_failure([worker for worker, _ in vain], [failure for _, failure in vain], "")
        return wanted

    def _is_own(self, worker: WorkerInfo) -> bool:
        """Return whether the worker generates for this job; the others serve its policy, and training does not depend
        on them."""
        return worker.ready_for(self.lease.job)

    def _has_outdated(self) -> bool:
        newest = self._snapshot
        return newest is not None and any(self._loaded.get(w.address) != newest.version for w in self._members)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
        self._give_up("the trainer has left")
        self._store = None

    def _give_up(self, why: str) -> None:
        """Release all members that wait for the group to be complete or for bytes."""
        if self._store is not None:
            from opentinker.shared.nn import transport

            # In a separate thread: a store that waits in a join serves no other call until that ends.
            threading.Thread(target=transport.give_up, args=(self._store, why), name="give-up", daemon=True).start()

    @property
    def _timeout_s(self) -> float:
        return self.ctx.settings.swap_timeout_s

    # --- membership ---------------------------------------------------------------------------------------------

    async def _rebuild(self, members: list[WorkerInfo]) -> None:
        """Form a new group of exactly these workers, or none."""
        self._leave()
        self._generation += 1
        self._members = members
        if not members:
            return
        chosen = await self._transports(members)
        world, port = 1 + len(members), self._open_store(1 + len(members))
        commands = [
            self._calls.command(
                action="join",
                generation=self._generation,
                address=self.ctx.settings.advertise_host,
                port=port,
                secret=self._secret,
                rank=rank,
                world=world,
                device="cpu" if self.device == "cuda" and transport in ("shared", "gloo") else self.device,
                transports=chosen,
            )
            for rank, transport in enumerate(chosen, 1)
        ]
        problem, answers = await self._calls.call(
            list(zip(members, commands, strict=True)), self._enter(port, chosen), self._timeout_s, self._give_up
        )
        self.room.note(members, answers)
        if problem or any(isinstance(answer, SwapFailure) for answer in answers):
            self._break_group(members, answers, problem)
            if self._is_own_fault(members, answers, problem):
                self._count_failure(members, answers, problem)
            return
        used = chosen if self._group is None else self._group.transports
        by_worker = dict(zip([w.id for w in members], used, strict=True))
        log.info("weight_group", generation=self._generation, rollout_workers=by_worker)

    async def _transports(self, members: list[WorkerInfo]) -> list[Transport]:
        """Choose the transport of each member."""
        own = next((w for w in await self.ctx.store.workers() if w.incarnation == self.lease.incarnation), None)
        if own is None or self.device != "cuda":
            return ["gloo"] * len(members)
        return transports(place_of(own), [place_of(worker) for worker in members])

    def _open_store(self, world: int) -> int:
        """Open the group's rendezvous store and return its port; 0 for a learner without tensors, which needs none."""
        if self.device == SIMULATED:
            return 0
        from opentinker.shared.nn import transport

        try:
            self._secret = transport.new_secret()
            host = self.ctx.settings.advertise_host
            self._store, port = transport.host_store(host, world, self._timeout_s, self._secret)
        except TransportError as error:
            raise JobFailed(f"{error}; see the setting advertise_host") from error
        return port

    async def _enter(self, port: int, chosen: list[Transport]) -> str:
        """Join a new group as the trainer. Returns an error message, or an empty string."""
        if self._store is None:
            return ""
        from opentinker.shared.nn import transport

        try:
            self._group = await asyncio.to_thread(
                transport.WeightGroup.join,
                address=self.ctx.settings.advertise_host,
                port=port,
                rank=0,
                world=1 + len(chosen),
                device=self.device,
                timeout_s=self._timeout_s,
                store=self._store,
                transports=chosen,
            )
        except TransportError as error:
            self._give_up(str(error))
            return str(error)
        return ""

    # --- one version --------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        """Run transfer -> checksum -> pause -> load -> stamp -> resume on all workers in parallel."""
        snapshot, members = self._snapshot, self._members
        assert snapshot is not None
        started = time.monotonic()
        command = self._calls.command(
            action="receive",
            generation=self._generation,
            device=self.device,
            version=snapshot.version,
            manifest=snapshot.manifest,
            fingerprints=snapshot.fingerprints,
            bucket_bytes=BUCKET_BYTES,
            probe=snapshot.probe,
        )
        with self._lanes.busy("swap", "publish", str(snapshot.version)):
            problem, answers = await self._calls.call(
                [(worker, command) for worker in members], self._transfer(snapshot), self._load_s(), self._give_up
            )
        good: list[SwapReply] = []
        own = 0
        for worker, answer in zip(members, answers, strict=True):
            if isinstance(answer, SwapReply):
                good.append(answer)
                own += self._is_own(worker)
                self._loaded[worker.address] = snapshot.version
                self._failures.pop(worker.address, None)
        if problem or len(good) < len(members):
            self._break_group(members, answers, problem)
        if not own:
            if self._is_own_fault(members, answers, problem):
                self._count_failure(members, answers, problem)
            return
        self._failed_attempts = 0
        phases = {f"swap/{name}_s": value for name, value in slowest(good).items()}
        if found := [reply.mismatch for reply in good if reply.mismatch is not None]:
            phases["swap/mismatch"] = max(found)
        await self._served(snapshot.version, {**phases, "swap/seconds": time.monotonic() - started})

    def _load_s(self) -> float:
        """Return the time limit of an engine for pause, load and resume, and for moving its weights out of the GPU and
        back; the group limits the transfer before it."""
        snapshot = self._snapshot
        if self._group is None or snapshot is None:
            return self._timeout_s
        from opentinker.shared.nn import transport

        sent = sum(bucket.numel() for bucket in snapshot.buckets)
        return transport.allowed_s(self._timeout_s, sent + snapshot.base_bytes)

    async def _transfer(self, snapshot: SnapshotLike) -> str:
        """Send the weights to the group. Returns an error message, or an empty string."""
        if self._group is None:
            return ""
        try:
            await asyncio.to_thread(self._group.send, snapshot.buckets)
        except TransportError as error:
            return str(error)
        return ""

    # --- failures -----------------------------------------------------------------------------------------------

    def _break_group(
        self, members: Sequence[WorkerInfo], answers: Sequence[SwapReply | SwapFailure], problem: str
    ) -> None:
        """Leave the broken group: the next iteration forms another without the workers at fault."""
        log.warning("weight_group_broken", generation=self._generation, problem=problem)
        for worker, failure in at_fault(members, answers, problem):
            self._back_off(worker, failure)
        self._leave()
        self._members = []
        self._wake.set()

    def _back_off(self, worker: WorkerInfo, failure: SwapFailure) -> None:
        """Exclude the worker, for longer each time. An absent one may return as soon as it answers."""
        log.warning("rollout_worker_excluded", rollout_worker=worker.id, why=failure.why)
        name = worker.address
        self._loaded.pop(name, None)
        if not failure.absent:
            self._failures[name] = self._failures.get(name, 0) + 1
            self._not_before[name] = time.monotonic() + exponential_delay_s(self._failures[name], *self._retry_s)

    def _is_own_fault(self, members: list[WorkerInfo], answers: list[SwapReply | SwapFailure], problem: str) -> bool:
        """Return whether the job's own workers, or the trainer, are at fault. If only workers that serve the policy
        are, the next group forms without them."""
        blamed = [worker for worker, _ in at_fault(members, answers, problem)]
        return any(self._is_own(worker) for worker in blamed or members)

    def _count_failure(self, members: list[WorkerInfo], answers: list[SwapReply | SwapFailure], problem: str) -> None:
        """Count an attempt that reached no worker. Raises JobFailed after too many in a row."""
        if not self.ctx.bus.nc.is_connected:
            return  # no worker is at fault, and the connection will return
        self._failed_attempts += 1
        if self._failed_attempts >= self.max_attempts + len(members):
            reasons = [f"{worker.id}: {failure.why}" for worker, failure in at_fault(members, answers, problem)]
            reasons += [problem] if problem else []
            version = "" if self._snapshot is None else f" {self._snapshot.version}"
            raise JobFailed(
                f"no rollout worker could take weights{version}, {self._failed_attempts} attempts in a row; last: "
                f"{'; '.join(reasons)} (each phase of a swap may take swap_timeout_s = {self._timeout_s:g} "
                "s, transfer and load also the time for their bytes at 50 MB/s)"
            )


def _addresses(workers: list[WorkerInfo]) -> set[str]:
    return {worker.address for worker in workers}
