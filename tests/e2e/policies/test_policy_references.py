"""Frozen models of some of a job's policies, end to end, with real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from examples.models.make_tiny import make_tiny
from opentinker.services.trainer import checkpoint
from opentinker.shared.types.core import part_id
from opentinker.shared.types.manifest import CRITIC
from tests.conftest import until
from tests.integration.trainer.test_reward_models import make_judge
from tests.integration.trainer.test_value_models import make_value_model
from tests.support.cluster import Cluster, shared_fixture
from tests.support.toys import toy_game

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

cluster = shared_fixture(Cluster, references=1)


async def test_one_of_two_policies_has_a_reference(system: Cluster, small: Path) -> None:
    policies = {"speaker": {"algorithm": {"kl_coef": 0.1}}, "listener": {}}
    spec = toy_game(
        small,
        policies=policies,
        seats={name: name for name in policies},
        train={"steps": 3, "lr": 1e-2, "checkpoint_every": 3},
    )
    job = await system.run(spec)
    for name in policies:
        await system.trained(job, spec, name)
    divergence = [line["loss/kl"] for line in system.lines(part_id(job, "speaker"))]
    assert divergence == pytest.approx([0.0] * 3, abs=1e-6), "equal rewards leave the weights as they started"
    assert all("loss/kl" not in line for line in system.lines(part_id(job, "listener")))

    async def scored() -> int:
        """Of the last heartbeat."""
        return sum(int(w.detail["groups"]) for w in await system.store.workers() if w.pool == "reference")

    await until(scored, lambda groups: groups >= 6)  # every match that it trained


async def test_a_reward_model_scores_one_of_two_policies_through_a_kill(
    system: Cluster, small: Path, tmp_path: Path
) -> None:
    judge = make_judge(small, tmp_path / "judge")
    policies: dict[str, dict[str, Any]] = {"speaker": {}, "listener": {}}
    spec = toy_game(
        small,
        policies=policies,
        seats={name: name for name in policies},
        reward_models=[{"base": str(judge), "name": "judge", "policies": ["speaker"]}],
        train={"steps": 6, "lr": 1e-3, "checkpoint_every": 2},
    )
    job = await system.submit(spec)
    await system.reaches(job, 2)
    system.kill("reference_forward-0")
    system.kill("trainer-0")
    await system.succeeds(job)
    for name in policies:
        await system.trained(job, spec, name)
    for line in system.lines(part_id(job, "speaker")):
        assert line["reward/mean"] == pytest.approx(line["reward/own"] + line["reward_model/judge/mean"], abs=1e-5)
    for line in system.lines(part_id(job, "listener")):
        assert not [name for name in line if name.startswith("reward_model/")] and "reward/own" not in line


async def test_each_policy_learns_from_its_teacher_through_a_kill(system: Cluster, small: Path, tmp_path: Path) -> None:
    """The speaker from the job's alone, the listener from its own and from rewards."""
    teachers = [make_tiny(tmp_path / f"t{n}", hidden_size=64, layers=1, norm_scale=12.0, seed=n) for n in (2, 3)]
    policies: dict[str, dict[str, Any]] = {
        "speaker": {"algorithm": {"name": "distill"}},
        "listener": {"algorithm": {"distill_coef": 0.5}, "teacher": {"base": str(teachers[1])}},
    }
    spec = toy_game(
        small,
        policies=policies,
        seats={name: name for name in policies},
        teacher={"base": str(teachers[0])},
        train={"steps": 10, "lr": 1e-3, "checkpoint_every": 2},
    )
    job = await system.submit(spec)
    await system.reaches(job, 5)
    system.kill("trainer-0")
    await system.succeeds(job)
    first = []
    for name in policies:
        await system.trained(job, spec, name)
        assert system.manifest(part_id(job, name)).resumed[2] > 0, "from a checkpoint"
        lines = system.lines(part_id(job, name))
        assert all(line["teacher/kl"] > 0.0 for line in lines), "the policy and its teacher differ"
        first.append(lines[0]["teacher/logprob"])
    assert first[0] != pytest.approx(first[1], rel=1e-3), "two teachers"


@pytest.mark.nightly
async def test_one_policy_has_a_value_model_and_the_other_its_critic_through_a_kill(
    system: Cluster, small: Path, tmp_path: Path
) -> None:
    values = make_value_model(small, tmp_path / "values")
    policies: dict[str, dict[str, Any]] = {"speaker": {}, "listener": {"trains_critic": True}}
    spec = toy_game(
        small,
        algorithm={"name": "ppo", "group_size": 2, "groups_per_batch": 2, "max_staleness": 1},
        policies=policies,
        seats={name: name for name in policies},
        value_model={"base": str(values)},
        train={"steps": 10, "lr": 1e-3, "checkpoint_every": 2},
    )
    job = await system.submit(spec)
    await system.reaches(job, 5)
    system.kill("trainer-0")
    await system.succeeds(job)
    for name in policies:
        await system.trained(job, spec, name)
        assert system.manifest(part_id(job, name)).resumed[2] > 0, "from a checkpoint"
    said, trained = (system.lines(part_id(job, name)) for name in policies)
    assert all("value/mean" in line and "loss/value" not in line for line in said)
    assert all("value/mean" not in line and "loss/value" in line for line in trained)
    kept = []
    for name in policies:
        found = checkpoint.find_newest(system.data / "jobs" / part_id(job, name) / "checkpoints")
        assert found is not None
        kept.append(found[0] / CRITIC)
    assert [path.exists() for path in kept] == [False, True]
    made = {int(tensor) for name, tensor in load_file(kept[1]).items() if name.startswith("step/")}
    assert made == {10}, "after the kill the critic went on where its checkpoint was"
