"""Inference jobs, asked with OpenAI's own client: answers, streams, tools, errors, and the command line."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import openai
import pytest
from nats.aio.client import Client as Nats

from opentinker.client import ApiError
from opentinker.sdk.inference import text_of
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from tests.support.api import bearing, write_checkpoint
from tests.support.inference import HELLO, Site, collected, opentinker
from tests.support.scheduling import new_job

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'


# --- answers --------------------------------------------------------------------------------------------------------


async def test_a_chat_is_answered_whole_and_streamed_alike(site: Site) -> None:
    async with site.asked() as (job, model):
        (first, *others) = [card.id for card in (await model.models.list()).data]
        assert (first, others) == ("some/model", ["chat", job])
        for name in (first, *others):
            assert (await model.models.retrieve(name)).id == name
        with pytest.raises(openai.NotFoundError, match="`gpt` does not exist here; this job has: some/model, chat, j-"):
            await model.models.retrieve("gpt")
        whole = await model.chat.completions.create(model=first, messages=HELLO, logprobs=True, seed=5)
        (choice,) = whole.choices
        assert (choice.message.content, choice.finish_reason) == ("Hello there.", "stop")
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [token.token for token in choice.logprobs.content] == [*"Hello there.", "<|im_end|>"]
        assert choice.logprobs.content[0].bytes == [ord("H")] and choice.logprobs.content[0].logprob == -0.5
        assert whole.system_fingerprint == "weights-3.7" and whole.model == first
        assert whole.usage is not None and whole.usage.completion_tokens == 13
        stream = await model.chat.completions.create(
            model="chat", messages=HELLO, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
        text, chunks = await collected(stream)
        assert text == "Hello there." and len(chunks) > 5 and chunks[-1].usage == whole.usage
        tokens = [t.token for c in chunks for d in c.choices if d.logprobs for t in d.logprobs.content]
        assert tokens == [token.token for token in choice.logprobs.content]
        assert [d.finish_reason for c in chunks for d in c.choices][-1] == "stop"
        assert len({chunk.id for chunk in chunks}) == 1
    prompt, sampling = site.speakers["rollout-0"].asked[0]
    assert prompt == "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n"
    assert (sampling.seed, sampling.temperature, sampling.max_tokens) == (5, 1.0, 10_000 - whole.usage.prompt_tokens)


async def test_sampling_is_what_the_request_says(site: Site) -> None:
    async with site.asked() as (job, model):
        cut = await model.chat.completions.create(
            model=job, messages=HELLO, max_completion_tokens=4, temperature=0, top_p=0.5, extra_body={"top_k": 7}
        )
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("Hell", "length")
        assert cut.usage is not None
        await model.chat.completions.create(model=job, messages=HELLO, max_tokens=1_000_000)
    sampling, beyond = [asked[1] for asked in site.speakers["rollout-0"].asked]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.0, 0.5, 7, 4)
    assert beyond.max_tokens == 10_000 - cut.usage.prompt_tokens, "what the context leaves"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_ends_before_its_stop_string_also_where_tokens_cut_it(site: Site, stream: bool) -> None:
    site.words = lambda prompt: "one ## two ### three"
    async with site.asked() as (_, model):
        answer: Any = await model.completions.create(model="chat", prompt="Count: ", stop=["###"], stream=stream)
        text = (await collected(answer))[0] if stream else answer.choices[0].text
    assert text == "one ## two "
    assert site.speakers["rollout-0"].asked[0][0] == "Count: "


async def test_plain_completions_take_token_ids_too(site: Site) -> None:
    async with site.asked() as (job, model):
        answer = await model.completions.create(model=job, prompt=[5, 6, 7], logprobs=0)
        assert answer.choices[0].text == "Hello there." and answer.usage is not None
        assert answer.usage.prompt_tokens == 3
        assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens is not None
        assert "".join(answer.choices[0].logprobs.tokens) == "Hello there.<|im_end|>"
        assert answer.choices[0].logprobs.text_offset == list(range(13))
        stream = await model.completions.create(model=job, prompt=[5, 6, 7], logprobs=0, stream=True)
        listed = [choice.logprobs for chunk in (await collected(stream))[1] for choice in chunk.choices]
        assert [place for found in listed for place in found.text_offset] == list(range(13))
        with pytest.raises(openai.BadRequestError, match="token ids up to"):
            await model.completions.create(model=job, prompt=[5, 10**6])
        with pytest.raises(openai.BadRequestError, match="66 answers at once; at most 64"):
            await model.completions.create(model=job, prompt=["a", "b"], n=33)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_tells_the_likeliest_tokens(site: Site, stream: bool) -> None:
    job = await site.job()
    options: Any = {"model": job, "messages": HELLO, "logprobs": True, "top_logprobs": 3, "stream": stream}
    async with site.openai(job) as model:
        answer: Any = await model.chat.completions.create(**options)
        choices = [c for chunk in (await collected(answer))[1] for c in chunk.choices] if stream else answer.choices
    listed = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert [(token.token, token.logprob) for token in listed] == [
        (mark, -0.5) for mark in [*"Hello there.", "<|im_end|>"]
    ]
    tops = [[(top.token, top.logprob, top.bytes) for top in token.top_logprobs] for token in listed]
    assert tops[0] == [("a", -0.25, [97]), ("H", -0.5, [72]), ("b", -3.0, [98])]
    assert [top[1][0] for top in tops] == [token.token for token in listed] and {len(top) for top in tops} == {3}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_tells_the_likeliest_tokens_and_the_sampled_one(site: Site, stream: bool) -> None:
    async with site.asked() as (job, model):
        answer: Any = await model.completions.create(model=job, prompt="Hello?", logprobs=1, stream=stream)
        choices = [c for chunk in (await collected(answer))[1] for c in chunk.choices] if stream else answer.choices
    tops = [top for choice in choices if choice.logprobs for top in choice.logprobs.top_logprobs or []]
    assert tops == [{"a": -0.25, mark: -0.5} for mark in [*"Hello there.", "<|im_end|>"]]


async def test_a_call_of_a_tool_comes_with_the_likeliest_tokens(site: Site) -> None:
    site.words = lambda prompt: CALL
    job = await site.job()
    options: Any = {"model": job, "messages": HELLO, "tools": [ADD], "logprobs": True, "top_logprobs": 2}
    async with site.openai(job) as model:
        (whole,) = (await model.chat.completions.create(**options)).choices
        _, chunks = await collected(await model.chat.completions.create(**options, stream=True))
    (streamed,) = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert whole.logprobs.model_dump() == streamed.model_dump() and {
        len(token.top_logprobs) for token in streamed.content
    } == {2}


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_are_offered_called_and_answered(site: Site, stream: bool) -> None:
    site.words = lambda prompt: "It is 4." if "tool_response" in prompt else f"I add.\n{CALL}"
    async with site.asked() as (job, model):
        answer: Any = await model.chat.completions.create(model=job, messages=HELLO, tools=[ADD], stream=stream)
        if stream:
            _, chunks = await collected(answer)
            deltas = [choice for chunk in chunks for choice in chunk.choices]
            words = "".join(choice.delta.content or "" for choice in deltas)
            (call,) = [call for choice in deltas for call in choice.delta.tool_calls or []]
            finish = deltas[-1].finish_reason
        else:
            (call,), finish = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
            words = answer.choices[0].message.content
        assert words == "I add."
        assert (call.function.name, json.loads(call.function.arguments), finish) == ("add", {"a": 3}, "tool_calls")
        asked: Any = {
            "role": "assistant",
            "tool_calls": [{"id": call.id, "type": "function", "function": call.function.model_dump()}],
        }
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        last = await model.chat.completions.create(model=job, messages=[*HELLO, asked, result], tools=[ADD])
        assert last.choices[0].message.content == "It is 4."
    assert '"name": "add"' in site.speakers["rollout-0"].asked[0][0]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 65}, "65 answers at once; at most 64"),
        ({"frequency_penalty": 2.5}, "frequency_penalty: must be a number from -2 to 2"),
        ({"extra_body": {"min_p": 2}}, "min_p: must be a number from 0 to 1"),
        ({"temperature": 2.5}, "temperature: must be a number from 0 to 2"),
        ({"top_p": 0}, "top_p: must be a number above 0"),
        ({"extra_body": {"guided_regex": "x"}}, "guided_regex is not supported"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, "chat_template_kwargs is not supported"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls can only be true"),
        ({"verbosity": "low"}, "verbosity is not supported"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs can be 20 at most"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs = true"),
        ({"extra_body": {"prompt": "x"}}, "prompt is not supported at chat/completions"),
        ({"extra_body": {"echo": True}}, "echo is not supported at chat/completions"),
        ({"messages": [{"role": "user", "content": "x" * 20_000}]}, "maximum context length is 10000"),
        ({"messages": [{"role": "user", "content": "x" * 700_000}]}, r"the prompt has 700\d\d\d bytes"),
    ],
)
async def test_what_cannot_be_done_is_refused_in_words(site: Site, options: dict[str, Any], said: str) -> None:
    async with site.asked() as (job, model):
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            await model.chat.completions.create(**{"model": job, "messages": HELLO, **options})
    assert refused.value.type == "invalid_request_error"
    assert site.speakers["rollout-0"].asked == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logprobs": 6}, "logprobs can be 5 at most"),
        ({"extra_body": {"max_completion_tokens": 3}}, "max_completion_tokens is not supported at completions"),
        ({"extra_body": {"messages": HELLO}}, "messages is not supported at completions"),
        ({"extra_body": {"tools": [ADD]}}, "tools is not supported at completions"),
        ({"extra_body": {"top_logprobs": 0}}, "top_logprobs is not supported at completions"),
    ],
)
async def test_what_a_completion_cannot_have_is_refused(site: Site, options: dict[str, Any], said: str) -> None:
    async with site.asked() as (job, model):
        with pytest.raises(openai.BadRequestError, match=said):
            await model.completions.create(**{"model": job, "prompt": "x", **options})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_breaks_something_ends_alone(site: Site, stream: bool) -> None:
    def words(prompt: str) -> str:
        if "break" in prompt:
            raise LookupError("nobody thought of this")
        return "Hello there."

    site.words = words
    job = await site.job()
    asked: Any = [{"role": "user", "content": "break"}]
    async with site.openai(job) as model:
        with pytest.raises(openai.InternalServerError, match=r"fault of ours \(LookupError\)"):
            await model.chat.completions.create(model=job, messages=asked, stream=stream)
        assert (await model.chat.completions.create(model=job, messages=HELLO)).choices
    assert not site._lives["rollout-0"].done()


async def test_what_the_message_bus_does_not_carry_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await site.job()
    monkeypatch.setattr(Nats, "max_payload", property(lambda nats: 4_000))
    async with site.openai(job) as model:
        with pytest.raises(openai.APIStatusError, match=r"the request has \d+ bytes.*max_payload") as refused:
            await model.completions.create(model=job, prompt="x" * 5_000)
        assert refused.value.status_code == 413
        site.words = lambda prompt: "a" * 1_000
        with pytest.raises(openai.InternalServerError, match=r"max_payload.*ask for fewer tokens"):
            await model.completions.create(model=job, prompt="x")
        with pytest.raises(openai.APIError, match=r"max_payload.*ask for fewer tokens"):
            await collected(await model.completions.create(model=job, prompt="x", stream=True))
        site.words = lambda prompt: "a"
        assert (await model.completions.create(model=job, prompt="x")).choices[0].text == "a"
    assert not site._lives["rollout-0"].done()


async def test_errors_below_the_endpoint_have_openai_s_shape(site: Site) -> None:
    async with site.asked() as (job, model):
        with pytest.raises(openai.NotFoundError, match="this job has: some/model, chat") as refused:
            await model.chat.completions.create(model="gpt", messages=HELLO)
        assert refused.value.code == "model_not_found"
    async with aiohttp.ClientSession(headers=bearing()) as session:
        for method, path, body, status in [
            ("POST", f"{job}/v1/chat/completions", "{", 400),
            ("POST", f"{job}/v1/chat/completions", "[]", 400),
            ("POST", f"{job}/v1/chat/completions", '{"messages": []}', 400),
            ("POST", f"{job}/v1/chat/completions", " " * 1_048_577, 413),
            ("GET", f"{job}/v1/chat/completions", "", 405),
            ("GET", f"{job}/v1/embeddings", "", 404),
            ("GET", "j-0000000000/v1/models", "", 404),
        ]:
            async with session.request(
                method, f"{site.client.url}/v1/jobs/{path}", data=io.BytesIO(body.encode())
            ) as response:
                error = (await response.json())["error"]
                assert (response.status, error["type"]) == (status, "invalid_request_error"), path
                assert error["message"]


async def test_jobs_that_answer_nothing_say_why(site: Site, store: Store) -> None:
    rl = await new_job(store, "j-0123456789")
    over = await site.job()
    await site.client.cancel(over)
    waiting = (
        await site.client.submit(
            {"name": "x", "kind": "inference", "model": {"base": "m"}, "resources": {"rollout_workers": 1}}
        )
    )["id"]
    for job, kind, said in [
        (rl, openai.BadRequestError, "is of kind rl.*start.from = 'j-0123456789@latest'"),
        (over, openai.ConflictError, "has cancelled"),
    ]:
        async with site.openai(job) as model:
            with pytest.raises(kind, match=said):
                await model.chat.completions.create(model="x", messages=HELLO)
    await site.runs(waiting)


async def test_people_chat_line_by_line(site: Site) -> None:
    site.words = lambda prompt: f"Answer {prompt.count('<|im_start|>user')}."
    job = await site.job()
    url = ["--url", site.client.url]
    status, out, _ = await opentinker("chat", job, *url, "--system", "Be short.", lines="one\n\ntwo\n")
    assert (status, out) == (0, "Answer 1.\nAnswer 2.\n")
    prompts = [prompt for prompt, _ in site.speakers["rollout-0"].asked]
    assert "Be short." in prompts[1] and "one<|im_end|>" in prompts[1] and "Answer 1.<|im_end|>" in prompts[1]
    status, out, _ = await opentinker("chat", job, *url, "-m", "once", "--json", "--seed", "3", "--max-tokens", "4")
    chunks = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and "".join(text_of(chunk) for chunk in chunks) == "Answ"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert site.speakers["rollout-0"].asked[-1][1].seed == 3
    status, _, complaints = await opentinker("chat", job, *url, "-m", "x", "--model", "other")
    assert status == 1 and "The model `other` does not exist here" in complaints


async def test_an_answer_that_breaks_off_is_an_error_of_the_client(site: Site) -> None:
    job = await site.job()
    site.speakers["rollout-0"].gate, site.speakers["rollout-0"].at = asyncio.Event(), 4
    got = ""
    with pytest.raises(ApiError, match=r"the answer broke off: .* is gone"):
        async for chunk in site.client.chat(job, HELLO):
            got += text_of(chunk)
            if got == "Hell":
                await site.kill("rollout-0")
    assert got == "Hell"


# --- what is served -------------------------------------------------------------------------------------------------


async def test_a_checkpoint_is_kept_for_the_job_and_named(site: Site, ctx: Context, store: Store) -> None:
    other = await new_job(store, "j-0123456789", JobState.SUCCEEDED, model__base="some/model")
    write_checkpoint(ctx, other, 7, {"model.safetensors": b"\x02\0\0\0\0\0\0\0{}"})
    async with site.asked(start={"from": f"{other}@latest"}) as (_, model):
        assert (await model.models.list()).data[0].id == f"{other}@7"
        assert (await model.chat.completions.create(model=f"{other}@7", messages=HELLO)).choices
    with pytest.raises(ApiError, match=r"model\.lora.*needs start\.from"):
        await site.client.submit({"name": "x", "kind": "inference", "model": {"base": "m", "lora": {}}})
