"""Inference jobs, asked in OpenAI's Responses API and Anthropic's Messages API, with their own clients."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from tests.conftest import WAIT_S
from tests.support.agents.agent_loops import LOOPS
from tests.support.api import OPERATOR
from tests.support.inference import Site

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
USER: Any = [{"role": "user", "content": "Hello?"}]


def claude(site: Site, job: str, key: str = OPERATOR) -> Any:
    """Typed loosely, as what it is asked for is not always in its types."""
    return AsyncAnthropic(
        base_url=f"{site.client.url}/v1/jobs/{job}", auth_token=key, api_key=None, max_retries=0, timeout=WAIT_S
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_loop_in_three_dialects_sends_the_same_prompts(site: Site, stream: bool) -> None:
    def words(prompt: str) -> str:
        return "It is 3." if "tool_response" in prompt else f"I add.\n{CALL}"

    site.words = words
    job = await site.job()
    async with site.openai(job) as model:
        for loop in LOOPS.values():
            assert await loop(model, "1+2", stream=stream, name=job) == "It is 3."
    prompts = [prompt for prompt, _ in site.speakers["rollout-0"].asked]
    assert len(prompts) == 6 and prompts[:2] == prompts[2:4] == prompts[4:]


async def test_text_is_streamed_as_it_is_sampled_in_every_dialect(site: Site) -> None:
    job = await site.job()
    speaker = site.speakers["rollout-0"]
    model: Any
    async with site.openai(job) as model, claude(site, job) as client:
        speaker.gate, speaker.at = asyncio.Event(), 4
        got = ""
        async for event in await model.responses.create(model=job, input="Hello?", stream=True):
            got += getattr(event, "delta", "")
            if got == "Hell":
                speaker.gate.set()
        assert (got, event.type, event.response.output_text) == ("Hello there.", "response.completed", "Hello there.")
        speaker.gate, got = asyncio.Event(), ""
        async for chunk in await client.messages.create(model=job, messages=USER, max_tokens=50, stream=True):
            got += getattr(getattr(chunk, "delta", None), "text", None) or ""
            if got == "Hell":
                speaker.gate.set()
        assert (got, chunk.type) == ("Hello there.", "message_stop")


async def test_logprobs_and_sampling_of_a_response_are_those_of_a_chat(site: Site) -> None:
    job = await site.job()
    include: Any = ["message.output_text.logprobs"]
    model: Any
    async with site.openai(job) as model:
        found = await model.responses.create(
            model=job, input="Hello?", include=include, top_logprobs=2, top_p=0.5, max_output_tokens=4
        )
    (item,) = found.output[0].content
    assert [token.token for token in item.logprobs] == [*"Hell"]
    assert {len(token.top_logprobs) for token in item.logprobs} == {2}
    sampling = site.speakers["rollout-0"].asked[0][1]
    assert (sampling.top_p, sampling.max_tokens) == (0.5, 4)


async def test_what_has_no_effect_is_refused_and_errors_have_the_dialect_s_form(site: Site) -> None:
    job = await site.job()
    model: Any
    options: Any
    async with site.openai(job) as model, claude(site, job) as client:
        for options, said in [
            ({"reasoning": {"effort": "low"}}, "reasoning is not supported"),
            ({"text": {"verbosity": "low"}}, "text.verbosity is not supported"),
            ({"extra_body": {"messages": USER}}, "messages is not supported at responses"),
        ]:
            with pytest.raises(openai.BadRequestError, match=said):
                await model.responses.create(model=job, input="a", **options)
        for options, said in [
            ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking is not supported"),
            ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "parallel_tool_calls can only be"),
            ({"extra_body": {"frequency_penalty": 1}}, "frequency_penalty is not supported"),
        ]:
            with pytest.raises(anthropic.BadRequestError, match=said) as refused:
                await client.messages.create(model=job, max_tokens=5, messages=USER, **options)
            body: Any = refused.value.body
            assert body["type"] == "error"
        with pytest.raises(anthropic.NotFoundError, match="this job has: some/model, chat"):
            await client.messages.create(model="gpt", max_tokens=5, messages=USER)
    async with claude(site, job, "nonsense") as client:
        with pytest.raises(anthropic.AuthenticationError, match="malformed API key"):
            await client.messages.create(model=job, max_tokens=5, messages=USER)
    assert site.speakers["rollout-0"].asked == []
