"""The policies of a deterministic job resume at the same position, and what they need for that is not removed."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from opentinker.services.trainer.checkpoint import commit, list_checkpoints
from opentinker.services.trainer.joint_progress import JointProgress
from opentinker.services.trainer.policy_checkpoints import PolicyCheckpoints
from opentinker.shared.types.core import WeightVersion
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


# --- jobs that are not deterministic ---------------------------------------------------------------------------------


class InStep(Pair):
    """Two policies that train on the same matches and resume from a recovery line."""

    def keep(
        self,
        name: str,
        step: int,
        *,
        seen: int,
        epoch: int = 1,
        resumed: dict[int, int] | None = None,
        seen_in: int = 1,
    ) -> None:
        """Save a checkpoint that was trained on matches of the other policy's versions up to `seen`."""
        (other,) = BATCH.keys() - {name}
        versions = {other: WeightVersion(1, seen)}
        made = msgspec.structs.replace(manifest(step, epoch), seen=versions, resumed=resumed or {1: 0})
        commit(self.roots[name], made, write)

    def steps(self, epoch: int = 2) -> dict[str, int]:
        """Return the step from which each policy resumes in a new trainer, which forgets what came after it."""
        joint = JointProgress(9, {"a": 9, "b": 9})
        found = {}
        for name, root in self.roots.items():
            stored = PolicyCheckpoints(root, [], joint, self.roots)
            one = stored.find({})
            stored.forget_newer(None if one is None else one[1], epoch)
            found[name] = 0 if one is None else one[1].step
        newest = {name: max([0, *(one.step for _, one in list_checkpoints(root))]) for name, root in self.roots.items()}
        assert found == newest
        return found


class Life:
    """One trainer of both policies, which keeps two checkpoints of each."""

    def __init__(self, in_step: InStep) -> None:
        self._in_step = in_step
        self.joint = JointProgress(20, {"a": 20, "b": 20})
        self.stored = {
            name: PolicyCheckpoints(root, [], self.joint, in_step.roots) for name, root in in_step.roots.items()
        }
        for name, one in self.stored.items():
            found = one.find({})
            one.resumed(None if found is None else found[1])
            self.joint.restore(name, 0 if found is None else found[1].step)

    def save(self, name: str, step: int, *, seen: int) -> int | None:
        """Save as a trainer does. Returns the step up to which it releases what its checkpoints account for."""
        stored = self.stored[name]
        asked = name in self.joint.asked_to_save
        self.joint.asked_to_save.discard(name)
        self._in_step.keep(name, step, seen=seen)
        stored.sweep(2, 1)
        (newest,) = (one for _, one in list_checkpoints(self._in_step.roots[name]) if one.step == step)
        released = stored.saved(newest, asked=asked)
        if released is not None:
            stored.note_release(released)
        return released

    def kept(self, name: str) -> list[int]:
        return [one.step for _, one in list_checkpoints(self._in_step.roots[name])]


@pytest.fixture
def in_step(tmp_path: Path) -> InStep:
    return InStep(tmp_path)


def test_no_checkpoint_counts_that_later_weights_of_another_policy_have_trained(in_step: InStep) -> None:
    assert in_step.steps() == {"a": 0, "b": 0}
    in_step.keep("a", 3, seen=2)
    assert in_step.steps() == {"a": 0, "b": 0}, "b has saved none of the versions that a has met"
    for step, seen in ((3, 2), (6, 6)):
        in_step.keep("a", step, seen=seen)
    in_step.keep("b", 4, seen=3)
    assert in_step.steps() == {"a": 3, "b": 4}, "a has met b's step 6, which is lost"
    in_step.keep("a", 6, seen=4)
    in_step.keep("b", 8, seen=6)
    assert in_step.steps() == {"a": 6, "b": 8}, "both are the newest"


def test_both_go_back_if_each_has_met_what_the_other_lacks(in_step: InStep) -> None:
    for step, seen in ((3, 3), (6, 7)):
        in_step.keep("a", step, seen=seen)
        in_step.keep("b", step, seen=seen)
    assert in_step.steps() == {"a": 3, "b": 3}


def test_a_policy_never_goes_back_to_what_was_released(in_step: InStep) -> None:
    for step in (3, 6):
        in_step.keep("a", step, seen=step + 1)
        in_step.keep("b", step, seen=step)
    PolicyCheckpoints(in_step.roots["a"], [], JointProgress(9, {"a": 9, "b": 9}), in_step.roots).note_release(6)
    assert in_step.steps() == {"a": 6, "b": 6}, "some matches are then trained by a alone"


def test_a_policy_goes_back_as_far_as_another_makes_it(in_step: InStep) -> None:
    for step in (2, 4, 6, 8):
        in_step.keep("a", step, seen=step)
    in_step.keep("b", 4, seen=2)
    assert in_step.steps() == {"a": 4, "b": 4}, (
        "a's steps 6 and 8 were trained on matches that b does not know any more"
    )


def test_nothing_is_released_that_a_policy_behind_makes_another_need(in_step: InStep) -> None:
    life = Life(in_step)
    assert life.save("a", 2, seen=1) is None and life.save("b", 1, seen=0) is None, "nothing before the newest of each"
    assert [life.save("a", step, seen=step - 1) for step in (4, 6, 8, 10)] == [None] * 4, "b has saved its step 1 alone"
    assert life.kept("a") == [2, 8, 10], "the newest two, and that which a would resume from"
    assert in_step.steps() == {"a": 2, "b": 1}
    life = Life(in_step)
    assert [life.save("a", step, seen=step - 1) for step in (4, 6)] == [None, None]
    assert not life.stored["a"].is_in_step
    assert life.save("b", 5, seen=4) == 1 and life.save("a", 8, seen=5) == 6, "both are in step again"
    assert life.stored["a"].is_in_step and in_step.steps() == {"a": 8, "b": 5}


@pytest.mark.parametrize("every", [1, 2, 5])
def test_policies_save_together_before_one_would_lose_two_checkpoints(in_step: InStep, every: int) -> None:
    life = Life(in_step)
    for step in range(1, 20):  # as far apart as they can be: every checkpoint of one has met what the other lacks
        life.save("a", 5 * step, seen=7 * step - 1)
        if "b" in life.joint.asked_to_save:
            life.save("b", 7 * step - 1, seen=5 * step)
            assert not life.joint.asked_to_save, "who saves because it was asked to asks nobody"
            assert life.stored["a"].is_in_step and life.stored["b"].is_in_step
        life.save("b", 7 * step, seen=5 * step + 2)
        if "a" in life.joint.asked_to_save:
            life.save("a", 5 * step + 2, seen=7 * step)
        assert all(len(life.kept(name)) <= 4 for name in BATCH)
        if step % every == 0:
            found = in_step.steps()
            assert found["a"] >= 5 * (step - 1) and found["b"] >= 7 * (step - 1)
            life = Life(in_step)


def test_a_damaged_checkpoint_on_the_way_back_is_passed_over(in_step: InStep) -> None:
    for step in (2, 4, 6):
        in_step.keep("a", step, seen=step)
    in_step.keep("b", 4, seen=2)
    (in_step.roots["a"] / name_of(4) / "model.safetensors").write_bytes(b"other")
    assert in_step.steps() == {"a": 2, "b": 4}


def test_nothing_is_removed_if_another_policy_has_no_intact_checkpoint(in_step: InStep) -> None:
    for step in (2, 4):
        in_step.keep("a", step, seen=step)
    in_step.keep("b", 4, seen=2)
    (in_step.roots["b"] / name_of(4) / "model.safetensors").write_bytes(b"other")
    joint = JointProgress(9, {"a": 9, "b": 9})
    stored = PolicyCheckpoints(in_step.roots["a"], [], joint, in_step.roots)
    found = stored.find({})
    assert found is not None and found[1].step == 4 and not stored.went_back
    assert stored.forget_newer(found[1], 2) == []


def test_a_policy_that_cannot_go_back_does_not_hold_the_others(in_step: InStep) -> None:
    in_step.keep("a", 3, seen=5)
    PolicyCheckpoints(in_step.roots["a"], [], JointProgress(9, {"a": 9, "b": 9}), in_step.roots).note_release(3)
    in_step.keep("b", 2, seen=3)
    in_step.keep("b", 4, seen=4)
    in_step.keep("a", 4, seen=6)
    joint = JointProgress(9, {"a": 9, "b": 9})
    stored = {name: PolicyCheckpoints(root, [], joint, in_step.roots) for name, root in in_step.roots.items()}
    found = {name: one.find({}) for name, one in stored.items()}
    assert {name: one and one[1].step for name, one in found.items()} == {"a": 4, "b": 4}
    assert {name: one.pinned for name, one in stored.items()} == {"a": True, "b": False}
    for name, one in stored.items():
        pair = found[name]
        assert pair is not None
        one.resumed(pair[1])
        joint.restore(name, pair[1].step)
    in_step.keep("a", 5, seen=7)
    (newest,) = (one for _, one in list_checkpoints(in_step.roots["a"]) if one.step == 5)
    assert stored["a"].saved(newest, asked=False) is None and joint.asked_to_save == {"b"}


def test_versions_that_were_rolled_back_are_in_no_checkpoint_of_a_later_trainer(in_step: InStep) -> None:
    for step in (3, 6):
        in_step.keep("a", step, seen=step)
    in_step.keep("b", 3, seen=2)
    in_step.keep("b", 7, seen=3, epoch=2, resumed={1: 0, 2: 5})
    assert in_step.steps(3) == {"a": 3, "b": 7}, "b's step 6 of the first trainer was another one"
