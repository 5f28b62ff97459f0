"""A model behind a URL plays a seat: what it is asked, what of it reaches the match, what a hostile server gains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from opentinker.services.rollout_worker.episode import Episode
from opentinker.services.rollout_worker.episode_protocol import EpisodeFailed
from opentinker.services.rollout_worker.seat_map import LoadedPolicy, SeatMap
from opentinker.services.rollout_worker.url_player import TRIES, UrlFailed, UrlPlayer
from opentinker.shared.security.egress import LOOPBACK, Egress
from opentinker.shared.spec import SeatSpec, parse_spec
from opentinker.shared.types.core import Ending, Image, Message, StopReason, Text, Tool
from opentinker.shared.types.env_protocol import SeatPrompt, SessionReply
from tests.support.factories import make_ticket
from tests.support.http_server import ChatServer, completion, serving
from tests.unit.rollout_worker.scripted_episode import Chars, Env, Script, renderer, say

SECRET = "sk-canary-0123456789"
SAID = [Message(role="system", content="Be brief."), Message(role="user", content="Move?")]
PROMPT = SeatPrompt(seat="second", messages=SAID)


@asynccontextmanager
async def player(
    server: ChatServer, secret: str = "", allow: tuple[str, ...] = LOOPBACK, **settings: Any
) -> AsyncIterator[UrlPlayer]:
    seat = SeatSpec(url=server.url, model="big", **settings)
    async with Egress(allow).session(limit=0) as http:
        yield UrlPlayer(seat, secret, http, renderer(), 1000, backoff_s=(0.001, 0.01))


async def failure(server: ChatServer, **settings: Any) -> str:
    async with player(server, **settings) as asked:
        with pytest.raises(UrlFailed) as failed:
            await asked.ask(SAID, PROMPT, [])
    return str(failed.value)


async def test_it_is_sent_the_conversation_and_its_words_are_the_turn() -> None:
    async with serving(ChatServer("a4$")) as server, player(server, temperature=0.5, answer_tokens=32) as asked:
        picture = Message(role="user", content=[Text("Look:"), Image(b"\x89PNG", "image/png")])
        turn = await asked.ask([*SAID, Message(role="assistant", content="b2"), picture], PROMPT, [])
        await asked.ask(SAID, SeatPrompt(messages=SAID, max_tokens=3), [])
        assert asked.name == f"big@{server.url}"
    assert turn.words == "a4$" and turn.completion.stop == StopReason.EOS
    assert turn.completion.ids == [*Chars().encode("a4$"), 1], "ended by an end of turn"
    first, second = server.bodies
    look = [{"type": "text", "text": "Look:"}]
    look += [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}]  # type: ignore[dict-item]
    assert first == {
        "model": "big",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Move?"},
            {"role": "assistant", "content": "b2"},
            {"role": "user", "content": look},
        ],
        "max_tokens": 32,
        "stream": False,
        "temperature": 0.5,
    }
    assert second["max_tokens"] == 3, "the environment allows less"
    assert server.keys == [None, None]


async def test_its_turn_ends_at_the_job_s_and_the_environment_s_strings() -> None:
    cut = completion("no end", finish="length")
    async with serving(ChatServer("x</move> y;z")) as server, player(server) as asked:
        first = await asked.ask(SAID, SeatPrompt(messages=SAID, stop=[";"]), ["</move>"])
        server.usual = orjson.dumps(cut)
        second = await asked.ask(SAID, PROMPT, [])
    assert (first.words, first.completion.stop) == ("x</move>", StopReason.STOP)
    assert (second.words, second.completion.stop) == ("no end", StopReason.LENGTH)


async def test_a_key_is_sent_and_never_shown() -> None:
    echo = f"my key is {SECRET}"
    async with serving(ChatServer(echo)) as server, player(server, secret=SECRET) as asked:
        assert (await asked.ask(SAID, PROMPT, [])).words == "my key is ***"
        assert server.keys == [f"Bearer {SECRET}"]
        server.usual = 401
        with pytest.raises(UrlFailed, match=r"answered 401: planned; you sent Bearer \*\*\*"):
            await asked.ask(SAID, PROMPT, [])
        server.usual = 500
        with pytest.raises(UrlFailed, match=r"answered 500: planned; you sent Bearer \*\*\*"):
            await asked.ask(SAID, PROMPT, [])
        server.usual = orjson.dumps({"choices": [], "sent": SECRET})
        with pytest.raises(UrlFailed, match=r"not answer with a chat completion: .*\*\*\*"):
            await asked.ask(SAID, PROMPT, [])
        server.usual = b"." * 190 + SECRET.encode()
        with pytest.raises(UrlFailed, match=r"\.\*\*\* \(3 tries\)$"):
            await asked.ask(SAID, PROMPT, [])
        assert SECRET not in repr(vars(asked)["_seat"])


async def test_a_key_with_quotes_is_not_shown_in_json_either() -> None:
    key = 'a"b\\c-secret'
    async with (
        serving(ChatServer(orjson.dumps({"choices": [], "sent": key}))) as server,
        player(server, secret=key) as asked,
    ):
        with pytest.raises(UrlFailed) as failed:
            await asked.ask(SAID, PROMPT, [])
    assert "***" in str(failed.value) and "secret" not in str(failed.value)


async def drip(request: web.Request) -> web.StreamResponse:
    """A byte now and then, forever: every one of them is in time."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.05)


async def flood(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * 2**16)


async def silent(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (503, "answered 503: planned"),
        (429, "answered 429"),
        (drip, "no answer in time"),
        (silent, "no answer in time"),
        (flood, "more than 1,048,576 bytes"),
        (hang_up, "disconnected"),
        (b"not json", "not answer with a chat completion: not json"),
        (b'{"choices": []}', "not answer with a chat completion"),
        (b'{"choices": [{"message": {"content": 5}}]}', "not answer with a chat completion"),
        (b'{"x": ' + b"[" * 500_000, "not answer with a chat completion"),
        (b'{"choices": [{"message": {"content": "\\ud800"}}]}', "not answer with a chat completion"),
        (b"\xff\xfe", "not answer with a chat completion"),
        (orjson.dumps(completion(None)), "said nothing"),
        ("x" * 70_000, "said 70,000 characters, and 65,536 are allowed"),
    ],
)
async def test_what_no_turn_can_be_made_of_is_asked_for_again_and_then_fails(answer: Any, problem: str) -> None:
    timeout_s = 1.0 if "in time" in problem else 60.0
    async with serving(ChatServer("7")) as server:
        server.planned = [answer]
        async with player(server, timeout_s=timeout_s) as asked:
            assert (await asked.ask(SAID, PROMPT, [])).words == "7" and len(server.bodies) > 1
        server.usual = answer
        server.bodies.clear()
        found = await failure(server, timeout_s=timeout_s)
        assert problem in found and f"({TRIES} tries)" in found and len(server.bodies) == TRIES
        assert len(found) < 1000


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_a_refused_request_is_not_repeated(status: int) -> None:
    async with serving(ChatServer(status)) as server:
        assert f"answered {status}" in await failure(server) and len(server.bodies) == 1


async def test_redirects_are_not_followed_and_nothing_is_sent_along() -> None:
    async with serving(ChatServer()) as other, serving(ChatServer()) as server:
        for where in ("http://169.254.169.254/latest/meta-data", f"{other.url}/chat/completions"):

            async def away(_: web.Request, where: str = where) -> web.StreamResponse:
                return web.Response(status=307, headers={"Location": where})

            server.usual = away
            found = await failure(server, secret=SECRET)
            assert f"answered 307, a redirect to {where}, which is not followed" in found
        assert len(server.bodies) == 2 and other.bodies == []


async def test_answers_in_encodings_are_not_unpacked() -> None:
    async def packed(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b"bomb", headers={"Content-Encoding": "gzip"})

    async with serving(ChatServer(packed)) as server:
        assert "an encoding that was not asked for" in await failure(server) and len(server.bodies) == 1


async def test_addresses_that_the_operator_does_not_allow_are_not_connected_to() -> None:
    async with serving(ChatServer()) as server:
        assert "is a loopback address: the operator allows" in await failure(server, allow=())
        assert server.bodies == []


async def test_requests_beyond_its_connections_wait() -> None:
    gate, most, now = asyncio.Event(), 0, 0

    async def counted(_: web.Request) -> web.StreamResponse:
        nonlocal most, now
        now += 1
        most = max(most, now)
        if now == 2:
            gate.set()
        await gate.wait()
        now -= 1
        return web.json_response(completion("7"))

    async with serving(ChatServer(counted)) as server, player(server, concurrency=2) as asked:
        turns = await asyncio.gather(*(asked.ask(SAID, PROMPT, []) for _ in range(8)))
    assert len(turns) == 8 and most == 2


# --- in an episode ----------------------------------------------------------------------------------------------

GAME: dict[str, Any] = {
    "name": "game",
    "model": {"base": "m"},
    "environment": {"name": "tictactoe"},
    "rollout": {"engine": "toy", "max_turns": 5, "max_tokens": 8},
    "train": {"steps": 1},
}


def to(seat: str, *texts: str, **changes: Any) -> SessionReply:
    return SessionReply(worker="e", seat=seat, messages=[Message(role="user", content=t) for t in texts], **changes)


def episode_of(asked: UrlPlayer, server: ChatServer, engine: Script, env: Env, **changes: Any) -> Episode:
    spec = parse_spec({**GAME, "seats": {"second": {"url": server.url, "model": "big"}}, **changes})
    first = LoadedPolicy("", spec, engine, renderer())  # type: ignore[arg-type]
    return Episode(spec, make_ticket(), 0, SeatMap(spec, [first], [asked]), env)


async def test_its_words_are_part_of_the_match_and_nothing_that_is_learned_from() -> None:
    wide = "a long answer of more than eight tokens"
    engine = Script([say("1$"), say("2$")])
    env = Env([
        to("first", "go"), to("second", "he said 1"), to("first", "she said it", rewards={"second": {"x": -1.0}}),
        to("second", "he said 2"), to("first", done=True, reward=0.5),
    ])  # fmt: skip
    async with serving(ChatServer(wide)) as server, player(server) as asked:
        episode = episode_of(asked, server, engine, env)
        own, other = await episode.run()
    assert [(turn, text) for turn, text, _ in env.steps] == [(0, "1"), (1, wide), (2, "2"), (3, wide)]
    assert (own.policy, own.seat, own.ending) == ("", "first", Ending.ENV_DONE), "its tokens end no episode"
    assert (other.policy, other.seat) == (f"big@{server.url}", "second")
    assert episode.sampled == int(own.mask.sum()) == 4 and other.messages is None
    assert episode.rewards == {"first": 0.0, "second": -0.5}
    for trajectory in (own, other):
        trajectory.check()
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["he said 1", wide, "he said 2"]


async def test_a_failed_answer_fails_the_episode_and_says_so() -> None:
    env = Env([to("second", "begin")])
    async with serving(ChatServer(404)) as server, player(server) as asked:
        with pytest.raises(EpisodeFailed, match="answered 404") as failed:
            await episode_of(asked, server, Script([]), env).run()
    assert failed.value.ending == Ending.URL_FAILED and failed.value.ending.failed and not failed.value.ending.repeats
    assert env.closed == 1


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ({"tools": [Tool(name="look", description="", parameters={})]}, "cannot call"),
        ({"prompt_ids": [5, 6]}, "takes messages"),
        ({"prompt_text": "x"}, "takes messages"),
    ],
)
async def test_a_seat_that_is_shown_what_only_a_policy_can_see_fails(prompt: dict[str, Any], problem: str) -> None:
    async with serving(ChatServer()) as server, player(server) as asked:
        with pytest.raises(EpisodeFailed, match=problem):
            await episode_of(asked, server, Script([]), Env([to("second", "begin", **prompt)])).run()
    assert server.bodies == []
