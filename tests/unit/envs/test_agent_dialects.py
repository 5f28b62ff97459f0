"""Agents that ask in OpenAI's Responses API or Anthropic's Messages API: tokens and streams are those of chats."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from opentinker.services.rollout_worker.engines.base import Completion
from opentinker.services.rollout_worker.episode import Episode
from opentinker.services.rollout_worker.seat_map import SeatMap
from opentinker.shared.types.core import Image, StopReason, ToolCall
from opentinker.shared.types.trajectories import Span, Trajectory
from tests.support.agents.agent_loops import LOOPS
from tests.support.agents.agent_talk import Direct, Scripted, action, play, root_of, texts
from tests.support.factories import V0, make_spec, make_ticket
from tests.unit.rollout_worker.scripted_episode import Script
from tests.unit.rollout_worker.test_tool_calls import renderer_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TURNS = (f"I add.\n{CALL}", f"{CALL}{CALL}", "It is 3.")
"""Words and a call, two calls, and words alone."""


async def played(loop: Any, turns: Sequence[str] = TURNS) -> list[Trajectory]:
    """The trajectories of an agent's episode in a rollout worker, whose policy says `turns`."""
    renderer, tokenizer = renderer_of("hermes")

    def say(place: int, text: str) -> Completion:
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        logprobs = [-0.01 * (place + 1) * (n + 1) for n in range(len(ids))]
        return Completion(ids=ids, logprobs=logprobs, spans=[Span(0, len(ids), V0)], stop=StopReason.EOS)

    engine: Any = Script([say(*turn) for turn in enumerate(turns)], context_length=4000)
    agent = Scripted(lambda model: loop(model, "1+2"))
    agent.policy = agent.policy.__class__(model="m", context_length=4000)
    job = make_spec(rollout__max_turns=9, rollout__max_tokens=2000)
    episode = Episode(job, make_ticket(), 0, SeatMap.single(job, engine, renderer), Direct(agent))
    found = await episode.run()
    assert agent.given == turns[-1]
    for trajectory in found:
        trajectory.check()
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_loop_in_three_dialects_gives_the_same_training_tokens(stream: bool) -> None:
    found = {name: await played(partial(loop, stream=stream)) for name, loop in LOOPS.items()}
    (chat,) = found["chat"]
    assert [turn.end - turn.start for turn in chat.turns] == [len(text) + 1 for text in TURNS], "one token a sign"
    assert sum(chat.mask) == sum(len(text) + 1 for text in TURNS)
    for name, trajectories in found.items():
        (one,) = trajectories
        assert (one.ids_T, one.mask_T, one.logprobs_T) == (chat.ids_T, chat.mask_T, chat.logprobs_T), name
        assert (one.spans, [turn.stop for turn in one.turns]) == (chat.spans, [turn.stop for turn in chat.turns]), name


# --- responses ------------------------------------------------------------------------------------------------------


async def test_a_response_is_what_the_client_expects_and_its_limits_travel() -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        include: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
        cut = await model.responses.create(model="m", input="a", max_output_tokens=2, include=include, temperature=0)
        said: Any = [{"role": "user", "content": "a"}, *(item.model_dump() for item in cut.output)]
        again = await model.responses.create(model="m", input=[*said, {"role": "user", "content": "b"}])
        return cut, again

    (cut, again), asked = await play(talk, action("ab", stop=StopReason.LENGTH), "c")
    assert (cut.output_text, cut.status, cut.incomplete_details.reason) == ("ab", "incomplete", "max_output_tokens")
    assert [(token.token, token.logprob) for token in cut.output[0].content[0].logprobs] == [
        ("token_id:97", 0.0),
        ("token_id:98", -0.5),
    ]
    assert (cut.usage.input_tokens, cut.usage.output_tokens, cut.model, cut.temperature) == (7, 2, "m", 0)
    assert (again.status, again.output_text) == ("completed", "c")
    assert [(step.stream, texts(step), step.max_tokens) for step in asked] == [
        ("", [("user", "a")], 2),
        ("", [("user", "b")], None),
    ]


async def test_a_streamed_response_has_every_event_in_order() -> None:
    async def talk(model: AsyncOpenAI) -> list[Any]:
        call = [event async for event in await model.responses.create(model="m", input="a", stream=True)]
        return call + [event async for event in await model.responses.create(model="m", input="b", stream=True)]

    calling = action("I add.<call>", words="I add.", tool_calls=[ToolCall(id="t", name="f", arguments={"x": 1})])
    events, _ = await play(talk, calling, "yes")
    message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
               "content_part.done", "output_item.done"]  # fmt: skip
    arguments = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
                 "output_item.done"]  # fmt: skip
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", *message, *arguments, "completed", "created", "in_progress", *message, "completed",
    ]  # fmt: skip
    first = events[: len(message) + len(arguments) + 3]
    assert [event.sequence_number for event in first] == list(range(len(first)))
    assert [(item.type, getattr(item, "call_id", None)) for item in first[-1].response.output] == [
        ("message", None),
        ("function_call", "t"),
    ]
    assert events[-1].response.output_text == "yes"


async def test_images_and_results_of_tools_in_a_response_are_understood() -> None:
    url = "data:image/png;base64,aGk="
    said: Any = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "input_text", "text": "w"}, {"type": "input_image", "image_url": url}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]},
    ]

    async def talk(model: AsyncOpenAI) -> Any:
        await model.responses.create(model="m", input=said)

    _, ((step),) = await play(talk, "x")
    assert texts(step) == [("system", "s"), ("user", "w"), ("assistant", ""), ("tool", "3")]
    assert step.messages[1].images == [Image(b"hi", "image/png")]
    assert (step.messages[2].tool_calls[0].id, step.messages[3].tool_call_id) == ("c", "c")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"previous_response_id": "resp_1"}, "responses are not stored"),
        ({"conversation": "conv_1"}, "responses are not stored"),
        ({"background": True}, "background is not supported"),
        ({"truncation": "auto"}, "truncation can only be"),
        ({"tool_choice": "required"}, "no tool is offered"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format: must have a schema"),
        ({"n": 2}, "n is not supported"),
        ({"include": ["file_search_call.results"]}, "cannot be included"),
        ({"top_logprobs": 1}, "top_logprobs can only be 0"),
        ({"tools": [{"type": "web_search"}]}, "must be a function; tools of type 'web_search' are not supported"),
        ({"tools": ["f"]}, "must be a function, with its name"),
        ({"input": []}, "there is no message"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "items of type message, function_call, function_call_out"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "["}]}, "arguments: is not JSON"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "parts of type input_text"),
    ],
)
async def test_a_response_that_cannot_be_given_is_refused(wrong: dict[str, Any], said: str) -> None:
    async def talk(model: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=said):
            await model.responses.create(model="m", extra_body={"input": "a", **wrong})
        await model.responses.create(model="m", input="a")

    _, asked = await play(talk, "x")
    assert len(asked) == 1


# --- messages -------------------------------------------------------------------------------------------------------


def claude(model: AsyncOpenAI) -> Any:
    return AsyncAnthropic(base_url=root_of(model), api_key="-", max_retries=0)


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


async def test_a_message_is_what_the_client_expects_and_its_limits_travel() -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        async with claude(model) as client:
            ignored = {"temperature": 0, "thinking": {"type": "adaptive"}}
            options: dict[str, Any] = {"model": "m", "extra_body": ignored, "system": [{"type": "text", "text": "s"}]}
            first = await client.messages.create(
                messages=[user("a")], max_tokens=5, stop_sequences=["?", "!"], **options
            )
            said: Any = [
                user("a"),
                {"role": "assistant", "content": first.content},
                user([{"type": "text", "text": "b"}]),
            ]
            return first, await client.messages.create(messages=said, max_tokens=9, **options)

    (first, cut), asked = await play(talk, action("oh!", stop=StopReason.STOP), action("ab", stop=StopReason.LENGTH))
    assert (first.content[0].text, first.stop_reason, first.stop_sequence) == ("oh", "stop_sequence", "!")
    assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("ab", "max_tokens", None)
    assert (first.usage.input_tokens, first.usage.output_tokens, first.model) == (7, 3, "m")
    assert [(step.stream, texts(step), step.max_tokens, step.stop) for step in asked] == [
        ("", [("system", "s"), ("user", "a")], 5, ["?", "!"]),
        ("", [("user", "b")], 9, []),
    ]


async def test_a_streamed_message_has_every_event_in_order() -> None:
    async def talk(model: AsyncOpenAI) -> list[Any]:
        async with claude(model) as client:
            asked: Any = {"model": "m", "max_tokens": 9, "stream": True}
            call = [event async for event in await client.messages.create(messages=[user("a")], **asked)]
            return call + [event async for event in await client.messages.create(messages=[user("b")], **asked)]

    calling = action("I add.<call>", words="I add.", tool_calls=[ToolCall(id="t", name="f", arguments={"x": 1})])
    events, _ = await play(talk, calling, "yes")
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    end = ["message_delta", "message_stop"]
    assert [event.type for event in events] == ["message_start", *block, *block, *end, "message_start", *block, *end]
    assert (events[4].index, events[4].content_block.name, events[5].delta.partial_json) == (1, "f", '{"x": 1}')
    assert (events[7].delta.stop_reason, events[7].usage.output_tokens) == ("tool_use", len("I add.<call>"))
    assert (events[9].message.usage.input_tokens, events[-2].delta.stop_reason) == (7, "end_turn")


async def test_images_and_results_of_tools_in_a_message_are_understood() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "3"}]}
    call: Any = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}

    async def talk(model: AsyncOpenAI) -> None:
        said = [user([{"type": "text", "text": "w"}, image]), call, user([result, {"type": "text", "text": "more"}])]
        async with claude(model) as client:
            await client.messages.create(model="m", max_tokens=9, messages=said)

    _, ((step),) = await play(talk, "x")
    assert texts(step) == [("user", "w"), ("assistant", ""), ("tool", "3"), ("user", "more")]
    assert step.messages[0].images == [Image(b"hi", "image/png")]
    assert (step.messages[1].tool_calls[0].id, step.messages[2].tool_call_id) == ("c", "c")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tool_choice": {"type": "any"}}, "no tool is offered"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "must be a tool of the client's own; tools of type 'bash_2",
        ),
        ({"messages": []}, "there is no message"),
        ({"messages": [user([{"type": "document"}])]}, "blocks of type text, image and tool_result"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "one of the roles"),
        ({"messages": [user([{"type": "image", "source": {"type": "url", "url": "x"}}])]}, "source of type base64"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format: must have a schema"),
        ({"stop_sequences": [""]}, "stop_sequences: must be"),
    ],
)
async def test_a_message_that_cannot_be_given_is_refused_in_anthropic_s_form(wrong: dict[str, Any], said: str) -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        async with claude(model) as client:
            with pytest.raises(anthropic.BadRequestError, match=said) as refused:
                await client.messages.create(**{"model": "m", "max_tokens": 9, "messages": [user("a")], **wrong})
            await client.messages.create(model="m", max_tokens=9, messages=[user("a")])
            return refused.value.body

    body, asked = await play(talk, "x")
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert len(asked) == 1
