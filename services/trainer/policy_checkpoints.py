"""Chooses the checkpoint that a policy resumes from, and those to remove.

The policies of a deterministic job resume together, at the newest position of its submission order at which each of
them has a checkpoint. Each saves separately, so a kill leaves the newest ones at different positions, and the matches
between them could only be played again with weights that some policies have moved on from.

The policies of another job that trains all on every match resume from a recovery line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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

    def fence(self, epoch: int) -> None:
        """Prevent commits of lower epochs, in the directories of all policies that resume together."""
        for root in self._together or list(self._in_step.values()) or [self._root]:
            checkpoint.fence(root, epoch)

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
        line = self._joint.line
        return checkpoint.remove_newer(self._root, kept, epoch) if line and self._root in line.gone_back else []

    def note_release(self, step: int) -> None:
        """Note, before what only older checkpoints account for is released, that the policy cannot go back to them."""
        if self._in_step:
            checkpoint.note_release(self._root, step)

    def sweep(self, keep: int, epoch: int) -> None:
        """Remove all but the newest `keep` checkpoints and those from which all policies could resume."""
        with self._joint.sweeping:
            needed = common_positions(self._together, CommonPosition())[:KEPT_POSITIONS] if self._together else []
            checkpoint.sweep(self._root, keep, epoch, needed)


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
    then every policy is trained on it, or none. A policy goes back by one checkpoint at most, for which the stream and
    admission have what it needs; where that is not enough, each resumes from its newest. `roots`: by policy."""
    line = RecoveryLine()
    newest = {name: checkpoint.find_newest(root, _into(line.damaged[root])) for name, root in roots.items()}
    found, gone_back = dict(newest), set[str]()
    while (late := _inconsistent(found)) is not None:
        held = found[late]
        before = None if held is None or late in gone_back else checkpoint.find_before(roots[late], held[1])
        if (
            held is None
            or late in gone_back
            or (before is None and not checkpoint.may_begin_again(roots[late], held[1]))
        ):
            found, gone_back = newest, set()
            break
        gone_back.add(late)
        found[late] = before
    line.found = {roots[name]: one for name, one in found.items()}
    line.gone_back = {roots[name] for name in gone_back}
    return line


def _inconsistent(found: Mapping[str, tuple[Path, Manifest] | None]) -> str | None:
    """Return a policy whose checkpoint was trained on a match that later weights of another's have played."""
    for name, held in found.items():
        for other, version in held[1].seen.items() if held is not None else ():
            if other in found and not _covers(found[other], version):
                return name
    return None


def _covers(held: tuple[Path, Manifest] | None, version: WeightVersion) -> bool:
    """Return whether a version is among those that led to a checkpoint."""
    if held is None:
        return version.step == 0
    later = [step for epoch, step in held[1].resumed.items() if epoch > version.epoch]
    return version.step <= min([held[1].step, *later])


def _into(problems: dict[str, str]) -> checkpoint.Damaged:
    """Return a callback of `checkpoint.find_newest` that notes the problem of each damaged checkpoint."""
    return lambda directory, problem: problems.update({directory.name: problem})
