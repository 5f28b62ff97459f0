"""Adapters: how they begin, and how a downloaded one becomes a plain model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.models.make_tiny import make_tiny
from opentinker import ApiError, AsyncClient
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import SpecError
from tests.support.api import write_checkpoint
from tests.support.factories import V0, make_spec
from tests.support.learning import plain_logprobs, random_groups, torch_learner, torch_spec

IDS = [5, 6, 7, 8, 9, 10, 11, 3, 4, 1]


def logprobs(learner: RlLearner) -> torch.Tensor:
    learner.causal.set_attn_implementation("sdpa")
    return plain_logprobs(learner.causal, IDS)


# --- how they begin -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["kaiming", "gaussian", "orthogonal"])
def test_adapter_begins_as_nothing_on_an_unchanged_base(tiny: Path, tmp_path: Path, init: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny)
    weights = dict(base.named_parameters())
    model = {"lora": {"rank": 4, "alpha": 8.0, "init": init}}
    learner = torch_learner(tiny, model=model)
    frozen = {n: p for n, p in learner.model.named_parameters() if "lora_" not in n}
    assert all(
        torch.equal(p, weights[n.removeprefix("base_model.model.").replace(".base_layer", "")])
        for n, p in frozen.items()
    )
    torch.testing.assert_close(logprobs(learner), plain_logprobs(base, IDS), atol=1e-5, rtol=0)
    assert isinstance(learner.model, PeftModel)
    with learner.model.disable_adapter():
        assert torch.equal(logprobs(learner), plain_logprobs(base, IDS)), "with the adapter off it is the base"
    learner.causal.set_attn_implementation("opentinker_packed")
    for step in range(2):
        learner.step(random_groups(step), WeightVersion(1, step))
    learner.save(tmp_path)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path)
    torch.testing.assert_close(plain_logprobs(plain, IDS), logprobs(learner), atol=1e-5, rtol=0)
    assert torch.equal(logprobs(torch_learner(tiny, tmp_path, model=model)), logprobs(learner))


def test_each_way_to_begin_is_another_one_and_follows_the_seed(tiny: Path) -> None:
    def first(init: str, seed: int = 0) -> torch.Tensor:
        learner = torch_learner(tiny, model={"lora": {"rank": 8, "init": init}}, train={"seed": seed})
        return next(p.detach() for n, p in learner.parameters.items() if "q_proj.lora_A" in n)

    gaussian = first("gaussian")
    assert gaussian.std().item() == pytest.approx(1 / 8, rel=0.1)
    kaiming = first("kaiming")
    assert kaiming.abs().max() <= gaussian.shape[1] ** -0.5 * 1.0001 < gaussian.abs().max()
    assert torch.equal(gaussian, first("gaussian")) and not torch.equal(gaussian, first("gaussian", seed=1))


@pytest.mark.parametrize("init", ["pissa", "olora", "eva", "loftq", "mica", True])
def test_what_would_change_the_base_or_needs_data_is_refused(init: object) -> None:
    with pytest.raises(SpecError, match=r"model\.lora\.init = .*'kaiming', 'gaussian' or 'orthogonal'"):
        make_spec(model={"base": "m", "lora": {"init": init}}, train={"steps": 1}, rollout={})


def test_orthogonal_needs_an_even_rank() -> None:
    with pytest.raises(SpecError, match=r"model\.lora\.rank = 3: must be even"):
        make_spec(model={"base": "m", "lora": {"init": "orthogonal", "rank": 3}}, train={"steps": 1}, rollout={})
    assert LoraSpec(init="orthogonal").rank % 2 == 0


# --- merged on download ---------------------------------------------------------------------------------------------


async def trained(client: AsyncClient, ctx: Context, base: Path, directory: Path, **model: Any) -> str:
    """A job with one checkpoint, which lies in `directory` too."""
    learner = torch_learner(base, model=model)
    for step in range(3):
        learner.step(random_groups(step), V0)
    learner.save(directory)
    job = str((await client.submit(torch_spec(base, model=model)))["id"])
    write_checkpoint(ctx, job, 3, files_in(directory))
    return job


def files_in(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([IDS])).logits.float()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_merged_downloads(client: AsyncClient, ctx: Context, tiny: Path, tmp_path: Path, dtype: str) -> None:
    base = tiny
    if dtype == "bfloat16":
        base = tmp_path / "base"
        AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(base)
        AutoTokenizer.from_pretrained(tiny).save_pretrained(base)
    job = await trained(client, ctx, base, tmp_path / "c", lora={"rank": 4, "alpha": 8.0}, dtype=dtype)
    merged = await client.download(job, tmp_path / "merged", merge=True)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(plain)
    expected = logits(PeftModel.from_pretrained(plain, tmp_path / "c"))
    model, info = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and str(model.dtype) == f"torch.{dtype}"
    assert (before - expected).abs().max() > 0.02, "the adapter has learnt something"
    tolerance = 1e-5 if dtype == "float32" else 0.02
    torch.testing.assert_close(logits(model.float()), expected, atol=tolerance, rtol=0)
    assert AutoTokenizer.from_pretrained(merged)("472=").input_ids == [7, 10, 5, 40]
    assert not [name for name in os.listdir(merged) if "adapter" in name or name == "manifest.json"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")], "nothing is left of the work"


async def test_base_may_lie_elsewhere(client: AsyncClient, ctx: Context, tiny: Path, tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "first" / "place", hidden_size=64, layers=1)
    job = await trained(client, ctx, base, tmp_path / "c", lora={"rank": 4, "alpha": 8.0})
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(ApiError, match=rf"base model {base} is not on this machine; say with `base` \(--base\)"):
        await client.download(job, tmp_path / "merged", merge=True)
    with pytest.raises(ApiError, match="does not fit"):
        await client.download(job, tmp_path / "merged", merge=True, base=str(tiny))
    with pytest.raises(ApiError, match="cannot be loaded"):
        await client.download(job, tmp_path / "merged", merge=True, base=str(tmp_path / "c"))
    assert not (tmp_path / "merged").exists()
    merged = await client.download(job, tmp_path / "merged", merge=True, base=str(moved))
    expected = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(moved), tmp_path / "c"))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), expected, atol=1e-5, rtol=0)


async def test_what_cannot_be_merged_is_said(
    client: AsyncClient, ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_tiny(tmp_path / "base", hidden_size=64, layers=1)
    full = await trained(client, ctx, base, tmp_path / "full")
    with pytest.raises(ApiError, match="step 3 is no adapter"):
        await client.download(full, tmp_path / "merged", merge=True)
    with pytest.raises(ApiError, match="only where an adapter is merged"):
        await client.download(full, tmp_path / "merged", base=str(base))
    with pytest.raises(ApiError, match="no checkpoint of step 9"):
        await client.download(full, tmp_path / "merged", step=9, merge=True)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(ApiError, match="not an empty directory"):
        await client.download(full, tmp_path / "taken", merge=True)
    monkeypatch.delitem(sys.modules, "opentinker.sdk.merge_adapter")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ApiError, match=r"peft is not installed: pip install 'opentinker\[trainer\]'"):
        await client.download(full, tmp_path / "merged", merge=True)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
async def test_tied_head_adapter_is_not_merged(client: AsyncClient, ctx: Context, tiny: Path, tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "lm_head"]}
    job = await trained(client, ctx, tiny, tmp_path / "c", lora=lora)
    with pytest.raises(ApiError, match=r"changes .*lm_head, whose weights are those of another layer too"):
        await client.download(job, tmp_path / "merged", merge=True)
