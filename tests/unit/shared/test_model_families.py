"""Models that no worker could load are refused in words, by their config.json, before any worker tries."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker.services.scheduler.jobs.check_gpus import check_gpus
from opentinker.services.scheduler.jobs.check_model import check_model
from opentinker.shared.data.model_families import (
    TEXT_OF_VISION,
    VISION_FAMILIES,
    indivisible,
    unsupported_family,
    unsupported_on_cpu,
)
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.errors import JobFailed, SpecError
from opentinker.shared.types.workers import Gpu
from tests.support.api import Http
from tests.support.factories import make_spec
from tests.support.scheduling import Workers
from tests.unit.shared.test_model_files import change

LOADED = {"model__chat_template": "plain", "rollout__engine": "vllm", "train__learner": "torch"}
SEES: dict[str, Any] = {"vision_config": {}, "text_config": {"rope_parameters": {"mrope_interleaved": True}}}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {**SEES, "architectures": ["Qwen3VLMoeForConditionalGeneration"]},
    "qwen3_vl": {**SEES, "text_config": {"rope_parameters": {"mrope_section": [6, 5, 5]}}},
    "gemma3": {**SEES, "architectures": ["Gemma3ForConditionalGeneration"]},
    "llava": {"vision_config": {"model_type": "pixtral"}, "architectures": ["LlavaForConditionalGeneration"]},
    "llava_next": {**SEES, "architectures": ["LlavaNextForConditionalGeneration"]},
    "qwen2_audio": {"audio_config": {}},
    "some_new_vl": {"architectures": ["SomeNewForConditionalGeneration"]},
    "t5": {"is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_families_that_vllm_would_not_load_are_named(kind: str) -> None:
    why = unsupported_family({"model_type": kind, **OTHERS[kind]}, served=True)
    assert why.startswith(f"is a {kind} model") and "OpenTinker trains and serves" in why


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "is_encoder_decoder": False},
        *({"model_type": kind, **SEES, "architectures": ["SomeForConditionalGeneration"]} for kind in VISION_FAMILIES),
        {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}, "architectures": None},
        {"model_type": "mine", "vision_config": None, "architectures": None},
    ],
)
def test_text_models_and_those_that_see_here_are_taken(config: dict[str, Any]) -> None:
    assert unsupported_family(config, served=True) == "" == unsupported_family(config, served=False)


def test_rows_of_text_train_what_transformers_has_as_a_language_model() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(TEXT_OF_VISION) - set(VISION_FAMILIES) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert unsupported_family({"model_type": "gemma3", **SEES}, served=False) == ""


def test_head_sizes_that_vllm_has_no_cpu_kernel_for_are_named() -> None:
    odd = {"num_attention_heads": 4, "hidden_size": 64}
    assert unsupported_on_cpu(odd).startswith("has attention heads of 16 dimensions; vLLM on CPUs takes 32, 64,")
    assert unsupported_on_cpu({**odd, "head_dim": 32}) == "" == unsupported_on_cpu({**odd, "kv_lora_rank": 8})
    assert unsupported_on_cpu({"text_config": odd}) != "" == unsupported_on_cpu({})


async def test_a_job_with_such_a_model_is_refused_when_it_is_submitted(http: Http, small: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small, tmp_path / "model"))
    change(model / "config.json", model_type="gemma3", **OTHERS["gemma3"])
    status, body = await http.submit(make_spec(model__base=str(model), **LOADED).model_dump(mode="json"))
    assert status == 422
    (problem,) = (e["problem"] for e in body["errors"] if e["field"] == "model.base")
    assert problem.startswith("is a gemma3 model; OpenTinker trains and serves text models")


async def test_a_tower_to_train_must_be_there(ctx: Context, small: Path, tmp_path: Path) -> None:
    spec = make_spec(model__base=str(small), model__train_vision=True, **LOADED)
    (mistake,) = await check_model(ctx, spec)
    assert mistake["field"] == "model.train_vision" and "without a vision tower" in mistake["problem"]
    seeing = Path(shutil.copytree(small, tmp_path / "model"))
    change(seeing / "config.json", model_type="qwen2_5_vl", **SEES)
    spec = make_spec(model__base=str(seeing), model__train_vision=True, **LOADED)
    assert await check_model(ctx, spec) == []


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"model__lora": {"rank": 4}}, "adapters are on the language model alone"),
        ({"train__learner": "simulated"}, "does not apply to train.learner"),
    ],
)
def test_a_tower_is_trained_where_that_means_something(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        make_spec(model__train_vision=True, **{**LOADED, **parts})


async def test_head_sizes_matter_on_cpus_alone(ctx: Context, store: Store, small: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small, tmp_path / "model"))
    change(model / "config.json", head_dim=16)
    spec, workers = make_spec(model__base=str(model), **LOADED), Workers(store)
    assert await check_model(ctx, spec) == []
    await workers.start("rollout-0")
    (mistake,) = await check_model(ctx, spec)
    assert mistake["field"] == "model.base" and "heads of 16 dimensions" in mistake["problem"]
    await workers.start("rollout-1", gpus=[Gpu(index=0, uuid="u", model="m", memory=1)])
    assert await check_model(ctx, spec) == []
    await workers.stop()


def test_models_that_ranks_cannot_share_equally_are_named() -> None:
    llama = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    assert [indivisible(llama, ranks) for ranks in (1, 2, 4, 8, 16)] == [""] * 5
    assert indivisible(llama, 3) == "has 32 attention heads, which 3 ranks cannot share equally"
    assert "12 key-value heads" in indivisible({"num_attention_heads": 24, "num_key_value_heads": 12}, 8)
    assert "intermediate_size of 5" in indivisible({"text_config": {**llama, "intermediate_size": 5}}, 2)
    assert indivisible({}, 2) == ""


async def test_a_job_that_would_divide_such_a_model_is_refused(ctx: Context, small: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small, tmp_path / "model"))
    change(model / "config.json", num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)
    spec = {"model__base": str(model), **LOADED}
    assert await check_model(ctx, make_spec(**spec, rollout__tensor_parallel=2)) == []
    for given in ({"rollout__tensor_parallel": 3}, {"resources__rollout_gpus": 3}):
        (mistake,) = await check_model(ctx, make_spec(**spec, **given))
        assert (mistake["field"], mistake["value"]) == ("rollout.tensor_parallel", 3)
        assert "has 4 attention heads, which 3 ranks cannot share equally" in mistake["problem"]


async def test_a_worker_needs_the_gpus_of_one_machine(ctx: Context, store: Store) -> None:
    spec, workers = make_spec(model__base="some/model", **LOADED, resources__rollout_gpus=4), Workers(store)
    assert await check_gpus(ctx, spec) == [], "no rollout worker runs, so none is known to be too small"
    await workers.start("rollout-0")
    (mistake,) = await check_gpus(ctx, spec)
    assert mistake["field"] == "resources.rollout_gpus" and "none has any" in mistake["problem"]
    first, second = (Gpu(index=index, uuid=f"GPU-{index}", model="m", memory=1) for index in range(2))
    await workers.start("trainer-0", gpus=[first, second])
    await workers.start("rollout-1", gpus=[first])
    (mistake,) = await check_gpus(ctx, spec)
    assert "the largest has 1" in mistake["problem"] and "take 1 at most" in mistake["problem"]
    unreserved = make_spec(model__base="some/model", **LOADED, rollout__tensor_parallel=2)
    (mistake,) = await check_gpus(ctx, unreserved)
    assert mistake["field"] == "rollout.tensor_parallel" and "rollout_gpus = 2" in mistake["problem"]
    await workers.start("rollout-2", gpus=[first, second])
    fits = make_spec(model__base="some/model", **LOADED, resources__rollout_gpus=2)
    assert await check_gpus(ctx, fits) == []
    await workers.stop()


def test_a_trainer_that_is_given_one_says_the_same(small: Path, tmp_path: Path) -> None:
    from opentinker.shared.nn.models import load_model, torch_dtype

    model = Path(shutil.copytree(small, tmp_path / "model"))
    config = orjson.loads((model / "config.json").read_bytes())
    (model / "config.json").write_bytes(orjson.dumps({**config, "model_type": "llava_next", **OTHERS["llava_next"]}))
    with pytest.raises(JobFailed, match="is a llava_next model; OpenTinker trains and serves text models"):
        load_model(str(model), torch_dtype("float32"))


async def test_a_vision_model_is_no_base_of_a_shared_trainer(ctx: Context, small: Path, tmp_path: Path) -> None:
    seeing = Path(shutil.copytree(small, tmp_path / "model"))
    change(seeing / "config.json", model_type="qwen2_5_vl", **SEES)
    for base, wrong in ((seeing, ["model.base"]), (small, [])):
        parts = {"model": {"base": str(base), "lora": {}}, "resources": {"trainer": "shared"}}
        found = await check_model(ctx, make_spec(**parts, train={"steps": 1}, rollout={"engine": "toy"}))
        assert [mistake["field"] for mistake in found] == wrong
        assert all("cannot share a base yet; take resources.trainer = 'own'" in one["problem"] for one in found)
