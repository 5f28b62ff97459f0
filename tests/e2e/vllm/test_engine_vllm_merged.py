"""A vLLM engine that serves one adapter merged into its base, next to one that serves it in vLLM's LoRA layers."""

from __future__ import annotations

import asyncio
import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from opentinker.services.rollout_worker.engines.base import LoraServing, Sampling, SwapError
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Span
from tests.conftest import soon
from tests.support.learning import plain_logprobs
from tests.support.vllm_engines import MARKS, PROMPT, TOLERANCE, Trainer, build, expected, started, vllm_engine, worst

pytestmark = MARKS

LORA = LoraSpec(rank=4, alpha=8.0)
IDS = [*PROMPT * 8, 7, 11]
DRAWN = Sampling(max_tokens=60, seed=1, temperature=0.9)
LONG = Sampling(max_tokens=400, seed=2)
V0 = WeightVersion(0, 0)


def adapted(base: Path) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()


def set_adapter(model: Any, seed: int | None) -> dict[str, torch.Tensor]:
    """Give a model another adapter, zero for None; return it as a trainer sends it."""
    from peft import get_peft_model_state_dict

    torch.manual_seed(seed or 0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.15)
            if "lora_B" in name and seed is None:
                weight.zero_()
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(model)
    return state


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.nightly)])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return build(tmp_path_factory.mktemp(request.param), tied=request.param == "tied")


def engine_of(base: Path, **settings: Any) -> Any:
    return started(base, lora=LORA, context_length=512, max_concurrent=8, group_timeout_s=60.0, **settings)


async def test_a_merged_adapter_computes_what_lora_layers_compute_and_leaves_the_base_untouched(base: Path) -> None:
    model = adapted(base)
    async with engine_of(base, serving="auto") as merged, engine_of(base, serving="adapter") as apart:
        assert merged.lora == LoraServing(True, "") and not apart.lora.merged
        assert merged._process.llm().vllm_config.lora_config is None
        await merged.serve(V0)
        plain = await merged.score(IDS)
        trainer = await Trainer(merged, apart).form()
        for step in (1, 2, 3):
            await trainer.publish(WeightVersion(0, step), set_adapter(model, step).items())
            truth, said = plain_logprobs(model, IDS), [await engine.score(IDS) for engine in (merged, apart)]
            assert [scores.version for scores in said] == [WeightVersion(0, step)] * 2
            for scores in said:
                assert (torch.tensor(scores.logprobs) - truth).abs().max() <= TOLERANCE
            assert (torch.tensor(plain.logprobs) - truth).abs().max() > 0.1, "the adapter changes something"
        await trainer.publish(WeightVersion(0, 4), set_adapter(model, None).items())
        assert (await merged.score(IDS)).logprobs == plain.logprobs, "bit for bit"


@pytest.mark.nightly
async def test_an_engine_that_joins_late_or_again_has_the_same_weights(base: Path) -> None:
    model = adapted(base)
    async with engine_of(base, serving="merged") as merged:
        trainer = await Trainer(merged).form()
        for step in range(5):
            await trainer.publish(WeightVersion(0, step), set_adapter(model, step).items())
        async with engine_of(base, serving="merged") as late:
            trainer = await Trainer(merged, late, generation=2).form()
            await trainer.publish(WeightVersion(0, 4), set_adapter(model, 4).items())
            said = [await engine.score(IDS) for engine in (merged, late)]
            assert said[0] == said[1], "bit for bit"
            assert (torch.tensor(said[0].logprobs) - plain_logprobs(model, IDS)).abs().max() <= TOLERANCE


async def test_a_request_under_way_has_a_span_of_each_version(base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    async with engine_of(base, serving="merged") as merged:
        set_adapter(model, 1)
        model.save_pretrained(tmp_path / "saved")
        await merged.serve(V0, tmp_path / "saved")
        first, begun = copy.deepcopy(model), asyncio.Event()
        running = asyncio.create_task(merged.generate("long", PROMPT, LONG, partial(set_event, begun)))
        await soon(begun.wait())
        trainer = await Trainer(merged).form()
        await trainer.publish(WeightVersion(0, 1), set_adapter(model, 2).items())
        done = await running
        assert [span.version for span in done.spans] == [V0, WeightVersion(0, 1)]
        cut = done.spans[0].end
        assert worst(done, expected(first, PROMPT, done, LONG), 0, cut) <= TOLERANCE
        assert worst(done, expected(model, PROMPT, done, LONG), cut) <= TOLERANCE

        wrong = {name.replace("q_proj", "z_proj"): tensor for name, tensor in set_adapter(model, 3).items()}
        with pytest.raises(SwapError, match=r"z_proj\.weight.*the base has none"):
            await trainer.publish(WeightVersion(0, 2), wrong.items())
        set_adapter(model, 2)
        done = await merged.generate("after", PROMPT, DRAWN)
        assert done.spans == [Span(0, len(done.ids), WeightVersion(0, 1))], "the engine has its old weights"
        assert worst(done, expected(model, PROMPT, done, DRAWN)) <= TOLERANCE


def set_event(event: asyncio.Event, *_: object) -> None:
    event.set()


@pytest.mark.nightly
async def test_a_model_whose_adapter_cannot_be_merged_gets_lora_layers(tmp_path: Path) -> None:
    """Decided before the engine is built, from the model's configuration."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    torch.manual_seed(0)
    config = Olmo2Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=0, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Olmo2ForCausalLM(config).save_pretrained(tmp_path)
    insists = vllm_engine(str(tmp_path), lora=LORA, serving="merged")
    with pytest.raises(JobFailed, match=r"'merged' does not work with .* olmo2 model"):
        await insists.start()
    await insists.close()
    async with engine_of(tmp_path, serving="auto") as vllm:
        assert vllm.lora is not None and not vllm.lora.merged and "olmo2" in vllm.lora.why
        model = adapted(tmp_path)
        await (await Trainer(vllm).form()).publish(WeightVersion(0, 1), set_adapter(model, 1).items())
        scores = await vllm.score(IDS)
        assert (torch.tensor(scores.logprobs) - plain_logprobs(model, IDS)).abs().max() <= TOLERANCE
