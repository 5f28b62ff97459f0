"""OpenEnv servers: a real one, with OpenEnv's own environment and two written on its classes, and a bad one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opentinker.envs.adapters import openenv
from opentinker.envs.adapters.library import Illegal, episode_seed
from opentinker.envs.adapters.openenv_schema import form_of
from opentinker.envs.base import BadReply
from opentinker.envs.registry import check
from opentinker.envs.remote_server import REPLY_BYTES
from opentinker.local.processes import free_port
from opentinker.shared.security.egress import VARIABLE
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import SessionReply
from opentinker.shared.types.errors import SpecError
from tests.conftest import until
from tests.samples.openenv_servers import error, planned, real, seen
from tests.samples.session_player import Playing

pytestmark = pytest.mark.usefixtures("loopback_allowed")


# --- a server that says what it should, and what it should not --------------------------------------------------------


async def test_a_session_is_reset_with_the_seed_of_its_group_and_freed() -> None:
    async with planned(seen({"hint": "go"})) as (server, url):
        playing = Playing(url, reset={"most": 5}, row_key="index", rows=2)
        assert await playing.open() == (
            'Each turn, say your action as a JSON object: {"guess": integer from 1 to 9}. '
            "What stands after the last `Action:` counts.\ngo"
        )
        sibling = Playing(url, hint=False, instruction="Guess!")
        assert await sibling.open() == "Guess!\nhigher"
        server.answers = [seen({"hint": "right", "tries": None}, 1, True, metadata={"tries": 1, "why": "luck"})]
        last = await playing.say('I think\nAction: {"guess": 4}')
        assert (last.reward, last.done, last.components) == (1.0, True, {"reward": 1.0})
        assert last.metrics == {"tries": 1.0, "return": 1.0, "illegal": 0.0}
        assert server.open == 2
        await playing.close()
        await sibling.close()
        await until(lambda: server.open == 0)
    first, second, step, *ends = server.heard
    assert first["data"]["seed"] == second["data"]["seed"] == episode_seed(3, 5)
    assert (first["data"]["most"], first["data"]["index"]) == (5, 1)
    assert first["data"]["episode_id"] != second["data"]["episode_id"] and "index" not in second["data"]
    assert step == {"type": "step", "data": {"guess": 4}} and ends == [{"type": "close"}] * 2


@pytest.mark.parametrize(
    ("answer", "ending", "reason"),
    [
        ("not json", Ending.ENV_BAD_REPLY, "did not answer with JSON: not json"),
        ("[]", Ending.ENV_BAD_REPLY, "neither an observation nor an error"),
        ({"type": "state", "data": {}}, Ending.ENV_BAD_REPLY, "neither an observation nor an error"),
        ({"type": "observation", "data": {"observation": "x"}}, Ending.ENV_BAD_REPLY, "must be an object"),
        (seen({}, done=1), Ending.ENV_BAD_REPLY, "done true or false"),  # type: ignore[arg-type]
        (seen({"hint": ""}, reward="1"), Ending.ENV_BAD_REPLY, "must be a finite number"),  # type: ignore[arg-type]
        (b"bytes", Ending.ENV_BAD_REPLY, "answers with text"),
        ("x" * (REPLY_BYTES + 1), Ending.ENV_BAD_REPLY, "more than 1,048,576 bytes"),
        (seen({"hint": "x" * 300_000}), Ending.ENV_BAD_REPLY, "at most 262,144 are allowed"),
        (error("EXECUTION_ERROR", "no luck"), Ending.ENV_ERROR, "step: EXECUTION_ERROR: no luck"),
        (error("SESSION_ERROR"), Ending.ENV_ERROR, "step: SESSION_ERROR"),
        ("hang up", Ending.ENV_LOST, "the server has ended the session"),
        (None, Ending.ENV_ERROR, "no answer within 0.2 s"),
    ],
)
async def test_bad_answers_end_the_episode_with_their_reason(answer: Any, ending: Ending, reason: str) -> None:
    async with planned(seen({"hint": "go"}), answer) as (server, url):
        playing = Playing(url, request_timeout_s=30.0)
        await playing.open()
        if answer is None:
            playing.hurry()
        reply = await playing.say('{"guess": 1}')
        assert reply.failure == ending and reason in reply.error
        await playing.close()
        await until(lambda: server.open == 0)
        assert [question["type"] for question in server.heard if question["type"] != "close"] == ["reset", "step"]


async def test_a_full_server_is_waited_for() -> None:
    async with planned() as (server, url):
        server.places = 1
        first, second = Playing(url), Playing(url)
        await first.open()
        waiting = asyncio.create_task(second.open())
        await until(lambda: server.connections >= 3)
        assert not waiting.done()
        await first.close()
        assert "higher" in await waiting
        await second.close()


async def test_more_episodes_than_the_job_allows_at_once_do_not_knock() -> None:
    async with planned() as (server, url):
        first, second = Playing(url, concurrency=1), Playing(url, concurrency=1)
        await first.open()
        waiting = asyncio.create_task(second.open())
        ((key, pool),) = [(key, pool) for key, pool in openenv.OpenEnv.pools.items() if key[1] == url]
        await until(lambda: pool.users == 2 and pool.places._waiters)
        assert server.connections == 1
        await first.close()
        assert "higher" in await waiting
        await second.close()
        assert key not in openenv.OpenEnv.pools


async def test_a_reset_is_repeated_and_a_deadline_ends_the_wait() -> None:
    async with planned() as (server, url):
        server.resets = {1: "hang up", 2: None}
        playing = Playing(url, request_timeout_s=0.5, patience_s=30.0)
        assert "higher" in await playing.open()
        assert server.connections >= 3
        await playing.close()
        await until(lambda: server.open == 0)
        server.places = 0
        hasty = Playing(url, deadline_s=0.3)
        late = await hasty.sessions.open(hasty.request)
        assert late.failure == Ending.ENV_TIMEOUT


@pytest.mark.parametrize(
    ("reply", "text", "why"),
    [
        (None, "seven", ""),
        (
            error("VALIDATION_ERROR", errors=[{"loc": ["guess"], "msg": "too large"}]),
            '{"guess": 99}',
            "guess: too large",
        ),
        (None, '{"guess": 123456789012345678901234567890}', "it cannot be sent"),
    ],
)
async def test_what_is_no_action_is_told_why_and_costs(reply: Any, text: str, why: str) -> None:
    answer = reply or error("VALIDATION_ERROR", errors=[{"loc": ["guess"], "msg": "should be a valid integer"}])
    async with planned(seen({"hint": "go"}), answer, answer) as (_, url):
        playing = Playing(url, max_illegal=2, penalty=0.25)
        await playing.open()
        refused = await playing.say(text)
        assert (refused.reward, refused.components, refused.done) == (-0.25, {"illegal": -0.25}, False)
        assert refused.messages[0].text.startswith("That is no action: " + why), refused.messages[0].text
        assert (await playing.say(text)).done
        await playing.close()


async def test_an_environment_that_raises_may_be_forgiven() -> None:
    async with planned(seen({"hint": "go"}), error("EXECUTION_ERROR", "no such door")) as (_, url):
        playing = Playing(url, forgive=True)
        await playing.open()
        assert (await playing.say('{"guess": 1}')).messages[0].text == "That is no action: no such door."
        await playing.close()


@pytest.mark.parametrize(
    ("answers", "schema", "config", "ending", "reason"),
    [
        ([error("FACTORY_ERROR", "no licence")], None, {}, Ending.ENV_ERROR, "reset: FACTORY_ERROR: no licence"),
        ([seen({}, done=True)], None, {}, Ending.ENV_BAD_REPLY, "over before anybody has acted"),
        ([], 404, {}, Ending.ENV_ERROR, "answered 404: is there an OpenEnv server?"),
        ([], 503, {}, Ending.ENV_LOST, "answered 503"),
        ([], [], {}, Ending.ENV_BAD_REPLY, "the schema of an action"),
        ([], {"type": "object"}, {}, Ending.ENV_BAD_REPLY, "no properties"),
        ([], None, {"action_field": "word"}, Ending.ENV_ERROR, "the server's actions have guess"),
        ([], None, {"show": ["hunt"]}, Ending.ENV_BAD_REPLY, "the observation has hint"),
        ([], None, {"actions": "tools"}, Ending.ENV_BAD_REPLY, "list of tools"),
        (
            [seen({}), seen({"tools": [{"name": f"t{n}", "input_schema": {}} for n in range(65)]})],
            None,
            {"actions": "tools"},
            Ending.ENV_BAD_REPLY,
            "it has 65 tools; 1 to 64 can be offered",
        ),
    ],
)
async def test_an_episode_that_cannot_begin_says_why(
    answers: list[Any], schema: Any, config: dict[str, Any], ending: Ending, reason: str
) -> None:
    async with planned(*answers, **({} if schema is None else {"schema": schema})) as (server, url):
        playing = Playing(url, **config)
        reply = await playing.sessions.open(playing.request)
        assert reply.failure == ending and reason in reply.error, reply.error
        await until(lambda: server.open == 0)


async def test_nothing_but_what_the_operator_allows_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    async with planned() as (server, url):
        playing = Playing(url)
        reply = await playing.sessions.open(playing.request)
        assert reply.failure == Ending.ENV_ERROR and "the operator allows such networks" in reply.error
        assert server.connections == 0
    with pytest.raises(SpecError, match="the operator allows such networks by env_egress_allow"):
        await asyncio.to_thread(check, "openenv", {"url": url})
    check("openenv", {"url": url}, elsewhere=True)


async def test_a_server_that_is_not_there_is_named() -> None:
    url = f"ws://127.0.0.1:{free_port()}"
    playing = Playing(url)
    reply = await playing.sessions.open(playing.request)
    assert reply.failure == Ending.ENV_LOST and url in reply.error
    await playing.close()
    await until(lambda: all(key[1] != url for key in openenv.OpenEnv.pools))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "is needed"),
        ({"url": "ftp://host/x"}, "is not a URL of the form"),
        ({"url": "ws://me:secret@127.0.0.1:8000"}, "secrets have no place"),
        ({"url": "ws://127.0.0.1:8000/?session_id=4"}, "has a query"),
        (
            {"url": "ws://127.0.0.1:8000", "actions": "json", "action_field": "x"},
            "action_field is for actions = 'text'",
        ),
        ({"url": "ws://127.0.0.1:8000", "rows": 5}, "rows needs row_key"),
        ({"url": "ws://127.0.0.1:8000", "reset": {"seed": 1, "n": 2}}, "reset: seed is said of each episode"),
        ({"url": "ws://127.0.0.1:8000", "reset": {"n": 2}, "row_key": "n"}, "reset: n is said of each episode"),
        ({"url": "ws://127.0.0.1:8000", "row": 5}, "OpenEnv knows: action, action_field"),
    ],
)
def test_wrong_config_is_refused_before_anything_is_played(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        check("openenv", config)


# --- actions and their schemas ----------------------------------------------------------------------------------------


def schema(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {"metadata": {}, **properties}, "required": required}


MOVE = schema(
    ["x", "y"], x={"type": "integer"}, y={"type": "integer"}, why={"type": "string", "description": "A note."}
)


@pytest.mark.parametrize(
    ("form", "text", "action"),
    [
        (form_of(schema(["say"], say={"type": "string"}), None, "", {}), "  hi\nthere ", {"say": "hi\nthere"}),
        (form_of(schema([], say={"type": "string"}), None, "", {"a": 1}), "Action: hi", {"say": "hi", "a": 1}),
        (form_of(schema(["n"], n={"type": "integer"}), None, "", {}), "Action: 7", {"n": 7}),
        (form_of(schema(["n"], n={"type": "integer"}), None, "", {}), 'so {"n": 7}.', {"n": 7}),
        (form_of(MOVE, None, "", {}), 'Not {"x": 0}\n```json\n{"x": 1, "y": {"z": 2}}\n```', {"x": 1, "y": {"z": 2}}),
        (form_of(MOVE, None, "", {"x": 3}), '{"x": 1, "y": 2}', {"x": 3, "y": 2}),
        (form_of(MOVE, None, "why", {"x": 3, "y": 4}), "because", {"why": "because", "x": 3, "y": 4}),
        (form_of(schema(["say"], say={"type": "string"}), "json", "", {}), '{"say": "{"}', {"say": "{"}),
    ],
)  # fmt: skip
def test_text_becomes_an_action_by_the_schema(form: Any, text: str, action: dict[str, Any]) -> None:
    assert form.read(text) == action


@pytest.mark.parametrize("text", ["", "1, 2", "[1, 2]", "{" * 3000, '{"x": 1', "[" * 100_000])
def test_text_without_an_object_is_no_action(text: str) -> None:
    with pytest.raises(Illegal, match="it must be a JSON object"):
        form_of(MOVE, None, "", {}).read(text)


def test_the_hint_says_what_the_schema_says() -> None:
    assert '{"x": integer, "y": integer, "why": string (A note), optional}' in form_of(MOVE, None, "", {}).hint()
    colour = schema(["c"], c={"anyOf": [{"enum": ["red", 1]}, {"type": "null"}]})
    assert '{"c": one of red, 1}' in form_of(colour, "json", "", {}).hint()
    assert (
        "the say (a word)"
        in form_of(schema(["say"], say={"type": "string", "description": "a word."}), None, "", {}).hint()
    )


def test_a_form_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="say which by action_field; there are: x, y, why"):
        form_of(MOVE, "text", "", {})
    with pytest.raises(BadReply, match="no properties"):
        form_of({}, None, "", {})


# --- real servers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real(tmp_path_factory.mktemp("openenv")) as url:
        yield url


@pytest.mark.slow
async def test_the_environment_that_openenv_itself_makes_is_played(servers: str) -> None:
    playing = Playing(f"{servers}/scaffold")
    assert "the message (Message to echo back)" in await playing.open()
    step = await playing.say("hello")
    assert step.messages[0].text == "echoed_message: hello\nmessage_length: 5"
    assert (step.reward, step.metrics) == (0.5, {"step": 1.0, "return": 0.5, "illegal": 0.0})
    other = Playing(f"{servers}/scaffold")  # the server takes one at a time
    waiting = asyncio.create_task(other.open())
    await playing.close()
    assert "ready" in await waiting
    await other.close()


@pytest.mark.slow
async def test_a_number_is_guessed_and_siblings_have_the_same(servers: str) -> None:
    ends = set()
    for row in range(3):
        prompts, rewards = [], []
        for _ in range(2):
            playing = Playing(f"{servers}/number", row=row, reset={"most": 7}, show=["hint", "left", "metadata.most"])
            prompts.append(await playing.open())
            assert "from 1 to 9 (your guess)" in prompts[-1] and prompts[-1].endswith("left: 4\nmetadata.most: 7")
            low, high, turn = 1, 7, SessionReply(worker="")
            guesses = []
            while not turn.done:
                guesses.append((low + high) // 2)
                turn = await playing.say(f'{{"number": {guesses[-1]}}}')
                seen_now = "".join(message.text for message in turn.messages)
                low, high = (guesses[-1] + 1, high) if "higher" in seen_now else (low, guesses[-1] - 1)
            rewards.append((turn.reward, tuple(guesses)))
            await playing.close()
        assert rewards[0] == rewards[1] and rewards[0][0] == 1.0
        ends.add(rewards[0])
    assert len(ends) > 1, "rows differ"


@pytest.mark.slow
async def test_errors_of_a_real_server_have_their_kinds(servers: str) -> None:
    playing = Playing(f"{servers}/number")
    await playing.open()
    refused = await playing.say('{"number": 99, "colour": "red"}')
    assert "number: Input should be less than or equal to 9" in refused.messages[0].text
    assert "colour: Extra inputs are not permitted" in refused.messages[0].text
    failed = await playing.say('{"number": 1, "sure": true}')
    assert failed.failure == Ending.ENV_ERROR and "EXECUTION_ERROR: nobody can be sure" in failed.error
    forgiven = Playing(f"{servers}/number", forgive=True)
    await forgiven.open()
    assert "nobody can be sure" in (await forgiven.say('{"number": 1, "sure": true}')).messages[0].text
    await forgiven.close()


@pytest.mark.slow
async def test_tools_of_a_real_server_are_called(servers: str) -> None:
    playing = Playing(f"{servers}/shop", show=["metadata.task"])
    assert await playing.open() == "Pay the price of all teas together."
    tools = {tool.name: tool for tool in playing.opened.tools}
    assert set(tools) == {"catalogue", "price", "pay"} and "item" in tools["price"].parameters["properties"]
    answers = (await playing.say("", ("catalogue", {}), ("price", {"item": "green tea"}))).messages
    assert [(message.role, message.tool_call_id, message.name) for message in answers] == [
        ("tool", "c0", "catalogue"),
        ("tool", "c1", "price"),
    ]
    assert answers[0].text == '["black tea","coffee","green tea"]' and answers[1].text == "3"
    assert "Error: " in (await playing.say("", ("price", {"item": "cola"}))).messages[0].text
    assert (await playing.say("7 then")).messages[0].text == "That is no action: it calls no tool."
    last = await playing.say("", ("pay", {"amount": 7}))
    assert (last.done, last.reward) == (True, 1.0)
    await playing.close()


def test_the_page_names_the_version_that_is_tested() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "environments" / "openenv.md").read_text()
    assert "0.10" in page
