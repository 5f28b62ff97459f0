"""Chooses the checkpoint that a policy resumes from, and those to remove.

The policies of a deterministic job resume together, at the newest position of its submission order at which each of
them has a checkpoint. Each saves separately, so a kill leaves the newest ones at different positions, and the matches
between them could only be played again with weights that some policies have moved on from.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.joint_progress import CommonPosition, JointProgress
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

    def __init__(self, root: Path, together: list[Path], joint: JointProgress) -> None:
        """`root`: directory of the policy's checkpoints; `together`: those of all policies that resume at the same
        position, if any do."""
        self._root, self._together, self._joint = root, together, joint

    def fence(self, epoch: int) -> None:
        """Prevent commits of lower epochs, in the directories of all policies that resume together."""
        for root in self._together or [self._root]:
            checkpoint.fence(root, epoch)

    def find(self, damaged: dict[str, str]) -> tuple[Path, Manifest] | None:
        """Return the checkpoint to resume from. Adds the problem of each damaged one of this policy to `damaged`."""
        if not self._together:
            return checkpoint.after_rewind(self._root, checkpoint.find_newest(self._root, _into(damaged)))
        common = self._joint.common = self._joint.common or newest_common(self._together)
        damaged.update(common.damaged[self._root])
        if common.position is None:
            return None
        return checkpoint.find_newest(self._root, _into(damaged), position=common.position)

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


def _into(problems: dict[str, str]) -> checkpoint.Damaged:
    """Return a callback of `checkpoint.find_newest` that notes the problem of each damaged checkpoint."""
    return lambda directory, problem: problems.update({directory.name: problem})
