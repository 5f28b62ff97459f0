"""Agents that own the loop: what they ask becomes observations, what the policy says their answers, token by token."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from opentinker.envs import agent as agent_module
from opentinker.envs.agent import AgentEnvironment, AgentError, Result
from opentinker.envs.agents.program import AgentProgram
from opentinker.envs.agents.wire import Asked
from opentinker.envs.base import Action, EnvironmentConfig, Opening, Step
from opentinker.envs.registry import check, find
from opentinker.services.env_worker.host import Host
from opentinker.services.env_worker.player import action_of, opening_of, reply_of
from opentinker.services.env_worker.resolver import Resolver
from opentinker.services.env_worker.worker import Sessions
from opentinker.services.rollout_worker.episode import Episode
from opentinker.shared.errors import SpecError
from opentinker.shared.sessions import CloseSession, OpenSession, Policy, SessionReply, StepSession
from opentinker.shared.types import Ending, Image, StopReason, ToolCall
from tests.conftest import until
from tests.factories import make_spec, make_ticket
from tests.test_episode import Chars, Script, renderer, say

Talk = Callable[[AsyncOpenAI], Awaitable[Any]]


def client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0)


class Scripted(AgentEnvironment):
    """Runs a function of the test's own, and keeps what it gives."""

    def __init__(self, talk: Talk) -> None:
        super().__init__(EnvironmentConfig())
        self.talk, self.policy = talk, Policy(model="m", context_length=100)
        self.base_url, self.given = "", None

    async def run(self, base_url: str, row: int, seed: int) -> Result:
        self.base_url = base_url
        async with client(base_url) as model:
            self.given = await self.talk(model)
        return Result(reward=1.0)


def action(text: str, turn: int = 0, stop: StopReason = StopReason.EOS, **changes: Any) -> Action:
    ids = [ord(c) for c in text]
    logprobs = [-0.5 * n for n in range(len(ids))]
    return Action(text=text, stop=stop, turn=turn, ids=ids, logprobs=logprobs, prompt_tokens=7, **changes)


async def play(talk: Talk, *answers: str | Action) -> tuple[Any, list[Opening | Step]]:
    """What the agent's function gives, and all that the policy was asked."""
    environment = Scripted(talk)
    asked: list[Opening | Step] = []
    try:
        asked.append(await environment.open(0, 0))
        for turn, answer in enumerate(answers):
            step = await environment.step(answer if isinstance(answer, Action) else action(answer, turn))
            asked.append(step)
        assert isinstance(asked[-1], Step) and asked[-1].done, "it wants more answers"
    finally:
        await environment.close()
    return environment.given, asked[:-1]


def texts(asked: Opening | Step) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in asked.messages]


def chat(*texts: str, **options: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"model": "m", "messages": [{"role": roles[n % 2], "content": t} for n, t in enumerate(texts)], **options}


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
async def test_a_request_that_rewrites_its_history_begins_a_new_stream_with_all_of_it(
    rewritten: dict[str, Any],
) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

    async def talk(model: AsyncOpenAI) -> None:
        await model.chat.completions.create(**chat("a", tools=[tool]))
        await model.chat.completions.create(**rewritten)

    _, asked = await play(talk, "one", "two")
    assert [step.stream for step in asked] == ["", "1"]
    assert [text for _, text in texts(asked[1])] == [m["content"] for m in rewritten["messages"]]
    assert ([tool.name for tool in asked[0].tools], asked[1].tools) == (["f"], [])


async def test_two_conversations_are_told_apart_and_the_longest_one_is_continued() -> None:
    async def talk(model: AsyncOpenAI) -> None:
        for said in (("a",), ("z",), ("a", "1", "b"), ("z", "2", "y"), ("a", "1", "b", "3", "c"), ("a", "1", "x")):
            await model.chat.completions.create(**chat(*said))

    _, asked = await play(talk, "1", "2", "3", "4", "5", "6")
    assert [step.stream for step in asked] == ["", "1", "", "1", "", "2"]
    assert [len(step.messages) for step in asked] == [1, 1, 1, 1, 1, 3]


async def test_tool_calls_go_out_and_come_back_as_openai_has_them() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    tools: Any = [{"type": "function", "function": function}]

    async def talk(model: AsyncOpenAI) -> Any:
        said: list[Any] = [{"role": "developer", "content": "be exact"}, {"role": "user", "content": "1+2"}]
        first = await model.chat.completions.create(model="m", messages=said, tools=tools)
        said.append(first.choices[0].message)
        said.append({"role": "tool", "tool_call_id": "t0", "content": [{"type": "text", "text": "3"}]})
        await model.chat.completions.create(model="m", messages=said, tools=tools)
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
            "max_tokens": 9,
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
        return await model.chat.completions.create(**chat("a", logprobs=True, top_logprobs=1))

    given, _ = await play(talk, action("ab", stop=StopReason.LENGTH))
    content = given.choices[0].logprobs.content
    assert [(token.token, token.logprob) for token in content] == [("token_id:97", 0.0), ("token_id:98", -0.5)]
    assert content[1].top_logprobs[0].logprob == -0.5
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


@asynccontextmanager
async def root(model: AsyncOpenAI) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    async with aiohttp.ClientSession() as http:
        yield http, str(model.base_url).rstrip("/").removesuffix("/v1")


async def generate(model: AsyncOpenAI, ids: list[int], session: str = "s", **params: Any) -> dict[str, Any]:
    async with root(model) as (http, url):
        body = {"model": "m", "token_ids": ids, "sampling_params": {"logprobs": 1, **params}}
        async with http.post(f"{url}/inference/v1/generate", json=body, headers={"X-Session-ID": session}) as reply:
            found: dict[str, Any] = await reply.json()
            return found


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
        with pytest.raises(openai.BadRequestError, match="list of token ids"):
            await model.completions.create(model="m", prompt="text")
        stream = await model.completions.create(model="m", prompt=[1, 2], stream=True)
        chunks = [chunk async for chunk in stream]
        return chunks, await model.completions.create(model="m", prompt=[1, 2, 97, 3], logprobs=1, max_tokens=2)

    (chunks, given), asked = await play(talk, "a", "b")
    assert (chunks[0].choices[0].text, given.choices[0].text) == ("a", "b")
    assert given.choices[0].logprobs.token_logprobs == [0.0]
    assert [(step.stream, step.prompt_ids) for step in asked] == [("", [1, 2]), ("", [1, 2, 97, 3])]


async def test_the_model_is_listed_with_its_context() -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        await model.chat.completions.create(**chat("a"))
        return [card async for card in model.models.list()]

    (card,), _ = await play(talk, "x")
    assert (card.id, card.model_extra["max_model_len"]) == ("m", 100)


# --- mistakes of agents ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"n": 2}, "n can only be 1"),
        ({"messages": []}, "no message"),
        ({"messages": [{"role": "ghost", "content": "x"}]}, "one of the roles"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "text and image_url"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "cannot be sent"),
        ({"max_tokens": 0}, "at least 1"),
        ({"top_logprobs": 5, "logprobs": True}, "0 or 1"),
        ({"tool_choice": "required"}, "auto"),
        ({"response_format": {"type": "json_object"}}, "nothing forces a format"),
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


async def test_a_prompt_beyond_the_context_is_refused_as_servers_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "OBSERVED_BYTES", 10)

    async def talk(model: AsyncOpenAI) -> list[str]:
        tokens = await generate(model, list(range(100)))
        with pytest.raises(openai.BadRequestError) as refused:
            await model.chat.completions.create(**chat("a" * 11))
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
    step = environment._playing
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


def waiting(environment: AgentEnvironment) -> set[Asked]:
    assert environment._endpoint is not None
    return environment._endpoint._waiting


async def test_an_agent_that_never_asks_has_failed() -> None:
    async def talk(model: AsyncOpenAI) -> None:
        pass

    with pytest.raises(AgentError, match="without having asked the model anything"):
        await play(talk)


# --- as trajectories ------------------------------------------------------------------------------------------------


class Direct:
    """The rollout worker's side of an environment that is in this process."""

    def __init__(self, environment: AgentEnvironment) -> None:
        self.environment = environment

    async def open(self, *, row: int, seed: int, **_: object) -> SessionReply:
        return opening_of("w", self.environment, await self.environment.open(row, seed))

    async def step(self, worker: str, request: StepSession) -> SessionReply:
        reply = reply_of(worker, self.environment, await self.environment.step(action_of(request)))
        if reply.done:
            await self.environment.close()
        return reply

    async def close(self, **_: object) -> None:
        await self.environment.close()


async def test_every_context_of_an_agent_becomes_a_trajectory_of_the_sampled_tokens() -> None:
    async def talk(model: AsyncOpenAI) -> None:
        await model.chat.completions.create(**chat("a"))
        await model.chat.completions.create(**chat("summary"))
        await model.chat.completions.create(**chat("a", "xy", "b"))
        await generate(model, [5, 6])

    engine = Script([say("xy$"), say("z$"), say("w$"), say("q$")])
    played = Episode(
        make_spec(rollout__max_turns=9, rollout__max_tokens=50),
        make_ticket(), 0, engine, renderer(), Direct(Scripted(talk)),  # type: ignore[arg-type]
    )  # fmt: skip
    first, second, third = await played.run()
    assert first.ids.tolist() == Chars().encode("<u>a$\n<a>xy$\n<u>b$\n<a>w$")
    assert "".join(c for c, m in zip("<u>a$\n<a>xy$\n<u>b$\n<a>w$", first.mask, strict=True) if m) == "xy$w$"
    assert first.logprobs[first.mask == 1].tolist() == [-0.5] * 5
    assert second.ids.tolist() == Chars().encode("<u>summary$\n<a>z$")
    assert third.ids.tolist() == [5, 6, *Chars().encode("q$")]
    assert [t.stream for t in (first, second, third)] == ["", "1", "2"]
    assert (first.reward, second.reward, third.reward) == (0.0, 0.0, 1.0)
    for trajectory in (first, second, third):
        trajectory.check()


# --- in an env worker -----------------------------------------------------------------------------------------------


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    host = Host(children=1, per_child=4, modules=True)
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=True), host=host)
    yield sessions
    await sessions.drain(0.01)
    await host.close()


def opening(sample: str, session: str = "s", deadline_s: float = 30.0, **config: Any) -> OpenSession:
    return OpenSession(
        job="j",
        session=session,
        environment=sample if sample == "agent_program" else f"tests.agent_samples:{sample}",
        config=config,
        row=3,
        seed=4,
        deadline_s=deadline_s,
        answer_within_s=60.0,
        policy=Policy(model="the-model", context_length=64),
    )


def turn(text: str, turn: int = 0, session: str = "s") -> StepSession:
    return StepSession(session=session, turn=turn, text=text, stop=StopReason.EOS, ids=[1], logprobs=[-1.0])


async def test_an_agent_is_an_ordinary_session(sessions: Sessions) -> None:
    opened = await sessions.open(opening("Echo"))
    assert (opened.messages[0].text, opened.wants_tokens) == ("row 3 seed 4 turn 0=", True)
    first = await sessions.step(turn("yes"))
    assert (first.messages[0].text, first.reward, first.done) == ("row 3 seed 4 turn 1=", 0.0, False)
    last = await sessions.step(turn("no", 1))
    assert (last.reward, last.components, last.metrics, last.done) == (1.0, {"right": 1.0}, {"exact": 1.0}, True)


@pytest.mark.parametrize(
    ("how", "said"), [("raise 0", "the agent is tired"), ("exit 0", "SystemExit"), ("raise -1", "tired")]
)
async def test_an_agent_that_fails_costs_its_own_episode(sessions: Sessions, how: str, said: str) -> None:
    other = await sessions.open(opening("Echo", "other"))
    reply = await sessions.open(opening("Echo", how=how))
    if reply.failure is None:
        reply = await sessions.step(turn("yes"))
    assert reply.failure == Ending.ENV_ERROR and said in reply.error
    assert other.failure is None and (await sessions.step(turn("x", session="other"))).failure is None


async def test_an_agent_that_hangs_ends_at_the_deadline(sessions: Sessions) -> None:
    await sessions.open(opening("Echo", deadline_s=0.5, how="hang 0"))
    assert (await sessions.step(turn("yes"))).failure == Ending.ENV_TIMEOUT


async def test_an_agent_must_give_a_result(sessions: Sessions) -> None:
    await sessions.open(opening("Nothing"))
    reply = await sessions.step(turn("yes"))
    assert "must return a Result, not float" in reply.error


async def test_agents_that_block_run_in_a_child_beside_each_other(sessions: Sessions) -> None:
    names = ["a", "b", "c"]
    for name in names:
        assert (await sessions.open(opening("BlockingEcho", name, block_s=0.05))).messages[0].text == "row 3="
    replies = await asyncio.gather(*(sessions.step(turn("yes", session=name)) for name in names))
    assert [(reply.reward, reply.done) for reply in replies] == [(1.0, True)] * 3
    opened = await sessions.open(opening("BlockingEcho", "left"))
    await sessions.close(CloseSession(session="left"))  # its agent waits for an answer, and must not hold the child
    assert opened.failure is None
    assert (await sessions.open(opening("BlockingEcho", "next"))).failure is None


# --- any program ----------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys, urllib.request
url, how = os.environ["OPENAI_BASE_URL"], sys.argv[1]
if how == "silent":
    sys.exit()
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": os.environ["OPENTINKER_ROW"]}]}
request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode())
with urllib.request.urlopen(request) as reply:
    answer = json.load(reply)["choices"][0]["message"]["content"]
print("some log line")
if how == "crash":
    sys.exit("it went wrong")
if how == "secrets":
    print(sorted(name for name in os.environ if "REDIS" in name or "NATS" in name))
    how = "work"
if how == "work":
    print(json.dumps({"reward": float(answer == "yes"), "metrics": {"seed": float(os.environ["OPENTINKER_SEED"])}}))
"""


def program(tmp_path: Path, how: str) -> dict[str, Any]:
    script = tmp_path / "agent.py"
    script.write_text(PROGRAM)
    return {"command": [sys.executable, str(script), how]}


async def test_any_program_is_an_environment(sessions: Sessions, tmp_path: Path) -> None:
    opened = await sessions.open(opening("agent_program", **program(tmp_path, "work")))
    assert opened.messages[0].text == "3"
    last = await sessions.step(turn("yes"))
    assert (last.reward, last.done, last.metrics) == (1.0, True, {"seed": 4.0})


@pytest.mark.parametrize(
    ("how", "said"), [("silent", "printed no reward"), ("crash", "exit status 1: it went wrong"), ("log", "last line")]
)
async def test_a_program_that_fails_says_why(sessions: Sessions, tmp_path: Path, how: str, said: str) -> None:
    reply = await sessions.open(opening("agent_program", **program(tmp_path, how)))
    if reply.failure is None:
        reply = await sessions.step(turn("yes"))
    assert reply.failure == Ending.ENV_ERROR and said in reply.error


async def test_a_program_is_ended_with_its_session(sessions: Sessions, tmp_path: Path) -> None:
    script, left = tmp_path / "agent.sh", tmp_path / "pid"
    script.write_text(f"echo $$ > {left}\nsleep 600 &\nwait\n")
    waiting = asyncio.create_task(sessions.open(opening("agent_program", command=["sh", str(script)])))
    await until(lambda: left.exists() and left.read_text().strip())
    await sessions.close(CloseSession(session="s"))
    await waiting
    group = int(left.read_text())
    await until(lambda: not alive(group))


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_programs_are_for_operators() -> None:
    with pytest.raises(SpecError, match="env_modules"):
        find("agent_program")
    assert find("agent_program", modules=True) is AgentProgram
    with pytest.raises(SpecError, match="env_modules"):
        find("agent_program")
    with pytest.raises(SpecError, match="no program 'not-there'"):
        check("agent_program", {"command": ["not-there"]}, modules=True)
