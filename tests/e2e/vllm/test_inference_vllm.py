"""Inference jobs with the real engine on a CPU, asked with OpenAI's client. One cluster, and one engine for all but the
adapter."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI

from opentinker.shared.types.core import JobState
from tests.conftest import WAIT_S, until
from tests.support.api import OPERATOR, write_checkpoint
from tests.support.cluster import Cluster, shared_fixture
from tests.support.lineage import undocumented
from tests.support.scheduling import new_job

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ASKED: Any = [{"role": "user", "content": "12="}]


cluster = shared_fixture(Cluster, trainers=0, env_workers=0, heavy=True, forked=False)


def serves(model: Path, **parts: Any) -> dict[str, Any]:
    return {"name": "chat", "kind": "inference", "model": {"base": str(model)}, **parts}


async def served(cluster: Cluster, model: Path, **parts: Any) -> str:
    job = str((await cluster.client.submit(serves(model, **parts)))["id"])
    await cluster.runs(job)
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


def assert_likeliest(
    tops: list[list[tuple[str, float]]], count: int, model: Any, tokenizer: Any, prompt: list[int], ids: list[int]
) -> None:
    """Those of transformers, at each place; tokens about as likely may change places."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.double().log_softmax(-1)
    best = logprobs.topk(count).values
    assert len(tops) == len(ids)
    for place, top in enumerate(tops):
        named = {tokenizer.decode([id]): float(logprobs[place, id]) for id in range(logprobs.shape[1])}
        said = torch.tensor([logprob for _, logprob in top]).double()
        assert len(top) == len({name for name, _ in top}) == count
        assert float((said - best[place]).abs().max()) < 1e-3
        assert max(abs(named[name] - logprob) for name, logprob in top) < 1e-3


async def test_answers_are_those_of_the_model_whole_and_streamed_alike(system: Cluster, job: str, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(tiny), AutoModelForCausalLM.from_pretrained(tiny)
    options: Any = {
        "model": "chat",
        "messages": ASKED,
        "max_tokens": 20,
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 20,
    }
    async with asking(system, job) as client:
        whole = await client.chat.completions.create(**options)
        again = await client.chat.completions.create(**options)
        other = await client.chat.completions.create(**{**options, "seed": 12})
        stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=True, return_dict=False)
        plain = await client.completions.create(model="chat", prompt=prompt, max_tokens=20, seed=11, logprobs=0)
        five = await client.completions.create(model="chat", prompt=prompt, max_tokens=20, seed=11, logprobs=5)
        narrow = await client.chat.completions.create(**options, extra_body={"top_k": 3})
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
    # the sampled tokens' own logprobs are the same whether others are asked for or not
    assert plain.choices[0].logprobs and five.choices[0].logprobs and narrow.choices[0].logprobs
    assert five.choices[0].logprobs.token_logprobs == pytest.approx(plain.choices[0].logprobs.token_logprobs, abs=1e-5)
    listed = [token for chunk in chunks for c in chunk.choices if c.logprobs for token in c.logprobs.content or []]
    for tokens in (whole.choices[0].logprobs.content, listed):
        tops = [[(top.token, top.logprob) for top in token.top_logprobs] for token in tokens]
        assert_likeliest(tops, 20, model, tokenizer, prompt, ids)
    found = [list(top.items()) for top in five.choices[0].logprobs.top_logprobs or []]
    names = five.choices[0].logprobs.tokens or []
    assert all(name in dict(top) and 5 <= len(top) <= 6 for name, top in zip(names, found, strict=True))
    assert_likeliest([top[:5] for top in found], 5, model, tokenizer, prompt, ids)
    assert {len(token.top_logprobs) for token in narrow.choices[0].logprobs.content or []} == {3}


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


async def test_a_format_is_forced_and_penalties_and_several_answers_are_sampled(system: Cluster, job: str) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    shape: Any = {"type": "json_schema", "json_schema": {"name": "two", "schema": schema}}
    options: Any = {"model": "chat", "messages": ASKED, "max_tokens": 60, "logprobs": True}
    async with asking(system, job) as client:
        forced = await client.chat.completions.create(**options, response_format=shape, n=4, temperature=2)
        wide = await client.chat.completions.create(**options, seed=3)
        narrow = await client.chat.completions.create(**options, seed=3, extra_body={"min_p": 0.9})
        varied = await client.chat.completions.create(**options, seed=3, presence_penalty=2, frequency_penalty=2)
        with pytest.raises(openai.BadRequestError, match="cannot force it"):
            broken: Any = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
            await client.chat.completions.create(**options, response_format=broken)
    texts = [str(choice.message.content) for choice in forced.choices]
    for text, choice in zip(texts, forced.choices, strict=True):
        assert [type(value) for value in json.loads(text)] == [bool, bool] and choice.finish_reason == "stop", text
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert choice.logprobs.content[0].logprob == 0.0, "no other token fits"
    assert len(set(texts)) > 1
    assert narrow.choices[0].message.content != wide.choices[0].message.content != varied.choices[0].message.content


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


async def trained(system: Cluster, job: str, base: Path, place: Path, seed: int, **lora: Any) -> Any:
    """A random adapter, as step 9 of this job; gives the model with it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(lora_alpha=64, init_lora_weights=False, **lora)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    model.save_pretrained(place)
    files = {name: (place / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    told = {"base": str(base), "lora": {"rank": lora["r"]}}
    await new_job(system.store, job, JobState.CANCELLED, model=told, rollout={}, train={"steps": 1})
    surroundings: Any = SimpleNamespace(settings=SimpleNamespace(data_dir=system.data))
    write_checkpoint(surroundings, job, 9, files)
    return model


async def test_the_adapter_of_a_checkpoint_is_served(system: Cluster, tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    layers = ["q_proj", "v_proj", "down_proj"]
    job = "j-adapter000"
    adapted = await trained(system, job, tiny, tmp_path / "adapter", 3, r=4, target_modules=layers)
    name = f"{job}@9"
    job = await served(system, tiny, start={"from": f"{job}@latest"}, rollout={"context_length": 256})
    prompt = AutoTokenizer.from_pretrained(tiny).apply_chat_template(
        ASKED, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    async with asking(system, job) as client:
        assert (await client.models.list()).data[0].id == name
        answer: Any = await client.completions.create(model=name, prompt=prompt, max_tokens=12, logprobs=0, seed=1)
    assert answer.system_fingerprint == "weights-1.9"
    said, ids = torch.tensor(answer.choices[0].logprobs.token_logprobs), answer.choices[0].token_ids
    assert float((said - logprobs_of(adapted, prompt, ids)).abs().max()) < 1e-3
    assert float((said - logprobs_of(AutoModelForCausalLM.from_pretrained(tiny), prompt, ids)).abs().max()) > 0.1
    assert (await system.client.cancel(job))["state"] == "cancelled"


@pytest.mark.nightly
async def test_adapters_and_base_are_served_before_and_after_sleep(system: Cluster, tiny: Path, tmp_path: Path) -> None:
    """Whatever is asked beside it, each answers with the probabilities that transformers and peft give it."""
    from transformers import AutoModelForCausalLM

    models = {
        "chat": AutoModelForCausalLM.from_pretrained(tiny),
        "maths": await trained(
            system, "j-maths00000", tiny, tmp_path / "m", 4, r=4, target_modules=["q_proj", "o_proj"]
        ),
        "code": await trained(system, "j-code000000", tiny, tmp_path / "c", 5, r=12, target_modules="all-linear"),
    }
    adapters = [{"name": "maths", "from": "j-maths00000@latest"}, {"name": "code", "from": "j-code000000@9"}]
    serving = {"adapters": adapters, "sleep_s": 1.0, "wake_s": WAIT_S}
    job = str((await system.client.submit(serves(tiny, rollout={"context_length": 512}, serving=serving)))["id"])
    prompts = [[5, 6, 7], [5 + n % 9 for n in range(300)]]  # the longer one is cached
    async with asking(system, job) as client:
        for again in range(2):
            asked = [(name, prompt, seed) for seed in range(6) for name in models for prompt in prompts]
            answers: list[Any] = await asyncio.gather(
                *(
                    client.completions.create(model=name, prompt=prompt, max_tokens=12, logprobs=0, seed=seed)
                    for name, prompt, seed in asked
                )
            )
            apart: dict[tuple[str, str], float] = {}
            for (name, prompt, _), answer in zip(asked, answers, strict=True):
                said, ids = torch.tensor(answer.choices[0].logprobs.token_logprobs), answer.choices[0].token_ids
                assert answer.model == name and answer.usage.prompt_tokens == len(prompt)
                assert answer.system_fingerprint == ("weights-0.0" if name == "chat" else "weights-1.9")
                for other, model in models.items():
                    far = float((said - logprobs_of(model, prompt, ids)).abs().max())
                    apart[name, other] = max(far, apart.get((name, other), 0.0))
            assert {pair for pair, far in apart.items() if far < 1e-3} == {(name, name) for name in models}
            assert all(far > 0.1 for (name, other), far in apart.items() if name != other)
            if not again:
                await until(lambda: system.client.job(job), lambda found: found["asleep"])
        with pytest.raises(openai.NotFoundError, match="maths, code"):
            await client.completions.create(model="poems", prompt=[5])
    assert (await system.client.cancel(job))["state"] == "cancelled"
