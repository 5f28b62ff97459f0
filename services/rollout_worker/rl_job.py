"""Tickets -> episodes -> groups. Serves one job at a time, many groups concurrently.

claim loop    consumes TICKET; waits for free slots and for weights; woken by the standing pull
group task    plays G episodes, retries failed ones, publishes GROUP (or SCORE), accepts, then acks the ticket
swap handler  answers the trainer's SWAP, see `weight_receiver.py`
report loop   produces METRIC once a second
timeline      produces TIMELINE once a second
exam loop     plays validation episodes, see `eval_runner.py`
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from functools import partial

import msgspec
import structlog

from opentinker.services.rollout_worker.episode import Episode, seconds_of
from opentinker.services.rollout_worker.episode_protocol import EpisodeFailed, Sessions
from opentinker.services.rollout_worker.eval_runner import EvalRunner
from opentinker.services.rollout_worker.opening_check import Sample, opening_mismatch_of
from opentinker.services.rollout_worker.opponents import Opponents
from opentinker.services.rollout_worker.seat_map import LoadedPolicy, SeatMap
from opentinker.services.rollout_worker.transcripts import has_transcripts, together, too_large, without_transcripts
from opentinker.services.rollout_worker.tree_episode import TreeEpisode
from opentinker.services.rollout_worker.url_player import UrlPlayer
from opentinker.services.rollout_worker.weight_receiver import WeightReceiver, note_swap
from opentinker.shared.asyncio_tools import first_results, forward_exception, sleep, wait_event
from opentinker.shared.data.step_log import metric_prefix
from opentinker.shared.messaging.bus import Bus, Consumer, Delivery, StreamFull, TooLarge
from opentinker.shared.messaging.subjects import GROUP, SCORE, SWAP, TICKET, WAKE
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import first_failure
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.runtime.timeline import Lanes
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.frozen_models import is_scored
from opentinker.shared.spec.matches.pools import pool_player
from opentinker.shared.spec.tree_sampling import is_tree
from opentinker.shared.state.admission import Admission
from opentinker.shared.state.circuits import DOWN, Circuits, circuit_key
from opentinker.shared.types.core import Ending, Lease, Ticket
from opentinker.shared.types.error_text import error_sentence, error_tail
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.swap import SwapCommand, SwapReply
from opentinker.shared.types.trajectories import Group, Trajectory

log = structlog.get_logger()

REPORT_S = 1.0
RATES = ("tokens", "episodes", "groups", "turns")
"""Counted from 0; reported as totals and per second."""
MAX_DELIVERIES = 5
"""A ticket delivered once more fails its group: a group that kills the engine at every try must come to an end. Tickets
that were in flight with it count too; their groups are replaced, and `rollout.max_failed_share` decides."""
FULL_PAUSE_S = 0.5
SEEDED = "row and seed alone must decide how an episode begins; opentinker env check finds what else does"


class RolloutJob:
    """One lease's work. The engines of `policies` are started by the caller."""

    def __init__(
        self,
        worker: LeasedWorker,
        lease: Lease,
        spec: JobSpec,
        policies: Sequence[LoadedPolicy],
        sessions: Sessions,
        urls: Sequence[UrlPlayer] = (),
        ack_wait_s: float = 6.0,
    ) -> None:
        """`ack_wait_s`: a ticket or an exam whose holder sends no progress for this time goes to another worker;
        holders send it every third of it."""
        self.worker, self.lease, self.spec, self.ack_wait_s = worker, lease, spec, ack_wait_s
        self.policies = {policy.name: policy for policy in policies}
        self.trained = [policy for policy in policies if not policy.is_frozen]
        self.seats, self.sessions, self.urls = SeatMap(spec, policies, urls), sessions, urls
        self.opponents = Opponents(spec, policies, worker.ctx.settings.data_dir, lease.job, self._opponent_loaded)
        self.is_tree = is_tree(spec)
        self.bus: Bus = worker.ctx.bus
        self.subject = SCORE if is_scored(spec.model_dump()) else GROUP
        self.admission = Admission(worker.ctx.store.redis, lease.job, policies=list(spec.policies))
        self.circuits = Circuits(worker.ctx.store.redis)
        self.circuit = ""
        """Key of its environment's."""
        self.metrics = MetricSource(self.bus, lease.job, worker.info.id)
        self.lanes = Lanes(self.bus, lease.job, worker.info.id)
        self.address = f"{worker.info.id}-{uuid.uuid4().hex[:12]}"
        self.groups: set[asyncio.Task[None]] = set()
        self.slot = asyncio.Event()
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Exception of a group task or an exam: a failure of this service, not of an episode."""
        self.weights = asyncio.Event()
        self.receivers = {
            policy.name: WeightReceiver(
                *(worker.ctx.store, worker.info, lease.job, lease.epoch, policy.engine, self.broken),
                partial(self._taken, policy),
            )
            for policy in self.trained
        }
        self.full = False
        """The message store had no room for the last group."""
        self.counts: Counter[str] = Counter(dict.fromkeys(RATES, 0))
        self.gauges: dict[str, float] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of finished episodes, by phase."""

    async def run(self) -> None:
        """Play until the lease ends or is taken back, or the service stops. Running groups may finish then."""
        record = await self.worker.ctx.store.job(self.lease.job)
        self.circuit = circuit_key(record.tenant, record.spec["environment"])
        async with AsyncExitStack() as held:
            # Held one by one: a lease taken away in the middle must not leave the first of them behind.
            for receiver in self.receivers.values():
                held.push_async_callback(receiver.end)
            swaps = await self.bus.serve(SWAP, self._answer_swap, worker=self.address)
            held.push_async_callback(swaps.unsubscribe)
            held.callback(self.metrics.close)
            held.push_async_callback(self.lanes.report)
            tickets = await self.bus.consume(
                TICKET,
                f"roll-{self.lease.job}",
                batch=self.spec.rollout.max_concurrent_groups,
                ack_wait_s=self.ack_wait_s,
                job=self.lease.job,
            )
            held.push_async_callback(tickets.close)
            held.push_async_callback(self._end_groups)
            await self.worker.status("ready", job=self.lease.job, epoch=self.lease.epoch, address=self.address)
            await self.bus.emit(WAKE, {"worker": self.worker.info.id}, who=f"trainer-{self.lease.job}")
            loops = {
                "claim": self._claim_loop(tickets),
                "report": self._report_loop(),
                "timeline": self.lanes.run(),
                "broken": asyncio.wait_for(self.broken, None),
                **{f"engine {name}": policy.engine.watch() for name, policy in self.policies.items()},
            }
            if self.spec.validation is not None:
                loops |= {f"exams {policy.name}": self._examiner(policy.name).run() for policy in self.trained}
            await first_failure(loops)
            if self.groups:
                log.info("draining", groups=len(self.groups))
                await asyncio.gather(*self.groups)

    def _examiner(self, policy: str) -> EvalRunner:
        pools = {pool_player(name) for name in self.spec.pools}
        return EvalRunner(
            self.bus,
            self.worker.info.id,
            self.lease.job,
            self.spec,
            [one for name, one in self.policies.items() if name not in pools],  # evaluations never meet members
            self.sessions,
            self.counts,
            self.broken,
            self.worker.spent,
            partial(self.lanes.busy, kind="evaluation"),
            policy,
            self.urls,
            self.ack_wait_s,
        )

    async def _end_groups(self) -> None:
        for task in self.groups:
            task.cancel()
        await asyncio.gather(*self.groups, return_exceptions=True)

    # --- tickets ------------------------------------------------------------------------------------------------

    async def _claim_loop(self, tickets: Consumer[Ticket]) -> None:
        """Consumes TICKET, starts group tasks. Returns when the service is stopping or the worker is taken back."""
        with self.lanes.busy("generation", "weights"):
            while not self.weights.is_set() and not self.worker.ending:
                await wait_event(self.weights, 0.5)
        while not self.worker.ending:
            free = self.spec.rollout.max_concurrent_groups - len(self.groups)
            if free <= 0:
                self.slot.clear()
                await wait_event(self.slot, 0.5)
                continue
            with nullcontext() if self.groups else self.lanes.busy("generation", "tickets"):
                delivery = await tickets.next(0.5, limit=free)
            if delivery is None:
                continue
            if delivery.noun is None:
                log.error("bad_ticket", error=delivery.error)
                await delivery.term()
                continue
            task = asyncio.create_task(self._run_group(delivery.noun, delivery))
            self.groups.add(task)
            task.add_done_callback(self._group_done)

    def _group_done(self, task: asyncio.Task[None]) -> None:
        self.groups.discard(task)
        self.slot.set()
        forward_exception(task, self.broken)

    async def _run_group(self, ticket: Ticket, delivery: Delivery[Ticket]) -> None:
        """One ticket to its end: group stored and accepted, or failed with a reason; then the ticket is acked."""
        with structlog.contextvars.bound_contextvars(group=ticket.seq):
            async with delivery.held(self.ack_wait_s):
                if not await self.admission.is_running(ticket.seq):
                    self.counts["tickets_repeated"] += 1
                elif delivery.deliveries > MAX_DELIVERIES:
                    tries = f"{MAX_DELIVERIES} tries came to no end, because workers or engines were lost meanwhile"
                    await self._fail(ticket, EpisodeFailed(Ending.ENGINE_ERROR, tries))
                else:
                    with self.worker.ctx.tracer.span("group", ticket.trace, job=ticket.job, group=ticket.seq):
                        await self._play_group(ticket)

    async def _play_group(self, ticket: Ticket) -> None:
        """Play a ticket's samples against the members that it names, and store the group."""
        try:
            async with self.opponents.playing(ticket.opponents) as members:
                seats = self.seats.against(members)
                ended = await self._play_samples(ticket, seats)
        except EpisodeFailed as error:
            await self._fail(ticket, error)
            return
        await self._store(ticket, ended, seats)

    async def _play_samples(self, ticket: Ticket, seats: SeatMap) -> list[Sample]:
        """Starts `rollout.oversample` samples more than the group needs, and cuts off those that are last. A tree is
        one episode, which comes to all samples. Raises EpisodeFailed."""
        needed = 1 if self.is_tree else ticket.group_size
        started = needed + self.spec.rollout.oversample
        samples = [asyncio.create_task(self._play_sample(ticket, index, seats)) for index in range(started)]
        try:
            ended = await first_results(samples, needed, EpisodeFailed)
            self.counts["episodes_cut"] += sum(not sample.done() for sample in samples)
            return ended
        finally:
            for sample in samples:
                sample.cancel()
            await asyncio.gather(*samples, return_exceptions=True)

    async def _store(self, ticket: Ticket, ended: Sequence[Sample], seats: SeatMap) -> None:
        if differs := opening_mismatch_of(ticket, ended, seats):
            await self._say_mismatch(ticket, differs)
            if self.spec.rollout.opening_mismatch == "fail":
                await self._fail(ticket, EpisodeFailed(Ending.ENV_BAD_REPLY, f"{differs}. {SEEDED}"))
                return
        played = [(i, t) for i, sample in enumerate(ended) for t in sample.trajectories]
        trajectories, images = together([t if self.is_tree else msgspec.structs.replace(t, index=i) for i, t in played])
        group = Group(
            job=ticket.job,
            seq=ticket.seq,
            environment=self.spec.environment.name,
            worker=self.worker.info.id,
            trace=ticket.trace,
            is_tree=self.is_tree,
            trajectories=trajectories,
            images=images,
        )
        await self._publish(group)
        await self.admission.accept(ticket.seq)  # the trainer may have seen it first: either way it counts once
        await self.circuits.succeeded(self.circuit)
        self.counts["groups"] += 1

    async def _play_sample(self, ticket: Ticket, index: int, seats: SeatMap) -> Sample:
        """Raises EpisodeFailed when the sample failed once more than `rollout.retries` allows."""
        for tries_left in range(self.spec.rollout.retries, -1, -1):
            busy = partial(self.lanes.busy, kind="rollout")
            kind = TreeEpisode if self.is_tree else Episode
            episode = kind(self.spec, ticket, index, seats, self.sessions, busy)
            try:
                with structlog.contextvars.bound_contextvars(episode=episode.session):
                    trajectories = await self._play(episode)
            except EpisodeFailed:
                if tries_left == 0:
                    raise
                continue
            self.counts["episodes"] += 1
            self.counts["tokens"] += episode.sampled
            self.counts["turns"] += sum(len(t.turns) for t in trajectories)
            for phase, seconds in seconds_of(episode, trajectories).items():
                self.seconds[phase] += seconds
            return Sample(index, episode.openings, trajectories)
        raise AssertionError("unreachable")

    async def _play(self, episode: Episode) -> list[Trajectory]:
        began = time.time()
        try:
            return await episode.run()
        except EpisodeFailed as error:
            error.opened_at = began + episode.open_s if episode.open_s else 0.0
            self.counts[f"episodes_failed/{error.ending}"] += 1
            log.info("episode_failed", ending=error.ending, error=error.error)
            raise
        finally:  # cut off ones too: they were generated
            self.worker.spent["tokens_generated"] += episode.sampled

    async def _publish(self, group: Group) -> None:
        """Stored durably when this returns; a full store is back-pressure. Raises JobFailed if it fits no message."""
        msg_id = f"{group.key}:{group.trajectories[0].attempt}"
        while True:
            try:
                await self.bus.publish(self.subject, group, msg_id, job=group.job)
                if self.full:
                    self.full = False
                    log.info("stream_has_room")
                return
            except StreamFull as error:
                await self._say_full(str(error))
                with self.lanes.busy("generation", "store"):
                    await asyncio.sleep(FULL_PAUSE_S)
            except TooLarge as error:
                if not has_transcripts(group):
                    raise too_large(group, error, self.spec, self.seats.context) from None
                group = without_transcripts(group)

    async def _say_full(self, why: str) -> None:
        """Report once, also in the job's events, that the stream of groups is full: groups wait until there is room."""
        self.counts["stream_full"] += 1
        if not self.full:
            self.full = True
            log.warning("stream_full", error=why)
            await self.worker.ctx.store.update(self.lease.job, event="stream_full", detail={"error": why})

    async def _say_mismatch(self, ticket: Ticket, differs: str) -> None:
        """Report a mismatch in the job's events once per worker; the metric counts all of them."""
        self.counts["opening_mismatches"] += 1
        if self.counts["opening_mismatches"] == 1:
            log.warning("opening_mismatch", group=ticket.seq, differs=differs)
            detail = {"group": ticket.seq, "differs": differs, "hint": SEEDED}
            await self.worker.ctx.store.update(ticket.job, event="opening_mismatch", detail=detail)

    async def _fail(self, ticket: Ticket, error: EpisodeFailed) -> None:
        why = error_sentence(error.error)
        is_down = await self.circuits.failed(self.circuit, error.ending, why, time.time(), opened_at=error.opened_at)
        if await self.admission.fail(ticket.seq, DOWN if is_down else error.ending) is None:
            return
        if self.spec.train.deterministic and not error.ending.repeats:
            raise JobFailed(
                f"group {ticket.seq} could not be played ({error.ending}: {error_sentence(error.error)}), and in a "
                "deterministic job no other group may take its place. Raise rollout.retries or "
                "rollout.episode_timeout_s, or see to the environment"
            )
        self.counts["groups_failed"] += 1
        log.warning("group_failed", ending=error.ending, error=error.error)
        await self.worker.ctx.store.update(
            ticket.job,
            event="group_failed",
            failure=True,
            detail={"group": ticket.seq, "reason": error.ending.value, "error": error_tail(error.error, 500)},
        )
        await self.bus.emit(WAKE, {"job": ticket.job}, who="admission")

    # --- weights ------------------------------------------------------------------------------------------------

    async def _answer_swap(self, command: SwapCommand) -> SwapReply:
        receiver = self.receivers.get(command.policy)
        if receiver is None:
            info, problem = self.worker.info, f"this worker has no policy {command.policy!r} of job {self.lease.job}"
            return SwapReply(worker=info.id, incarnation=info.incarnation, ok=False, error=problem)
        return await receiver.answer(command)

    async def _taken(self, policy: LoadedPolicy, seconds: dict[str, float]) -> None:
        self.counts["swaps"] += 1
        self.gauges.update({f"swap_{phase}_s": value for phase, value in seconds.items()})
        note_swap(self.lanes, f"{metric_prefix(policy.name)}{policy.engine.version}", seconds)
        if all(other.engine.version is not None for other in self.trained):
            self.weights.set()

    def _opponent_loaded(self, seconds: float) -> None:
        self.counts["opponents_loaded"] += 1
        self.gauges["opponent_load_s"] = seconds

    @property
    def _step(self) -> int:
        """Step of the oldest weights that play and learn."""
        versions = [policy.engine.version for policy in self.trained]
        return min(0 if version is None else version.step for version in versions)

    # --- metrics ------------------------------------------------------------------------------------------------

    async def _report_loop(self) -> None:
        """Produces METRIC: rates since the last report, gauges as they are. Returns never."""
        last, then = Counter(self.counts), time.monotonic()
        while True:
            await sleep(REPORT_S)
            now, counts = time.monotonic(), Counter(self.counts)
            elapsed = now - then
            if counts != last:
                values = {f"rollout/{name}": float(count) for name, count in counts.items()}
                for name in RATES:
                    values[f"rollout/{name}_per_s"] = (counts[name] - last[name]) / elapsed
                values |= {f"rollout/{name}": value for name, value in {**self.gauges, **self.seconds}.items()}
                values["rollout/running_groups"] = float(len(self.groups))
                await self.metrics.emit(self._step, values)
                last, then = counts, now  # a silent second counts for the next report
