"""Training of one RL job, as loops around one learner:

    intake    consumes GROUP                produces pending groups       waits for messages        woken by the pull;
              see `intake.py`
    train     consumes pending groups       produces weights, METRIC      waits for a full batch    woken by intake
    publish   consumes snapshots            produces SWAP, versions       waits for a new snapshot  woken by train
    evaluate  consumes a version            produces EXAM, val/* METRIC   see `eval_scheduler.py`; it withholds
    checkpoint     inside train, between steps; the manifest that it commits is authoritative for what was trained

Generation never waits for training and training never waits for a weight transfer, except as `max_staleness` requires.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.batch.assembler import Assembler
from opentinker.services.trainer.batch.distributions import Histogram, distributions
from opentinker.services.trainer.batch.row_plays import plays_of
from opentinker.services.trainer.batch.starvation import unfillable
from opentinker.services.trainer.eval_scheduler import EvalScheduler
from opentinker.services.trainer.intake import Intake
from opentinker.services.trainer.job_reporter import JobReporter
from opentinker.services.trainer.joint_progress import JointProgress
from opentinker.services.trainer.learners.base import Learner, NonFinite, SnapshotLike
from opentinker.services.trainer.opponent_pools import OpponentPools
from opentinker.services.trainer.policy_checkpoints import SavedStep
from opentinker.services.trainer.resume import resume
from opentinker.services.trainer.rewinder import Rewinder
from opentinker.services.trainer.rollout_log import RolloutLog
from opentinker.services.trainer.weights.publisher import Publisher
from opentinker.shared.asyncio_tools import check_cancelled, finish_uncancelled, sleep, wait_event
from opentinker.shared.messaging.subjects import GROUP, ROLLOUTS
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import first_failure
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.pools import pools_of
from opentinker.shared.state.admission import Admission
from opentinker.shared.types.core import Discard, Lease, WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import Manifest
from opentinker.shared.types.match_results import count_outcomes
from opentinker.shared.types.telemetry import KeptStep
from opentinker.shared.types.trajectories import Group

log = structlog.get_logger()


class TrainerJob:
    """The work of one lease, or of one policy in it. Raises JobFailed when the job cannot continue, Fenced when a newer
    epoch owns it."""

    def __init__(
        self,
        worker: LeasedWorker,
        lease: Lease,
        spec: JobSpec,
        learner: Learner,
        policy: str = "",
        joint: JointProgress | None = None,
    ) -> None:
        """`policy`: name of this one in a job with several; `spec` has its settings, `joint` all of them."""
        self.worker, self.lease, self.spec, self.learner = worker, lease, spec, learner
        self.policy, self.joint = policy, joint or JointProgress.of(spec)
        self.ctx = worker.ctx
        self.reporter = JobReporter(self.ctx, lease, spec, learner, worker.trace, policy, self.joint)
        root, event = self.reporter.root.parent, self.reporter.event
        self.rollout_log = RolloutLog(root, spec.rollout.transcripts, event)
        self.admission = Admission(
            self.ctx.store.redis, lease.job, lease.epoch, policies=list(spec.policies), policy=policy
        )
        identity = Manifest(job=lease.job, policy=policy, epoch=lease.epoch, step=0, version=WeightVersion(0, 0))
        anchor = "" if spec.validation is None else spec.validation.anchor_of(policy)
        self.pools = OpponentPools(
            pools_of(spec, policy), identity, root, learner, self.admission, event, self.joint.ratings, anchor
        )
        self.publisher = Publisher(self.ctx, lease, learner.device, self._served, self.reporter.lanes, policy)
        self.validation = EvalScheduler(
            self.ctx, lease, spec.validation, self.reporter, self.publisher.offer,
            asleep_s=lambda: self.publisher.room.asleep_s,
        )  # fmt: skip
        self.assembler = Assembler.of(spec, lease.epoch, self.joint)
        self.intake = Intake(self.reporter, self.admission, self.assembler, self.joint, lambda: self.step)
        self.rewinder = Rewinder(self.reporter, self.intake)
        self.unsaved_bytes = 2**30
        """Bytes of trajectories since the last checkpoint above which one is due regardless of `checkpoint_every`: the
        stream keeps them until then, and all jobs share its disk."""
        self.starved_s, self.starved_bytes = 60.0, 2**26
        """After waiting this long, with this much in the stream, the trainer purges its part: the disk may be full, and
        then nothing else frees it."""
        self.step = 0
        self.saved: list[SavedStep] = []
        """Oldest first."""
        self.received_at_save = 0
        """`received` at the last attempt to save a checkpoint."""
        self.received_at_purge = 0
        """`received` at the checkpoint up to whose floor the stream was purged."""
        self.position: int | None = 0 if spec.train.deterministic else None
        """See Manifest.position."""
        self.seen: dict[str, WeightVersion] = {}
        """See Manifest.seen."""
        self.shift = 0
        """Number of unused group numbers, see Admission.shift."""
        self.withheld: SnapshotLike | None = None
        """The newest version, if its evaluation is due and the previous one has not finished, or if it becomes visible
        with those of the other policies: training waits."""
        self.swap: dict[str, float] = {}
        self.opponent_lags: list[int] = []
        """Lag of each group of the batch at the time when it was taken."""
        self.stepped_at = 0.0
        """Monotonic time of the end of the last step."""

    async def run(self) -> None:
        async with self.joint.loading:
            await self._restore()
        await self.joint.until_restored()
        await self.pools.publish()
        await self.intake.open()
        try:
            async with self.reporter.save_on_exit(self._save):
                await self.validation.offer(await self._snapshot())
                await self.worker.status("ready", job=self.lease.job, epoch=self.lease.epoch)
                loops = {"intake": self.intake.run(), "publish": self.publisher.run(), "train": self._train()}
                if self.spec.validation is not None:
                    loops["evaluate"] = self.validation.run()
                await first_failure(loops)
        finally:
            await self.intake.close()

    @property
    def _version(self) -> WeightVersion:
        return WeightVersion(self.lease.epoch, self.step)

    # --- start and resume ---------------------------------------------------------------------------------------

    async def _restore(self) -> None:
        manifest = await resume(self.reporter)
        discarded: dict[str, int] = {}
        next_seq = 0
        resumed = {self.lease.epoch: 0}
        if manifest is not None:
            self.step, next_seq = manifest.step, manifest.next_seq
            resumed = {**manifest.resumed, self.lease.epoch: manifest.step}
            self.assembler.floor = self.assembler.last = manifest.stream_floor
            self.assembler.known.update(manifest.consumed)
            discarded = {k.removeprefix("discarded/"): n for k, n in manifest.ledger.items() if "/" in k}
            self.saved = [SavedStep(manifest.step, manifest.stream_floor, 0)]
            self.position, self.seen = manifest.position, dict(manifest.seen)
            await self.validation.resumed(self.step)
        await self.rewinder.restored(manifest)
        self.assembler.resumed = resumed
        algorithm, rule = self.spec.algorithm, self.joint.rule
        self.assembler.trained = manifest.ledger["trained"] if manifest is not None else 0
        await self.pools.restore(manifest, self._version)  # before any ticket
        await self.admission.restore(
            step=self.step,
            max_staleness=algorithm.max_staleness,
            groups_per_batch=algorithm.groups_per_batch,
            total=self.spec.train.steps * algorithm.groups_per_batch,
            discarded=discarded,
            next_seq=next_seq,
            position=self.position,
            trained=self.assembler.trained,
            settled=manifest.consumed if manifest is not None and manifest.rewound else (),
            gate=rule.gate,
            turn=rule.turn,
        )
        kept = (await self.admission.ledger()).discarded  # with what was discarded for good after the checkpoint
        self.assembler.discarded.update({Discard(reason): n for reason, n in kept.items()})
        self.shift = await self.admission.shift()

    # --- training -----------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Consume pending groups. Returns when all steps are done, the target is met or the service stops."""
        steps = self.spec.train.steps
        self.stepped_at = time.monotonic()
        await finish_uncancelled(self.rewinder.check(self.step))
        while True:
            if not await self._until_visible():
                await finish_uncancelled(self._save())
                return
            if self.step >= steps or await self._target_met():
                break
            began = time.monotonic()
            if self.withheld is not None:
                await self.validation.offer(self.withheld)
            with self.reporter.lanes.busy("training", "wait", str(self._version)):
                batch = await self._next_batch()
            if batch is None:
                await finish_uncancelled(self._save())
                return
            waited = time.monotonic() - began
            try:
                await self.reporter.run_interruptible(self._advance(batch, waited))
            except NonFinite as error:
                await finish_uncancelled(self.rewinder.refused(self.step, error))
            await finish_uncancelled(self.rewinder.check(self.step))
            due = (
                self.step % self.spec.train.checkpoint_every == 0
                or self.intake.received - self.received_at_save > self.unsaved_bytes
            )
            if due and self.step < steps:
                await finish_uncancelled(self._save())
        await self._finish()

    async def _until_visible(self) -> bool:
        """Wait for the other policies and publish, if versions become visible together. Return False if the service
        stops first."""
        if not self.joint.rule.together:
            return True
        while not self.ctx.stopping.is_set():
            check_cancelled()
            self.intake.arrived.clear()
            await self._save_if_asked()
            if self.joint.may_show(self.policy):
                if self.withheld is not None:
                    await self.validation.offer(self.withheld)
                    self.withheld = None
                return True
            with self.reporter.lanes.busy("training", "wait", str(self._version)):
                await wait_event(self.intake.arrived, 0.5)
        return False

    async def _target_met(self) -> bool:
        """Return whether the target is met, after waiting for an evaluation that may end the job: the weights that met
        the target must be the last."""
        if self.reporter.target_uses_evaluation:
            await self.validation.over()
        return self.reporter.target_met()

    async def _next_batch(self) -> list[Group] | None:
        """Return the next batch, or None when the service stops."""
        began = time.monotonic()
        await self.intake.discard_unfit()
        self.assembler.overtaken = 0  # what comes from now on was played while this policy waited
        while not self.ctx.stopping.is_set():
            check_cancelled()
            self.intake.arrived.clear()
            await self._save_if_asked()
            await self.intake.discard_unfit()
            batch = self.assembler.take(self.step, self.spec.algorithm.groups_per_batch, self.joint.growth(self.policy))
            if batch is not None:
                self.opponent_lags = [self.joint.moved(group.opponents) for group in batch]
                return batch
            if why := unfillable(self.spec, self.policy, self.assembler):
                raise JobFailed(
                    f"step {self.step + 1} could not be filled: {why}; {self.reporter.describe_last_checkpoint()}"
                )
            unpurged = self.intake.received - self.received_at_purge
            if time.monotonic() - began > self.starved_s and unpurged > self.starved_bytes:
                await finish_uncancelled(self._make_room())
                began = time.monotonic() if self.reporter.stored.is_in_step else began
            await wait_event(self.intake.arrived, 0.5)
        return None

    async def _advance(self, batch: list[Group], waited: float) -> None:
        """Run one step with its ledger entry, snapshot for the workers and metrics. If the job is cancelled during it,
        the step is undone or, once computed, completed."""
        began = time.monotonic()
        async with self.publisher.room_for_step():
            values = await self.reporter.compute(self.step + 1, lambda: self.learner.step(batch, self._version))
        trained = time.monotonic() - began
        spread = distributions(batch, self._version, values)
        self.step += 1
        matches = [*(match for group in batch for match in group.matches), *self.assembler.pop_uncounted()]
        self.pools.count(count_outcomes(matches))
        for name, version in (pair for group in batch for pair in group.newest_opponents.items()):
            self.seen[name] = max(version, self.seen.get(name, version))
        if self.position is not None:  # nothing is issued between the batch's last group and the next version
            self.position = max(group.seq for group in batch) + 1 - self.shift
        await self.admission.train(self.step, [group.seq for group in batch])
        snapshot = await self._snapshot()
        published = not self.joint.rule.together and self.validation.takes(snapshot)
        self.withheld = None if published else snapshot
        values |= self.pools.metrics()
        if self.step < self.spec.train.steps:  # after the last step no episode needs an opponent
            with self.reporter.lanes.busy("swap", "snapshot", str(self._version)):
                await self.pools.grow(self._version)
        ledger = await self.admission.ledger()
        now = time.monotonic()
        seconds, self.stepped_at = now - self.stepped_at, now
        values["train_seconds"] = values.pop("step_seconds", trained)
        values |= {
            "step_seconds": seconds,
            "trainer/wait_share": waited / seconds,
            "trainer/tokens_per_s": values.get("tokens", 0.0) / seconds,
            "queue/pending_groups": float(ledger.pending),
            "queue/running_groups": float(ledger.running),
            "rollout_workers": float(self.publisher.workers),
            **self._opponent_metrics(),
            **{f"dropped/{reason}": float(count) for reason, count in ledger.discarded.items()},
            **{f"failed/{reason}": float(count) for reason, count in ledger.failed.items()},
            **self.swap,
        }
        await self.reporter.step(self.step, values, matches, seqs=[group.seq for group in batch])
        await self._log_rollouts(batch, spread)

    async def _snapshot(self) -> SnapshotLike:
        """Copy the version, which gathers it from all ranks under zero3."""
        with self.reporter.lanes.busy("swap", "snapshot", str(self._version)):
            return await asyncio.to_thread(self.learner.snapshot, self._version)

    def _opponent_metrics(self) -> dict[str, float]:
        lags = self.opponent_lags
        if len(self.spec.policies) < 2:
            return {}
        return {"opponent_lag/mean": sum(lags) / len(lags), "opponent_lag/max": float(max(lags))}

    async def _log_rollouts(self, batch: list[Group], spread: dict[str, Histogram]) -> None:
        """Log the step's episodes and distributions, and announce the kept episodes."""
        now, version = time.time(), self._version
        plays = [plays for group in batch if (plays := plays_of(group, self.assembler.solved_at)) is not None]
        plays += self.assembler.pop_unlogged()
        kept = await self.rollout_log.step(version, now, batch, spread, self.learner.credited, plays)
        if kept:
            said = KeptStep(
                job=self.lease.job, policy=self.policy, epoch=version.epoch, step=version.step, time=now, episodes=kept
            )
            await self.ctx.bus.emit(ROLLOUTS, said, job=self.lease.job)

    async def _served(self, version: WeightVersion, seconds: dict[str, float]) -> None:
        """Tell admission that the workers have a version."""
        self.swap = seconds
        self.validation.served(version)
        await self.admission.set_version(version.step)
        await self.intake.wake_admission()
        await self.reporter.running()

    # --- checkpoints and the end --------------------------------------------------------------------------------

    async def _save_if_asked(self) -> None:
        if self.policy in self.joint.asked_to_save:
            await finish_uncancelled(self._save(asked=True))

    async def _save(self, *, last: bool = False, asked: bool = False) -> None:
        """Commit a checkpoint of the current step; then release what nothing will be resumed from any more. `asked`: by
        another policy."""
        if self.saved and self.saved[-1].step == self.step:
            self.joint.asked_to_save.discard(self.policy)
            return
        self.received_at_save = self.intake.received
        floor, above, discarded = await self.intake.account()
        manifest = Manifest(
            job=self.lease.job,
            policy=self.policy,
            epoch=self.lease.epoch,
            step=self.step,
            version=self._version,
            resumed=self.assembler.resumed,
            stream_floor=floor,
            consumed=above,
            ledger={
                "trained": self.assembler.trained_by(self.step),
                **{f"discarded/{reason}": n for reason, n in discarded.items()},
            },
            next_seq=(await self.admission.ledger()).issued,
            position=self.position,
            seen=dict(self.seen),
            baselines=self.learner.baselines,
            pools=dict(self.pools.members),
            rewinds=self.rewinder.count,
        )
        written = await self.reporter.commit(manifest, last=last)
        self.joint.asked_to_save.discard(self.policy)
        if not written:
            return
        self.saved.append(SavedStep(self.step, floor, self.received_at_save))
        step = self.reporter.stored.saved(manifest, asked=asked)
        for saved in [one for one in self.saved if one.step == step]:
            await self._release(saved)

    async def _release(self, saved: SavedStep) -> None:
        """Release everything that this checkpoint accounts for: it will not be read again."""
        self.saved = [one for one in self.saved if one.step >= saved.step]
        await asyncio.to_thread(self.reporter.stored.note_release, saved.step)
        await self.admission.commit(saved.step)
        self.assembler.forget(saved.floor)
        self.received_at_purge = saved.received
        floor = self.joint.release(self.policy, saved.floor)
        await self.ctx.bus.purge("GROUPS", GROUP.at(job=self.lease.job), below=floor + 1)

    async def _make_room(self) -> bool:
        """Purge everything that the newest checkpoint accounts for, after verifying it instead of writing two. Returns
        whether it is intact, and no other policy may make this one go back from it."""
        await self._save()
        if not self.reporter.stored.is_in_step:
            self.joint.ask_to_save(self.policy)
            return False
        found = await asyncio.to_thread(checkpoint.find_newest, self.reporter.root)
        intact = found is not None and bool(self.saved) and found[1].step == self.saved[-1].step
        if intact:
            if self.saved[-1].step == self.step:  # what was discarded since then for good
                floor, _, _ = await self.intake.account()
                self.saved[-1] = SavedStep(self.step, floor, self.intake.received)
            await self._release(self.saved[-1])
            log.info("stream_purged", step=self.saved[-1].step)
        return intact

    async def _finish(self) -> None:
        await finish_uncancelled(self._save(last=True))
        if not await self.validation.finish(self.step):
            return
        if self.policy:  # the others' matches need its weights until they are finished too
            self.intake.is_over = True
            self.joint.ask_to_save(self.policy)
            while not self.reporter.stored.is_in_step and self.joint.asked_to_save - {self.policy}:
                if self.ctx.stopping.is_set():
                    return
                self.joint.asked_to_save.discard(self.policy)
                await sleep(0.5)
            if await finish_uncancelled(self._make_room()):
                self.joint.cover(self.policy)
            await self.admission.finish(Discard.SURPLUS)
            await self.intake.wake_admission()
        await self.reporter.succeed(self.step)
        while not self.joint.all_finished and not self.ctx.stopping.is_set():
            await sleep(0.5)
