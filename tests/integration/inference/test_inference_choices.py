"""Inference jobs: several answers to one request, penalties, and what is forced of an answer."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.support.inference import Site

HELLO: Any = [{"role": "user", "content": "Hello?"}]
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_and_answers_are_choices_in_order(site: Site, stream: bool) -> None:
    site.words = lambda prompt: f"{prompt}!"
    job = await site.job()
    options: Any = {"model": job, "prompt": ["a", "bc"], "n": 2, "seed": 5, "stream": stream}
    model: Any
    async with site.openai(job) as model:
        if stream:
            chunks = [
                c async for c in await model.completions.create(**options, stream_options={"include_usage": True})
            ]
            texts = ["".join(c.text for k in chunks for c in k.choices if c.index == n) for n in range(4)]
            ends = sorted(c.index for k in chunks for c in k.choices if c.finish_reason == "stop")
            usage = chunks[-1].usage
            assert len({chunk.id for chunk in chunks}) == 1
        else:
            answer = await model.completions.create(**options)
            texts, usage = [choice.text for choice in answer.choices], answer.usage
            ends = [choice.index for choice in answer.choices if choice.finish_reason == "stop"]
    assert (texts, ends) == (["a!", "a!", "bc!", "bc!"], [0, 1, 2, 3])
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 14, 17)
    asked = site.speakers["rollout-0"].asked
    assert sorted((prompt, sampling.seed) for prompt, sampling in asked) == [("a", 5), ("a", 6), ("bc", 5), ("bc", 6)]


async def test_if_one_answer_fails_the_request_fails_and_the_others_are_cancelled(site: Site) -> None:
    def words(prompt: str) -> str:
        if prompt == "break":
            raise LookupError("nobody thought of this")
        return "x" * 3000

    site.words = words
    job = await site.job()
    async with site.openai(job) as model:
        with pytest.raises(openai.InternalServerError, match="fault of ours"):
            await model.completions.create(model=job, prompt=["a", "break"])
        site.words = lambda prompt: "ok"
        assert (await model.chat.completions.create(model=job, messages=HELLO, n=3)).choices[2].message.content == "ok"


async def test_penalties_and_what_is_forced_reach_the_engine(site: Site) -> None:
    site.words = lambda prompt: '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    job = await site.job()
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    extra = {"repetition_penalty": 1.2, "min_p": 0.1}
    model: Any
    async with site.openai(job) as model:
        await model.chat.completions.create(
            model=job,
            messages=HELLO,
            presence_penalty=0.5,
            frequency_penalty=-1,
            extra_body=extra,
            response_format=shape,
        )
        named = {"type": "function", "function": {"name": "add"}}
        for choice in ("required", named):
            called = await model.chat.completions.create(model=job, messages=HELLO, tools=[ADD], tool_choice=choice)
            assert called.choices[0].message.tool_calls[0].function.name == "add"
        with pytest.raises(openai.BadRequestError, match="names a tool that is not offered: 'sub'"):
            wrong = {"type": "function", "function": {"name": "sub"}}
            await model.chat.completions.create(model=job, messages=HELLO, tools=[ADD], tool_choice=wrong)
    first, *others = [sampling for _, sampling in site.speakers["rollout-0"].asked]
    assert (first.presence_penalty, first.frequency_penalty, first.repetition_penalty, first.min_p) == (
        0.5,
        -1,
        1.2,
        0.1,
    )
    assert json.loads(first.structure)["format"] == {"type": "json_schema", "json_schema": SCHEMA}
    assert all(json.loads(sampling.structure)["format"]["type"] == "tag" for sampling in others) and len(others) == 2


async def test_the_simulated_engine_says_what_it_cannot_do(site: Site) -> None:
    job = await site.job(rollout={"engine": "toy"})
    options: Any
    async with site.openai(job) as model:
        for options, said in [
            ({"response_format": {"type": "json_object"}}, "forces no call or format"),
            ({"presence_penalty": 1}, "has no penalties and no min_p"),
        ]:
            asked: Any = {"model": job, "messages": HELLO, **options}
            with pytest.raises(openai.BadRequestError, match=said):
                await model.chat.completions.create(**asked)
