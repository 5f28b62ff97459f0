"""Handlers of /v1/plays: a person plays an episode on the page, in place of the policy.

The environment runs where those of jobs run. The env worker holds the episode; Redis keeps which one (state/plays.py),
so that any scheduler can send it the next turn.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, cast

import msgspec
from aiohttp import web
from pydantic import Field

from opentinker.services.scheduler.http.auth import principal_of, tenant_of
from opentinker.services.scheduler.http.errors import Body, json_response, parsed, read_json
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.services.scheduler.jobs.check_environment import EnvironmentCheck, check_environment, describe
from opentinker.shared import api_types
from opentinker.shared.data.readable_paths import readable_by
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Action
from opentinker.shared.spec.matches.seats import MAX_SEATS, SeatName
from opentinker.shared.spec.rollout import EnvironmentSpec
from opentinker.shared.state.plays import PLAY_S, Play, PlayAnswer, Plays
from opentinker.shared.types import codec
from opentinker.shared.types.core import Image, Message, StopReason, ToolCall
from opentinker.shared.types.env_protocol import (
    MAX_ROWS,
    ROUND_SEATS,
    OpenSession,
    SeatAction,
    SeatPrompt,
    SessionReply,
)
from opentinker.shared.types.errors import Conflict, NotFound, SpecError

OPEN_S = 25.0
TURN_S = 60.0
"""Less than a client waits for an answer."""
_TOKENS = (
    "(A prompt of {:,} token ids. It is not shown as text, because that needs a model's tokenizer, and an episode that "
    "you play has no model.)"
)
Name = Annotated[str, Field(max_length=200)]
BotName = Annotated[str, Field(min_length=1, max_length=100)]


class SeatsRequest(Body):
    """The body of POST /v1/plays/seats."""

    environment: EnvironmentSpec
    """As in a job."""
    bots: Annotated[dict[SeatName, Annotated[str, Field(max_length=100)]], Field(max_length=MAX_SEATS)] = {}
    """Bot of each entry of a job's [seats], by seat or pattern; empty for an entry with another player."""


class PlayRequest(Body):
    """The body of POST /v1/plays."""

    environment: EnvironmentSpec
    """As in a job."""
    row: Annotated[int, Field(ge=0, lt=MAX_ROWS)] = 0
    """Index of the task."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    bots: Annotated[dict[SeatName, BotName], Field(max_length=MAX_SEATS)] = {}
    """Seats that scripted players of the environment take, by name or pattern. The person plays the others, at least
    one."""


class CalledTool(Body):
    name: Name
    arguments: dict[str, Any] = {}


class PlayedAction(Body):
    """Action of a seat."""

    text: Annotated[str, Field(max_length=50_000)] = ""
    tool_calls: Annotated[list[CalledTool], Field(max_length=16)] = []


class PlayedTurn(Body):
    """The body of POST /v1/plays/{play}/turns."""

    turn: Annotated[int, Field(ge=0, lt=2**31)]
    """Turn of the last answer. A request with the same turn and actions is played once, however often it is sent."""
    actions: Annotated[list[PlayedAction], Field(min_length=1, max_length=ROUND_SEATS)]
    """One for each prompt of the last answer, in its order."""

    def repeats(self, last: PlayAnswer) -> bool:
        return (last.turn, last.actions) == (self.turn, self.digest())

    def digest(self) -> str:
        return hashlib.sha256(codec.to_json([one.model_dump() for one in self.actions])).hexdigest()


class PlaysApi:
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._plays = Plays(ctx.store.redis)

    @Route("POST", "/v1/plays", Action.JOBS_WRITE, status=201, body=PlayRequest, answer=api_types.PlayedEpisode)
    async def begin(self, request: web.Request) -> web.Response:
        """Play an episode yourself.

        It ends after half an hour at the latest. A key or a user plays four at a time: a fifth ends the oldest."""
        body = await read_json(request)
        asked, tenant = parsed(PlayRequest, body), tenant_of(request)
        checked = await self._checked(tenant, body["environment"], asked.bots)
        assert checked.check is not None
        play = Play(id=secrets.token_hex(10), environment=checked.check.name, worker="", together=False, seats=[])
        opening = OpenSession(
            job=f"play-{tenant}",
            session=play.session,
            environment=checked.check.name,
            isolation=checked.check.isolation,
            config=asked.environment.config,
            row=asked.row,
            seed=asked.seed,
            deadline_s=PLAY_S,
            tools=checked.check.tools,
            tool_turns=asked.environment.tool_turns,
            bots=asked.bots,
        )
        client = EnvClient(self._ctx.bus, tenant=tenant, own_jobs=checked.check.own_jobs)
        try:
            async with asyncio.timeout(OPEN_S):
                reply = await client.open(opening)
        except TimeoutError:
            raise Conflict(
                f"the episode did not open within {OPEN_S:g} s; try again when env workers have room"
            ) from None
        try:
            if reply.wants_tokens:
                problem = "needs the tokens that a model samples, so a person cannot play it"
                raise SpecError.of("environment.name", play.environment, problem)
            return json_response(await self._opened(request, play, reply), 201)
        except BaseException:  # no one can play it: its place is free now, and not after PLAY_S
            await client.close(worker=reply.worker, session=play.session)
            raise

    @Route("POST", "/v1/plays/seats", Action.JOBS_WRITE, body=SeatsRequest, answer=api_types.PlayableSeats)
    async def seats(self, request: web.Request) -> web.Response:
        """Get the seats of an environment with a config, and the bots that may take them while you play the others."""
        body = await read_json(request)
        asked, tenant = parsed(SeatsRequest, body), tenant_of(request)
        checked = await self._checked(tenant, body["environment"], {})
        assert checked.check is not None
        about = await describe(self._ctx, asked.environment.name, tenant)
        players = await asyncio.to_thread(_players, checked.seats, asked.bots)
        found = {"environment": checked.check.name, "seats": checked.seats, "bots": about.bots, "players": players}
        return json_response(found)

    async def _checked(self, tenant: str, environment: Any, bots: Mapping[str, str]) -> EnvironmentCheck:
        """Return an environment that can be played, with bots by seat. Raises SpecError, Conflict."""
        named = {"environment": environment}
        readable = await readable_by(self._ctx.store, self._ctx.settings, tenant, named)
        mistakes = await asyncio.to_thread(partial(readable.mistakes_in, named, files=True))
        spec = {**named, "seats": {seat: {"bot": bot} for seat, bot in bots.items()}}
        checked = await check_environment(self._ctx, spec, None, tenant, mistakes, readable.own)
        if mistakes := mistakes + [_of_bots(one) for one in checked.mistakes]:
            raise SpecError(mistakes)
        if checked.check is None or not checked.answered:
            raise Conflict("no env worker answers, so nothing can be played: start one")
        return checked

    @Route("POST", "/v1/plays/{play}/turns", Action.JOBS_WRITE, body=PlayedTurn, answer=api_types.PlayedEpisode)
    async def turn(self, request: web.Request) -> web.Response:
        """Answer in an episode that you play.

        If the response was lost, send the same again: the turn is not played twice."""
        said = parsed(PlayedTurn, await read_json(request))
        tenant, id = tenant_of(request), request.match_info["play"]
        play = await self._plays.find(tenant, id)
        last = await self._plays.answered(tenant, id)  # after the play, which moves with it
        if last is not None and said.repeats(last):
            return _again(last)
        if play is None:
            raise _not_played(id)
        if said.turn != play.turn:
            raise Conflict(
                f"the next turn of this episode is {play.turn}, not {said.turn}, which was answered in other words or "
                "elsewhere; if you did not see what followed, send the same answer again"
            )
        if len(said.actions) != len(play.seats):
            problem = f"must have {len(play.seats)}, one for each prompt"
            raise SpecError.of("actions", len(said.actions), problem)
        actions = [_action(seat, one) for seat, one in zip(play.seats, said.actions, strict=True)]
        acting = [SeatPrompt(seat=seat) for seat in play.seats]
        asked = SessionReply(worker=play.worker).with_prompts(acting, together=play.together)
        try:
            async with asyncio.timeout(TURN_S):
                reply = await self._client(request).step(play.worker, asked.step(play.session, play.turn, actions))
        except TimeoutError:
            raise Conflict(f"the environment did not answer within {TURN_S:g} s; send the turn again") from None
        return await self._moved(request, play, said, reply)

    @Route("DELETE", "/v1/plays/{play}", Action.JOBS_WRITE, answer=api_types.EndedPlay)
    async def end(self, request: web.Request) -> web.Response:
        """End an episode that you play."""
        play = await self._found(request)
        await self._plays.end(tenant_of(request), principal_of(request).name, play.id)
        await self._client(request).close(worker=play.worker, session=play.session)
        return json_response({"id": play.id, "ended": True})

    async def _found(self, request: web.Request) -> Play:
        """Return the play that the path names. Raises NotFound."""
        id = request.match_info["play"]
        play = await self._plays.find(tenant_of(request), id)
        if play is None:
            raise _not_played(id)
        return play

    def _client(self, request: web.Request) -> EnvClient:
        return EnvClient(self._ctx.bus, tenant=tenant_of(request))

    async def _opened(self, request: web.Request, play: Play, reply: SessionReply) -> api_types.PlayedEpisode:
        """Return the first prompts, and keep where the episode is."""
        if _over(reply):
            await self._close_failed(request, reply, play)
        else:
            play = _waiting(play, reply)
            for old in await self._plays.begin(tenant_of(request), principal_of(request).name, play, time.time()):
                await self._client(request).close(worker=old.worker, session=old.session)
        return _episode(play, reply)

    async def _moved(self, request: web.Request, before: Play, said: PlayedTurn, reply: SessionReply) -> web.Response:
        """Return what the person sees after a turn, and keep it and where the episode is.

        Raises Conflict if the episode has moved or ended otherwise since `before`."""
        tenant, owner = tenant_of(request), principal_of(request).name
        after = _waiting(msgspec.structs.replace(before, turn=before.turn + 1), reply)
        answer = msgspec.Raw(codec.to_json(_episode(after, reply)))
        last = PlayAnswer(turn=said.turn, actions=said.digest(), answer=answer)
        if _over(reply):
            await self._plays.end(tenant, owner, before.id, last)
            await self._close_failed(request, reply, before)
        elif not await self._plays.move(tenant, before, after, last):
            kept = await self._plays.answered(tenant, before.id)
            if kept is None or not said.repeats(kept):
                raise Conflict("this turn was answered twice at the same time, or the episode was ended: begin another")
            last = kept
        return _again(last)

    async def _close_failed(self, request: web.Request, reply: SessionReply, play: Play) -> None:
        if reply.failure is not None:  # an answer that cannot be read leaves the session open
            await self._client(request).close(worker=reply.worker, session=play.session)


def _of_bots(mistake: dict[str, Any]) -> dict[str, Any]:
    """Return a mistake in [seats] as one in the `bots` of a request."""
    field = re.sub(r"^seats(\..*)?\.bot$|^seats", lambda found: f"bots{found[1] or ''}", mistake["field"])
    return {**mistake, "field": field}


def _players(seats: list[str], bots: Mapping[str, str]) -> dict[str, str]:
    """Return the bot of each seat, as [seats] is read: the entry with its name, else the first pattern that matches."""
    found = {seat: next((bot for entry, bot in bots.items() if fnmatchcase(seat, entry)), "") for seat in seats}
    return found | {seat: bots[seat] for seat in seats if seat in bots}


def _not_played(id: str) -> NotFound:
    return NotFound(f"no episode {id[:100]!r} is played: it may have ended; begin another")


def _over(reply: SessionReply) -> bool:
    return reply.done or reply.failure is not None


def _prompts(reply: SessionReply) -> list[SeatPrompt]:
    return [] if _over(reply) and not reply.truncated else reply.prompts


def _waiting(play: Play, reply: SessionReply) -> Play:
    """Return the play with the seats that act next."""
    seats = [prompt.seat for prompt in _prompts(reply)]
    return msgspec.structs.replace(play, worker=reply.worker, together=bool(reply.round), seats=seats)


def _again(last: PlayAnswer) -> web.Response:
    return web.Response(body=bytes(last.answer), content_type="application/json")


def _episode(play: Play, reply: SessionReply) -> api_types.PlayedEpisode:
    """Return what the person sees next."""
    return {
        "id": play.id,
        "environment": play.environment,
        "turn": play.turn,
        "prompts": [_shown(prompt) for prompt in _prompts(reply)],
        "reward": reply.reward,
        "components": reply.components,
        "rewards": reply.rewards,
        "metrics": reply.metrics,
        "done": _over(reply),
        "truncated": reply.truncated,
        "error": reply.error,
    }


def _action(seat: str, said: PlayedAction) -> SeatAction:
    calls = [ToolCall(id=f"call_{n}", name=one.name, arguments=one.arguments) for n, one in enumerate(said.tool_calls)]
    return SeatAction(seat=seat, text=said.text, words=said.text, stop=StopReason.EOS, tool_calls=calls)


def _shown(prompt: SeatPrompt) -> api_types.PlayedPrompt:
    messages = [_message(one) for one in prompt.messages]
    if prompt.prompt_text is not None:
        messages.append({"role": "text", "content": prompt.prompt_text, "images": []})
    if prompt.prompt_ids is not None:
        messages.append({"role": "text", "content": _TOKENS.format(len(prompt.prompt_ids)), "images": []})
    tools = cast(list[api_types.PlayedTool], msgspec.to_builtins(prompt.tools))
    return {"seat": prompt.seat, "stream": prompt.stream, "messages": messages, "tools": tools}


def _message(message: Message) -> api_types.PlayedMessage:
    parts = [] if isinstance(message.content, str) else message.content
    images = [base64.b64encode(part.data).decode() for part in parts if isinstance(part, Image)]
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return {"role": message.role, "content": "\n".join([*filter(None, [message.text]), *calls]), "images": images}
