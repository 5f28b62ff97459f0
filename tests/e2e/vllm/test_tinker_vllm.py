"""Samples of the Tinker API by vLLM, compared with transformers: adapters that come and go, stops, prompts."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from opentinker.services.rollout_worker.engines.gpu_split import GpuSplit
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.service import make_engine
from opentinker.services.rollout_worker.tinker.adapter_cache import AdapterCache
from opentinker.services.rollout_worker.tinker.tinker_job import TinkerJob, Undrawn
from opentinker.shared.config import Settings
from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.engines import engine_policies
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.tinker import Failed, Sampled, SampleParams, SampleRequest
from tests.e2e.vllm.test_engine_vllm_own import other_weights_of_disk
from tests.support.adapters import write_adapter
from tests.support.vllm_engines import EOS, LETTERS, MARKS, PROMPT, TOLERANCE, build

pytestmark = MARKS
LONG = PROMPT * 40
"""More than a block of the cache."""
SEEDS = {"a": 1, "b": 2, "c": 3}
"""Of adapters, of which the engine holds two."""
HOT, COLD = SampleParams(max_tokens=24, temperature=0.7, seed=1), SampleParams(max_tokens=24, temperature=0.0)


def adapted(base: Path, place: Path, name: str, seed: int) -> Any:
    """The model with a random adapter, which is saved too; they differ in rank, scale and layers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    layers = ["q_proj", "down_proj"] if seed == 1 else "all-linear"
    config = LoraConfig(
        task_type="CAUSAL_LM", r=2 * seed + 2, lora_alpha=16 * seed, target_modules=layers, init_lora_weights=False
    )
    model = get_peft_model(other_weights_of_disk(base), config).eval()
    model.save_pretrained(place / name)
    return model


class Sampler:
    """The work of a rollout worker, and the models that it should sample like; "" is the base."""

    def __init__(self, job: TinkerJob, place: Path, models: dict[str, Any]) -> None:
        self.job, self.place, self.models = job, place, models

    async def ask(self, name: str = "", prompt: list[int] = PROMPT, **fields: Any) -> Sampled | Failed:
        directory = str(self.place / name) if name else ""
        ids = np.asarray(prompt, "<i4").tobytes()
        request = SampleRequest(request="r", tenant="t", prompt=ids, directory=directory, version=f"{name}@1", **fields)
        undrawn = Undrawn("t", request.count)
        self.job.turns.enter("t", request.count)
        try:
            return await self.job._result(request, undrawn)
        finally:
            self.job.turns.leave("t", undrawn.samples)

    async def draw(self, name: str = "", prompt: list[int] = PROMPT, **fields: Any) -> Sampled:
        result = await self.ask(name, prompt, **fields)
        assert isinstance(result, Sampled), result
        return result

    def truth(self, name: str, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Logprobs of every token after each of `ids`, [N, V]."""
        with torch.no_grad():
            return (self.models[name](torch.tensor([ids])).logits[0].double() / temperature).log_softmax(-1)

    def distance(self, name: str, prompt: list[int], result: Sampled, temperature: float) -> float:
        """Largest difference between the logprobs of the samples and those of a model."""
        worst = 0.0
        for one in result.sequences:
            ids, said = tokens(one), torch.tensor(np.frombuffer(one.logprobs, "<f4").copy()).double()
            rows = self.truth(name, prompt + ids, temperature)[len(prompt) - 1 : -1]
            worst = max(worst, float((rows.gather(-1, torch.tensor(ids)[:, None])[:, 0] - said).abs().max()))
        return worst


def tokens(sequence: Any) -> list[int]:
    ids: list[int] = np.frombuffer(sequence.tokens, "<i4").tolist()
    return ids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sampler(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sampler]:
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("tinker")
    base = build(place / "base", tied=False)
    models = {name: adapted(base, place, name, seed) for name, seed in SEEDS.items()}
    spec = parse_spec(
        {
            "name": "server",
            "kind": "tinker",
            "model": {"base": str(base)},
            "rollout": {"context_length": 1024},
            "tinker": {"max_adapters": 2, "max_rank": 8, "max_concurrent": 16},
        }
    )
    renderer = Renderer.load(str(base), "plain")
    engine = make_engine(spec, renderer, str(base), [], engine_policies(spec), 1, GpuSplit(), Settings())
    store, spent = SimpleNamespace(redis=None), Counter[str]()
    worker: Any = SimpleNamespace(ctx=SimpleNamespace(bus=None, store=store), info=SimpleNamespace(id="w"), spent=spent)
    lease: Any = SimpleNamespace(job="j")
    try:
        await engine.start()
        await engine.serve(WeightVersion(0, 0))
        yield Sampler(TinkerJob(worker, lease, spec, engine), place, {"": other_weights_of_disk(base), **models})
    finally:
        await engine.close()


async def test_greedy_samples_are_those_of_transformers(sampler: Sampler) -> None:
    for name in ("", "a"):
        (one,) = (await sampler.draw(name, params=SampleParams(max_tokens=40, temperature=0.0, stop_ids=[]))).sequences
        ids = tokens(one)
        rows = sampler.truth(name, PROMPT + ids)[len(PROMPT) - 1 : -1]
        chosen = rows.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert len(ids) == 40 and float((rows.max(-1).values - chosen).max()) <= TOLERANCE
        assert np.allclose(np.frombuffer(one.logprobs, "<f4"), chosen, atol=TOLERANCE), "at temperature 1"


async def test_adapters_and_the_base_in_one_batch_are_each_what_they_are_alone(sampler: Sampler) -> None:
    names = ["", "a", "b"]
    alone = {name: await sampler.draw(name, LONG, count=3, params=HOT) for name in names}
    for _ in range(2):
        asked = [sampler.draw(name, LONG, count=3, params=HOT) for name in names]
        for name, result in zip(names, await asyncio.gather(*asked), strict=True):
            assert [*map(tokens, result.sequences)] == [*map(tokens, alone[name].sequences)], "seeds repeat"
            apart = {other: sampler.distance(other, LONG, result, 0.7) for other in names}
            assert apart.pop(name) <= TOLERANCE and min(apart.values()) > 0.1


async def test_an_evicted_adapter_comes_back_and_nothing_under_way_loses_its_own(sampler: Sampler) -> None:
    cache = sampler.job.adapters
    assert isinstance(cache, AdapterCache)
    before = cache.loads
    for name in ("a", "b", "c", "a", "", "b"):
        assert sampler.distance(name, PROMPT, await sampler.draw(name, params=HOT), 0.7) <= TOLERANCE
    assert cache.loads - before >= 3 and len(cache) == 2
    names = ["a", "", "b", "c"] * 4  # three for two places, at once
    results = await asyncio.gather(*(sampler.draw(name, LONG, count=2, params=HOT) for name in names))
    for name, result in zip(names, results, strict=True):
        assert sampler.distance(name, LONG, result, 0.7) <= TOLERANCE
    assert len(cache) == 2


async def test_prompts_and_likeliest_tokens_are_told_at_temperature_1_next_to_samples(sampler: Sampler) -> None:
    from opentinker.services.rollout_worker.engines.vllm_config import SCORED_TOKENS

    asked = {"prompt_logprobs": True, "likely_prompt": 5, "likely": 3, "params": HOT}
    names = ["", "a", "b"]
    prompt = LONG * 5  # which is computed in two passes
    assert len(prompt) > SCORED_TOKENS
    plain = [sampler.draw(name, LONG, params=HOT) for name in names]
    results = await asyncio.gather(*(sampler.draw(name, prompt, count=2, **asked) for name in names), *plain)
    for name, result in zip(names, results, strict=False):
        truth = sampler.truth(name, prompt)[:-1]
        said = np.frombuffer(result.prompt_logprobs, "<f4")
        assert len(said) == len(prompt) and np.isnan(said[0])
        assert np.allclose(said[1:], truth.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0], atol=TOLERANCE)
        likely = result.likely_prompt
        assert likely is not None and (likely.k, likely.length) == (5, len(prompt))
        ids = torch.tensor(np.frombuffer(likely.ids, "<i4").reshape(-1, 5)[1:].copy()).long()
        values = np.frombuffer(likely.logprobs, "<f4").reshape(-1, 5)[1:]
        assert np.allclose(values, truth.topk(5).values, atol=TOLERANCE)
        assert np.allclose(values, truth.gather(-1, ids), atol=TOLERANCE)
        for one in result.sequences:
            assert one.likely is not None and one.likely.length == len(tokens(one))
            drawn = sampler.truth(name, prompt + tokens(one), 0.7)[len(prompt) - 1 : -1]
            found = np.frombuffer(one.likely.logprobs, "<f4").reshape(-1, 3)
            assert np.allclose(found, drawn.topk(3).values, atol=TOLERANCE)


async def test_a_seed_repeats_samples_however_a_prompt_is_computed(sampler: Sampler) -> None:
    """In two passes at first, in none when it is cached; a vLLM on CPUs ends at the first of two."""
    prompt = [7, *LONG * 5]
    first, cached = [await sampler.draw("b", prompt, params=HOT) for _ in range(2)]
    assert tokens(first.sequences[0]) == tokens(cached.sequences[0])
    assert sampler.distance("b", prompt, cached, 0.7) <= TOLERANCE


async def test_one_token_of_a_prompt_has_no_logprob(sampler: Sampler) -> None:
    result = await sampler.draw("a", PROMPT[:1], prompt_logprobs=True, likely_prompt=2, params=COLD)
    said = np.frombuffer(result.prompt_logprobs, "<f4")
    assert len(said) == 1 and np.isnan(said[0]) and result.likely_prompt is not None
    assert result.likely_prompt.length == 1


async def test_a_list_of_stops_takes_the_place_of_the_end_of_turn_and_stays_in_the_sample(sampler: Sampler) -> None:
    def params(**stops: Any) -> SampleParams:
        return SampleParams(max_tokens=60, temperature=2.0, seed=5, **stops)

    async def drawn(**stops: Any) -> list[tuple[list[int], str]]:
        result = await sampler.draw(count=24, params=params(**stops))
        return [(tokens(one), one.stop) for one in result.sequences]

    endless = await drawn(stop_ids=[])
    assert all(len(ids) == 60 and stop == "length" for ids, stop in endless)
    assert any(EOS in ids[:-1] for ids, _ in endless), "the end-of-turn token was drawn"

    def cut(ids: list[int], *ends: int) -> tuple[list[int], str]:
        place = next((place for place, id in enumerate(ids, 1) if id in ends), None)
        return (ids[:place], "stop" if place else "length")

    assert await drawn() == [cut(ids, EOS) for ids, _ in endless]
    assert await drawn(stop_ids=[7, 11]) == [cut(ids, 7, 11) for ids, _ in endless]
    assert await drawn(stop=[LETTERS[EOS]]) == [cut(ids, EOS) for ids, _ in endless], "special tokens are text too"
    word = next(ids for ids, _ in endless if EOS not in ids)[9:11]
    text = "".join(LETTERS[id] for id in word)
    for (ids, stop), (whole, _) in zip(await drawn(stop=[text]), endless, strict=True):
        place = next((place for place in range(2, 61) if whole[place - 2 : place] == word), None)
        assert (ids, stop) == (whole[:place], "stop" if place else "length")


async def test_a_bad_adapter_is_refused_and_the_engine_serves_on(sampler: Sampler, tmp_path: Path) -> None:
    write_adapter(sampler.place / "nan", value=float("nan"))
    write_adapter(sampler.place / "large", rank=16)
    for name in ("nan", "large"):
        refused = await sampler.ask(name, params=COLD)
        assert isinstance(refused, Failed) and refused.category == "user" and not refused.lost
    foreign = sampler.place / "foreign"
    shutil.copytree(sampler.place / "a", foreign)
    weights = foreign / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"q_proj", b"z_proj"))
    refused = await sampler.ask("foreign", params=COLD)
    assert isinstance(refused, Failed) and refused.category == "user" and "cannot be loaded" in refused.error
    gone = await sampler.ask("absent", params=COLD)
    assert isinstance(gone, Failed) and not gone.lost and "make a sampler from newer weights" in gone.error
    for name in ("a", "b", "c", ""):
        assert sampler.distance(name, PROMPT, await sampler.draw(name, params=HOT), 0.7) <= TOLERANCE
