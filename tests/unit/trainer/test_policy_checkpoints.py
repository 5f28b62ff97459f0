"""The policies of a deterministic job resume at the same position, and what they need for that is not removed."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from opentinker.services.trainer.checkpoint import commit, list_checkpoints
from opentinker.services.trainer.joint_progress import JointProgress
from opentinker.services.trainer.policy_checkpoints import PolicyCheckpoints
from opentinker.shared.types.manifest import name_of
from tests.unit.trainer.test_checkpoint import manifest, write

BATCH = {"a": 4, "b": 2}
"""Matches of a step."""


class Pair:
    """Two policies below one directory, `looked` anew with each life of the trainer."""

    def __init__(self, directory: Path) -> None:
        self.roots = {name: directory / name for name in BATCH}
        for root in self.roots.values():
            root.mkdir()

    def save(self, name: str, *positions: int) -> None:
        for position in positions:
            step = position // BATCH[name]
            commit(self.roots[name], msgspec.structs.replace(manifest(step), position=position), write)

    def directory(self, name: str, position: int) -> Path:
        return self.roots[name] / name_of(position // BATCH[name])

    def stored(self, name: str, joint: JointProgress | None = None) -> PolicyCheckpoints:
        joint = joint or JointProgress(9, {"a": 9, "b": 9})
        return PolicyCheckpoints(self.roots[name], list(self.roots.values()), joint)

    def resume(self) -> tuple[dict[str, int | None], dict[str, dict[str, str]]]:
        """Return position and damage of each policy in a new trainer."""
        joint = JointProgress(9, {"a": 9, "b": 9})
        damaged: dict[str, dict[str, str]] = {name: {} for name in BATCH}
        found = {name: self.stored(name, joint).find(damaged[name]) for name in BATCH}
        return {name: None if one is None else one[1].position for name, one in found.items()}, damaged

    def kept(self, name: str) -> list[int | None]:
        return [one.position for _, one in list_checkpoints(self.roots[name])]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_the_newest_position_that_all_have_counts(pair: Pair) -> None:
    assert pair.resume() == ({"a": None, "b": None}, {"a": {}, "b": {}})
    pair.save("a", 8, 16, 24, 28)
    assert pair.resume()[0] == {"a": None, "b": None}, "the other has made no step that it saved"
    pair.save("b", 8, 16, 18)
    assert pair.resume() == ({"a": 16, "b": 16}, {"a": {}, "b": {}})


def test_a_checkpoint_that_is_damaged_for_one_counts_for_none(pair: Pair) -> None:
    pair.save("a", 8, 16, 24)
    pair.save("b", 8, 16, 24)
    (pair.directory("b", 24) / "model.safetensors").write_bytes(b"other")
    (pair.directory("a", 16) / "manifest.json").write_bytes(b"{")
    positions, damaged = pair.resume()
    assert positions == {"a": 8, "b": 8}
    assert {name: list(found) for name, found in damaged.items()} == {"a": ["step-000004"], "b": ["step-000012"]}
    shutil.rmtree(pair.directory("b", 8))
    positions, damaged = pair.resume()
    assert positions == {"a": None, "b": None} and damaged["a"] and damaged["b"], "the job fails instead"


def test_a_policy_keeps_what_the_one_behind_it_needs(pair: Pair) -> None:
    pair.save("b", 8, 16)
    pair.save("a", 8, 16, 20, 24, 28)
    pair.stored("a").sweep(2, 1)
    assert pair.kept("a") == [8, 16, 24, 28]
    pair.save("b", 24)
    pair.stored("b").sweep(2, 1)
    pair.stored("a").sweep(2, 1)
    assert (pair.kept("b"), pair.kept("a")) == ([16, 24], [16, 24, 28])
    assert pair.resume()[0] == {"a": 24, "b": 24}
