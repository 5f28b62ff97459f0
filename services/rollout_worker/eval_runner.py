"""Plays evaluation episodes with the engine and environments of the job's groups, without counting them as groups.

exam loop    consumes EXAM; waits for free places, and for the version that an exam names; woken by the standing pull
exam task    plays one episode, tries a failed one again, hands the result to who asked for it, then acks the exam
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

import msgspec
import structlog

from opentinker.services.rollout_worker.episode import Episode
from opentinker.services.rollout_worker.episode_protocol import Busy, EpisodeFailed, Sessions
from opentinker.services.rollout_worker.renderer import images_of
from opentinker.services.rollout_worker.seat_map import LoadedPolicy, SeatMap
from opentinker.services.rollout_worker.token_stream import Stream
from opentinker.services.rollout_worker.transcripts import TOKENS, shortened
from opentinker.services.rollout_worker.url_player import UrlPlayer
from opentinker.shared.asyncio_tools import cancel_and_wait, forward_exception, sleep, wait_event
from opentinker.shared.evaluation.outcomes import OUTCOME_TRANSCRIPTS, Outcome, is_among_first, outcomes_of
from opentinker.shared.messaging.bus import Bus, Delivery, NoReply
from opentinker.shared.messaging.subjects import EXAM, EXAM_RESULT
from opentinker.shared.spec import JobSpec, ValidationSpec
from opentinker.shared.spec.evaluation import exam_of, validation_episodes
from opentinker.shared.types.core import Ending, Message, Ticket, WeightVersion, part_id
from opentinker.shared.types.error_text import error_tail
from opentinker.shared.types.evaluation import EvalEpisode, EvalResult, ExamView, MessageOrigin
from opentinker.shared.types.match_results import alike
from opentinker.shared.types.token_records import images_within, order_of_play, sampled_by, tokens_of
from opentinker.shared.types.trajectories import Trajectory, Turn, totals

log = structlog.get_logger()

MAX_DELIVERIES = 10
"""An exam that comes once more counts as failed: what kills the engine at every try must have an end. Workers that had
not the version yet gave it back, and count too."""
TRANSCRIPT_CHARACTERS = 100_000
"""Characters of all messages of a kept episode, which travel in one message of the bus."""
TOKEN_BY_TOKEN = 64
"""So many of the kept episodes, at most, are kept token by token too."""
REQUEST_TIMEOUT_S = 5.0
RETRY_S = 0.2


class EvalRunner:
    """`policies`: the one that is evaluated, and all that may play against it. `broken` gets the exceptions of an exam
    that are failures of this service."""

    def __init__(
        self,
        bus: Bus,
        worker: str,
        job: str,
        spec: JobSpec,
        policies: Sequence[LoadedPolicy],
        sessions: Sessions,
        counts: Counter[str],
        broken: asyncio.Future[None],
        spent: Counter[str],
        busy: Busy = nullcontext,
        policy: str = "",
        urls: Sequence[UrlPlayer] = (),
        ack_wait_s: float = 6.0,
        idle: Busy = nullcontext,
    ) -> None:
        """`policy`: the one of `policies` that is evaluated. `ack_wait_s`: an exam whose holder sends no progress for
        this time goes to another worker; holders send it every third of it. `idle`: around waits for exams while none
        is played."""
        exam = exam_of(spec)
        assert exam is not None
        self.bus, self.worker, self.job, self.counts, self._broken = bus, worker, job, counts, broken
        self.spent, self._busy, self._idle, self._ack_wait_s = spent, busy, idle, ack_wait_s
        self.spec = validation_episodes(spec)
        self.kept, self.samples, self.solved_at = exam.transcripts, exam.samples, exam.solved_at
        self._counted: WeightVersion | None = None
        self._ended: Counter[Outcome] = Counter()
        """Episodes of the version `_counted`."""
        self.policy, self.part = policy, part_id(job, policy)
        self.opponents = exam.opponents_of(policy) if isinstance(exam, ValidationSpec) else []
        self.total = exam.total
        self.seats, self.sessions = SeatMap(self.spec, policies, urls), sessions
        self.engines = {one.name: one.engine for one in policies}
        places = spec.rollout.max_concurrent_groups * (spec.algorithm.group_size if spec.kind == "rl" else 1)
        self.places = max(1, places // max(1, len(spec.policies)))
        """Episodes that are played at the same time; the policies of a job have equal parts."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.place = asyncio.Event()

    async def run(self) -> None:
        """Never returns; what is being played when it is cancelled goes back."""
        try:
            while True:
                too_old = await self._consume()
                while self._version == too_old:
                    await sleep(RETRY_S)
        finally:
            await cancel_and_wait(*self.tasks)

    @property
    def _version(self) -> WeightVersion | None:
        """Return the evaluated policy's version; None until every policy has weights: its opponents may be policies."""
        versions = {name: engine.version for name, engine in self.engines.items()}
        return None if None in versions.values() else versions[self.policy]

    async def _consume(self) -> WeightVersion | None:
        """Consumes EXAM, starts exam tasks. Returns at an exam of a version that the engine has not got yet: which one
        it has. Others may have the other, so nothing is on its way to us from then on."""
        exams = await self.bus.consume(
            EXAM, f"exam-{self.part}", batch=self.places, ack_wait_s=self._ack_wait_s, job=self.part
        )
        try:
            while True:
                free = self.places - len(self.tasks)
                if free <= 0:
                    self.place.clear()
                    await wait_event(self.place, 0.5)
                    continue
                with nullcontext() if self.tasks else self._idle("generation"):
                    delivery = await exams.next(0.5, limit=free)
                version = self._version
                if delivery is not None and not await self._take(delivery, version):
                    return version
        finally:
            await exams.close()

    async def _take(self, delivery: Delivery[EvalEpisode], version: WeightVersion | None) -> bool:
        """Start the episode of a message. Return False if the message was given back, because the engine's version is
        older."""
        exam = delivery.noun
        if exam is None:
            log.error("bad_exam", error=delivery.error)
            await delivery.term()
        elif version is None or version < exam.version:
            await delivery.nak(RETRY_S)
            return False
        elif version > exam.version:  # no engine has these weights any longer
            await delivery.ack()
        else:
            task = asyncio.create_task(self._run(exam, delivery))
            self.tasks.add(task)
            task.add_done_callback(self._done)
        return True

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.place.set()
        forward_exception(task, self._broken)

    async def _run(self, exam: EvalEpisode, delivery: Delivery[EvalEpisode]) -> None:
        async with delivery.held(self._ack_wait_s):
            if delivery.deliveries > MAX_DELIVERIES:
                tries = f"{MAX_DELIVERIES} tries came to no end, because workers or engines were lost meanwhile"
                result = self._failed(exam, Ending.ENGINE_ERROR, tries)
            else:
                result = await self._play(exam)
            await self._hand_in(result)
            self.counts["exams"] += 1

    async def _play(self, exam: EvalEpisode) -> EvalResult:
        opponent, place = divmod(exam.index, self.total)
        state, sample = divmod(place, self.samples)
        seats = self.seats
        if self.opponents:
            seats = seats.turned(state, sample).opposed(self.policy, self.opponents[opponent], state + sample)
        ticket = Ticket(job=self.job, seq=state, row=state, seed=exam.seed, group_size=self.samples)
        for tries_left in range(self.spec.rollout.retries, -1, -1):
            episode = Episode(self.spec, ticket, sample, seats, self.sessions, self._busy)
            episode.is_trained = False
            episode.is_kept = self._is_among(exam, min(self.kept, TOKEN_BY_TOKEN))
            try:
                with structlog.contextvars.bound_contextvars(exam=exam.index, episode=episode.session):
                    return await self._result(exam, episode)
            except EpisodeFailed as error:
                log.info("exam_failed", exam=exam.index, ending=error.ending, error=error.error)
                if tries_left == 0:
                    return self._failed(exam, error.ending, error.error)
            finally:
                self.spent["tokens_generated"] += episode.sampled
        raise AssertionError("unreachable")

    async def _result(self, exam: EvalEpisode, episode: Episode) -> EvalResult:
        played = await episode.run()
        trajectories = [trajectory for trajectory in played if trajectory.policy == self.policy]
        rewards, components = totals(trajectories)
        if not rewards:  # an opponent ended it before the policy had a turn
            own, _ = episode.seats.split_seats(self.policy, episode.rewards)
            rewards = {seat: episode.rewards[seat] for seat in own} or {"": 0.0}
        reward, outcome = sum(rewards.values()) / len(rewards), outcome_of(episode, self.policy)
        is_read = self._is_rare(exam, reward, outcome) or self._is_among(exam, self.kept)
        said, origins = conversation(list(episode.streams.values()))
        messages = shortened(said, TRANSCRIPT_CHARACTERS) if is_read else []
        return EvalResult(
            job=exam.job,
            version=exam.version,
            index=exam.index,
            worker=self.worker,
            sampled_by=sorted({span.version for t in trajectories for span in t.spans}),
            opponent=self._opponent_version(exam, played),
            ending=played[0].ending,
            reward=reward,
            seats=episode.rewards,
            outcome=outcome,
            components={name: value / len(rewards) for name, value in components.items()},
            metrics=played[0].metrics,
            row=played[0].row,
            tokens=sum(int(t.mask.sum()) for t in trajectories),
            stops=[turn.stop for t in trajectories for turn in t.turns],
            seconds=played[0].seconds,
            messages=messages,
            origins=origins[: len(messages)],
            images=images_within(messages, images_of(said), self.kept) if messages else {},
            views=views_of(played),
        )

    def _opponent_version(self, exam: EvalEpisode, played: Sequence[Trajectory]) -> WeightVersion | None:
        """Return the oldest weights of the policy that an exam is played against: those that it has, if it had no turn.
        None: another player."""
        policy = self.opponents[exam.index // self.total].policy if self.opponents else None
        if policy is None:
            return None
        versions = [span.version for one in played if one.policy == policy for span in one.spans]
        return min(versions) if versions else self.engines[policy].version

    def _is_among(self, exam: EvalEpisode, first: int) -> bool:
        return is_among_first(exam.index, self.total, len(self.opponents), first)

    def _is_rare(self, exam: EvalEpisode, reward: float, outcome: float | None) -> bool:
        """Count an episode, and return whether it is one of this worker's first with its outcome. Its transcript is
        then sent, since the requester may have no other."""
        if exam.version != self._counted:
            self._counted, self._ended = exam.version, Counter()
        keys = [(exam.index // self.total, name) for name in outcomes_of(reward, outcome, self.solved_at)]
        self._ended.update(keys)
        return self.kept > 0 and any(self._ended[key] <= OUTCOME_TRANSCRIPTS for key in keys)

    def _failed(self, exam: EvalEpisode, ending: Ending, error: str) -> EvalResult:
        return EvalResult(
            job=exam.job,
            version=exam.version,
            index=exam.index,
            worker=self.worker,
            ending=ending,
            error=error_tail(error, 500),
        )

    async def _hand_in(self, result: EvalResult) -> None:
        """Send the result until the requester has it. A trainer that was restarted answers that it does not need it."""
        while True:
            try:
                await self.bus.request(EXAM_RESULT, result, REQUEST_TIMEOUT_S, job=self.part)
                return
            except NoReply:
                await sleep(RETRY_S)


def outcome_of(episode: Episode, policy: str) -> float | None:
    """See `EvalResult.outcome`. Means are over the seats that acted or were rewarded; without such seats they are 0."""
    rewards = episode.rewards
    own, others = episode.seats.split_seats(policy, rewards)
    if not others:
        return None
    paid = [seat for seat in rewards if seat in others]
    mine, theirs = (math.fsum(rewards[seat] for seat in seats) / max(1, len(seats)) for seats in (own, paid))
    return 0.5 if alike([mine, theirs]) else float(mine > theirs)


def conversation(streams: Sequence[Stream]) -> tuple[list[Message], list[MessageOrigin]]:
    """Return the messages of an episode in the order of play; of several seats or contexts, with the origin of each."""
    order = order_of_play([(stream.turns, len(stream.said)) for stream in streams])
    messages = [streams[place].said[number] for place, number in order]
    if len(streams) < 2:
        return messages, []
    turns = [{turn.message: turn for turn in stream.turns} for stream in streams]
    return messages, [_origin(streams[place], turns[place].get(number)) for place, number in order]


def _origin(stream: Stream, turn: Turn | None) -> MessageOrigin:
    """`turn`: in which it was said; None: the seat was shown it."""
    origin = MessageOrigin(seat=stream.seat, stream=stream.name, policy=stream.player.name)
    if turn is None:
        return origin
    tokens, versions = (turn.start, turn.end), sampled_by(turn, stream.spans)
    return msgspec.structs.replace(origin, turn=turn.number, tokens=tokens, versions=versions)


def views_of(trajectories: Sequence[Trajectory], room: int = TOKENS) -> list[ExamView]:
    """The first `room` tokens of an episode, over all its contexts: they travel in one message of the bus."""
    views: list[ExamView] = []
    for one in trajectories:
        pieces = (one.pieces or [])[:room]
        if pieces:
            tokens = tokens_of(one, pieces)
            views.append(ExamView(seat=one.seat, stream=one.stream, tokens=tokens, policy=one.policy))
            room -= len(pieces)
    return views
