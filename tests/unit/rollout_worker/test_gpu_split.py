"""How the memory of a GPU is divided between a rollout worker's engines and its neighbours."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import orjson
import pytest

from opentinker.services.rollout_worker.engines import gpu_split
from opentinker.services.rollout_worker.engines.gpu_split import (
    ALONE,
    GpuSplit,
    Neighbours,
    is_shared,
    neighbours,
    planned,
    split,
)
from opentinker.services.rollout_worker.run_lease import Loader
from opentinker.shared.data.gpu_memory import CONTEXT_BYTES
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.spec.engines import EnginePolicy
from opentinker.shared.types.core import Lease, Pool
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trainer_group import RankShare
from opentinker.shared.types.workers import Gpu, WorkerInfo

GB = 1_000_000_000
TOTAL = 80 * GB
HERE = Gpu(index=0, uuid="GPU-1", model="X", memory=TOTAL)
THERE = Gpu(index=1, uuid="GPU-2", model="X", memory=TOTAL)
QWEN = {
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True},
}


def divided(engine: int, near: Neighbours, sleep: Any = "auto", *, may_sleep: bool = True, staged: int = 0) -> GpuSplit:
    return split(TOTAL, engine, near, sleep=sleep, may_sleep=may_sleep, staged=staged)


def test_worker_alone_takes_most() -> None:
    assert divided(2 * GB, Neighbours(0, 0, 0)) == GpuSplit(ALONE)


def test_worker_alone_leaves_others_what_they_use() -> None:
    assert divided(2 * GB, Neighbours(0, 0, 3 * GB)) == GpuSplit(ALONE)
    found = divided(2 * GB, Neighbours(0, 0, 40 * GB))
    assert found.share == pytest.approx(0.46) and "40.0 in use by other processes" in found.why
    with pytest.raises(JobFailed, match=r"80 GB: 70\.0 in use by other processes.*nvidia-smi"):
        divided(10 * GB, Neighbours(0, 0, 70 * GB))


def test_a_version_that_arrives_has_room_outside_the_engines_share() -> None:
    assert divided(16 * GB, Neighbours(0, 0, 0), staged=16 * GB).share == pytest.approx(0.96 - 16 / 80)
    assert divided(2 * GB, Neighbours(0, 0, 0), staged=2 * GB).share == ALONE
    near = Neighbours(20 * GB, 12 * GB, 0)
    assert divided(4 * GB, near, staged=4 * GB).share == pytest.approx(0.96 - 20 / 80 - 4 / 80)
    assert divided(4 * GB, near._replace(rollout_workers=2), staged=4 * GB).share == pytest.approx(
        (0.96 - 20 / 80) / 2 - 4 / 80
    )


def test_a_large_model_that_is_alone_does_not_fail_for_a_version_that_might_fit_nowhere_on_the_gpu() -> None:
    assert divided(50 * GB, Neighbours(0, 0, 0), staged=50 * GB) == GpuSplit(ALONE)


def test_memory_in_use_is_divided_among_those_that_have_not_loaded() -> None:
    first = divided(2 * GB, Neighbours(20 * GB, 12 * GB, 12 * GB, 2))
    used = 12 * GB + int(first.share * TOTAL)
    second = divided(2 * GB, Neighbours(20 * GB, 12 * GB, used, 2, 1))
    assert second.share == first.share == pytest.approx((0.96 - 20 / 80) / 2)
    used += 10 * GB  # a stranger's
    assert divided(2 * GB, Neighbours(20 * GB, 12 * GB, used, 2, 1)).share == pytest.approx(0.96 - used / TOTAL)


def test_engines_get_what_a_step_leaves() -> None:
    found = divided(2 * GB, Neighbours(20 * GB, 12 * GB, 5 * GB))
    assert not found.sleeps and found.share == pytest.approx(0.96 - 20 / 80)
    assert "20.0 for a step" in found.why


def test_what_is_already_in_use_counts_if_it_is_more_than_planned() -> None:
    assert divided(2 * GB, Neighbours(20 * GB, 12 * GB, 40 * GB)).share == pytest.approx(0.96 - 40 / 80)


def test_engines_sleep_where_they_do_not_fit_next_to_a_step() -> None:
    near = Neighbours(74 * GB, 40 * GB, 0)
    found = divided(4 * GB, near)
    assert found.sleeps and found.share == pytest.approx(0.96 - 40 / 80)
    assert "sleep during steps" in found.why


@pytest.mark.parametrize(("sleep", "may_sleep"), [("never", True), ("auto", False)])
def test_where_engines_must_not_sleep_a_small_cache_is_better_than_none(sleep: str, may_sleep: bool) -> None:
    found = divided(4 * GB, Neighbours(68 * GB, 40 * GB, 0), sleep, may_sleep=may_sleep)
    assert not found.sleeps and "a small KV cache" in found.why


def test_engines_sleep_where_the_spec_says_so() -> None:
    assert divided(2 * GB, Neighbours(20 * GB, 12 * GB, 0), "always").sleeps


def test_an_engine_that_has_the_gpu_for_itself_sleeps_where_the_spec_says_so() -> None:
    assert divided(2 * GB, Neighbours(0, 0, 0), "always") == GpuSplit(ALONE, sleeps=True)


def test_models_that_fit_in_no_way_fail_the_job() -> None:
    with pytest.raises(JobFailed, match=r"share a GPU of 80 GB: 90\.0 for a step") as failed:
        divided(10 * GB, Neighbours(90 * GB, 75 * GB, 0))
    assert "gradient_checkpointing" in str(failed.value)


def test_rollout_workers_on_one_gpu_have_equal_parts() -> None:
    assert divided(2 * GB, Neighbours(0, 0, 0, 2)).share == pytest.approx(ALONE / 2)
    assert divided(2 * GB, Neighbours(20 * GB, 12 * GB, 0, 2)).share == pytest.approx((0.96 - 20 / 80) / 2)


def worker(pool: Pool, gpu: Gpu, job: str | None = "j") -> WorkerInfo:
    return WorkerInfo(id=f"{pool}-{gpu.index}", incarnation="i", pool=pool, host="h", pid=1, job=job, gpus=[gpu])


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "config.json").write_bytes(orjson.dumps(QWEN))
    return parse_spec(
        {
            "name": "one gpu",
            "model": {"base": str(tmp_path), "dtype": "bfloat16"},
            "environment": {"name": "copy_digits"},
            "resources": {"trainer_gpus": 1, "rollout_gpus": 1},
            "train": {"steps": 1},
        }
    )


def test_a_gpu_that_another_process_sees_is_shared_whatever_its_job(spec: JobSpec) -> None:
    own, other = worker(Pool.ROLLOUT, HERE), worker(Pool.TRAINER, HERE, "other")
    assert is_shared(own, 1, [own, other])
    assert not is_shared(own, 1, [own, worker(Pool.TRAINER, THERE)])


def test_only_what_is_on_the_same_gpu_is_a_neighbour(spec: JobSpec) -> None:
    own = worker(Pool.ROLLOUT, HERE)
    near = neighbours(spec, "j", HERE, [own, worker(Pool.TRAINER, HERE)], 7, {})
    assert 16 * 0.55 * GB < near.step < 40 * GB and near.rest < near.step
    assert (near.used, near.rollout_workers) == (7, 1)
    nothing = Neighbours(0, 0, 7)
    assert neighbours(spec, "j", HERE, [own, worker(Pool.TRAINER, THERE)], 7, {}) == nothing
    on_the_cpu = msgspec.structs.replace(worker(Pool.TRAINER, HERE, "other"), gpus=[])
    assert neighbours(spec, "j", HERE, [own, on_the_cpu], 7, {"other": spec}) == nothing
    two = neighbours(spec, "j", HERE, [own, worker(Pool.ROLLOUT, HERE, None), worker(Pool.ROLLOUT, THERE)], 7, {})
    assert two == Neighbours(0, 0, 7, 2)
    ready = msgspec.structs.replace(worker(Pool.ROLLOUT, HERE), id="ready", status="ready")
    assert neighbours(spec, "j", HERE, [own, ready], 7, {}) == Neighbours(0, 0, 7, 2, 1)


def test_each_checkpoint_that_policies_start_from_is_a_reference_model(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_split, "weight_bytes", lambda *_: 2 * GB)
    kl, seats = {"kl_coef": 0.1}, {name: name for name in "abcde"}

    def references(**policies: dict[str, Any]) -> int:
        every = {name: {"algorithm": kl, **policies.get(name, {})} for name in seats}
        data = {**spec.model_dump(mode="json"), "policies": every, "seats": seats, "environment": {"name": "game"}}
        for table in ("model", "algorithm", "train"):
            data[table] = {"model": {"base": spec.model.base}, "train": {"steps": 1}}.get(table, {})
        near = neighbours(parse_spec(data), "j", HERE, [worker(Pool.REFERENCE, HERE)], 0, {})
        return (near.rest - CONTEXT_BYTES) // (2 * GB)

    def start(checkpoint: str) -> dict[str, Any]:
        return {"start": {"from": checkpoint}}

    one, other = "j-0123456789@1", "j-0123456789@2"
    assert references() == 1
    assert references(a=start(one), b=start(one), c=start(other)) == 3, "the base and two checkpoints"
    assert references(a={"model": {"fp32_head": True, "dtype": "bfloat16"}}, b={"model": {"dtype": "bfloat16"}}) == 3
    assert references(a={**start(one), "algorithm": {"kl_coef": 0.0}}) == 1
    taught = {"algorithm": {**kl, "distill_coef": 0.5}}
    owns: dict[str, Any] = {"a": {**taught, "teacher": {"base": "t"}}, "b": {**taught, "teacher": {"base": "t"}}}
    assert references(**owns, c={**taught, "teacher": {"base": "u"}}) == 3, "the base and two teachers"
    valued = {"algorithm": {**kl, "name": "ppo"}, "value_model": {"base": "v"}}
    assert references(**owns, d=valued, e=valued) == 3, "the base, a teacher and a value model"


def test_the_next_version_is_made_while_the_last_one_is_sent(spec: JobSpec) -> None:
    near = neighbours(spec, "j", HERE, [worker(Pool.TRAINER, HERE)], 0, {})
    (memory,) = planned(spec)
    assert near.rest == memory.weights + memory.moments + 2 * memory.snapshot + CONTEXT_BYTES


def with_parts(spec: JobSpec, **parts: dict[str, Any]) -> JobSpec:
    data = spec.model_dump(mode="json", exclude_unset=True)
    return parse_spec(data | {name: data.get(name, {}) | part for name, part in parts.items()})


def job_trainer(job: str | None) -> WorkerInfo:
    return msgspec.structs.replace(worker(Pool.TRAINER, HERE, job), id=f"trainer-of-{job}")


def test_steps_of_all_jobs_that_train_on_the_gpu_fit_next_to_the_engines_of_all(spec: JobSpec) -> None:
    spec = with_parts(spec, model={"lora": {"rank": 8}})
    workers = [job_trainer("a"), job_trainer("b"), worker(Pool.ROLLOUT, HERE, "a"), worker(Pool.ROLLOUT, HERE, "b")]
    nears = [neighbours(spec, one, HERE, workers, 0, {other: spec}) for one, other in ("ab", "ba")]
    (memory,) = planned(spec)
    step = memory.total + CONTEXT_BYTES
    assert all((near.step, near.other_jobs) == (2 * step, 1) for near in nears)
    found = [divided(2 * GB, near) for near in nears]
    assert 2 * step + sum(one.share for one in found) * TOTAL <= TOTAL
    assert not any(one.sleeps for one in found) and "for steps of 1 other job" in found[0].why


def test_engines_that_sleep_for_their_own_trainer_are_awake_when_another_job_takes_a_step(spec: JobSpec) -> None:
    alone = neighbours(spec, "a", HERE, [job_trainer("a")], 0, {})
    both = neighbours(spec, "a", HERE, [job_trainer("a"), job_trainer("b")], 0, {"b": spec})
    assert both.rest == alone.rest + alone.step
    assert divided(2 * GB, both, "always").share <= 1 - (alone.rest + alone.step) / TOTAL


def test_another_job_takes_memory_only_where_it_trains_on_the_gpu(spec: JobSpec) -> None:
    trainers = [job_trainer("b")]
    assert neighbours(spec, "a", HERE, trainers, 0, {"b": spec}).step > 0
    on_the_cpu = with_parts(spec, resources={"trainer_gpus": 0})
    assert neighbours(spec, "a", HERE, trainers, 0, {"b": on_the_cpu}).step == 0
    assert neighbours(spec, "a", HERE, trainers, 0, {"c": spec}).step == 0


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}


def configure(spec: JobSpec, config: dict[str, Any], parameters: int = 0) -> None:
    """Give the job's model this config.json, and weights of a file of zeros, in bfloat16, that takes no space."""
    base = Path(spec.model.base)
    (base / "config.json").write_bytes(orjson.dumps(config | {"dtype": "bfloat16"}))
    with (base / "model.safetensors").open("wb") as file:
        file.truncate(2 * parameters)


def test_a_model_with_experts_is_planned_by_the_size_of_its_files(spec: JobSpec) -> None:
    count = 3 * 10**9
    configure(spec, QWEN | EXPERTS, count)
    near = neighbours(spec, "j", HERE, [worker(Pool.TRAINER, HERE)], 0, {})
    assert near.step > 16 * count and near.rest > 12 * count, "weights, gradients, moments"
    lora = with_parts(spec, model={"lora": {"rank": 8}})
    (memory,) = planned(lora)
    assert 2 * count < memory.weights < 2.1 * count and memory.gradients < 0.1 * count
    (more,) = planned(spec)
    configure(spec, QWEN | EXPERTS | {"num_experts_per_tok": 4}, count)
    assert planned(spec)[0].activations > more.activations, "of the experts of a token"


@pytest.mark.parametrize("config", [QWEN | EXPERTS, QWEN | {"num_experts": 8}, {"hidden_size": 8}])
def test_what_cannot_be_planned_fails_the_job_and_says_what_to_set(spec: JobSpec, config: dict[str, Any]) -> None:
    configure(spec, config, 0 if "num_experts_per_tok" in config else 10**9)
    with pytest.raises(JobFailed, match=r"lacks dimensions .* set rollout\.gpu_memory_utilization"):
        neighbours(spec, "j", HERE, [worker(Pool.TRAINER, HERE)], 0, {})
    (Path(spec.model.base) / "config.json").unlink()
    with pytest.raises(JobFailed, match=r"cannot be read here .* set rollout\.gpu_memory_utilization"):
        neighbours(spec, "j", HERE, [worker(Pool.TRAINER, HERE)], 0, {})


def lease_of(job: str, own: WorkerInfo, *ranks: int) -> Lease:
    """`ranks`: of each trainer of its group, which it leads."""
    group = tuple(RankShare(f"{own.id}{'+' * n}", "i", count) for n, count in enumerate(ranks))
    return Lease(job=job, worker=own.id, incarnation="i", epoch=1, pool=own.pool, group=group)


def test_ranks_are_counted_by_the_lease_and_versions_where_the_group_is_led(spec: JobSpec) -> None:
    resources = {"trainer_gpus": 4, "min_trainer_ranks": 2}
    many = with_parts(spec, resources=resources, train={"parallel": "zero3"})
    lead = worker(Pool.TRAINER, HERE)
    member = msgspec.structs.replace(lead, id=f"{lead.id}+")

    def step(own: WorkerInfo, *leases: Lease) -> int:
        return neighbours(many, "j", HERE, [own], 0, {}, leases).step - CONTEXT_BYTES

    assert step(lead) == planned(many, 2)[0].total, "as few as it may get"
    assert step(lead, lease_of("j", lead)) == planned(many, 4)[0].total, "one trainer has all"
    of_three = lease_of("j", lead, 2, 1)
    assert step(lead, of_three) == planned(many, 3)[0].total < planned(many, 2)[0].total
    assert step(member, of_three) == planned(many, 3, leads=False)[0].total < step(lead, of_three)


async def test_a_trainer_counts_for_the_job_of_its_lease_before_it_takes_it(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = with_parts(spec, model={"lora": {"rank": 8}})
    own, mine, idle = worker(Pool.ROLLOUT, HERE), job_trainer("j"), job_trainer(None)
    load = loader(spec, monkeypatch, own, AsyncMock(return_value=[own, mine, idle]), [0])
    store: Any = load._worker.ctx.store
    store.lease = AsyncMock(side_effect={mine.id: lease_of("j", mine), idle.id: lease_of("other", idle)}.get)
    store.jobs.return_value = [SimpleNamespace(id="other", spec=spec.model_dump(mode="json", exclude_unset=True))]
    found = await load._split("nowhere")
    store.jobs.assert_awaited_once_with(["other"])
    assert "for steps of 1 other job" in found.why
    assert found.share == pytest.approx(0.96 - 2 * (planned(spec)[0].total + CONTEXT_BYTES) / TOTAL)


async def shares(spec: JobSpec, monkeypatch: pytest.MonkeyPatch, *used: int, kept: float = 0.0) -> list[float]:
    """Return the shares of two engines of a worker, where the driver says that this much is in use."""
    own, trainer = worker(Pool.ROLLOUT, HERE), worker(Pool.TRAINER, THERE)
    load = loader(spec, monkeypatch, own, AsyncMock(return_value=[own, trainer]), used, kept)
    return [(await load._split("nowhere")).share for _ in range(2)]


def loader(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, own: WorkerInfo, workers: Any, used: Iterable[int], kept: float = 0
) -> Loader:
    """`workers`: answers who is there; `used`: bytes that the driver says are in use."""
    measured = iter(used)
    monkeypatch.setattr(gpu_split, "used_bytes", lambda _: next(measured))
    monkeypatch.setattr(gpu_split, "POLL_S", 0.0)
    lease_of_each, jobs = AsyncMock(return_value=None), AsyncMock(return_value=[])
    store = SimpleNamespace(workers=workers, update=AsyncMock(), lease=lease_of_each, jobs=jobs)
    ctx = SimpleNamespace(store=store)
    lease = Lease(job="j", worker=own.id, incarnation="i", epoch=1, pool=Pool.ROLLOUT)
    leased: Any = SimpleNamespace(info=own, ctx=ctx)
    return Loader(leased, lease, spec, lambda *_: None, AsyncExitStack(), kept=kept)  # type: ignore[arg-type]


async def test_a_trainer_that_starts_again_is_waited_for(spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    own, trainer = worker(Pool.ROLLOUT, HERE), worker(Pool.TRAINER, HERE)
    workers = AsyncMock(side_effect=[[own], [own], [own, trainer]])
    found = await loader(spec, monkeypatch, own, workers, [0])._split("nowhere")
    assert "for a step" in found.why
    monkeypatch.setattr(gpu_split, "TRAINER_S", 0.0)
    alone = await loader(spec, monkeypatch, own, AsyncMock(return_value=[own]), [0])._split("nowhere")
    assert alone.share == ALONE, "not for ever"


async def test_only_engines_that_a_trainer_sends_versions_to_have_room_for_them(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = worker(Pool.ROLLOUT, HERE)
    monkeypatch.setattr(gpu_split, "weight_bytes", lambda *_: 10 * GB)
    load = loader(spec, monkeypatch, own, AsyncMock(return_value=[own, worker(Pool.TRAINER, THERE)]), [0])
    load._engines = [[EnginePolicy("a", None, 1)], [EnginePolicy("b", None, 1, is_frozen=True)]]
    assert (await load._split("nowhere")).share == pytest.approx(0.96 - 10 / 80)


async def test_a_step_that_is_under_way_is_waited_for(spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    own = worker(Pool.ROLLOUT, HERE)
    monkeypatch.setattr(gpu_split, "weight_bytes", lambda *_: 4 * GB)
    workers = AsyncMock(return_value=[own, worker(Pool.TRAINER, THERE)])
    found = await loader(spec, monkeypatch, own, workers, [79 * GB, 79 * GB, 40 * GB])._split("nowhere")
    assert found.share == pytest.approx(0.96 - 44 / 80)
    monkeypatch.setattr(gpu_split, "STEP_S", 0.0)
    with pytest.raises(JobFailed, match=r"79\.0 in use"):
        await loader(spec, monkeypatch, own, workers, [79 * GB])._split("nowhere")


async def test_each_gpu_of_a_divided_engine_has_room_for_its_share(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = msgspec.structs.replace(worker(Pool.ROLLOUT, HERE), gpus=[HERE, THERE])
    monkeypatch.setattr(gpu_split, "engine_ranks", lambda _: 2)
    near = {HERE.uuid: GpuSplit(0.3), THERE.uuid: GpuSplit(0.7, sleeps=True)}

    def choose(*_: Any, **__: Any) -> GpuSplit:
        return near[asked.pop(0)]

    monkeypatch.setattr(gpu_split, "split", choose)
    asked = [HERE.uuid, THERE.uuid]
    there = AsyncMock(return_value=[two, worker(Pool.TRAINER, HERE)])
    found = await loader(spec, monkeypatch, two, there, [0, 0])._split("nowhere")
    assert (found.share, found.sleeps) == (0.3, True)
    asked = [HERE.uuid, THERE.uuid]
    monkeypatch.setattr(gpu_split, "weight_bytes", lambda *_: 60 * GB)
    with pytest.raises(JobFailed, match="the same share of each GPU"):
        await loader(spec, monkeypatch, two, there, [0, 0])._split("nowhere")


async def test_all_engines_of_a_worker_have_one_measurement(spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await shares(spec, monkeypatch, 4 * GB, 60 * GB) == [ALONE, ALONE]


async def test_an_engine_that_is_kept_is_not_counted_against_the_next_and_strangers_are(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = await shares(spec, monkeypatch, 40 * GB)
    assert first == pytest.approx(0.46)
    engine = int(first * TOTAL) + GB // 2  # never its share to the byte
    assert await shares(spec, monkeypatch, 40 * GB + engine, kept=first) == [first] * 2, "the engine is kept"
    assert (await shares(spec, monkeypatch, 20 * GB + engine, kept=first))[0] == pytest.approx(0.96 - 20.5 / 80)
    assert await shares(spec, monkeypatch, 73 * GB, kept=ALONE) == [ALONE] * 2
