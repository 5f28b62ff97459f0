"""One episode with tree sampling, which is a whole group: at every turn each seat that learns samples group_size
candidates from the same state. The env worker plays each on a copy of the environment, the episode continues with the
best one, and all of them are trained.

The streams hold the candidates that were chosen: sample 0 of the group, an episode like any other. Each of the others
is a trajectory of the samples 1..G-1, unless it cannot be trained. Seats that do not learn have one candidate.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from opentinker.services.rollout_worker.episode import Episode, Sampled
from opentinker.services.rollout_worker.episode_protocol import EpisodeFailed
from opentinker.services.rollout_worker.seat_map import learner_of
from opentinker.services.rollout_worker.token_stream import Stream
from opentinker.shared.asyncio_tools import gather_all
from opentinker.shared.spec.tree_sampling import turn_rewards
from opentinker.shared.types.core import Ending, StopReason
from opentinker.shared.types.env_protocol import SeatAction, SeatPrompt, SessionReply, StepSession
from opentinker.shared.types.trajectories import Trajectory, Turn


class Candidate(NamedTuple):
    sampled: Sampled
    action: SeatAction


class TreeEpisode(Episode):
    """Plays the only episode of a ticket. `run` gives the trajectories of all samples of its group, in their order."""

    _others: Sequence[Trajectory] = ()
    """Candidates that were not chosen and can be trained."""
    _others_sampled = 0
    """Tokens of all candidates that were not chosen."""
    _chosen = 0
    """Index of the candidate with which the episode continued, among those of its turn."""
    _all_done = False

    @property
    def sampled(self) -> int:
        return super().sampled + self._others_sampled

    @property
    def _is_closed(self) -> bool:
        return self._all_done

    async def run(self) -> list[Trajectory]:
        played = await super().run()
        ends = [msgspec.structs.replace(o, ending=played[0].ending, seconds=played[0].seconds) for o in self._others]
        return [*played, *sorted(ends, key=lambda other: other.index)]

    async def _take_turn(self, worker: str, streams: list[Stream], asked: SessionReply) -> SessionReply:
        """The candidates of every seat that is asked, side by side, and what the environment answers to the best."""
        self.state = "GENERATING"
        with self._busy("generation"):
            candidates_SK = await gather_all(
                [
                    self._candidates(stream, prompt, place)
                    for place, (stream, prompt) in enumerate(zip(streams, asked.prompts, strict=True))
                ]
            )
        self.state = "INTERACTING"
        generated = time.monotonic()
        count = max(map(len, candidates_SK))
        joint_K = [[own[k % len(own)].action for own in candidates_SK] for k in range(count)]
        with self._busy("env"):
            request = StepSession(
                session=self.session,
                turn=self.turn,
                text="",
                stop=StopReason.EOS,
                candidates=joint_K,
                chosen=self._chosen,
            )
            reply = self._good(await self.sessions.step(worker, request))
        if len(reply.outcomes) != count:
            problem = f"{len(reply.outcomes)} outcomes of {count} candidates"
            raise EpisodeFailed(Ending.ENV_BAD_REPLY, problem)
        env_s = (time.monotonic() - generated) / count
        self._all_done = reply.done
        for outcome in reply.outcomes:
            self._check_rewards(asked, outcome)
        paid_K = [_paid(streams, outcome) for outcome in reply.outcomes]
        trained = {stream.seat for stream in self.streams.values() if stream.spans}
        self._chosen = best = _best(streams, candidates_SK, paid_K, trained)
        for stream, own in zip(streams, candidates_SK, strict=True):
            places = [place for place in range(len(own)) if place != best] if len(own) > 1 else []
            self._others_sampled += sum(len(own[place].sampled.completion.ids) for place in places)
            kept = [place for place in places if not own[place].sampled.untrainable]
            self._others = [
                *self._others,
                *(
                    self._other(stream, own[place], index, reply.outcomes[place], paid_K[place], env_s)
                    for index, place in enumerate(kept, start=1)
                ),
            ]
            chosen = own[best % len(own)]
            stream.sample(chosen.sampled.completion, chosen.action.text, chosen.sampled.untrainable)
            self._record(stream, chosen.sampled, reply.outcomes[best], env_s)
            stream.turns[-1] = msgspec.structs.replace(stream.turns[-1], paid=paid_K[best])
        self._pay_others(reply.outcomes[best])
        self.turn += 1
        return reply.outcomes[best]

    async def _candidates(self, stream: Stream, prompt: SeatPrompt, place: int) -> list[Candidate]:
        """Return the candidates of one seat, which see the same."""
        count = self.ticket.group_size if learner_of(stream.player) is not None else 1
        sampled_K = await gather_all([self._sample(stream, prompt, place, candidate) for candidate in range(count)])
        return [Candidate(sampled, self._action(stream, sampled)) for sampled in sampled_K]

    def _other(
        self,
        stream: Stream,
        candidate: Candidate,
        index: int,
        outcome: SessionReply,
        paid: dict[str, float],
        env_s: float,
    ) -> Trajectory:
        """Return a candidate that was not chosen: the context that it followed, and its tokens with mask 1."""
        other = Stream(stream.seat, stream.name, stream.tools, stream.player)
        other.observe(stream.ids, [], [])
        other.sample(candidate.sampled.completion, candidate.action.text)
        other.pictures, other.images = list(stream.pictures), dict(stream.images)
        turn = Turn(
            start=len(stream.ids),
            end=len(other.ids),
            stop=candidate.sampled.completion.stop,
            reward=paid.get(stream.seat, 0.0),
            number=self.turn,
            components=dict(outcome.components) | outcome.rewards.get(stream.seat, {}),
            paid=paid,
            generate_s=candidate.sampled.seconds,
            env_s=env_s,
        )
        other.turns.append(turn)
        ending = Ending.ENV_DONE  # the episode's, once it is known
        trajectory = other.trajectory(index, self.attempt, ending, is_kept=False)
        return msgspec.structs.replace(trajectory, truncated=outcome.truncated, metrics=outcome.metrics, messages=None)


def _paid(streams: Sequence[Stream], outcome: SessionReply) -> dict[str, float]:
    """Return what the environment paid for a turn, by seat, those that acted included. `streams`: theirs."""
    paid = {stream.seat: outcome.reward for stream in streams}  # 0 in a round, whose rewards are named
    for seat, parts in outcome.rewards.items():
        paid[seat] = paid.get(seat, 0.0) + sum(parts.values())
    return paid


def _best(
    streams: Sequence[Stream],
    candidates_SK: Sequence[Sequence[Candidate]],
    paid_K: Sequence[dict[str, float]],
    trained: Collection[str],
) -> int:
    """Return the candidate with the highest mean reward of the seats that act and learn, the first of several.
    `trained`: seats with a turn that can be trained. For the others those candidates come first that can: the episode
    may end here, and it fails if a seat has no such turn."""
    count = len(paid_K)
    totals_K, trainable_K = np.zeros(count), np.zeros(count)
    for stream, own in zip(streams, candidates_SK, strict=True):
        if (policy := learner_of(stream.player)) is None:
            continue
        totals_K += turn_rewards(stream.seat, paid_K, policy.spec.algorithm)
        if stream.seat not in trained:
            trainable_K += [not one.sampled.untrainable for one in own]
    return int(np.argmax(np.where(trainable_K == trainable_K.max(), totals_K, -np.inf)))
