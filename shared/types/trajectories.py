"""Results of an episode: Turn -> Trajectory -> Group, from rollout workers to reference-forward and the trainer.

The nouns that it is made of, and the shape suffixes, are in `core.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from opentinker.shared.types.core import F32, I32, U8, Ending, Message, StopReason, WeightVersion
from opentinker.shared.types.match_results import IdleSeat, MatchResult, Opposing, alike, count_outcomes, match_of
from opentinker.shared.types.pools import Outcomes


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a trajectory were sampled by `version`."""

    start: int
    end: int
    version: WeightVersion


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model output and the environment's answer. `start`/`end` are token positions of the output."""

    start: int
    end: int
    stop: StopReason
    reward: float
    number: int = 0
    """0, 1, 2... over all seats and streams of the episode: the order of play."""
    message: int | None = None
    """Place of its words among the messages of its stream."""
    components: dict[str, float] = {}
    paid: dict[str, float] = {}
    """In a tree: what the environment paid for this turn, by seat. The candidates of a turn are compared by it; what a
    seat earns later, in turns of others, is part of `reward` alone."""
    untrainable: str = ""
    """Why its tokens are not trained; empty: they are. Their mask is 0, and `end` is `start`, after them."""
    generate_s: float = 0.0
    env_s: float = 0.0


class Picture(msgspec.Struct, frozen=True, array_like=True):
    """An image in a trajectory: its digest and its places."""

    digest: str
    """SHA-256 of the encoded image, in hexadecimal: a key of the group's `images`."""
    runs: list[tuple[int, int]]
    """[start, end) of its placeholder tokens, in order: the i-th of them all stands for the i-th embedding."""

    @property
    def tokens(self) -> int:
        return sum(end - start for start, end in self.runs)

    def moved(self, by: int) -> Picture:
        return Picture(self.digest, [(start + by, end + by) for start, end in self.runs])


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's observations and actions in one token stream of an episode. Arrays are little-endian bytes of length
    T.

    An episode has a trajectory per seat, and per stream of a seat whose context was restarted. The reward of a seat is
    the sum over its streams; samples of a group are compared seat by seat.

    Example: prompt "7=" answered "7<eos>": ids [7, 13, 7, 1], mask [0, 0, 1, 1], logprobs [0, 0, -2.1, -0.3].
    """

    index: int
    """Place of its sample in the group, 0..G-1."""
    attempt: str
    """Differs per try of the same sample."""
    seat: str = ""
    """Seat whose view it is, in an environment with several."""
    stream: str = ""
    """Context of the seat, by name."""
    policy: str = ""
    """Player of the seat: a policy, in a job with several; a frozen checkpoint, JOB@STEP; a member of a pool,
    POOL@EPOCH.STEP."""
    ids_T: bytes
    """int32 token ids: prompt, outputs and observations in order, exactly as the engine saw and sampled them."""
    mask_T: bytes
    """uint8: 1 where the policy sampled the token, 0 elsewhere."""
    logprobs_T: bytes
    """float32 behaviour logprobs of the distribution really sampled from; 0 where mask is 0."""
    spans: list[Span]
    """Weight version of every mask-1 token, in order."""
    turns: list[Turn]
    ending: Ending
    row: int | None = None
    """Row of the data set that the environment played, if it lists them."""
    truncated: bool = False
    """A limit ended the episode (of turns, tokens or context, or one of the environment's own), not the task: more
    reward could have come."""
    reward: float
    """Sum of the turn rewards."""
    metrics: dict[str, float] = {}
    """Metrics that the environment reported at the end, e.g. `exact`."""
    bots: dict[str, float] = {}
    """Mean reward of the seats of each scripted player of the episode, by its name."""
    idle: dict[str, IdleSeat] = {}
    """The episode's seats without a trajectory, see `SeatMap.idle_seats`."""
    seconds: float = 0.0
    ref_logprobs_T: bytes | None = None
    """float32 logprobs of the frozen reference, added by reference-forward; 0 where mask is 0."""
    teacher_logprobs_T: bytes | None = None
    """float32 logprobs of the teacher, added by reference-forward; 0 where mask is 0."""
    values_T: bytes | None = None
    """float32 values of the frozen value model, added by reference-forward: the return it expects where the token is
    about to be chosen; 0 where mask is 0."""
    end_value: float = 0.0
    """For a truncated trajectory: the frozen value model's value of its final state, where `values_T` are present."""
    messages: list[Message] | None = None
    """The conversation as text, of jobs with reward models: on the way to reference-forward alone."""
    transcript: list[Message] | None = None
    """The conversation as text, of the episodes that people may read: for the trainer to write down."""
    pieces: list[str] | None = None
    """The text of each of its first tokens, of the same episodes."""
    scores: dict[str, float] = {}
    """Scores of reward models by name, added by reference-forward; weight times score is part of the last reward."""
    pictures: list[Picture] = []
    """The images that the policy saw, in order."""
    images: dict[str, bytes] = {}
    """By digest, PNG or JPEG: what they are, until the group has them (`together`)."""

    @property
    def ids(self) -> I32:
        return np.frombuffer(self.ids_T, dtype="<i4")

    @property
    def mask(self) -> U8:
        return np.frombuffer(self.mask_T, dtype="u1")

    @property
    def logprobs(self) -> F32:
        return np.frombuffer(self.logprobs_T, dtype="<f4")

    @property
    def ref_logprobs(self) -> F32 | None:
        return None if self.ref_logprobs_T is None else np.frombuffer(self.ref_logprobs_T, dtype="<f4")

    @property
    def teacher_logprobs(self) -> F32 | None:
        return None if self.teacher_logprobs_T is None else np.frombuffer(self.teacher_logprobs_T, dtype="<f4")

    @property
    def values(self) -> F32 | None:
        return None if self.values_T is None else np.frombuffer(self.values_T, dtype="<f4")

    @property
    def oldest(self) -> WeightVersion:
        return min(span.version for span in self.spans)

    def check(self) -> None:
        """Raise ValueError if the parts do not agree with each other."""
        T = len(self.ids_T) // 4
        if len(self.ids_T) != 4 * T or len(self.mask_T) != T or len(self.logprobs_T) != 4 * T:
            raise ValueError("ids, mask and logprobs differ in length")
        added = {
            "reference logprobs": self.ref_logprobs_T,
            "teacher logprobs": self.teacher_logprobs_T,
            "values": self.values_T,
        }
        for name, added_T in added.items():
            if added_T is not None and len(added_T) != 4 * T:
                raise ValueError(f"{name} differ in length from ids")
        mask = self.mask
        covered = np.zeros(T, dtype=np.uint8)
        at = 0
        for span in self.spans:
            if not at <= span.start < span.end <= T:
                raise ValueError(f"span [{span.start}, {span.end}) is empty, out of order or outside 0..{T}")
            covered[span.start : span.end] = 1
            at = span.end
        if not self.spans or not np.array_equal(covered, mask):
            raise ValueError("the spans must cover the sampled tokens, at least one, and nothing else")
        for numbers in (self.logprobs, self.ref_logprobs, self.teacher_logprobs, self.values):
            if numbers is not None and (not np.isfinite(numbers).all() or numbers[mask == 0].any()):
                raise ValueError("logprobs and values must be finite, and 0 where the policy did not sample")
        if (self.ids < 0).any():
            raise ValueError("token ids must not be negative")
        self._check_pictures(mask)
        self._check_rewards(mask)

    def _check_pictures(self, mask: U8) -> None:
        at = 0
        for start, end in (run for picture in self.pictures for run in picture.runs):
            if not at <= start < end <= len(mask) or mask[start:end].any():
                raise ValueError(f"image tokens [{start}, {end}) are out of order or the policy's own")
            at = end

    def _check_rewards(self, mask: U8) -> None:
        at = 0
        for turn in self.turns:
            if not at <= turn.start <= turn.end <= len(mask) or not mask[turn.start : turn.end].all():
                raise ValueError(f"turn [{turn.start}, {turn.end}) is out of order or not the policy's own")
            at = turn.end
        if any(later.number < turn.number for turn, later in pairwise(self.turns)):
            raise ValueError("the turns of a trajectory must be numbered in order of play")
        rewards = [turn.reward for turn in self.turns]
        numbers = [self.reward, self.seconds, self.end_value, *rewards, *self.metrics.values(), *self.scores.values()]
        numbers += [seat.reward for seat in self.idle.values()]
        if not all(map(math.isfinite, numbers)):
            raise ValueError("rewards and metrics must be finite")
        if rewards and not math.isclose(self.reward, math.fsum(rewards), rel_tol=1e-6, abs_tol=1e-6):
            raise ValueError("the reward must be the sum of the turn rewards")


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one ticket: from a rollout worker, to reference-forward and the trainer.

    The trajectories of its G samples, ordered by sample; one each, or one per seat and stream that had a turn. In a
    tree, sample 0 is the episode, made of the candidates that were chosen; the samples 1..G-1 are the others of each
    turn, which have a trajectory each: the seat's context so far (mask 0) and the candidate.
    """

    job: str
    seq: int
    environment: str
    worker: str
    trajectories: list[Trajectory]
    trace: str = ""
    """The ticket's."""
    is_tree: bool = False
    """Whether its samples are the candidates of each turn of one episode."""
    images: dict[str, bytes] = {}
    """By digest, PNG or JPEG: what the trajectories show, each image once."""
    rewards_of_all: dict[int, dict[str, float]] = {}
    """By sample and seat, of a part that one policy played (`of`): `totals` of the whole group."""
    opponents: dict[str, WeightVersion] = {}
    """By name, of a part that one policy played (`of`): the oldest version of each other policy that had a turn."""
    newest_opponents: dict[str, WeightVersion] = {}
    """The same, the newest version of each."""
    matches: list[MatchResult] = []
    """Results of the policy against the other players, in the part of a group that is for it (`of`)."""
    others: list[Trajectory] = []
    """In a part that one policy played (`of`), trajectories of the others in the episodes that people may read."""

    @property
    def oldest(self) -> WeightVersion:
        return min(t.oldest for t in self.trajectories)

    @property
    def key(self) -> str:
        return f"{self.job}/{self.seq}"

    def of(self, policy: str, opposing: Opposing | None = None) -> Group:
        """Return what this policy played, with the rewards of the other seats, the versions of the other players, who
        won, and what they played in the episodes that people may read; without trajectories if it had no turn.
        `opposing`: the seats of its opponents; None: all others are."""
        own = [t for t in self.trajectories if t.policy == policy]
        others = [t for t in self.trajectories if t.policy != policy]
        versions: dict[str, list[WeightVersion]] = {}
        for other in others:
            versions.setdefault(other.policy, []).extend(span.version for span in other.spans)
        return msgspec.structs.replace(
            self,
            trajectories=own,
            rewards_of_all=self.totals,
            opponents={name: min(seen) for name, seen in versions.items()},
            newest_opponents={name: max(seen) for name, seen in versions.items()},
            matches=self._matches(policy, opposing),
            others=[other for other in others if other.transcript is not None],
        )

    def _matches(self, policy: str, opposing: Opposing | None) -> list[MatchResult]:
        """Return the results of a policy. A sample is won if the policy's seats earned more on average than the
        opponent's, and drawn if equal, also where the game was over before one of them had a turn."""
        played: dict[int, list[Trajectory]] = {}
        for one in (t for t in self.trajectories if self.is_played(t.index)):
            played.setdefault(one.index, []).append(one)
        totals, found = self.totals, []
        for index, views in played.items():
            acted = [(view.policy, view.seat, view.oldest) for view in views]
            idle, bots = views[0].idle, views[0].bots
            rewards = totals[index]
            found.append(match_of(policy, self.seq, index, acted, idle, rewards=rewards, bots=bots, opposing=opposing))
        return [match for match in found if match is not None and match.opponents]

    @property
    def outcomes(self) -> dict[str, Outcomes]:
        """Return the games of the policy against each other player, of a part that it played (`of`)."""
        return count_outcomes(self.matches)

    @property
    def samples(self) -> int:
        """G."""
        return len({t.index for t in self.trajectories})

    @property
    def seats(self) -> dict[str, list[list[int]]]:
        """Return by seat, for each sample in which it acted, the indices of its streams in `trajectories`. Those under
        one seat are compared with each other and with nothing else."""
        places: dict[str, dict[int, list[int]]] = {}
        for place, trajectory in enumerate(self.trajectories):
            places.setdefault(trajectory.seat, {}).setdefault(trajectory.index, []).append(place)
        return {seat: list(samples.values()) for seat, samples in places.items()}

    @property
    def totals(self) -> dict[int, dict[str, float]]:
        """Return for each sample the reward of each seat that acted, the sum over its streams."""
        if self.rewards_of_all:
            return self.rewards_of_all
        found: dict[int, dict[str, float]] = {}
        for seat, samples in self.seats.items():
            for streams in samples:
                own = [self.trajectories[place] for place in streams]
                found.setdefault(own[0].index, {})[seat] = math.fsum(t.reward for t in own)
        return found

    @property
    def rewards(self) -> dict[str, list[float]]:
        """Return by seat, for each sample in which it acted, the sum of rewards over its streams."""
        return {
            seat: [math.fsum(self.trajectories[place].reward for place in streams) for streams in samples]
            for seat, samples in self.seats.items()
        }

    @property
    def equal(self) -> bool:
        """No seat did better in one sample than in another, in a tree with one candidate of a turn: there is nothing to
        compare."""
        if not self.is_tree:
            return all(alike(rewards) for rewards in self.rewards.values())
        turns: dict[tuple[str, int], list[float]] = {}
        for trajectory in self.trajectories:
            for turn in trajectory.turns:
                turns.setdefault((trajectory.seat, turn.number), []).append(turn.paid.get(trajectory.seat, 0.0))
        return all(map(alike, turns.values()))

    def is_played(self, index: int) -> bool:
        """Return whether a sample is an episode that was played, and not the candidates that were not chosen."""
        return index == 0 or not self.is_tree

    def _candidate(self, trajectory: Trajectory) -> int:
        """Return the turn that a candidate belongs to which was not chosen; 0 of a played episode."""
        return 0 if self.is_played(trajectory.index) or not trajectory.turns else trajectory.turns[0].number

    def check(self) -> None:
        """Raise ValueError if a trajectory is inconsistent, or if the samples are not numbered 0..G-1."""
        indices = [t.index for t in self.trajectories]
        if not indices or indices != sorted(indices) or set(indices) != set(range(indices[-1] + 1)):
            raise ValueError("the samples of a group must be numbered 0, 1, 2...")
        if len({(t.index, t.seat, t.stream, self._candidate(t)) for t in self.trajectories}) != len(indices):
            raise ValueError("a sample has one trajectory per seat and stream, in a tree per candidate")
        for trajectory in self.trajectories:
            trajectory.check()
        pictures = [picture for trajectory in self.trajectories for picture in trajectory.pictures]
        if not {picture.digest for picture in pictures} <= self.images.keys():
            raise ValueError("the group lacks an image that a trajectory shows")
        if len({(p.digest, p.tokens) for p in pictures}) > len({p.digest for p in pictures}):
            raise ValueError("the same image takes the same number of tokens everywhere")
        for streams in (streams for samples in self.seats.values() for streams in samples if len(streams) > 1):
            numbers = [turn.number for place in streams for turn in self.trajectories[place].turns]
            if len(set(numbers)) < len(numbers):
                raise ValueError("the turns of a seat that has several streams must be numbered in order of play")


def totals(trajectories: Sequence[Trajectory]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the totals of one sample: the reward by seat, and by component, over all turns of all seats."""
    rewards: dict[str, float] = {}
    components: dict[str, float] = {}
    for trajectory in trajectories:
        rewards[trajectory.seat] = rewards.get(trajectory.seat, 0.0) + trajectory.reward
        for name, value in (part for turn in trajectory.turns for part in turn.components.items()):
            components[name] = components.get(name, 0.0) + value
    return rewards, components
