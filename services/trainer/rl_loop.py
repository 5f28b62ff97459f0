"""One RL job's training, as loops around one learner:

    intake    consumes GROUP                produces pending groups       waits for messages        woken by the pull
    train     consumes pending groups       produces weights, METRIC      waits for a full batch    woken by intake
    publish   consumes snapshots            produces SWAP, versions       waits for a new snapshot  woken by train
    evaluate  consumes a version            produces EXAM, val/* METRIC   see `eval_scheduler.py`; it holds back
    snapshots (checkpoint: inside train, between steps; the manifest it commits is the truth about what was trained)

Generation never waits for training and training never waits for a weight transfer, except when `max_staleness` says so.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import NamedTuple

import structlog

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.batch.assembler import Assembler
from opentinker.services.trainer.batch.distributions import Histogram, distributions
from opentinker.services.trainer.eval_scheduler import Validation
from opentinker.services.trainer.job_reporter import Record
from opentinker.services.trainer.learners.base import Learner, SnapshotLike
from opentinker.services.trainer.rollout_log import RolloutLog
from opentinker.services.trainer.weights.publisher import Publisher
from opentinker.shared.asyncio_tools import check_cancelled, finish_uncancelled, wait_event
from opentinker.shared.messaging.bus import Consumer, Delivery
from opentinker.shared.messaging.consumer import ConsumerDeleted
from opentinker.shared.messaging.subjects import GROUP, GROUPS, ROLLOUTS, WAKE
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import first_failure
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.staleness import Admission
from opentinker.shared.types.core import Discard, Lease, WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import Manifest
from opentinker.shared.types.telemetry import KeptStep
from opentinker.shared.types.trajectories import Group

log = structlog.get_logger()

UNSAVED_BYTES = 2**30
"""Trajectories received since the last checkpoint, in bytes, from which one is due whatever `checkpoint_every` says:
the stream keeps them until then, and its disk is everybody's."""
STARVED_S = 60.0
STARVED_BYTES = 2**26
"""A trainer that waited so long, with so much in the stream, makes room there: the disk may be full, and then nothing
else does."""
SETTLED_S = 2.0
OLD_CONSUMERS = 16
"""Epochs before ours whose consumer may still be there; an older one, which nobody reads, the server drops itself."""
MAX_INVALID = 100
"""Groups that cannot be read or contradict themselves, over a job's life, before it fails."""


def consumer_of(job: str, epoch: int) -> str:
    """The durable through which the trainer of this epoch reads GROUP."""
    return f"train-{job}-{epoch}"


MOST_FETCHED = 256
"""Groups that are on their way to the trainer at the same time."""


class Saved(NamedTuple):
    """A checkpoint that was made or resumed from."""

    step: int
    floor: int
    received: int
    """`TrainerJob.received` at that time."""


class TrainerJob:
    """One lease's work. Raises JobFailed when the job cannot go on, Fenced when a newer epoch owns it."""

    def __init__(self, worker: LeasedWorker, lease: Lease, spec: JobSpec, learner: Learner) -> None:
        self.worker, self.lease, self.spec, self.learner = worker, lease, spec, learner
        self.ctx = worker.ctx
        self.record = Record(self.ctx, lease, spec, learner, worker.trace)
        self.told = RolloutLog(self.record.root.parent, spec.rollout.transcripts, self.record.event)
        self.admission = Admission(self.ctx.store.redis, lease.job, lease.epoch)
        self.publisher = Publisher(self.ctx, lease, learner.device, self._served)
        self.validation = Validation(self.ctx, lease, spec.validation, self.record, self.publisher.offer)
        algorithm = spec.algorithm
        self.assembler = Assembler(
            algorithm.max_staleness,
            lease.epoch,
            drop_zero_variance=bool(algorithm.drop_zero_variance),
            in_order=spec.train.deterministic,
        )
        self.arrived = asyncio.Event()
        self.step = 0
        self.received = 0
        """Bytes of trajectories, since this trainer took over."""
        self.saved: list[Saved] = []
        """Oldest first."""
        self.tried = 0
        """`received` when the last checkpoint was tried."""
        self.purged = 0
        """`received` at the checkpoint up to whose floor the stream holds nothing any more."""
        self.position: int | None = 0 if spec.train.deterministic else None
        """See Manifest.position."""
        self.shift = 0
        """Group numbers that were used in vain, see Admission.shift."""
        self.unoffered: SnapshotLike | None = None
        """The newest version, if its evaluation is due and the one before is not over: training waits."""
        self.swap: dict[str, float] = {}
        self.stepped = 0.0
        """When the last step was done, monotonic."""

    async def run(self) -> None:
        await self._restore()
        self.consumer = consumer = await self._consume()
        try:
            await self.validation.offer(await asyncio.to_thread(self.learner.snapshot, self._version))
            await self.worker.status("ready", job=self.lease.job, epoch=self.lease.epoch)
            loops = {"intake": self._intake(consumer), "publish": self.publisher.run(), "train": self._train()}
            if self.spec.validation is not None:
                loops["evaluate"] = self.validation.run()
            async with self.record.saving(self._save):
                await first_failure(loops)
        finally:
            await consumer.close()

    @property
    def _version(self) -> WeightVersion:
        return WeightVersion(self.lease.epoch, self.step)

    # --- start and resume ---------------------------------------------------------------------------------------

    async def _restore(self) -> None:
        manifest = await self.record.restore()
        discarded: dict[str, int] = {}
        next_seq = 0
        resumed = {self.lease.epoch: 0}
        if manifest is not None:
            self.step, next_seq = manifest.step, manifest.next_seq
            resumed = {**manifest.resumed, self.lease.epoch: manifest.step}
            self.assembler.floor = self.assembler.last = manifest.stream_floor
            self.assembler.known.update(manifest.consumed)
            discarded = {k.removeprefix("discarded/"): n for k, n in manifest.ledger.items() if "/" in k}
            self.saved = [Saved(manifest.step, manifest.stream_floor, 0)]
            self.position = manifest.position
            await self.validation.resumed(self.step)
        self.assembler.resumed = resumed
        self.assembler.discarded.update({Discard(reason): n for reason, n in discarded.items()})
        algorithm = self.spec.algorithm
        await self.admission.restore(
            step=self.step,
            max_staleness=algorithm.max_staleness,
            groups_per_batch=algorithm.groups_per_batch,
            total=self.spec.train.steps * algorithm.groups_per_batch,
            discarded=discarded,
            next_seq=next_seq,
            position=self.position,
        )
        self.shift = await self.admission.shift()

    # --- intake -------------------------------------------------------------------------------------------------

    async def _consume(self) -> Consumer[Group]:
        """A consumer of this epoch alone, from the checkpoint on: whoever had the lease before, and may only sleep,
        takes no group away from us. Its own consumer goes."""
        job, epoch = self.lease.job, self.lease.epoch
        assert GROUPS.name is not None
        for before in range(max(1, epoch - OLD_CONSUMERS), epoch):
            await self.ctx.bus.delete_consumer(GROUPS.name, consumer_of(job, before))
        return await self.ctx.bus.consume(
            GROUP,
            consumer_of(job, epoch),
            batch=min(2 * self.spec.algorithm.groups_per_batch, MOST_FETCHED),
            start_seq=self.assembler.floor + 1,
            job=job,
        )

    async def _intake(self, consumer: Consumer[Group]) -> None:
        """Consumes GROUP into the assembler; acks are flow control only."""
        while True:
            try:
                delivery = await consumer.next(1.0)
            except ConsumerDeleted:
                await self.record.guard()  # most likely it is our successor who did that
                raise
            if delivery is None:
                continue
            await self._receive(delivery)
            await delivery.ack()

    async def _receive(self, delivery: Delivery[Group]) -> None:
        group = delivery.noun
        self.received += delivery.size
        if group is None:
            log.error("undecodable_group", group=delivery.key, error=delivery.error)
            named = re.match(r".*/([0-9]{1,15})(:|$)", delivery.key)  # JOB/NUMBER:ATTEMPT, see Group.key
            number = int(named[1]) if named else -1
            if named is None or number in self.assembler.known or await self._is_past(number):
                self.assembler.ignore(delivery.seq, self.step + 1)
            else:
                await self._reject(delivery.seq, number, delivery.error)
            return
        if group.seq in self.assembler.known:
            self.assembler.ignore(delivery.seq, self.step + 1)
            return
        if await self._is_past(group.seq):
            self.assembler.ignore(delivery.seq, self.step + 1)
            return
        try:
            group.check()
        except ValueError as error:
            log.error("invalid_group", group=group.seq, error=str(error))
            await self._reject(delivery.seq, group.seq, str(error))
            return
        if self.assembler.add(delivery.seq, group):
            self.arrived.set()

    async def _is_past(self, group: int) -> bool:
        """Accepts the group, unless it was accepted and consumed before."""
        if await self.admission.accept(group) in ("ok", "p"):
            return False
        log.info("group_of_the_past", group=group)
        return True

    async def _reject(self, stream_seq: int, group: int, error: str) -> None:
        """A group that cannot be trained is discarded and replaced, but not without end."""
        self.assembler.reject(stream_seq, group, self.step + 1)
        detail = {"group": group, "reason": Discard.INVALID.value, "error": error[-500:]}
        await self.ctx.store.update(
            self.lease.job, epoch=self.lease.epoch, event="group_rejected", failure=True, detail=detail
        )
        await self.admission.discard(self.step + 1, Discard.INVALID, [group])
        await self._wake_admission()
        count = self.assembler.discarded[Discard.INVALID]
        if count > MAX_INVALID:
            raise JobFailed(f"{count} groups were unreadable or contradicted themselves; {self.record.last_good()}")

    # --- training -----------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Consumes pending groups. Returns when all steps are done, the target is met or the service stops."""
        steps = self.spec.train.steps
        self.stepped = time.monotonic()
        while self.step < steps:
            began = time.monotonic()
            if await self._target_met():
                break
            if self.unoffered is not None:
                await self.validation.offer(self.unoffered)
            with self.record.lanes.busy("training", "wait", str(self._version)):
                batch = await self._next_batch()
            if batch is None:
                await finish_uncancelled(self._save())
                return
            waited = time.monotonic() - began
            await self.record.unless_cancelled(self._advance(batch, waited))
            due = self.step % self.spec.train.checkpoint_every == 0 or self.received - self.tried > UNSAVED_BYTES
            if due and self.step < steps:
                await finish_uncancelled(self._save())
        await self._finish()

    async def _target_met(self) -> bool:
        """An evaluation that may end the job is waited for: the weights that met the target shall be the last."""
        if self.record.target_is_validated:
            await self.validation.over()
        return self.record.target_met()

    async def _next_batch(self) -> list[Group] | None:
        """The next batch, or None when the service is told to stop."""
        began = time.monotonic()
        while not self.ctx.stopping.is_set():
            check_cancelled()
            self.arrived.clear()
            while dropped := self.assembler.drop(self.step):  # more may come in meanwhile: those are judged too
                for reason, seqs in dropped.items():
                    await self.admission.discard(self.step + 1, reason, seqs)
                    log.info("groups_dropped", reason=reason, groups=len(seqs))
                await self._wake_admission()
            batch = self.assembler.take(self.step, self.spec.algorithm.groups_per_batch)
            if batch is not None:
                return batch
            self._check_barren()
            if time.monotonic() - began > STARVED_S and self.received - self.purged > STARVED_BYTES:
                await finish_uncancelled(self._make_room())
                began = time.monotonic()
            await wait_event(self.arrived, 0.5)
        return None

    def _check_barren(self) -> None:
        """Replacing groups of equal rewards must come to an end."""
        algorithm = self.spec.algorithm
        allowed = (algorithm.max_zero_variance_batches or 0) * algorithm.groups_per_batch
        if algorithm.drop_zero_variance and self.assembler.barren >= allowed:
            raise JobFailed(
                f"{self.assembler.barren} groups since the last step had {algorithm.group_size} equal rewards each, so "
                f"step {self.step + 1} could not be filled: the task is too easy or too hard for the model by now. "
                "Set a `train.target` to end in time, take a larger group_size, or drop_zero_variance = false; "
                f"{self.record.last_good()}"
            )

    async def _advance(self, batch: list[Group], waited: float) -> None:
        """One step, and all that makes it count: ledger, snapshot for the workers, metrics. When the job is cancelled
        meanwhile it is given up, or, once computed, done whole."""
        began = time.monotonic()
        values = await self.record.compute(self.step + 1, lambda: self.learner.step(batch, self._version))
        trained = time.monotonic() - began
        spread = distributions(batch, self._version, values)
        self.step += 1
        if self.position is not None:  # nothing is issued between the batch's last group and the next version
            self.position = max(group.seq for group in batch) + 1 - self.shift
        await self.admission.train(self.step, [group.seq for group in batch])
        snapshot = await asyncio.to_thread(self.learner.snapshot, self._version)
        self.unoffered = None if self.validation.takes(snapshot) else snapshot
        ledger = await self.admission.ledger()
        now = time.monotonic()
        seconds, self.stepped = now - self.stepped, now
        values["train_seconds"] = values.pop("step_seconds", trained)
        values |= {
            "step_seconds": seconds,
            "trainer/wait_share": waited / seconds,
            "trainer/tokens_per_s": values.get("tokens", 0.0) / seconds,
            "queue/pending_groups": float(ledger.pending),
            "queue/running_groups": float(ledger.running),
            "rollout_workers": float(self.publisher.workers),
            **{f"dropped/{reason}": float(count) for reason, count in ledger.discarded.items()},
            **{f"failed/{reason}": float(count) for reason, count in ledger.failed.items()},
            **self.swap,
        }
        await self.record.step(self.step, values, seqs=[group.seq for group in batch])
        await self._tell(batch, spread)

    async def _tell(self, batch: list[Group], spread: dict[str, Histogram]) -> None:
        """What people read of the step, and that it is there."""
        now, version = time.time(), self._version
        kept = await self.told.step(version, now, batch, spread, self.learner.credited)
        if kept:
            said = KeptStep(job=self.lease.job, epoch=version.epoch, step=version.step, time=now, episodes=kept)
            await self.ctx.bus.emit(ROLLOUTS, said, job=self.lease.job)

    async def _served(self, version: WeightVersion, seconds: dict[str, float]) -> None:
        """The publisher got a version to the workers: admission may count on it."""
        self.swap, now = seconds, time.time()
        self.record.lanes.note("swap", "publish", now - seconds["swap/seconds"], now, version=str(version))
        self.validation.served(version)
        await self.admission.set_version(version.step)
        await self._wake_admission()
        await self.record.running()

    async def _wake_admission(self) -> None:
        await self.ctx.bus.emit(WAKE, {"job": self.lease.job}, who="admission")

    # --- checkpoints and the end --------------------------------------------------------------------------------

    async def _save(self, *, last: bool = False) -> None:
        """Commit a checkpoint of the current step; then let go of what the one before it no longer needs."""
        if self.saved and self.saved[-1].step == self.step:
            return
        self.tried = self.received
        try:
            async with asyncio.timeout(SETTLED_S):
                settled = await self.consumer.settled()
        except TimeoutError:
            log.warning("checkpoint_without_nats", floor=self.assembler.floor)  # of an earlier one, and true still
            settled = self.assembler.floor
        floor, above, discarded = self.assembler.account(self.step, settled)
        trained = self.step * self.spec.algorithm.groups_per_batch
        manifest = Manifest(
            job=self.lease.job,
            epoch=self.lease.epoch,
            step=self.step,
            version=self._version,
            resumed=self.assembler.resumed,
            stream_floor=floor,
            consumed=above,
            ledger={"trained": trained, **{f"discarded/{reason}": n for reason, n in discarded.items()}},
            next_seq=(await self.admission.ledger()).issued,
            position=self.position,
        )
        if not await self.record.commit(manifest, last=last):
            return
        if self.saved:  # one checkpoint behind: the newest may turn out to be damaged
            await self._let_go(self.saved[-1])
        self.saved.append(Saved(self.step, floor, self.tried))

    async def _let_go(self, saved: Saved) -> None:
        """Nothing that this checkpoint accounts for will be read again."""
        await self.admission.commit(saved.step)
        self.assembler.forget(saved.floor)
        self.purged = saved.received
        await self.ctx.bus.purge("GROUPS", GROUP.at(job=self.lease.job), below=saved.floor + 1)

    async def _make_room(self) -> None:
        """Let go of everything that the newest checkpoint accounts for, after reading it back instead of making two."""
        await self._save()
        found = await asyncio.to_thread(checkpoint.newest, self.record.root)
        if found is not None and self.saved and found[1].step == self.saved[-1].step:
            await self._let_go(self.saved[-1])
            log.info("made_room", step=self.saved[-1].step)

    async def _finish(self) -> None:
        await finish_uncancelled(self._save(last=True))
        if await self.validation.finish(self.step):
            await self.record.succeed(self.step)
