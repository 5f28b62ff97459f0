"""The handler of retrieve_future: waits for an answer as long as a client does, and says why it is not there yet."""

from __future__ import annotations

import asyncio

from aiohttp import web

from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.services.scheduler.tinker.access import Access
from opentinker.services.scheduler.tinker.answers import response_of
from opentinker.services.scheduler.tinker.bodies import FutureBody, read_body
from opentinker.services.scheduler.tinker.futures import Futures
from opentinker.services.scheduler.tinker.large_bodies import Places
from opentinker.services.scheduler.tinker.models_api import queue_of
from opentinker.shared.security.authorization import Action
from opentinker.shared.state.tinker.requests import TRAINED
from opentinker.shared.types.core import JobRecord, JobState
from opentinker.shared.types.errors import NotFound
from opentinker.shared.types.tinker import SMALL_RESULT, Loaded, Sampler, TinkerModel

HOLD_S = 30.0
"""Time that a request without an answer is held; clients wait for 45 s."""
SEND_S = 120.0
"""Time in which a client reads a large answer; meanwhile its tenant's others wait for its place."""


class FuturesApi:
    def __init__(self, access: Access, futures: Futures, hold_s: float) -> None:
        self._access, self._futures, self._hold_s, self._places = access, futures, hold_s, Places()

    @Route("POST", "/api/v1/retrieve_future", Action.JOBS_READ, takes="application/json")
    async def retrieve(self, request: web.Request) -> web.Response:
        """Wait for the answer to a request (Tinker)."""
        id = (await read_body(request, FutureBody)).request_id
        owner = await self._owner(request, id)
        size = await self._futures.size(id, 0.0)
        if not size:
            await self._refuse_unknown(id)
            if ended := _ended(await self._access.server_or_ended(owner.job)):
                return ended
            size = await self._futures.size(id, self._hold_s)
        if not size:
            job = await self._access.ctx.store.job(owner.job)
            return _ended(job) or await self._try_again(id, owner, job)
        return await self._answer(request, id, owner, is_large=size > SMALL_RESULT)

    async def _answer(
        self, request: web.Request, id: str, owner: TinkerModel | Sampler, *, is_large: bool
    ) -> web.Response:
        """Return the answer that a request has. A large one keeps its place until it is sent."""
        store = self._access.store
        async with self._places.of_tenant(request, is_large=is_large):
            if is_large and request.transport is None:
                return web.Response()  # nobody reads it: the client has left while it waited for its place
            async with self._places.parsing(is_large=is_large):
                if (answer := await store.answered(id)) is None:
                    raise _kept_no_more(id)
                result = answer.result
                if (
                    isinstance(result, Loaded) and isinstance(owner, TinkerModel) and id.endswith("#0")
                ):  # of the creation
                    result = Loaded(path=owner.start)
                response = await response_of(request, owner.id, result)
            await store.note_read(answer)
            if is_large:
                await _send(request, response)
            return response

    async def _owner(self, request: web.Request, id: str) -> TinkerModel | Sampler:
        """Return the model or sampler of a request. Raises NotFound."""
        owner, _, number = id.partition("#")
        if not (number.isdecimal() and len(number) < 20):
            raise NotFound(f"request {id[:100]} does not exist")
        find = self._access.model if TRAINED in owner else self._access.sampler
        return await find(request, owner)

    async def _refuse_unknown(self, id: str) -> None:
        """Raises NotFound, or HTTPGone for one whose answer has expired."""
        store = self._access.store
        if not await store.was_asked(id):
            raise NotFound(f"request {id} does not exist")
        if not await store.was_answered(id):
            return
        if not await self._futures.size(id, 0.0):  # it has not come since it was last looked for
            raise _kept_no_more(id)

    async def _try_again(self, id: str, owner: TinkerModel | Sampler, job: JobRecord) -> web.Response:
        waits, why = job.state is not JobState.RUNNING, ""
        if waits:
            for_what = job.waiting_for or job.reason
            why = f"the Tinker server {job.id} is {job.state}" + (f" and waits for {for_what}" if for_what else "")
        elif isinstance(owner, TinkerModel) and (queue := await queue_of(self._access.ctx.store, job)):
            why = f"the trainer: {queue}"
        body = {"type": "try_again", "request_id": id, "queue_state": "paused_capacity" if waits else "active"}
        return json_response(body | ({"queue_state_reason": why} if why else {}), status=408)


def _kept_no_more(id: str) -> web.HTTPGone:
    return web.HTTPGone(text=f"request {id} was carried out, and its answer is kept no more")


async def _send(request: web.Request, response: web.Response) -> None:
    """Send a response to its end. The connection of a client that does not read it in time is closed."""
    try:
        async with asyncio.timeout(SEND_S):
            await response.prepare(request)
            await response.write_eof()
    except ConnectionError:
        pass  # the client has left; it asks again if it wants the answer
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()


def _ended(job: JobRecord) -> web.Response | None:
    """Return a failure if the server that would answer has ended."""
    if not job.state.final:
        return None
    error = f"the Tinker server {job.id} has {job.state}: {job.reason or 'no reason given'}"
    return json_response({"error": f"{error}; load a checkpoint to continue on another one", "category": "server"})
