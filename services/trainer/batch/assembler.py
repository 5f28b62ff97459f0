"""Groups in arrival or submission order -> batches, with the hard staleness drop and the record of consumed messages.

    received --take--> trained       (stays here, tagged with its batch, until a checkpoint covers it)
             '-------> discarded     (see Discard)

Staleness of a group at the step that makes version k+1 is k minus the step of its oldest token; more than
`max_staleness` is dropped regardless of admission. The stream floor is the highest sequence below which every
message of the job is consumed: a restart begins reading after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from opentinker.services.trainer.batch.row_plays import plays_of
from opentinker.services.trainer.joint_progress import JointProgress
from opentinker.shared.data.row_log import RowPlays, added
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.schedules import kept_groups, max_opponent_lag
from opentinker.shared.types.core import Discard, WeightVersion
from opentinker.shared.types.match_results import MatchResult
from opentinker.shared.types.trajectories import Group


@dataclass
class Consumed:
    """A message that needs no reading again once a checkpoint of `batch` exists."""

    batch: int
    seq: int | None
    """Group number; None if the message was a duplicate or of the past."""
    reason: Discard | None
    """None: trained."""


@dataclass
class Assembler:
    max_staleness: int
    epoch: int
    drop_zero_variance: bool = False
    """Groups whose rewards are all equal are discarded; admission lets as many new ones start."""
    in_order: bool = False
    """A batch is ordered by group number. Deterministic jobs have no staleness, so it then holds all there are."""
    opponent_lag: Callable[[Group], int] = lambda _: 0
    """How many versions the other policies have moved since they played the group."""
    opponent_is_gone: Callable[[Group], bool] = lambda _: False
    """Whether another policy has played the group with weights that were rolled back: it will not train on it."""
    max_opponent_lag: int | None = None
    """Groups with a larger opponent lag are discarded."""
    keep: int | None = None
    """Most groups that wait; beyond them the oldest are discarded."""
    solved_at: float = 1.0
    """Smallest reward with which an episode counts as solved."""
    resting: bool = False
    """Whether another policy has its turn: nothing is taken, and what arrives is discarded."""
    trained: int = 0
    """Groups taken, over the life of the job's lineage."""
    resumed: dict[int, int] = field(default_factory=dict)
    """epoch -> step at which that epoch began; tokens of an older epoch beyond that step were rolled back."""
    floor: int = 0
    """Stream sequence up to which everything was consumed before this trainer started."""
    pending: dict[int, Group] = field(default_factory=dict)
    """stream sequence -> group, in arrival order."""
    consumed: dict[int, Consumed] = field(default_factory=dict)
    """stream sequence -> how it was consumed, above the floor."""
    discarded: Counter[str] = field(default_factory=Counter)
    """By reason, over the life of the job's lineage."""
    known: set[int] = field(default_factory=set)
    """Group numbers received or consumed: a second message of the same group is a duplicate."""
    last: int = 0
    """Highest stream sequence seen."""
    barren: int = 0
    """Groups of equal rewards discarded since the last batch was taken."""
    absent: int = 0
    """Groups without a turn of the policy discarded since the last batch was taken."""
    uncounted: list[MatchResult] = field(default_factory=list)
    """Matches of groups discarded since the last step because of equal rewards, or because the policy had no turn: they
    are results nevertheless, except of weights that were rolled back."""
    unlogged: dict[int, RowPlays] = field(default_factory=dict)
    """By row, episodes of groups discarded since the last step: they were played nevertheless."""
    overtaken: int = 0
    """Groups discarded because an opponent had moved, since the trainer began to wait for a batch."""

    @classmethod
    def of(cls, spec: JobSpec, epoch: int, joint: JointProgress) -> Assembler:
        """Return an empty one that follows the spec of a job, or of one of its policies."""
        return cls(
            spec.algorithm.max_staleness,
            epoch,
            drop_zero_variance=bool(spec.algorithm.drop_zero_variance),
            in_order=spec.train.deterministic,
            opponent_lag=lambda group: joint.moved(group.opponents),
            opponent_is_gone=joint.is_gone,
            max_opponent_lag=max_opponent_lag(spec),
            keep=kept_groups(spec),
            solved_at=spec.validation.solved_at if spec.validation is not None else 1.0,
        )

    def add(self, stream_seq: int, group: Group) -> bool:
        """Add a group. Return False if it was seen before."""
        self.last = max(self.last, stream_seq)
        if group.seq in self.known:
            return False
        self.known.add(group.seq)
        self.pending[stream_seq] = group
        return True

    def ignore(self, stream_seq: int, batch: int) -> None:
        """Consume a message that needs no training: a duplicate, or a group consumed before."""
        self.last = max(self.last, stream_seq)
        if stream_seq not in self.pending:
            self.consumed.setdefault(stream_seq, Consumed(batch, None, None))

    def reject(self, stream_seq: int, group: int, batch: int) -> None:
        """Consume a group that is unreadable or inconsistent: it is never trained."""
        self.last = max(self.last, stream_seq)
        self.known.add(group)
        self.consumed[stream_seq] = Consumed(batch, group, Discard.INVALID)
        self.discarded[Discard.INVALID] += 1

    def _verdict(self, group: Group, step: int) -> Discard | None:
        if not group.trajectories:
            return Discard.ABSENT
        if self._is_gone(group, step):
            return Discard.FROM_FUTURE
        if step - group.oldest.step > self.max_staleness:
            return Discard.STALE
        if self.max_opponent_lag is not None and self.opponent_lag(group) > self.max_opponent_lag:
            return Discard.OPPONENT_MOVED
        if self.drop_zero_variance and group.equal:
            return Discard.ZERO_VARIANCE
        return None

    def _is_gone(self, group: Group, step: int) -> bool:
        """Return whether weights were rolled back that have played the group, or would have in a seat without turn."""
        played = (span.version for trajectory in group.trajectories for span in trajectory.spans)
        reported = (WeightVersion.parse(match.version) for match in group.matches)
        return any(self._rolled_back(version, step) for version in (*played, *reported)) or self.opponent_is_gone(group)

    def _rolled_back(self, version: WeightVersion, step: int) -> bool:
        if version.step > step or version.epoch > self.epoch:
            return True
        return any(version.epoch < epoch and version.step > at for epoch, at in self.resumed.items())

    @staticmethod
    def discard_batch(reason: Discard, step: int) -> int:
        """Return the number of the step that a discard at version `step` belongs to: the next one. A resting policy
        makes no step for long; its discards are final immediately, so that the stream need not hold them."""
        return step if reason is Discard.RESTING else step + 1

    def drop(self, step: int) -> dict[Discard, list[int]]:
        """Discard groups that may not train the batch starting at version `step`. Returns group numbers by reason."""
        dropped: dict[Discard, list[int]] = {}
        reasons = {
            stream_seq: Discard.RESTING if self.resting else self._verdict(group, step)
            for stream_seq, group in self.pending.items()
        }
        good = [stream_seq for stream_seq, reason in reasons.items() if reason is None]
        if self.keep is not None:
            reasons |= dict.fromkeys(good[: max(0, len(good) - self.keep)], Discard.SURPLUS)
        for stream_seq, reason in reasons.items():
            if reason is not None:
                group = self.pending.pop(stream_seq)
                self.consumed[stream_seq] = Consumed(self.discard_batch(reason, step), group.seq, reason)
                self.discarded[reason] += 1
                if reason in (Discard.ZERO_VARIANCE, Discard.ABSENT) and not self._is_gone(group, step):
                    self.uncounted += group.matches
                self.barren += reason == Discard.ZERO_VARIANCE
                if reason is not Discard.FROM_FUTURE and (plays := plays_of(group, self.solved_at)) is not None:
                    had = self.unlogged.get(plays.row)
                    self.unlogged[plays.row] = plays if had is None else added(had, plays)
                self.absent += reason == Discard.ABSENT
                self.overtaken += reason == Discard.OPPONENT_MOVED
                dropped.setdefault(reason, []).append(group.seq)
        return dropped

    def pop_unlogged(self) -> list[RowPlays]:
        """Return the episodes of groups discarded since the last step, by row; each once."""
        found, self.unlogged = self.unlogged, {}
        return list(found.values())

    def pop_uncounted(self) -> list[MatchResult]:
        """Return the matches of groups discarded for the batch that was just trained because of equal rewards, or
        because the policy had no turn; each once."""
        found, self.uncounted = self.uncounted, []
        return found

    @property
    def overfull(self) -> bool:
        return self.keep is not None and len(self.pending) > self.keep

    def take(self, step: int, groups: int, growth: int = 1) -> list[Group] | None:
        """Return the first `groups` as the batch that makes version step + 1, or up to `growth` times as many if they
        are there; None if there are not enough yet."""
        if self.resting or len(self.pending) < groups:
            return None
        self.barren = self.absent = 0
        arrived = list(self.pending.items())
        size = min(len(arrived) // groups, growth) * groups
        batch = (sorted(arrived, key=lambda item: item[1].seq) if self.in_order else arrived)[:size]
        self.trained += size
        for stream_seq, group in batch:
            del self.pending[stream_seq]
            self.consumed[stream_seq] = Consumed(step + 1, group.seq, None)
        return [group for _, group in batch]

    def account(self, step: int, settled: int) -> tuple[int, list[int], dict[str, int]]:
        """Return for the checkpoint of `step`: stream floor, group numbers consumed above it, discards by reason.

        `settled`: the stream sequence below which the server has nothing left to deliver. Messages do not always
        arrive in order, so the highest one seen implies nothing about those before it.
        """
        open_seqs = [*self.pending, *(s for s, c in self.consumed.items() if c.batch > step)]
        floor = max(self.floor, min([settled, self.last, *(seq - 1 for seq in open_seqs)]))
        above = [c.seq for s, c in self.consumed.items() if s > floor and c.batch <= step and c.seq is not None]
        later = Counter(c.reason for c in self.consumed.values() if c.batch > step and c.reason is not None)
        discarded = {reason: count - later[Discard(reason)] for reason, count in self.discarded.items()}
        return floor, sorted(above), {str(r): n for r, n in discarded.items() if n}

    def trained_by(self, step: int) -> int:
        """Return how many groups were trained in the steps up to this one."""
        later = (c for c in self.consumed.values() if c.batch > step and c.seq is not None and c.reason is None)
        return self.trained - sum(1 for _ in later)

    def forget(self, floor: int) -> None:
        """A durable checkpoint has this floor: nothing at or below it will ever be read again."""
        self.floor = floor
        for stream_seq in [s for s in self.consumed if s <= floor]:
            gone = self.consumed.pop(stream_seq)
            if gone.seq is not None:
                self.known.discard(gone.seq)
