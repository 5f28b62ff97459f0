"""Which jobs may share a trainer, and with which others."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.engines import bank_of, may_share
from tests.support.factories import make_spec, refusals

ADAPTER = {"base": "m", "lora": {}}
SHARED = {"trainer": "shared"}
STEP = {"steps": 1}


def test_jobs_that_share_a_trainer_have_base_and_precision_in_common() -> None:
    def bank(**model: Any) -> str:
        spec = make_spec(model={**ADAPTER, **model}, train=STEP, resources=SHARED)
        return bank_of(spec.model_dump(mode="json"))

    assert bank() == bank(lora={"rank": 2, "target_modules": ["q_proj"]}) != ""
    assert len({bank(), bank(dtype="bfloat16"), bank(base="n")}) == 3
    assert bank_of(make_spec(model=ADAPTER, train=STEP).model_dump(mode="json")) == ""


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"model": {"base": "m"}}, "model.lora", "is needed: jobs share the base model"),
        ({"model": {"base": "m", "lora": {"rank": 65}}}, "model.lora.rank", "is above 64, the most here"),
        ({"model": {"base": "m", "lora": {"dropout": 0.1}}}, "model.lora.dropout", "must be 0"),
        (
            {"model": {"base": "m", "lora": {"target_modules": ["q_proj", "lm_head"]}}},
            "model.lora.target_modules",
            "are embeddings, which jobs share",
        ),
        (
            {"model": {**ADAPTER, "dtype": "bfloat16", "fp32_head": True}},
            "model.fp32_head",
            "'own'",
        ),
        ({"train": {**STEP, "gradient_checkpointing": True}}, "train.gradient_checkpointing", "would change"),
        ({"train": {**STEP, "learner": "simulated"}}, "train.learner", "trains no adapter"),
        ({"algorithm": {"name": "ppo"}}, "algorithm.advantage", "trains a critic"),
        ({"resources": {**SHARED, "trainer_ranks": 2}}, "resources.trainer_ranks", "must be 1"),
        ({"resources": {**SHARED, "trainer_gpus": 2}}, "resources.trainer_gpus", "must be 0 or 1"),
    ],
)
def test_what_a_shared_trainer_cannot_do_is_refused(changes: dict[str, Any], field: str, problem: str) -> None:
    found = refusals(make_spec, **{"model": ADAPTER, "train": STEP, "resources": SHARED, **changes})
    assert problem in found[field] and "resources.trainer = 'shared'" in found[field]


def test_jobs_share_a_trainers_gpu_with_those_that_ask_for_one() -> None:
    def on(gpus: int, trainer: str = "shared") -> Any:
        return make_spec(model=ADAPTER, train=STEP, resources={"trainer": trainer, "trainer_gpus": gpus})

    assert bank_of(on(1).model_dump(mode="json")) == "m in float32 on a GPU"
    assert bank_of(on(0).model_dump(mode="json")) == "m in float32"
    assert may_share(on(1, "auto")) and not may_share(on(2, "auto"))


def game(**changes: Any) -> dict[str, Any]:
    """Parts of a job with two policies."""
    seats = {"speaker": "x", "listener": "y"}
    parts = {"environment": {"name": "signalling"}, "algorithm": {"group_size": 2}, "seats": seats, "train": STEP}
    return {**parts, "resources": SHARED, "policies": {"x": {}, "y": {}}, **changes}


def test_policies_with_adapters_of_one_base_share_a_trainer_as_other_jobs_of_it_do() -> None:
    policies = {"x": {"model": {"lora": {"rank": 2}}}, "y": {"train": {"lr": 1e-2}, "algorithm": {"loss": "cispo"}}}
    spec = make_spec(**game(model=ADAPTER, policies=policies))
    alone = make_spec(model=ADAPTER, train=STEP, resources=SHARED)
    assert bank_of(spec.model_dump(mode="json")) == bank_of(alone.model_dump(mode="json"))
    own = {name: {"model": ADAPTER} for name in ("x", "y")}
    spec = make_spec(**game(model={"base": "of no policy"}, policies=own))
    assert bank_of(spec.model_dump(mode="json")) == bank_of(alone.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"model": {"base": "m"}}, "model.lora", "is needed"),
        ({"model": {"base": "m"}, "policies": {"x": {"model": {"lora": {}}}, "y": {}}}, "policies.y.model.lora", "is"),
        ({"policies": {"x": {}, "y": {"model": {"base": "n"}}}}, "policies.y.model.base", "must be 'm', as policy 'x'"),
        ({"policies": {"x": {}, "y": {"model": {"dtype": "bfloat16"}}}}, "policies.y.model.dtype", "must be 'float32'"),
        ({"policies": {"x": {"model": {"lora": {"rank": 65}}}, "y": {}}}, "policies.x.model.lora.rank", "is above 64"),
        ({"policies": {"x": {"trainer_ranks": 2}, "y": {}}}, "policies.x.trainer_ranks", "must be 1"),
        ({"policies": {"x": {"algorithm": {"name": "ppo"}}, "y": {}}}, "policies.x.algorithm.advantage", "a critic"),
        ({"train": {**STEP, "gradient_checkpointing": True}}, "train.gradient_checkpointing", "would change"),
        ({"resources": {**SHARED, "trainer_ranks": 2}}, "resources.trainer_ranks", "must be 1"),
    ],
)
def test_a_mistake_of_one_policy_is_reported_there_and_one_of_all_once(
    changes: dict[str, Any], field: str, problem: str
) -> None:
    found = refusals(make_spec, **game(**{"model": ADAPTER, **changes}))
    assert list(found) == [field]
    assert problem in found[field] and "resources.trainer = 'shared'" in found[field]


@pytest.mark.parametrize("kind", ["inference", "eval"])
def test_jobs_that_do_not_train_share_no_trainer(kind: str) -> None:
    data = {"name": "j", "kind": kind, "model": {"base": "m"}, "resources": SHARED}
    found = refusals(parse_spec, data | ({"environment": {"name": "copy_digits"}} if kind == "eval" else {}))
    assert f"does not apply to kind {kind!r}" in found["resources.trainer"]


def test_a_deterministic_job_shares_a_trainer_only_if_it_asks() -> None:
    exact: dict[str, Any] = {
        "model": ADAPTER, "train": {**STEP, "deterministic": True}, "rollout": {"seed": 1},
        "algorithm": {"max_staleness": 0},
    }  # fmt: skip
    assert bank_of(make_spec(**exact, resources=SHARED).model_dump(mode="json"))
    assert not may_share(make_spec(**exact)) and may_share(make_spec(model=ADAPTER, train=STEP))
