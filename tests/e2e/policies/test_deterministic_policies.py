"""`train.deterministic` with several policies: the same spec gives the same bits of each, whoever is killed, and though
they have saved at different matches."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.core import part_id
from opentinker.shared.types.manifest import name_of, read_manifest
from tests.conftest import until
from tests.samples.seat_samples import BACKER, RIVAL
from tests.support.cluster import JOB_S, Cluster

STEPS, EVERY = 6, 2
SHARE = {"first": 1, "second": 2}
"""By policy: its steps for one of the job."""
HASHED = ("adapter_model.safetensors", "trainer/optimizer.safetensors")


def game(model: Path, schedule: str = "wait", **rollout: Any) -> JobSpec:
    """With dropout, for which both draw from one generator of the process. The second policy makes two steps with the
    matches of one. Seats rotate: who plays which depends on the position of a match, not on its number."""
    lockstep = schedule == "lockstep"
    halves = {
        "algorithm": {"groups_per_batch": 2},
        "train": {"steps": SHARE["second"] * STEPS, "checkpoint_every": SHARE["second"] * EVERY},
    }
    spec: dict[str, Any] = {
        "name": "same bits",
        "model": {"base": str(model), "chat_template": "plain", "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.2}},
        "environment": {"name": "tests.samples.seat_samples:SeededStakes"},
        # Two updates: the order of groups decides which of them are in the first; rae: also what each is compared with.
        "algorithm": {"advantage": "rae", "group_size": 4, "groups_per_batch": 4, "max_staleness": 0}
        | {"updates_per_batch": 2},
        "rollout": {"engine": "toy", "max_tokens": 8, "max_turns": 2, "seed": 7, "retries": 0}
        | {"toy": {"seconds_per_token": 0.01}, **rollout},
        "train": {"steps": STEPS, "lr": 1e-3, "checkpoint_every": EVERY, "deterministic": True},
        "match": {"rotate": True, "schedule": schedule},
        "policies": {"first": {}, "second": {"train": {"lr": 5e-4}} if lockstep else halves},
        "seats": {BACKER: "first", RIVAL: "second"},
    }
    return parse_spec(spec)


def hashes(cluster: Cluster, job: str, spec: JobSpec) -> dict[str, list[str]]:
    """Return, by policy, what its last checkpoint holds."""
    found = {}
    for name in SHARE:
        steps, part = spec_of(spec, name).train.steps, part_id(job, name)
        manifest = cluster.manifest(part)
        assert manifest.step == steps and manifest.baselines
        before = read_manifest(cluster.data / "jobs" / part / "checkpoints" / name_of(steps // STEPS * (STEPS - EVERY)))
        assert all(manifest.files[file].sha256 != before.files[file].sha256 for file in HASHED), (
            "every step changes them"
        )
        found[name] = [*(manifest.files[file].sha256 for file in HASHED), str(manifest.baselines)]
    assert found["first"] != found["second"]
    return found


async def whole(cluster: Cluster, spec: JobSpec) -> dict[str, list[str]]:
    job = await cluster.run(spec)
    return hashes(cluster, job, spec)


async def broken(cluster: Cluster, spec: JobSpec, behind: str) -> dict[str, list[str]]:
    """With a trainer that is killed, and a policy that had not saved its newest checkpoint by then."""
    job = await cluster.submit(spec)
    roots = {name: cluster.data / "jobs" / part_id(job, name) / "checkpoints" for name in SHARE}
    share = {name: spec_of(spec, name).train.steps // STEPS for name in SHARE}
    saved = {name: roots[name] / name_of(2 * EVERY * share[name]) for name in SHARE}
    await until(lambda: all(directory.exists() for directory in saved.values()), timeout_s=JOB_S)
    assert await cluster.stop("trainer-0", signal.SIGKILL) == -signal.SIGKILL
    assert not (roots[behind] / name_of(3 * EVERY * share[behind])).exists(), "killed too late"
    shutil.rmtree(saved[behind])
    cluster.start("trainer-0")
    await cluster.succeeds(job)
    for name in SHARE:
        assert cluster.manifest(part_id(job, name)).resumed[2] == EVERY * share[name], "where both had a checkpoint"
        ledger = await cluster.trained(job, spec, name)
        assert ledger.failed["env_error"] >= STEPS - 1 and not sum(ledger.discarded.values())
    return hashes(cluster, job, spec)


@pytest.mark.nightly  # of one policy: tests/e2e/test_deterministic.py, with every merge
@pytest.mark.parametrize(("schedule", "behind"), [("wait", "second"), ("lockstep", "first")])
async def test_weights_of_both_are_bit_identical_after_a_kill(
    tmp_path: Path, tiny: Path, schedule: str, behind: str
) -> None:
    async with Cluster(tmp_path, env_workers=2, forked=False) as cluster:
        spec = game(tiny, schedule)
        assert await broken(cluster, spec, behind) == await whole(cluster, spec)
