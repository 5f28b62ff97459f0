"""From the stream to the assembler: every group of a policy is consumed through a consumer of the trainer's epoch, and
trained, discarded or recognized as one that was consumed before."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from functools import partial

import structlog

from opentinker.services.trainer.batch.assembler import Assembler
from opentinker.services.trainer.epoch_consumer import deliveries, open_epoch_consumer
from opentinker.services.trainer.job_reporter import JobReporter
from opentinker.services.trainer.joint_progress import JointProgress
from opentinker.shared.messaging.bus import Consumer, Delivery
from opentinker.shared.messaging.subjects import GROUP, WAKE
from opentinker.shared.spec.matches.opposition import Opposition
from opentinker.shared.state.admission import Admission
from opentinker.shared.types.core import Discard
from opentinker.shared.types.errors import JobFailed, RestartNeeded
from opentinker.shared.types.trajectories import Group, Trajectory

log = structlog.get_logger()

SETTLE_TIMEOUT_S = 2.0
MAX_INVALID = 100
"""Number of unreadable or inconsistent groups over a job's life before it fails."""
MAX_FETCHED = 256
"""Maximum number of groups in transit to the trainer."""


def consumer_name(job: str, epoch: int, policy: str = "") -> str:
    """Return the name of the durable consumer through which the trainer of this epoch reads GROUP, for each policy of a
    job with several."""
    return f"train-{job}-{epoch}-{policy}" if policy else f"train-{job}-{epoch}"


def _has_others(trajectory: Trajectory, policy: str) -> bool:
    """Return whether anybody but the policy played in its episode, or would have."""
    players = {trajectory.policy, *(seat.policy for seat in trajectory.idle.values())}
    return players != {policy} or bool(trajectory.bots)


class Intake:
    """Consumes the groups of one policy, and keeps its assembler and its ledger in Redis alike."""

    def __init__(
        self,
        reporter: JobReporter,
        admission: Admission,
        assembler: Assembler,
        joint: JointProgress,
        step: Callable[[], int],
    ) -> None:
        """`step`: returns how many the policy has made."""
        self.ctx, self.lease, self.policy = reporter.ctx, reporter.lease, reporter.policy
        self.reporter, self.admission, self.assembler, self.joint = reporter, admission, assembler, joint
        self._step = step
        self._opposition = Opposition(reporter.spec, reporter.policy)
        self._consumer: Consumer[Group] | None = None
        self.arrived = asyncio.Event()
        """A group has arrived, or another policy has moved."""
        joint.watch(self.arrived)
        self.received = 0
        """Bytes of trajectories received by this trainer."""
        self.is_over = False
        """Whether the policy has made its last step and saved it: what arrives is for others."""
        self._discarding = asyncio.Lock()
        """Held while groups are discarded, first in the assembler and then in Redis: no checkpoint sees half of it."""

    async def open(self) -> None:
        """Create the consumer of this epoch, from the checkpoint on."""
        self._consumer = await open_epoch_consumer(
            self.ctx.bus,
            GROUP,
            self.lease,
            partial(consumer_name, policy=self.policy),
            batch=min(2 * self.reporter.spec.algorithm.groups_per_batch, MAX_FETCHED),
            start_seq=self.assembler.floor + 1,
        )

    async def close(self) -> None:
        if self._consumer is not None:
            await self._consumer.close()

    async def run(self) -> None:
        """Consume GROUP into the assembler."""
        assert self._consumer is not None
        async for delivery in deliveries(self._consumer, self.reporter.guard):
            await self._receive(delivery)

    async def _receive(self, delivery: Delivery[Group]) -> None:
        group = delivery.noun
        if self.is_over:  # played for other policies
            return
        self.received += delivery.size
        if group is None:
            log.error("undecodable_group", group=delivery.key, error=delivery.error)
            named = re.match(r".*/([0-9]{1,15})(:|$)", delivery.key)  # JOB/NUMBER:ATTEMPT, see Group.key
            number = int(named[1]) if named else -1
            if named is None or number in self.assembler.known or await self._is_consumed(number):
                self.assembler.ignore(delivery.seq, self._step() + 1)
            else:
                await self._reject(delivery.seq, number, delivery.error)
            return
        if group.seq in self.assembler.known or await self._is_consumed(group.seq):
            self.assembler.ignore(delivery.seq, self._step() + 1)
            return
        try:
            group.check()
        except ValueError as error:
            log.error("invalid_group", group=group.seq, error=str(error))
            await self._reject(delivery.seq, group.seq, str(error))
            return
        if any(_has_others(trajectory, self.policy) for trajectory in group.trajectories):
            group = group.of(self.policy, self._opposition.seats)
        if self.assembler.add(delivery.seq, group):
            self.arrived.set()
        if self.assembler.overfull:
            await self.discard_unfit()

    async def _is_consumed(self, group: int) -> bool:
        """Accept the group, or return True if it was accepted and consumed before."""
        if await self.admission.accept(group) in ("ok", "p"):
            return False
        log.info("group_already_consumed", group=group)
        return True

    async def _reject(self, stream_seq: int, group: int, error: str) -> None:
        """Discard and replace an invalid group. Raises JobFailed after MAX_INVALID of them."""
        async with self._discarding:
            batch = self._step() + 1
            self.assembler.reject(stream_seq, group, batch)
            await self.admission.discard(batch, Discard.INVALID, [group])
        detail = {"group": group, "reason": Discard.INVALID.value, "error": error[-500:]}
        await self.ctx.store.update(
            self.lease.job, epoch=self.lease.epoch, event="group_rejected", failure=True, detail=detail
        )
        await self.wake_admission()
        count = self.assembler.discarded[Discard.INVALID]
        if count > MAX_INVALID:
            raise JobFailed(
                f"{count} groups were unreadable or contradicted themselves; {self.reporter.describe_last_checkpoint()}"
            )

    async def discard_unfit(self) -> None:
        """Discard and replace groups that may not be trained now; those that arrive in between are checked too."""
        async with self._discarding:
            self.assembler.resting = self.joint.rests(self.policy)
            while dropped := self.assembler.drop(step := self._step()):  # intake discards while a step is made
                for reason, seqs in dropped.items():
                    await self.admission.discard(self.assembler.discard_batch(reason, step), reason, seqs)
                    log.info("groups_dropped", reason=reason, groups=len(seqs))
                await self.wake_admission()

    async def account(self) -> tuple[int, list[int], dict[str, int]]:
        """Return what a checkpoint of the current step records, see `Assembler.account`."""
        assert self._consumer is not None
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                settled = await self._consumer.settled()
        except TimeoutError:  # the floor is that of an earlier checkpoint, and still valid
            log.warning("checkpoint_without_nats", floor=self.assembler.floor)
            settled = self.assembler.floor
        async with self._discarding:
            return self.assembler.account(self._step(), settled)

    @contextlib.asynccontextmanager
    async def closed_books(self) -> AsyncIterator[tuple[int, list[int], dict[str, int]]]:
        """Give what `account` does, of all groups consumed so far, also below the floor and for the step under way.
        Nothing is discarded in the body, nor after its RestartNeeded, with which this trainer ends; any other error
        may be followed by a checkpoint."""
        floor, _, _ = await self.account()
        await self._discarding.acquire()
        try:
            _, _, discarded = self.assembler.account(self._step() + 1, floor)
            waiting = {group.seq for group in self.assembler.pending.values()}
            seen = {one.seq for one in self.assembler.consumed.values() if one.seq is not None}
            seen |= self.assembler.known - waiting | set(await self.admission.consumed())
            yield floor, sorted(seen), discarded
        except RestartNeeded:
            raise
        except BaseException:
            self._discarding.release()
            raise

    async def wake_admission(self) -> None:
        await self.ctx.bus.emit(WAKE, {"job": self.lease.job}, who="admission")
