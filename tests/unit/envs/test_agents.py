"""Agents that own the loop: what they ask becomes observations, what the policy says their answers, token by token."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from opentinker.envs.agent import OBSERVED_BYTES, AgentEnvironment, AgentError
from opentinker.envs.agents.endpoint import PendingRequest
from opentinker.envs.base import Opening, Step
from opentinker.shared.types.core import Image, StopReason, ToolCall
from tests.conftest import until
from tests.support.agents.agent_talk import Scripted, action, chat, generate, play, root, texts

ADD: Any = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]

# --- conversations --------------------------------------------------------------------------------------------------


async def test_a_request_that_goes_on_from_an_earlier_one_stays_in_its_stream() -> None:
    async def talk(model: AsyncOpenAI) -> list[str]:
        first = await model.chat.completions.create(**chat("a"))
        again = await model.chat.completions.create(**chat("a", "one", "b"))
        return [answer.choices[0].message.content for answer in (first, again)]

    given, asked = await play(talk, "one", "two")
    assert given == ["one", "two"]
    assert [step.stream for step in asked] == ["", ""]
    assert [texts(step) for step in asked] == [[("user", "a")], [("user", "b")]]


@pytest.mark.parametrize(
    "rewritten",
    [chat("A", "one", "b"), chat("a", "One", "b"), chat("a"), chat("a", "one"), chat("a", "one", "b", tools=[])],
)
async def test_a_request_with_a_rewritten_history_begins_a_new_stream(rewritten: dict[str, Any]) -> None:
    async def talk(model: AsyncOpenAI) -> None:
        await model.chat.completions.create(**chat("a", tools=ADD))
        await model.chat.completions.create(**rewritten)

    _, asked = await play(talk, "one", "two")
    assert [step.stream for step in asked] == ["", "1"]
    assert [text for _, text in texts(asked[1])] == [m["content"] for m in rewritten["messages"]]
    assert ([tool.name for tool in asked[0].tools], asked[1].tools) == (["add"], [])


async def test_two_conversations_are_told_apart_and_the_longest_one_is_continued() -> None:
    async def talk(model: AsyncOpenAI) -> None:
        for said in (("a",), ("z",), ("a", "1", "b"), ("z", "2", "y"), ("a", "1", "b", "3", "c"), ("a", "1", "x")):
            await model.chat.completions.create(**chat(*said))

    _, asked = await play(talk, "1", "2", "3", "4", "5", "6")
    assert [step.stream for step in asked] == ["", "1", "", "1", "", "2"]
    assert [len(step.messages) for step in asked] == [1, 1, 1, 1, 1, 3]


async def test_tool_calls_go_out_and_come_back_as_openai_has_them() -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        said: list[Any] = [{"role": "developer", "content": "be exact"}, {"role": "user", "content": "1+2"}]
        first = await model.chat.completions.create(model="m", messages=said, tools=ADD)
        said.append(first.choices[0].message)
        said.append({"role": "tool", "tool_call_id": "t0", "content": [{"type": "text", "text": "3"}]})
        await model.chat.completions.create(model="m", messages=said, tools=ADD)
        return first

    call = ToolCall(id="t0", name="add", arguments={"b": 2, "a": 1})
    first, asked = await play(talk, action("<tool_call>...", tool_calls=[call]), "3")
    (answered,) = first.choices[0].message.tool_calls
    assert (answered.id, answered.function.name) == ("t0", "add")
    assert json.loads(answered.function.arguments) == {"a": 1, "b": 2}
    assert (first.choices[0].finish_reason, first.choices[0].message.content) == ("tool_calls", None)
    assert texts(asked[0]) == [("system", "be exact"), ("user", "1+2")]
    assert (asked[0].tools[0].name, asked[0].tools[0].description) == ("add", "Adds.")
    assert asked[1].stream == "" and asked[1].tools == []
    assert (texts(asked[1]), asked[1].messages[0].tool_call_id) == ([("tool", "3")], "t0")


async def test_images_and_text_parts_are_understood() -> None:
    url = "data:image/png;base64,aGk="

    async def talk(model: AsyncOpenAI) -> None:
        parts: Any = [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": url}}]
        await model.chat.completions.create(model="m", messages=[{"role": "user", "content": parts}])

    _, asked = await play(talk, "x")
    assert asked[0].messages[0].images == [Image(b"hi", "image/png")]


async def test_limits_of_a_request_travel_and_its_sampling_does_not() -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        options = {
            "max_completion_tokens": 5,
            "max_tokens": 5,
            "stop": "!",
            "temperature": 0.0,
            "seed": 3,
            "top_p": 0.1,
        }
        return await model.chat.completions.create(**chat("a", **options))

    given, asked = await play(talk, action("oh!", stop=StopReason.STOP))
    assert (asked[0].max_tokens, asked[0].stop) == (5, ["!"])
    assert (given.choices[0].message.content, given.choices[0].finish_reason) == ("oh", "stop")
    assert (given.usage.prompt_tokens, given.usage.completion_tokens, given.usage.total_tokens) == (7, 3, 10)


async def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        return await model.chat.completions.create(**chat("a", logprobs=True, top_logprobs=0))

    given, _ = await play(talk, action("ab", stop=StopReason.LENGTH))
    content = given.choices[0].logprobs.content
    assert [(token.token, token.logprob) for token in content] == [("token_id:97", 0.0), ("token_id:98", -0.5)]
    assert content[1].top_logprobs == []
    assert given.choices[0].finish_reason == "length"


async def test_streams_have_every_chunk_the_usage_and_an_end() -> None:
    async def talk(model: AsyncOpenAI) -> list[Any]:
        options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
        stream = await model.chat.completions.create(**chat("a", **options))
        chunks = [chunk async for chunk in stream]
        await model.chat.completions.create(**chat("a", "yes", "b"))
        return chunks

    chunks, asked = await play(talk, "yes", "x")
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "yes"
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, None, "stop"]
    assert (chunks[0].choices[0].delta.role, chunks[-1].usage.completion_tokens) == ("assistant", 3)
    assert sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices and c.choices[0].logprobs) == 3
    assert asked[1].stream == ""


async def test_streamed_tool_calls_are_put_together_by_the_client() -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        stream = await model.chat.completions.create(**chat("a", stream=True))
        return [chunk async for chunk in stream]

    chunks, _ = await play(talk, action("...", tool_calls=[ToolCall(id="t", name="f", arguments={"x": 1})]))
    (call,) = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert (call.index, call.id, call.function.name, call.function.arguments) == (0, "t", "f", '{"x": 1}')
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_requests_at_the_same_time_are_answered_one_after_the_other() -> None:
    async def talk(model: AsyncOpenAI) -> list[str]:
        answers = await asyncio.gather(*(model.chat.completions.create(**chat(name)) for name in "abcd"))
        return [answer.choices[0].message.content for answer in answers]

    environment = Scripted(talk)
    step: Opening | Step = await environment.open(0, 0)
    while not (isinstance(step, Step) and step.done):
        step = await environment.step(action(step.messages[0].text.upper()))
    await environment.close()
    assert environment.given == ["A", "B", "C", "D"]


# --- tokens ---------------------------------------------------------------------------------------------------------


async def test_tokens_in_tokens_out_and_a_prompt_that_begins_with_earlier_tokens_goes_on() -> None:
    async def talk(model: AsyncOpenAI) -> list[Any]:
        first = await generate(model, [5, 6], max_tokens=4, stop_token_ids=[1])
        again = await generate(model, [5, 6, *first["choices"][0]["token_ids"], 9])
        other = await generate(model, [5, 6, 97, 98, 9], session="other")
        return [first, again, other]

    (first, *_), asked = await play(talk, "ab", "c", "d")
    assert first["choices"][0]["token_ids"] == [97, 98]
    assert [token["logprob"] for token in first["choices"][0]["logprobs"]["content"]] == [0.0, -0.5]
    assert first["choices"][0]["finish_reason"] == "stop"
    assert [(step.stream, step.prompt_ids) for step in asked] == [
        ("", [5, 6]),
        ("", [5, 6, 97, 98, 9]),
        ("1", [5, 6, 97, 98, 9]),
    ]
    assert (asked[0].max_tokens, asked[0].messages) == (4, [])


async def test_completions_take_token_ids() -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        mistakes = (("", "must not be empty"), (["a", "b"], "one prompt at a time"), ([-1], "list of token ids"))
        for wrong, said in mistakes:
            with pytest.raises(openai.BadRequestError, match=said):
                await model.completions.create(model="m", prompt=wrong)
        stream = await model.completions.create(model="m", prompt=[1, 2], stream=True)
        chunks = [chunk async for chunk in stream]
        return chunks, await model.completions.create(model="m", prompt=[1, 2, 97, 3], logprobs=0, max_tokens=2)

    (chunks, given), asked = await play(talk, "a", "b")
    assert (chunks[0].choices[0].text, given.choices[0].text) == ("a", "b")
    assert (given.choices[0].logprobs.token_logprobs, given.choices[0].logprobs.text_offset) == ([0.0], None)
    assert [(step.stream, step.prompt_ids) for step in asked] == [("", [1, 2]), ("", [1, 2, 97, 3])]


async def test_completions_take_plain_text_which_goes_on_unless_a_turn_has_ended() -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        await model.completions.create(model="m", prompt=["one "], max_tokens=3, stop="!")
        await model.completions.create(model="m", prompt="one ab! and")
        await model.completions.create(model="m", prompt="one ab! and c more")
        return await model.completions.create(model="m", prompt="one ab! and")

    answers = (action("ab!", stop=StopReason.STOP), action("c"), action("d"), action("e"))
    given, asked = await play(talk, *answers)
    assert given.choices[0].text == "e"
    assert [(step.stream, step.prompt_text) for step in asked] == [
        ("", "one "),
        ("", " and"),
        ("1", "one ab! and c more"),
        ("2", "one ab! and"),
    ]
    assert [step.messages for step in asked] == [[]] * 4 and asked[0].stop == ["!"]


async def test_words_before_tool_calls_are_said_and_stay_in_the_stream() -> None:
    call = ToolCall(id="t0", name="add", arguments={"a": 1})

    async def talk(model: AsyncOpenAI) -> Any:
        question: Any = {"role": "user", "content": "q"}
        options: dict[str, Any] = {"model": "m", "tools": ADD}
        first = await model.chat.completions.create(messages=[question], **options)
        said = first.choices[0].message
        result = {"role": "tool", "content": "3", "tool_call_id": "t0"}
        history: Any = [question, said.model_dump(exclude_none=True), result]
        stream: Any = await model.chat.completions.create(messages=history, stream=True, **options)
        return said, [chunk.choices[0].delta async for chunk in stream]

    calling = action("I add.<call>", words="I add.", tool_calls=[call])
    (said, deltas), asked = await play(talk, calling, calling)
    assert (said.content, said.tool_calls[0].function.name) == ("I add.", "add")
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    assert [name for delta in deltas for one in delta.tool_calls or [] for name in [one.function.name]] == ["add"]
    assert [(step.stream, texts(step)) for step in asked] == [("", [("user", "q")]), ("", [("tool", "3")])]


async def test_the_model_is_listed_with_its_context() -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        await model.chat.completions.create(**chat("a"))
        listed = [card async for card in model.models.list()]
        assert await model.models.retrieve(listed[0].id) == listed[0]
        with pytest.raises(openai.NotFoundError, match="`gpt` does not exist here; this job has: m"):
            await model.models.retrieve("gpt")
        return listed

    (card,), _ = await play(talk, "x")
    assert (card.id, card.model_extra["max_model_len"]) == ("m", 100)


# --- mistakes of agents ---------------------------------------------------------------------------------------------

DEEP = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"a":' + 5000 * "["}}
"""Cut off, and too deep to be read so far."""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"n": 2}, "n can only be 1"),
        ({"messages": []}, "no message"),
        ({"messages": [{"role": "ghost", "content": "x"}]}, "one of the roles"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "text and image_url"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "cannot be sent"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": 0, "max_completion_tokens": 5}, "at least 1"),
        ({"max_tokens": 9, "max_completion_tokens": 5}, "max_completion_tokens is 5 and max_tokens is 9"),
        ({"top_logprobs": 1, "logprobs": True}, "top_logprobs can only be 0"),
        ({"top_logprobs": 0}, "top_logprobs needs logprobs"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "continuous_usage_stats is not supported",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [DEEP]}]}, "function.arguments: is not JSON"),
        ({"tool_choice": "required"}, "forces a call, and no tool is offered"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "names a tool that is not offered: 'f'"),
        ({"tool_choice": "sometimes"}, "must be auto, none, required"),
        ({"response_format": {"type": "grammar"}}, "must have the type text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "must have a schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}}, "bytes"),
        ({"stop": ["a", ""]}, "list of strings"),
        ({"tools": [{"type": "web_search"}]}, "must be a function"),
    ],
)
async def test_what_cannot_be_given_is_refused_and_the_episode_goes_on(wrong: dict[str, Any], said: str) -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        async with root(model) as (http, url):
            body = json.dumps(chat("a") | wrong)
            async with http.post(f"{url}/v1/chat/completions", data=body) as reply:
                refused = (reply.status, await reply.json())
        await model.chat.completions.create(**chat("a"))
        return refused

    (status, body), asked = await play(talk, "x")
    assert status == 400 and said in body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"
    assert len(asked) == 1


async def test_a_prompt_beyond_the_context_is_refused_as_servers_refuse_it() -> None:
    async def talk(model: AsyncOpenAI) -> list[str]:
        tokens = await generate(model, list(range(100)))
        with pytest.raises(openai.BadRequestError) as refused:
            await model.chat.completions.create(**chat("a" * (OBSERVED_BYTES + 1)))
        await model.chat.completions.create(**chat("a"))
        return [tokens["error"]["code"], refused.value.code]

    given, _ = await play(talk, "x")
    assert given == ["context_length_exceeded"] * 2


async def test_who_does_not_know_the_key_is_told_nothing() -> None:
    async def talk(model: AsyncOpenAI) -> list[int]:
        async with root(model) as (http, url):
            port = url.rpartition("/")[0]
            places = [f"{port}/v1/models", f"{port}/guess/v1/models", f"{url}/v1/other", f"{url}/v1/chat/completions"]
            statuses = []
            for place in places:
                async with http.get(place) as reply:
                    statuses.append(reply.status)
        await model.chat.completions.create(**chat("a"))
        return statuses

    given, _ = await play(talk, "x")
    assert given == [404, 404, 404, 405]


async def test_an_agent_that_hangs_up_is_not_waited_for() -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        with pytest.raises(openai.APITimeoutError):
            await model.with_options(timeout=0.3).chat.completions.create(**chat("a"))
        late = asyncio.create_task(model.chat.completions.create(**chat("b")))
        return await late

    environment = Scripted(talk)
    await environment.open(0, 0)
    step = environment._pending
    await until(lambda: step.gone)
    asked = await environment.step(action("nobody reads this"))
    assert [texts(asked), asked.stream] == [[("user", "b")], "1"]
    assert (await environment.step(action("x"))).done
    await environment.close()


async def test_a_request_that_was_given_up_while_it_waited_is_never_played() -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        first = asyncio.create_task(model.chat.completions.create(**chat("a")))
        await until(lambda: waiting(environment))
        second = asyncio.create_task(model.chat.completions.create(**chat("b")))
        await until(lambda: len(waiting(environment)) == 2)
        second.cancel()
        await until(lambda: len(waiting(environment)) == 1)
        given_up.set()
        await first
        return await model.chat.completions.create(**chat("c"))

    given_up = asyncio.Event()
    environment = Scripted(talk)
    await environment.open(0, 0)
    await given_up.wait()
    step = await environment.step(action("x"))
    assert texts(step) == [("user", "c")]
    assert (await environment.step(action("y"))).done
    await environment.close()


def waiting(environment: AgentEnvironment) -> set[PendingRequest]:
    assert environment._endpoint is not None
    return environment._endpoint._pending


async def test_an_agent_that_never_asks_has_failed() -> None:
    async def talk(model: AsyncOpenAI) -> None:
        pass

    with pytest.raises(AgentError, match="without having asked the model anything"):
        await play(talk)
