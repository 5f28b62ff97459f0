"""`train.deterministic`: the same spec gives the same bits, however often it is run and whoever is killed meanwhile."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from opentinker.services.trainer.batch.assembler import Assembler
from opentinker.shared.data.step_log import StepLog, lineage
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.admission import Admission
from opentinker.shared.state.store import Store
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import name_of, read_manifest
from tests.conftest import soon
from tests.integration.rollout_worker.rollout_bench import Bench, Failing
from tests.support.cluster import Cluster
from tests.support.factories import make_group, make_spec, refusals

STEPS = 10
KILL_AT = 5
HASHED = ("model.safetensors", "trainer/optimizer.safetensors")


def deterministic(model: Path, **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "model": {"base": str(model)},
        "environment": {"name": "tests.samples.env_samples:BrokenRows", "config": {"digits": 2, "every": 5}},
        # Two updates: the order of groups decides which of them are in the first; rae: also what each is compared with.
        "algorithm": {"advantage": "rae", "group_size": 4, "groups_per_batch": 4, "max_staleness": 0}
        | {"updates_per_batch": 2},
        "rollout": {"engine": "toy", "max_tokens": 8, "toy": {"seconds_per_token": 0.03}, "seed": 7, "retries": 0},
        "train": {"steps": STEPS, "lr": 1e-3, "checkpoint_every": 3, "deterministic": True},
    }
    return make_spec(**{**fields, **changes})


def hashes(cluster: Cluster, job: str) -> list[str]:
    manifest = cluster.manifest(job)
    assert manifest.step == STEPS
    before = read_manifest(cluster.data / "jobs" / job / "checkpoints" / name_of(STEPS - 1))
    assert all(manifest.files[name].sha256 != before.files[name].sha256 for name in HASHED), "every step changes them"
    assert manifest.baselines and manifest.baselines != before.baselines
    return [*(manifest.files[name].sha256 for name in HASHED), str(manifest.baselines)]


async def whole(cluster: Cluster, spec: JobSpec) -> list[str]:
    job = await cluster.run(spec)
    return hashes(cluster, job)


async def broken(cluster: Cluster, spec: JobSpec) -> list[str]:
    """With a trainer that is killed once it has made some steps that no checkpoint holds."""
    job = await cluster.submit(spec)
    await cluster.reaches(job, KILL_AT)
    cluster.kill("trainer-0")
    await cluster.succeeds(job)
    assert cluster.processes["trainer-0"].exits[-1] == -signal.SIGKILL
    assert 3 <= cluster.manifest(job).resumed[2] < STEPS
    ledger = await cluster.trained(job, spec)
    assert ledger.failed["env_error"] >= 4, "groups that always fail are always replaced by the same ones"
    return hashes(cluster, job)


async def test_weights_are_bit_identical_after_ten_steps_and_a_kill(tmp_path: Path, small: Path) -> None:
    async with Cluster(tmp_path, env_workers=2, forked=False) as cluster:
        spec = deterministic(small)
        assert await whole(cluster, spec) == await broken(cluster, spec)


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.slow
async def test_weights_are_the_same_with_vllm(tmp_path: Path, tiny: Path) -> None:
    async with Cluster(tmp_path, heavy=True, forked=False) as cluster:
        spec = deterministic(tiny, rollout={"max_tokens": 4, "seed": 7})
        assert await whole(cluster, spec) == await broken(cluster, spec)


# --- the parts ------------------------------------------------------------------------------------------------------


async def test_group_that_failed_by_bad_luck_fails_the_job(bus: Bus, store: Store) -> None:
    """Another one in its place would depend on luck too."""
    bench = Bench(bus, store)
    bench.spec = deterministic(Path("m"))
    await bench.issue(1)
    with pytest.raises(JobFailed, match=r"engine_error: out of luck.*no other group may take its place"):
        await soon(bench.live(Failing()))


def test_batch_is_in_submission_order() -> None:
    assembler = Assembler(max_staleness=0, epoch=1, in_order=True)
    for place, number in enumerate((3, 0, 2, 1)):
        assert assembler.take(0, 4) is None
        assembler.add(place + 1, make_group(seq=number))
    batch = assembler.take(0, 4)
    assert batch is not None and [group.seq for group in batch] == [0, 1, 2, 3]


async def test_resumed_job_goes_on_at_the_position_of_its_checkpoint(store: Store) -> None:
    """Numbers are never used twice, positions are."""
    law: dict[str, Any] = {"max_staleness": 0, "groups_per_batch": 2, "total": 20, "discarded": {}}
    admission = Admission(store.redis, "j-pos", 1)
    await admission.restore(step=0, position=0, **law)
    await admission.set_version(0)
    for step in range(3):
        _, seqs = await admission.issue(9)
        for seq in seqs:
            await admission.accept(seq)
        if step < 2:
            await admission.train(step + 1, seqs)
            await admission.set_version(step + 1)
    assert (await admission.ledger()).pending == 2 and await admission.shift() == 0

    resumed = Admission(store.redis, "j-pos", 2)
    await resumed.restore(step=1, position=2, next_seq=2, **law)
    ledger = await resumed.ledger()
    assert ledger.balanced and (ledger.trained, ledger.pending, ledger.running) == (2, 0, 0)
    assert (await resumed.issue(9))[1] == [], "the rollout workers may still have later weights, now rolled back"
    await resumed.set_version(1)
    _, seqs = await resumed.issue(9)
    assert seqs == [6, 7] and await resumed.shift() == 4
    assert await resumed.accept(2) == "unknown", "a group of before is of the past"


def of_time(metric: str) -> dict[str, Any]:
    return {"train": {"steps": 3, "deterministic": True, "target": {metric: 0.5, "exact": 0.9}}}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"algorithm": {"max_staleness": 1}}, "algorithm.max_staleness"),
        ({"rollout": {"engine": "toy"}}, "rollout.seed"),
        ({"resources": {"rollout_workers": 2}}, "resources.rollout_workers"),
        ({"algorithm": {"max_staleness": 0, "kl_coef": 0.1}}, "algorithm.kl_coef"),
        ({"algorithm": {"name": "distill", "max_staleness": 0}, "teacher": {"base": "t"}}, "algorithm.distill_coef"),
        (of_time("step_seconds"), "train.target.step_seconds"),
        (of_time("trainer/tokens_per_s"), "train.target.trainer/tokens_per_s"),
        (of_time("swap/pause_s"), "train.target.swap/pause_s"),
        ({**of_time("val/seconds"), "validation": {"every": 3}}, "train.target.val/seconds"),
    ],
)
def test_what_breaks_the_promise_is_refused_with_the_reason(changes: dict[str, Any], field: str) -> None:
    ((found, problem),) = refusals(deterministic, Path("m"), **changes).items()
    assert found == field and "(train.deterministic)" in problem


PAIR: dict[str, Any] = {
    "policies": {"a": {}, "b": {}},
    "seats": {"x": "a", "y": "b"},
    "algorithm": {"max_staleness": 0, "group_size": 2, "groups_per_batch": 4},
}


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"match": {"schedule": "drop"}}, "match.schedule", "'wait' or 'lockstep'"),
        ({"match": {"max_opponent_lag": 2}}, "match.max_opponent_lag", "how far opponents have moved"),
        ({"train": {"steps": 3, "deterministic": True, "target": {"exact": 0.9}}}, "train.target", "the same match"),
        ({"policies": {"a": {"train": {"target": {"exact": 0.9}}}, "b": {}}}, "policies.a.train.target", "same match"),
        (
            {"policies": {"a": {"algorithm": {"max_staleness": 2}}, "b": {}}},
            "policies.a.algorithm.max_staleness",
            "which weights",
        ),
        (
            {"policies": {"a": {}, "b": {"algorithm": {"drop_zero_variance": True}}}},
            "policies.b.algorithm.drop_zero_variance",
            "the same matches",
        ),
        (
            {"policies": {"a": {"algorithm": {"groups_per_batch": 2}, "train": {"steps": 6}}, "b": {}}},
            "policies.a.train.checkpoint_every",
            "must be 200, as for the job",
        ),
        (
            {"policies": {"a": {"train": {"deterministic": False}}, "b": {}}},
            "policies.a.train.deterministic",
            "must be the job's, true",
        ),
    ],
)
def test_policies_that_would_not_train_on_the_same_matches_are_refused(
    changes: dict[str, Any], field: str, problem: str
) -> None:
    fields: dict[str, Any] = {**PAIR, "train": {"steps": 3, "deterministic": True}, **changes}
    ((found, said),) = refusals(deterministic, Path("m"), **fields).items()
    assert found == field and problem in said


def test_lineage_of_the_step_log_leaves_out_what_was_rolled_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert lineage(path, {1: 0}, 9) == []
    log = StepLog(path)
    for epoch, steps in ((1, range(1, 6)), (2, range(4, 9))):
        for step in steps:
            log.add({"epoch": epoch, "step": step})
    with path.open("ab") as file:
        file.write(b'{"epoch": 2, "st')
    found = lineage(path, {1: 0, 2: 3}, 7)
    assert [(line["epoch"], line["step"]) for line in found] == [
        (1, 1),
        (1, 2),
        (1, 3),
        *((2, s) for s in (4, 5, 6, 7)),
    ]
