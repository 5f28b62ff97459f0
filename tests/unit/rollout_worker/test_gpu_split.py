"""How the memory of a GPU is divided between a rollout worker's engines and its neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker.services.rollout_worker.engines.gpu_split import (
    ALONE,
    GpuSplit,
    Neighbours,
    is_shared,
    neighbours,
    split,
)
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import Gpu, Pool, WorkerInfo
from opentinker.shared.types.errors import JobFailed

GB = 1_000_000_000
TOTAL = 80 * GB
HERE = Gpu(index=0, uuid="GPU-1", model="X", memory=TOTAL)
THERE = Gpu(index=1, uuid="GPU-2", model="X", memory=TOTAL)
QWEN = {
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True},
}


def divided(engine: int, near: Neighbours, sleep: Any = "auto", *, may_sleep: bool = True) -> GpuSplit:
    return split(TOTAL, engine, near, sleep=sleep, may_sleep=may_sleep)


def test_worker_alone_takes_most() -> None:
    assert divided(2 * GB, Neighbours(0, 0, 0)) == GpuSplit(ALONE)


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
    near = neighbours(spec, "j", HERE, [own, worker(Pool.TRAINER, HERE)], 7)
    assert 16 * 0.55 * GB < near.step < 40 * GB and near.rest < near.step
    assert (near.used, near.rollout_workers) == (7, 1)
    nothing = Neighbours(0, 0, 7)
    assert neighbours(spec, "j", HERE, [own, worker(Pool.TRAINER, THERE)], 7) == nothing
    assert neighbours(spec, "j", HERE, [own, worker(Pool.TRAINER, HERE, "other")], 7) == nothing
    two = neighbours(spec, "j", HERE, [own, worker(Pool.ROLLOUT, HERE, None), worker(Pool.ROLLOUT, THERE)], 7)
    assert two == Neighbours(0, 0, 7, 2)
