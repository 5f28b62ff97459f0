"""GPUs where trainers of other jobs have no plan of their memory, so that they do not fail this job while it could run,
and other jobs whose specs were accepted by an earlier release."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from opentinker.services.rollout_worker.engines import gpu_split
from opentinker.services.rollout_worker.engines.gpu_split import neighbours, planned
from opentinker.services.rollout_worker.run_lease import Loader
from opentinker.shared.data.gpu_memory import CONTEXT_BYTES
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import Lease, Pool
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.workers import WorkerInfo
from tests.unit.rollout_worker.test_gpu_split import (
    GB,
    HERE,
    configure,
    job_trainer,
    lease_of,
    loader,
    spec,
    with_parts,
    worker,
)
from tests.unit.shared.spec.signalling_job import BASE, refused

__all__ = ["spec"]
OPT = {
    **{"hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50272},
    **{"model_type": "opt", "tie_word_embeddings": True},
}
COUNT = 250_000_000


@pytest.fixture
def other(spec: JobSpec, tmp_path: Path) -> JobSpec:
    """A job whose model lacks dimensions, and its files are here."""
    base = tmp_path / "somebody"
    base.mkdir()
    found = with_parts(spec, model={"base": str(base)})
    configure(found, OPT, COUNT)
    return found


def step(spec: JobSpec, other: JobSpec) -> int:
    return neighbours(spec, "j", HERE, [job_trainer("other")], 0, {"other": other}).step


def test_another_jobs_model_without_dimensions_is_planned_by_the_size_of_its_files(
    spec: JobSpec, other: JobSpec
) -> None:
    assert 4 * GB <= step(spec, other) < 8 * GB
    assert step(spec, with_parts(other, model={"lora": {"rank": 8}})) < 2 * GB
    own = with_parts(spec, model={"base": other.model.base})
    with pytest.raises(JobFailed, match="lacks dimensions"):
        neighbours(own, "j", HERE, [job_trainer("j")], 0, {})


def test_a_failure_says_nothing_of_another_jobs_model(spec: JobSpec) -> None:
    other = with_parts(spec, model={"base": "/models/of/somebody"})
    with pytest.raises(JobFailed, match="another job's trainer") as failed:
        neighbours(spec, "j", HERE, [job_trainer("other")], 0, {"other": other})
    assert "somebody" not in str(failed.value)
    assert "rollout.gpu_memory_utilization" in str(failed.value)


async def test_another_jobs_trainer_without_a_plan_is_waited_for_and_fails_the_job_in_the_end(
    spec: JobSpec, other: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(other, OPT, 0)
    own, its = worker(Pool.ROLLOUT, HERE), job_trainer("other")
    record = SimpleNamespace(id="other", spec=other.model_dump(mode="json", exclude_unset=True))

    def loader_beside(leases: int) -> Loader:
        """`leases`: how often the other job still has its trainer."""
        load = loader(spec, monkeypatch, own, AsyncMock(return_value=[own, its, job_trainer("j")]), [0] * 9)
        store: Any = load._worker.ctx.store
        held = iter([lease_of("other", its)] * leases)
        store.lease = AsyncMock(side_effect=lambda id: next(held, None) if id == its.id else None)
        store.jobs = AsyncMock(side_effect=lambda ids: [record] if ids else [])
        return load

    found = await loader_beside(leases=2)._split("nowhere")
    assert "for a step of the trainer" in found.why and "other job" not in found.why
    monkeypatch.setattr(gpu_split, "STEP_S", 0.0)
    with pytest.raises(JobFailed, match="another job's trainer"):
        await loader_beside(leases=2)._split("nowhere")


async def test_the_jobs_own_trainer_without_a_plan_fails_it_at_once(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(spec, OPT, COUNT)
    own = worker(Pool.ROLLOUT, HERE)
    load = loader(spec, monkeypatch, own, AsyncMock(return_value=[own, job_trainer("j")]), [0])
    with pytest.raises(JobFailed, match="lacks dimensions"):
        await load._split("nowhere")


async def test_the_spec_of_another_job_is_read_though_a_submission_of_it_is_refused_now() -> None:
    kept = {"keep_best": 1, "best_metric": "val/winrate/speaker/random"}
    against = {"every": 5, "episodes": 4, "against": [{"bot": "random"}]}
    assert refused(artifacts=kept, validation=against).keys() == {"artifacts.best_metric"}
    record = SimpleNamespace(id="b", spec={**BASE, "artifacts": kept, "validation": against})
    store: Any = SimpleNamespace(jobs=AsyncMock(return_value=[record]))
    trains = Lease(job="b", worker="trainer-0", incarnation="i", epoch=1, pool=Pool.TRAINER)
    found = await gpu_split._other_jobs(store, "a", [trains])
    assert list(found) == ["b"] and list(found["b"].policies) == ["speaker", "listener"]


async def test_the_spec_of_another_job_that_cannot_be_read_is_no_mistake_of_this_one_and_shows_none_of_it() -> None:
    record = SimpleNamespace(id="b", spec={**BASE, "of_another_release": "secret"})
    store: Any = SimpleNamespace(jobs=AsyncMock(return_value=[record]))
    trains = Lease(job="b", worker="trainer-0", incarnation="i", epoch=1, pool=Pool.TRAINER)
    with pytest.raises(JobFailed, match="another job's trainer") as raised:
        await gpu_split._other_jobs(store, "a", [trains])
    assert not isinstance(raised.value, gpu_split.Unplanned), "so it is waited for"
    assert "secret" not in str(raised.value) and "of_another_release" not in str(raised.value)


def places(process: str, *jobs: str | None) -> list[WorkerInfo]:
    """Of a trainer on the GPU whose jobs share a base."""
    found = [job_trainer(job) for job in jobs]
    return [
        msgspec.structs.replace(one, id=f"{process}.{n}", bank=process, bank_tokens=8192) for n, one in enumerate(found)
    ]


@pytest.fixture
def sharing(spec: JobSpec) -> JobSpec:
    return with_parts(spec, model={"lora": {"rank": 8}}, resources={"trainer": "shared"})


def test_jobs_that_share_a_trainer_have_its_base_and_one_pass_in_common(spec: JobSpec, sharing: JobSpec) -> None:
    def step(job: str, *jobs: str | None) -> int:
        others = {name: sharing for name in jobs if name not in (job, None)}
        return neighbours(sharing, job, HERE, places("bank", *jobs), 0, others).step

    (alone,) = planned(with_parts(sharing, resources={"trainer": "own"}))
    one, two, three = step("a", "a"), step("a", "a", "b", None), step("a", "a", "b", "c")
    assert one == pytest.approx(alone.total + CONTEXT_BYTES, rel=0.5)
    assert two - one == three - two < 0.1 * one, "an adapter"
    assert step("a", "b", None) == two, "it may be about to get a place"
    near = neighbours(sharing, "a", HERE, places("bank", "a", "b"), 0, {"b": sharing})
    assert near.rest == near.step and near.other_jobs == 1, "passes of other jobs come at any time"
    long = [msgspec.structs.replace(one, bank_tokens=65_536) for one in places("bank", "a")]
    assert neighbours(sharing, "a", HERE, long, 0, {}).step > 2 * one


def test_a_shared_trainer_on_the_cpu_or_of_another_base_takes_nothing_of_the_gpu_for_the_job(
    spec: JobSpec, sharing: JobSpec, other: JobSpec
) -> None:
    on_the_cpu = with_parts(sharing, resources={"trainer_gpus": 0})
    assert neighbours(on_the_cpu, "a", HERE, places("bank", "a"), 0, {}).step == 0
    assert neighbours(spec, "a", HERE, places("bank", None), 0, {}).step == 0, "it has a trainer of its own"
    assert neighbours(spec, "a", HERE, places("bank", "b"), 0, {"b": on_the_cpu}).other_jobs == 0
    its = with_parts(other, model={"lora": {"rank": 8}}, resources={"trainer": "shared"})
    beside = neighbours(spec, "a", HERE, places("bank", "b"), 0, {"b": its})
    assert beside.step > CONTEXT_BYTES and beside.other_jobs == 1
    assert neighbours(sharing, "a", HERE, places("bank", "b", None), 0, {"b": its}).step == beside.step


def test_models_of_a_tinker_server_are_counted_as_many_as_it_may_hold(spec: JobSpec) -> None:
    def step(**tinker: Any) -> int:
        data = {
            "name": "t", "kind": "tinker", "model": {"base": spec.model.base, "dtype": "bfloat16"}, "tinker": tinker,
            "resources": {"trainer_gpus": 1, "rollout_gpus": 1},
        }  # fmt: skip
        return neighbours(parse_spec(data), "t", HERE, places("bank", "t"), 0, {}).step

    assert step(max_adapters=8) - step(max_adapters=4) == step(max_adapters=12) - step(max_adapters=8) > 0
    assert step(max_rank=64) > step(max_rank=8)
    assert step(full_weights=True) > 20 * 0.55e9
