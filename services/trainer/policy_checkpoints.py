"""Chooses the checkpoint that a policy resumes from, and those to remove.

The policies of a deterministic job resume together, at the newest position of its submission order at which each of
them has a checkpoint. Each saves separately, so a kill leaves the newest ones at different positions, and the matches
between them could only be played again with weights that some policies have moved on from.

The policies of another job that trains all on every match resume from a recovery line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.joint_progress import CommonPosition, JointProgress, RecoveryLine
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.manifest import Manifest

KEPT_POSITIONS = 2
"""Newest common positions whose checkpoints are never removed: one of the newest may be damaged."""


class SavedStep(NamedTuple):
    """A checkpoint that this trainer wrote or resumed from."""

    step: int
    floor: int
    received: int
    """`Intake.received` at that time."""


class PolicyCheckpoints:
    """The checkpoints of one policy, and of those that resume with it. All methods block."""

    def __init__(
        self, root: Path, together: list[Path], joint: JointProgress, in_step: Mapping[str, Path] | None = None
    ) -> None:
        """`root`: directory of the policy's checkpoints; `together`: those of all policies that resume at the same
        position, if any do; `in_step`: of all policies that resume from a recovery line, by policy."""
        self._root, self._together, self._joint = root, together, joint
        self._in_step = dict(in_step or {})
        self._policy = next((name for name, one in self._in_step.items() if one == root), "")

    def fence(self, epoch: int) -> None:
        """Prevent commits of lower epochs, in the directories of all policies that resume together."""
        for root in self._together or list(self._in_step.values()) or [self._root]:
            checkpoint.fence(root, epoch)

    @property
    def pinned(self) -> bool:
        """Whether the policy resumes from a checkpoint that was trained on matches which another policy is not: it
        should have gone further back than it can."""
        return self._joint.line is not None and self._root in self._joint.line.pinned

    def find(self, damaged: dict[str, str]) -> tuple[Path, Manifest] | None:
        """Return the checkpoint to resume from. Adds the problem of each damaged one of this policy to `damaged`."""
        if self._in_step:
            line = self._joint.line = self._joint.line or recovery_line(self._in_step)
            damaged.update(line.damaged[self._root])
            return line.found[self._root]
        if not self._together:
            return checkpoint.after_rewind(self._root, checkpoint.find_newest(self._root, _into(damaged)))
        common = self._joint.common = self._joint.common or newest_common(self._together)
        damaged.update(common.damaged[self._root])
        if common.position is None:
            return None
        return checkpoint.find_newest(self._root, _into(damaged), position=common.position)

    def forget_newer(self, kept: Manifest | None, epoch: int) -> list[int]:
        """Remove the checkpoints that the policy goes back from with the others. Returns their steps."""
        return checkpoint.remove_newer(self._root, kept, epoch) if self.went_back else []

    @property
    def went_back(self) -> bool:
        """Whether the policy resumes from an older checkpoint than its newest, with the others."""
        return self._joint.line is not None and self._root in self._joint.line.gone_back

    def resumed(self, manifest: Manifest | None) -> None:
        """The policy goes on from this checkpoint; None: from its first weights."""
        if manifest is not None and self.pinned:  # what it has met is lost, whatever the others save from now on
            manifest = msgspec.structs.replace(manifest, seen={})
        self._joint.kept[self._root] = [manifest]

    def saved(self, manifest: Manifest, *, asked: bool) -> int | None:
        """A checkpoint was committed. Returns the step of the one up to which everything may be released: that before
        the one from which the policy would resume now, which may be damaged. None: nothing may be. If that is the one
        with which this trainer began, or older than the last but one, the other policies are asked to save too, unless
        this one was itself `asked` to."""
        kept = self._joint.kept.setdefault(self._root, [])
        kept.append(manifest)
        needed = self._needed()
        at = kept.index(needed[-1])
        if not asked and at < len(kept) - 1 and (at == 0 or at < len(kept) - 2):
            self._joint.ask_to_save(self._policy)
        return needed[0].step if len(needed) > 1 and needed[0] is not None else None

    def _needed(self) -> list[Manifest | None]:
        """Return the checkpoint from which the policy would resume, after the one before it, if there is one."""
        kept = self._joint.kept[self._root]
        own = kept[-1]
        if self._in_step:  # older, as long as another policy has not saved the versions that this one has met
            lists = {name: self._joint.kept[root] for name, root in self._in_step.items()}
            line, _ = _go_back(
                {name: one[-1] for name, one in lists.items()}, lambda name, at: _before(lists[name], at)
            )
            own = line[self._policy]
        at = kept.index(own)
        return kept[max(0, at - 1) : at + 1]

    @property
    def is_in_step(self) -> bool:
        """Whether the policy would resume from its newest checkpoint."""
        return self._needed()[-1] is self._joint.kept[self._root][-1]

    def note_release(self, step: int) -> None:
        """Note, before what only older checkpoints account for is released, that the policy cannot go back to them."""
        self._keep(lambda one: one is not None and one.step >= step)
        if self._in_step:
            checkpoint.note_release(self._root, step)

    def sweep(self, keep: int, epoch: int) -> None:
        """Remove all but the newest `keep` checkpoints and those from which all policies could resume."""
        with self._joint.sweeping:
            needed = common_positions(self._together, CommonPosition())[:KEPT_POSITIONS] if self._together else []
            steps = [one.step for one in self._needed() if one is not None] if self._in_step else []
            checkpoint.sweep(self._root, keep, epoch, needed, steps)
        if self._in_step:
            left = {one.step for _, one in checkpoint.list_checkpoints(self._root)}
            self._keep(lambda one: one is None or one.step in left)

    def _keep(self, holds: Callable[[Manifest | None], bool]) -> None:
        kept = self._joint.kept
        kept[self._root] = [one for one in kept.get(self._root, []) if holds(one)]


def common_positions(roots: list[Path], found: CommonPosition) -> list[int]:
    """Return the positions at which every policy has a checkpoint, newest first; files are not verified, unreadable
    manifests are noted in `found`."""
    each = [checkpoint.positions(root, _into(found.damaged[root])) for root in roots]
    return sorted(set.intersection(*each), reverse=True)


def newest_common(roots: list[Path]) -> CommonPosition:
    """Return the newest position at which every policy has an intact checkpoint."""
    found = CommonPosition()
    for position in common_positions(roots, found):
        each = [checkpoint.find_newest(root, _into(found.damaged[root]), position=position) for root in roots]
        if None not in each:
            found.position = position
            break
    return found


def recovery_line(roots: Mapping[str, Path]) -> RecoveryLine:
    """Return the newest checkpoints none of which was trained on a match that weights after another's have played:
    then every policy is trained on it, or none. A policy goes back as far as the stream and admission have what it
    needs; where that is not enough it is pinned. `roots`: by policy."""
    line = RecoveryLine()
    newest = {name: checkpoint.find_newest(root, _into(line.damaged[root])) for name, root in roots.items()}
    paths = {id(one): path for path, one in filter(None, newest.values())}

    def before(name: str, one: Manifest) -> tuple[Manifest | None] | None:
        earlier = checkpoint.find_before(roots[name], one)
        if earlier is None:
            return (None,) if checkpoint.may_begin_again(roots[name]) else None
        paths[id(earlier[1])] = earlier[0]
        return (earlier[1],)

    if any(newest[name] is None and line.damaged[root] for name, root in roots.items()):  # the job cannot go on
        line.found = {roots[name]: one for name, one in newest.items()}
        return line
    found, pinned = _go_back({name: one and one[1] for name, one in newest.items()}, before)
    line.found = {roots[name]: None if one is None else (paths[id(one)], one) for name, one in found.items()}
    line.gone_back = {root for name, root in roots.items() if line.found[root] != newest[name]}
    line.pinned = {roots[name] for name in pinned}
    return line


def _go_back(
    newest: Mapping[str, Manifest | None], before: Callable[[str, Manifest], tuple[Manifest | None] | None]
) -> tuple[dict[str, Manifest | None], set[str]]:
    """Go back, one policy at a time, until no checkpoint was trained on a match that later weights of another policy
    have played. `before`: returns the checkpoint before one of a policy, in a tuple; None: it cannot go back. Returns
    the checkpoint of each policy, None for its first weights, and the policies that cannot go back far enough, and stay
    at their newest."""
    found, pinned = dict(newest), set[str]()
    while (late := _inconsistent(found, pinned)) is not None:
        name, held = late
        if (earlier := before(name, held)) is None:
            pinned.add(name)
            found = dict(newest)
        else:
            (found[name],) = earlier
    return found, pinned


def _before(kept: list[Manifest | None], one: Manifest) -> tuple[Manifest | None] | None:
    at = kept.index(one)
    return (kept[at - 1],) if at > 0 else None


def _inconsistent(found: Mapping[str, Manifest | None], pinned: Collection[str]) -> tuple[str, Manifest] | None:
    """Return a policy, with its checkpoint, that was trained on a match which later weights of another have played."""
    for name, held in found.items():
        if held is None or name in pinned:
            continue
        if any(other in found and not _covers(found[other], version) for other, version in held.seen.items()):
            return name, held
    return None


def _covers(held: Manifest | None, version: WeightVersion) -> bool:
    """Return whether a version is among those that led to a checkpoint."""
    if held is None:
        return version.step == 0
    later = [step for epoch, step in held.resumed.items() if epoch > version.epoch]
    return version.step <= min([held.step, *later])


def _into(problems: dict[str, str]) -> checkpoint.Damaged:
    """Return a callback of `checkpoint.find_newest` that notes the problem of each damaged checkpoint."""
    return lambda directory, problem: problems.update({directory.name: problem})
