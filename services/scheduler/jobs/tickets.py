"""Admission: room under the staleness bound -> tickets.

    ticket loop   consumes the room that `Admission.issue` grants; produces TICKET, one portion per job and round;
                  waits for 0.2 s unless a job has room for more; woken by WAKE "admission" (a group was accepted or
                  failed, a version was served)

A number is issued in Redis before its ticket is stored in NATS, so a crash in between leaves a running group without
a ticket. A sweep at start and every few seconds stores what is missing, under the same message id. So it does when the
store of the NATS server was full.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import nats.errors
import structlog

from opentinker.services.scheduler.jobs.outages import Outages, down_too_long
from opentinker.shared.asyncio_tools import wait_event
from opentinker.shared.evaluation.pool_draws import choose_opponent
from opentinker.shared.messaging.bus import NoReply, StreamFull
from opentinker.shared.messaging.stored_messages import required_stream
from opentinker.shared.messaging.subjects import TICKET, WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.admission import admission_of
from opentinker.shared.state.circuits import DOWN, Circuit
from opentinker.shared.state.group_ledger import Ledger
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.types.core import HELD, JobRecord, JobState, Ticket
from opentinker.shared.types.error_text import error_sentence
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.pools import PoolRecords

log = structlog.get_logger()

SWEEP_S = 5.0
PORTION = 64
"""Tickets that a job gets before the next job has its turn."""
MAX_SWEPT = 256
"""Lost tickets of a job that one sweep stores again."""
JUDGED_FROM = 20
"""Groups that must have ended before the share of failed ones is judged."""


def ticket_seed(seed: int, position: int) -> int:
    """Start-state seed of a group: the first 53 bits of SHA-256 of "<rollout.seed>/<position>"; the same everywhere.

    Without a seed in the spec it is 0; then only what the policy samples differs from run to run.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{position}".encode()).digest()[:8], "big") >> 11


class TicketIssuer:
    """`leader`: the number of this scheduler's leadership; what it writes into jobs is refused after it."""

    def __init__(self, ctx: Context, leader: int = UNFENCED, poll_s: float = 0.2) -> None:
        self._poll_s = poll_s
        self.ctx, self.store, self.bus, self.leader = ctx, ctx.store, ctx.bus, leader
        self._wake = asyncio.Event()
        self._outages = Outages(ctx.store, leader)
        self._missing: dict[str, set[int]] = {}
        """Per job: running groups that had no ticket in the last sweep."""
        self._full = False
        """True: the store has no room for a ticket, which was logged."""

    async def run(self) -> None:
        swept_at = float("-inf")
        async with self.bus.wakes(self._wake, WAKE, who="admission"):
            while True:
                self._wake.clear()
                more = await self.issue()
                if time.monotonic() - swept_at >= SWEEP_S:
                    await self.sweep()
                    swept_at = time.monotonic()
                if not more:
                    await wait_event(self._wake, self._poll_s)

    async def _held(self) -> list[JobRecord]:
        return [job for job in await self.store.held_jobs() if job.kind == "rl"]

    async def issue(self) -> bool:
        """One portion per job. True if a job may have room for more."""
        more, held = False, await self._held()
        self._outages.keep(held)
        for job in held:
            circuit = await self._outages.look(job)
            more |= await self._issue_portion(job, circuit)
            await self._fail_if_failing(job, circuit)
        return more

    async def _issue_portion(self, job: JobRecord, circuit: Circuit) -> bool:
        if circuit.is_open and time.time() < circuit.retry_at:
            return False
        _, seqs = await admission_of(self.store.redis, job).issue(1 if circuit.is_open else PORTION)
        if circuit.is_open and seqs:
            await self._outages.tried(job)
        return await self._store(job, seqs) and len(seqs) == PORTION

    async def _store(self, job: JobRecord, seqs: list[int], again: str = "") -> bool:
        """Store tickets in NATS. Return False if the store is full; the sweep stores the missing ones when there is
        room."""
        if not seqs:
            return True
        admission = admission_of(self.store.redis, job)
        shift = await admission.shift()
        # Read after the numbers were issued: a trainer that has removed a member knows which tickets may name it.
        pools = await admission.pools() if job.spec.get("pools") else {}
        tickets = [_ticket(job, seq, seq - shift, draw_opponents(job.spec, pools, seq)) for seq in seqs]
        try:
            await asyncio.gather(
                *(self.bus.publish(TICKET, one, f"{job.id}/{one.seq}{again}", job=job.id) for one in tickets)
            )
        except StreamFull as error:
            if not self._full:
                log.warning("stream_full", job=job.id, error=str(error))
            self._full = True
            return False
        self._full = False
        return True

    async def sweep(self) -> None:
        """Tickets are listed before running groups: a group that ends in between is not taken for one without a
        ticket."""
        for job in await self._held():
            try:
                await self._republish(job)
            except (NoReply, TimeoutError, nats.errors.Error) as error:
                log.warning("sweep_deferred", job=job.id, error=str(error) or type(error).__name__)

    async def _republish(self, job: JobRecord) -> None:
        admission = admission_of(self.store.redis, job)
        if await self.bus.count(required_stream(TICKET), TICKET.at(job=job.id)) >= len(await admission.running()):
            self._missing.pop(job.id, None)
            return
        stored = {ticket.seq for ticket in await self.bus.stored(TICKET, job=job.id)}
        missing = set(sorted(set(await admission.running()) - stored)[:MAX_SWEPT])
        if missing:
            stubborn = missing & self._missing.get(job.id, set())
            log.warning("tickets_republished", job=job.id, groups=sorted(missing))
            await self._store(job, sorted(missing - stubborn))
            # Stored once and gone although the group runs: the server would take the old id for a repetition.
            await self._store(job, sorted(stubborn), again=f"/{time.time_ns()}")
        self._missing[job.id] = missing

    async def _fail_if_failing(self, job: JobRecord, circuit: Circuit) -> None:
        """Fail a job whose environment has been down for too long, or whose groups fail too often otherwise."""
        if circuit.is_open:
            problem, said = down_too_long(circuit, job, time.time()), circuit.error
        else:
            share = job.spec["rollout"]["max_failed_share"]
            ledgers = [await admission_of(self.store.redis, job, policy).ledger() for policy in job.policies or ("",)]
            problem = next(filter(None, (too_many_failures(ledger, share) for ledger in ledgers)), None)
            last = await self.store.latest_event(job.id, "group_failed") if problem else None
            said = error_sentence(last["error"]) if last else ""
        if problem is None:
            return
        reason = f"{problem}; last error: {said}" if said else problem
        try:
            await self.store.transition(job.id, JobState.FAILED, allowed=HELD, leader=self.leader, reason=reason)
        except (Conflict, NotFound):
            return  # it has ended by itself
        log.error("job_failed", job=job.id, reason=reason)
        await self.bus.emit(WAKE, {"job": job.id}, who="scheduler")


def too_many_failures(ledger: Ledger, max_share: float) -> str | None:
    """The reason to fail the job, or None. Groups that failed while the environment was down do not count."""
    reasons_counted = {reason: count for reason, count in ledger.failed.items() if reason != DOWN}
    failed = sum(reasons_counted.values())
    ended = failed + ledger.accepted
    if ended < JUDGED_FROM or (failed <= max_share * ended and ledger.accepted):
        return None
    ranked = sorted(reasons_counted.items(), key=lambda item: -item[1])[:3]
    reasons = ", ".join(f"{name} {count}" for name, count in ranked)
    return f"{failed} of {ended} groups failed (rollout.max_failed_share is {max_share:g}): {reasons}"


def draw_opponents(spec: dict[str, Any], pools: PoolRecords, seq: int) -> dict[str, str]:
    """Return which member of each pool plays a group, see `choose_opponent`. `spec`: of the job, as stored; `pools`: as
    its trainer has told."""
    return {
        name: choose_opponent(
            pools[name].members,
            pools[name].win_rates,
            rule=pool["rule"],
            latest=pool["latest"],
            seed=spec["rollout"]["seed"] or 0,
            match=seq // pool["stretch"],
            pool=name,
        )
        for name, pool in (spec.get("pools") or {}).items()
    }


def _ticket(job: JobRecord, seq: int, position: int, opponents: dict[str, str]) -> Ticket:
    """`position`: the number without those used in vain; it alone decides the start state."""
    return Ticket(
        job=job.id,
        seq=seq,
        row=position,
        seed=ticket_seed(job.spec["rollout"]["seed"] or 0, position),
        trace=job.trace,
        group_size=job.spec["algorithm"]["group_size"],
        opponents=opponents,
    )
