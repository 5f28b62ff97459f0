"""Several policies of one job in one trainer process: each has a learner, a consumer, a weight group and checkpoints of
its own (`rl_loop.py`); what they have in common is here.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opentinker.shared.evaluation.job_ratings import JobRatings
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.opposition import Opposition
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.spec.matches.schedules import Rule, rule_of
from opentinker.shared.spec.tree_sampling import is_tree
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.manifest import Manifest
from opentinker.shared.types.trajectories import Group


@dataclass
class CommonPosition:
    """From which checkpoints the policies of a deterministic job resume, see `policy_checkpoints.py`."""

    position: int | None = None
    """None: there is no position at which every policy has an intact checkpoint."""
    damaged: dict[Path, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    """By directory: damaged checkpoints that were skipped, and the problem of each."""


@dataclass
class RecoveryLine:
    """From which checkpoints the policies of a job resume that trains all on every match, by directory of each; see
    `policy_checkpoints.py`."""

    found: dict[Path, tuple[Path, Manifest] | None] = field(default_factory=dict)
    """None: the policy begins with its first weights."""
    gone_back: set[Path] = field(default_factory=set)
    """Those that resume from an older checkpoint than their newest."""
    pinned: set[Path] = field(default_factory=set)
    """Those that cannot go back as far as they should, and stay at their newest: they alone train some matches."""
    damaged: dict[Path, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))


class JointProgress:
    """The job's step, the floor of the stream that all policies read, and the job's end. A job with one policy has it
    under the empty name."""

    def __init__(
        self,
        total: int,
        steps: Mapping[str, int],
        rule: Rule | None = None,
        groups_per_batch: Mapping[str, int] | None = None,
    ) -> None:
        """`total`: steps of the job; `steps`: of each policy; `rule`: of the schedule; `groups_per_batch`: of each
        policy, by default the same for all."""
        self._total, self._steps = total, dict(steps)
        self.rule = rule or Rule()
        self._groups_per_batch = groups_per_batch or dict.fromkeys(steps, 1)
        self._visible: dict[str, int] = {}
        """Step of the newest version of each policy that the others may play against."""
        self._watchers: list[asyncio.Event] = []
        self._made: dict[str, int] = {}
        self._resumed: dict[str, dict[int, int]] = {}
        self._restored = asyncio.Event()
        self._counting = asyncio.Lock()
        self._covered: set[str] = set()
        self.loading = asyncio.Lock()
        """Held while a policy is loaded: learners seed torch's generator, which they share."""
        self.goes_back_together = False
        """Whether the policies resume from a `RecoveryLine`."""
        self.line: RecoveryLine | None = None
        """Where the policies of another job resume, if they train on the same matches, likewise."""
        self.kept: dict[Path, list[Manifest | None]] = {}
        """By directory: the checkpoints, oldest first, that such a policy could go back to; None: its first weights."""
        self.asked_to_save: set[str] = set()
        """Policies that save before they take their next batch: then no checkpoint of another holds what they lack."""
        self.common: CommonPosition | None = None
        """Where the policies of a deterministic job resume, once the first of them has looked."""
        self.sweeping = threading.Lock()
        """Held while a policy's expired checkpoints are removed: others look for those that all have."""
        self._pools: dict[str, str] = {}
        """The policy whose versions are in each pool."""
        self.ratings = JobRatings()
        self.rates = False
        """Whether anything shows ratings: evaluations or pools."""
        self._shown: dict[str, dict[str, float]] = {}
        self._floors = dict.fromkeys(steps, 0)
        self._finished: dict[str, str] = {}

    @classmethod
    def of(cls, spec: JobSpec) -> JointProgress:
        own = {name: spec_of(spec, name) for name in spec.policies or ("",)}
        steps = {name: one.train.steps for name, one in own.items()}
        batches = {name: one.algorithm.groups_per_batch for name, one in own.items()}
        joint = cls(spec.train.steps, steps, rule_of(spec), batches)
        joint._pools = {name: pool.policy or "" for name, pool in spec.pools.items()}
        joint.ratings = JobRatings(
            spec.policies,
            joint._pools,
            has_trees=is_tree(spec),
            opponents={name: Opposition(one, name).names for name, one in own.items()},
        )
        joint.rates = spec.validation is not None or bool(spec.pools)
        joint.goes_back_together = len(own) > 1 and joint.rule.trains_together and not spec.train.deterministic
        return joint

    def restore(self, policy: str, step: int, resumed: Mapping[int, int] | None = None) -> int | None:
        """A policy resumed from `step`. Returns the job's step, or None until the last policy has. `resumed`: step at
        which each epoch of the policy began."""
        self._made[policy] = self._visible[policy] = step
        self._resumed[policy] = dict(resumed or {})
        self.ratings.resume(policy, self._resumed[policy])
        if self._made.keys() != self._steps.keys():
            return None
        self._restored.set()
        return self.step

    async def until_restored(self) -> None:
        """Wait until all policies know their step, and results of before are counted: no match of one may count
        before."""
        await self._restored.wait()
        async with self._counting:
            if self.rates:
                await asyncio.to_thread(self.ratings.count_restored)

    def made(self, policy: str) -> int:
        """Return the step of the policy's newest version."""
        return self._made[policy]

    def advance(self, policy: str, step: int) -> int:
        """A policy has made a step. Returns the job's step."""
        self._made[policy] = step
        self._show_versions()
        return self.step

    @property
    def step(self) -> int:
        """Steps of the job that all policies have made which are not finished; the most that any has made, if all
        are."""
        open_ = [self._share(name) for name in self._open]
        return min(open_) if open_ else max(map(self._share, self._made))

    def _share(self, policy: str) -> int:
        made, wanted = self._made[policy], self._steps[policy]
        return made if wanted == self._total else made * self._total // wanted

    def _is_over(self, policy: str) -> bool:
        return policy in self._finished

    def moved(self, opponents: Mapping[str, WeightVersion]) -> int:
        """Return how many steps the policy has moved that has moved most since its version here; 0 for none. Players
        that are no policies of the job do not move."""
        return max(
            (self._distance(name, version) for name, version in opponents.items() if name in self._made), default=0
        )

    def _distance(self, policy: str, version: WeightVersion) -> int:
        """Return the number of steps between a version and the policy's newest: of one that was rolled back, those back
        to the step from which the policy resumed, and from there on."""
        later: Iterable[int] = (step for epoch, step in self._resumed[policy].items() if epoch > version.epoch)
        common = min([version.step, *later])
        return version.step - common + self._visible[policy] - common

    def is_gone(self, group: Group) -> bool:
        """Return whether another policy has played the group, or would have in a seat without a turn, with weights from
        which it was rolled back, or a member of a pool has that is such a version. Under every schedule: the policy
        would learn to answer weights that nobody has any more."""
        met = ((name, one.version) for match in group.matches for name, one in match.opponents.items())
        reported = [(name, WeightVersion.parse(version)) for name, version in met if self._policy_of(name) is not None]
        return any(
            version.epoch < epoch and version.step > step
            for name, version in (*group.newest_opponents.items(), *reported)
            if (policy := self._policy_of(name)) is not None
            for epoch, step in self._resumed.get(policy, {}).items()
        )

    def _policy_of(self, player: str) -> str | None:
        """Return the policy that a player is, or was when it became a member of a pool; None of all others."""
        if player in self._resumed:
            return player
        pool, has_version, _ = player.rpartition("@")
        return self._pools.get(pool) if has_version else None

    def release(self, policy: str, floor: int) -> int:
        """A checkpoint of the policy accounts for the stream up to `floor`. Returns up to where all policies do."""
        self._floors[policy] = floor
        return min((floor for name, floor in self._floors.items() if name not in self._covered), default=floor)

    def cover(self, policy: str) -> None:
        """The last checkpoint of a policy is intact: it never reads the stream again."""
        self._covered.add(policy)

    def show(self, policy: str, progress: dict[str, float]) -> dict[str, object]:
        """Return the job's progress record after a policy's report: the report itself, or those of all by policy."""
        self._shown[policy] = progress
        return dict(progress) if not policy else {"policies": self._shown}

    def ask_to_save(self, policy: str) -> None:
        """Have the other policies save."""
        self.asked_to_save.update(name for name in self._open if name != policy)

    def finish(self, policy: str, why: str = "") -> None:
        """A policy has made its last step and saved it. `why`: what the job's owner should know about its end."""
        self._finished[policy] = why
        self._show_versions()

    # --- schedules ----------------------------------------------------------------------------------------------

    def watch(self, event: asyncio.Event) -> None:
        """Set the event whenever a policy has made a step or has finished."""
        self._watchers.append(event)

    def _show_versions(self) -> None:
        for policy, made in self._made.items():
            if self.may_show(policy):
                self._visible[policy] = made
        for event in self._watchers:
            event.set()

    def may_show(self, policy: str) -> bool:
        """Return whether the policy's newest version may be published, and its next step be made: where versions become
        visible together, once no other policy is behind."""
        return not self.rule.together or all(self._made[policy] <= self._made[other] for other in self._open)

    def rests(self, policy: str) -> bool:
        """Return whether it is another policy's turn: the first's of those that have had the fewest."""
        if not self.rule.turn or policy not in self._open:
            return False
        unfinished = [name for name in self._open if self._made[name] < self._steps[name]]
        return bool(unfinished) and policy != min(unfinished, key=lambda name: self._made[name] // self.rule.turn)

    def growth(self, policy: str) -> int:
        """Return how many batches the policy's next step may take: several only where another policy is ahead."""
        ahead = max((self._made[name] * self._groups_per_batch[name] for name in self._open), default=0)
        return self.rule.growth if self._made[policy] * self._groups_per_batch[policy] < ahead else 1

    @property
    def _open(self) -> list[str]:
        return [name for name in self._steps if name in self._made and not self._is_over(name)]

    @property
    def all_finished(self) -> bool:
        return self._finished.keys() == self._steps.keys()

    @property
    def reason(self) -> str:
        """Return what the job reports about the ends of its policies."""
        said = {name: why for name, why in self._finished.items() if why}
        if set(said) == {""}:
            return said[""]
        if len(said) == len(self._finished) and len(set(said.values())) == 1:
            return next(iter(said.values()))
        return "; ".join(f"{name}: {why}" for name, why in said.items())
