"""What several learners of one process draw, in a deterministic job, does not depend on whose turn it is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from tests.support.factories import version
from tests.support.learning import digest, loaded, random_groups, torch_spec

STEPS = 3


def pair(small: Path, *, deterministic: bool = True) -> list[JobSpec]:
    spec = torch_spec(
        small,
        model={"lora": {"rank": 4, "alpha": 8.0, "dropout": 0.3}},
        algorithm={"max_staleness": 0},
        rollout={"seed": 1},
        train={"deterministic": deterministic},
        policies={"a": {}, "b": {"train": {"seed": 3}}},
        seats={"x": "a", "y": "b"},
    )
    return [spec_of(spec, name) for name in spec.policies]


def alone(spec: JobSpec) -> str:
    learner = loaded(RlLearner(spec))
    for step in range(STEPS):
        learner.step(random_groups(step), version(step))
    return digest(learner)


@pytest.mark.parametrize("order", ["ababab", "aaabbb", "baabba"])
def test_dropout_of_each_policy_is_its_own_whoever_steps_first(small: Path, order: str) -> None:
    specs = pair(small)
    learners = dict(zip("ab", map(loaded, map(RlLearner, specs)), strict=True))
    for name in order:
        learners[name].step(random_groups(learners[name].steps), version(learners[name].steps))
    assert [digest(learner) for learner in learners.values()] == [alone(spec) for spec in specs]


def test_a_checkpoint_holds_the_state_of_its_own_policy(small: Path, tmp_path: Path) -> None:
    specs = pair(small)
    first, second = map(loaded, map(RlLearner, specs))
    first.step(random_groups(0), version(0))
    second.step(random_groups(0), version(0))
    first.save(tmp_path / "a")
    second.save(tmp_path / "b")
    resumed = [loaded(RlLearner(spec), tmp_path / name) for spec, name in zip(specs, "ab", strict=True)]
    for step in range(1, STEPS):
        for learner in reversed(resumed):
            learner.step(random_groups(step), version(step))
    assert [digest(learner) for learner in resumed] == [alone(spec) for spec in specs]


def test_steps_of_two_policies_do_not_overlap(small: Path) -> None:
    first, second = map(loaded, map(RlLearner, pair(small)))
    began = threading.Event()

    def step() -> None:
        began.set()
        second.step(random_groups(0), version(0))

    stepping = threading.Thread(target=step)
    with first.random_state.held():
        before = torch.get_rng_state()
        stepping.start()
        began.wait()
        stepping.join(0.2)
        assert stepping.is_alive() and second.steps == 0 and torch.equal(torch.get_rng_state(), before)
    stepping.join()
    assert second.steps == 1
