"""Policies that are adapters of one base, in one vLLM process and one batch."""

from __future__ import annotations

import asyncio
import copy
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from opentinker.services.rollout_worker.engines.base import Completion, Sampling
from opentinker.shared.spec import LoraSpec, parse_spec
from opentinker.shared.types.core import WeightVersion, part_id
from opentinker.shared.types.trajectories import Span
from tests.conftest import soon
from tests.support.cluster import Cluster
from tests.support.learning import plain_logprobs
from tests.support.vllm_engines import EOS, MARKS, PROMPT, TOLERANCE, Trainer, build, expected, vllm_engine, worst

if TYPE_CHECKING:
    from opentinker.services.rollout_worker.engines.vllm import VllmEngine

pytestmark = MARKS

LORAS = {"red": LoraSpec(rank=4, alpha=8.0), "blue": LoraSpec(rank=8, alpha=8.0)}
V1, V2, FROZEN = WeightVersion(0, 1), WeightVersion(0, 2), WeightVersion(3, 7)
DRAWN = Sampling(max_tokens=60, seed=1, temperature=0.9)
LONG = Sampling(max_tokens=400, seed=2)


def adapted(base: Path, lora: LoraSpec) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()


def set_adapter(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Give a model other adapter weights; return them as a trainer sends them."""
    from peft import get_peft_model_state_dict

    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.15)
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(model)
    return state


async def ask_all(engines: dict[str, VllmEngine], name: str) -> dict[str, Completion]:
    """In one batch."""
    asked = (engine.generate(f"{name}-{who}", PROMPT, DRAWN) for who, engine in engines.items())
    return dict(zip(engines, await asyncio.gather(*asked), strict=True))


def check(done: Completion, version: WeightVersion, model: Any, sampling: Sampling) -> None:
    assert done.spans == [Span(0, len(done.ids), version)]
    assert worst(done, expected(model, PROMPT, done, sampling)) <= TOLERANCE


async def check_scores(engines: dict[str, VllmEngine], models: dict[str, Any]) -> None:
    scored = await asyncio.gather(*(engine.score(PROMPT * 5) for engine in engines.values()))
    for name, scores in zip(engines, scored, strict=True):
        assert (torch.tensor(scores.logprobs) - plain_logprobs(models[name], PROMPT * 5)).abs().max() <= TOLERANCE


def same(one: Completion, other: Completion) -> bool:
    return one.ids == other.ids and worst(one, torch.tensor(other.logprobs)) < TOLERANCE


async def test_adapters_of_one_base_share_an_engine_and_change_nothing_for_each_other(tmp_path: Path) -> None:
    """Two policies and a frozen checkpoint; one is swapped while all generate. `apart` has the blue one for itself."""
    torch.manual_seed(0)
    base = build(tmp_path / "base", tied=False)
    models = {name: adapted(base, lora) for name, lora in LORAS.items()} | {"frozen": adapted(base, LORAS["red"])}
    states = {name: set_adapter(model, seed) for seed, (name, model) in enumerate(models.items(), 10)}
    models["frozen"].save_pretrained(tmp_path / "frozen")
    settings: dict[str, Any] = {"context_length": 512, "max_concurrent": 8}
    red = vllm_engine(str(base), lora=LORAS["red"], max_rank=8, max_adapters=3 + 3 + 1, **settings)
    apart = vllm_engine(str(base), lora=LORAS["blue"], **settings)
    try:
        await red.start()
        await apart.start()
        blue, frozen = red.sibling([EOS], LORAS["blue"]), red.sibling([EOS], LORAS["red"])
        shared = {"red": red, "blue": blue, "frozen": frozen}
        everyone = {**shared, "apart": apart}
        of_red, of_blue = await Trainer(red).form(), await Trainer(blue, apart).form()
        await frozen.serve(FROZEN, tmp_path / "frozen")
        await asyncio.gather(of_red.publish(V1, states["red"].items()), of_blue.publish(V1, states["blue"].items()))
        versions = {"red": V1, "blue": V1, "frozen": FROZEN}

        before = await ask_all(everyone, "before")
        for name, model in models.items():
            check(before[name], versions[name], model, DRAWN)
        assert same(before["blue"], before["apart"])
        assert len({tuple(done.ids) for done in before.values()}) == 3, "the adapters differ"

        begun = {name: asyncio.Event() for name in shared}
        running = {
            name: asyncio.create_task(engine.generate(f"long-{name}", PROMPT, LONG, partial(set_event, begun[name])))
            for name, engine in shared.items()
        }
        for event in begun.values():
            await soon(event.wait())
        first = {**models, "blue": copy.deepcopy(models["blue"])}
        await of_blue.publish(V2, set_adapter(models["blue"], 20).items())
        assert (red.version, blue.version, frozen.version) == (V1, V2, FROZEN)
        assert not any(task.done() for task in running.values()), "prompts are scored beside requests that sample"
        await check_scores(shared, models)
        after = await ask_all(everyone, "after")
        check(after["blue"], V2, models["blue"], DRAWN)
        assert same(after["blue"], after["apart"]) and not same(after["blue"], before["blue"])
        for name in ("red", "frozen"):
            check(after[name], versions[name], models[name], DRAWN)
            assert same(after[name], before[name])
        for name, task in running.items():
            check(await task, versions[name], first[name], LONG)
        assert (await blue.score(PROMPT)).version == V2
    finally:
        await red.close()
        await apart.close()


def set_event(event: asyncio.Event, *_: object) -> None:
    event.set()


@pytest.mark.nightly
@pytest.mark.slow
async def test_two_adapters_of_a_job_train_through_one_engine(tiny: Path, tmp_path: Path) -> None:
    """Without staleness every token is one of the adapter that is being trained, so every step compares logprobs."""
    ranks = {"speaker": 4, "listener": 8}
    spec: dict[str, Any] = {
        "name": "game",
        "model": {"base": str(tiny), "chat_template": "plain"},
        "environment": {"name": "signalling", "config": {"rules": False}},
        "algorithm": {"group_size": 4, "groups_per_batch": 2, "max_staleness": 0},
        "rollout": {"max_tokens": 3},
        "train": {"steps": 5, "lr": 1e-2, "checkpoint_every": 5},
        "policies": {name: {"model": {"lora": {"rank": rank}}} for name, rank in ranks.items()},
        "seats": {name: name for name in ranks},
    }
    async with Cluster(tmp_path, heavy=True) as cluster:
        job = await cluster.run(parse_spec(spec))
        assert cluster.logs("rollout_worker-0").count("engine_started") == 1
        for name, rank in ranks.items():
            lines = cluster.lines(part_id(job, name))
            assert len(lines) == 5
            assert all(line["mismatch/tokens"] == line["tokens"] > 0 for line in lines)
            assert max(line["mismatch/max"] for line in lines) <= 1e-3
            target = await cluster.client.download(part_id(job, name), tmp_path / name)
            assert json.loads((target / "adapter_config.json").read_text())["r"] == rank
