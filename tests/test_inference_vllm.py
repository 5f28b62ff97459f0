"""Inference jobs with the real engine on a CPU, asked with OpenAI's client. One cluster, and one engine for all but the
adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI

from opentinker.shared.types import JobState
from tests.api import OPERATOR, write_checkpoint
from tests.cluster import Cluster, undocumented
from tests.conftest import WAIT_S, until
from tests.scheduling import new_job

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ASKED: Any = [{"role": "user", "content": "12="}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path_factory.mktemp("serving"), trainers=0, env_workers=0, heavy=True) as cluster:
        yield cluster


async def served(cluster: Cluster, model: Path, **parts: Any) -> str:
    job = str(
        (await cluster.client.submit({"name": "chat", "kind": "inference", "model": {"base": str(model)}, **parts}))[
            "id"
        ]
    )

    async def running() -> bool:
        record = await cluster.client.job(job)
        assert record["state"] in ("queued", "starting", "running"), record["reason"]
        return bool(record["state"] == "running")

    await until(running)
    return job


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def job(cluster: Cluster, tiny: Path) -> str:
    return await served(cluster, tiny, rollout={"context_length": 256})


def asking(cluster: Cluster, job: str) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{cluster.client.url}/v1/jobs/{job}/v1", api_key=OPERATOR, timeout=WAIT_S, max_retries=8
    )


def logprobs_of(model: Any, prompt: list[int], ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


async def test_answers_are_those_of_the_model_whole_and_streamed_alike(system: Cluster, job: str, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(tiny), AutoModelForCausalLM.from_pretrained(tiny)
    options: Any = {"model": "chat", "messages": ASKED, "max_tokens": 20, "seed": 11, "logprobs": True}
    async with asking(system, job) as client:
        whole = await client.chat.completions.create(**options)
        again = await client.chat.completions.create(**options)
        other = await client.chat.completions.create(**{**options, "seed": 12})
        stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=True, return_dict=False)
        plain = await client.completions.create(model="chat", prompt=prompt, max_tokens=20, seed=11, logprobs=0)
    text = whole.choices[0].message.content
    assert text and again.choices[0].message.content == text != other.choices[0].message.content
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text
    assert len(chunks) > 5 and chunks[-1].usage == whole.usage
    assert plain.choices[0].text == text
    assert whole.usage is not None and whole.usage.prompt_tokens == len(prompt)
    ids = plain.choices[0].token_ids  # type: ignore[attr-defined]
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    said = torch.tensor([token.logprob for token in whole.choices[0].logprobs.content])
    assert len(ids) == len(said) and float((said - logprobs_of(model, prompt, ids)).abs().max()) < 1e-3


async def test_stops_limits_and_greedy(system: Cluster, job: str) -> None:
    options: Any = {"model": "chat", "messages": ASKED, "temperature": 0, "max_tokens": 30}
    async with asking(system, job) as client:
        free = (await client.chat.completions.create(**options)).choices[0].message.content or ""
        assert len(free) > 3
        mark = free[2:4]
        ended = (await client.chat.completions.create(**options, stop=[mark])).choices[0]
        assert (ended.message.content, ended.finish_reason) == (free[: free.index(mark)], "stop")
        stream = await client.chat.completions.create(**options, stop=[mark], stream=True)
        streamed = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
        assert "".join(streamed) == free[: free.index(mark)]
        cut = (await client.chat.completions.create(**{**options, "max_tokens": 2})).choices[0]
        assert (cut.message.content, cut.finish_reason) == (free[:2], "length")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 256"):
            await client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "1" * 300}])
        with pytest.raises(openai.BadRequestError, match="chat template"):
            await client.chat.completions.create(
                **options, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]
            )


async def test_many_are_answered_at_once_and_their_numbers_are_told(system: Cluster, job: str) -> None:
    async with asking(system, job) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(model="chat", messages=ASKED, max_tokens=16, seed=seed)
                for seed in range(100)
            )
        )
    assert len({answer.choices[0].message.content for answer in answers}) > 50

    async def counted() -> bool:
        points = await system.client.metrics(job)
        assert undocumented({name for point in points for name in point["values"]}) == []
        return any(point["values"].get("serving/answers", 0) >= 100 for point in points)

    await until(counted)


async def test_what_is_killed_comes_back_and_serves_again(system: Cluster, job: str) -> None:
    options: Any = {"model": "chat", "messages": ASKED, "temperature": 0, "max_tokens": 8}
    async with asking(system, job) as client:
        before = await client.chat.completions.create(**options)
        system.kill("scheduler")
        system.kill("rollout_worker-0")
        after = await client.chat.completions.create(**options)
    assert after.choices[0].message.content == before.choices[0].message.content
    assert (await system.client.job(job))["state"] == "running"
    assert (await system.client.complete(job))["state"] == "succeeded"


async def test_the_adapter_of_a_checkpoint_is_served(system: Cluster, tiny: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(tiny)
    config = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    files = {
        name: (tmp_path / "adapter" / name).read_bytes()
        for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    model = {"base": str(tiny), "lora": {"rank": 4}}
    trained = await new_job(
        system.store, "j-adapter000", JobState.CANCELLED, model=model, rollout={}, train={"steps": 1}
    )
    surroundings: Any = SimpleNamespace(settings=SimpleNamespace(data_dir=system.data))
    write_checkpoint(surroundings, trained, 9, files)
    job = await served(system, tiny, start={"from": f"{trained}@latest"}, rollout={"context_length": 256})
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "adapter")
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=True, return_dict=False)
    async with asking(system, job) as client:
        assert (await client.models.list()).data[0].id == f"{trained}@9"
        answer: Any = await client.completions.create(
            model=f"{trained}@9", prompt=prompt, max_tokens=12, logprobs=0, seed=1
        )
    assert answer.system_fingerprint == "weights-1.9"
    said, ids = torch.tensor(answer.choices[0].logprobs.token_logprobs), answer.choices[0].token_ids
    assert float((said - logprobs_of(adapted, prompt, ids)).abs().max()) < 1e-3
    assert float((said - logprobs_of(AutoModelForCausalLM.from_pretrained(tiny), prompt, ids)).abs().max()) > 0.1
    assert (await system.client.cancel(job))["state"] == "cancelled"
