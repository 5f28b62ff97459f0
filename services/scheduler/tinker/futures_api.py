"""The handler of retrieve_future: waits for an answer as long as a client does, and says why it is not there yet."""

from __future__ import annotations

from aiohttp import web

from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.services.scheduler.tinker.access import Access
from opentinker.services.scheduler.tinker.answers import response_of
from opentinker.services.scheduler.tinker.bodies import FutureBody, read_body
from opentinker.services.scheduler.tinker.futures import Futures
from opentinker.services.scheduler.tinker.models_api import queue_of
from opentinker.shared.security.authorization import Action
from opentinker.shared.state.tinker.requests import TRAINED
from opentinker.shared.types.core import JobRecord, JobState
from opentinker.shared.types.errors import NotFound
from opentinker.shared.types.tinker import Sampler, TinkerModel

HOLD_S = 30.0
"""Time that a request without an answer is held; clients wait for 45 s."""


class FuturesApi:
    def __init__(self, access: Access, futures: Futures, hold_s: float) -> None:
        self._access, self._futures, self._hold_s = access, futures, hold_s

    @Route("POST", "/api/v1/retrieve_future", Action.JOBS_READ, takes="application/json")
    async def retrieve(self, request: web.Request) -> web.Response:
        """Wait for the answer to a request (Tinker)."""
        id = (await read_body(request, FutureBody)).request_id
        owner = await self._owner(request, id)
        answer = await self._futures.answer(id, 0.0)
        if answer is None:
            await self._refuse_unknown(id)
            if ended := _ended(await self._access.server_or_ended(owner.job)):
                return ended
            answer = await self._futures.answer(id, self._hold_s)
        if answer is None:
            job = await self._access.ctx.store.job(owner.job)
            return _ended(job) or await self._try_again(id, owner, job)
        response = await response_of(request, owner.id, answer.result)
        await self._access.store.note_read(answer)
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
        if await self._futures.answer(id, 0.0) is None:  # it has not come since it was last looked for
            raise web.HTTPGone(text=f"request {id} was carried out, and its answer is kept no more")

    async def _try_again(self, id: str, owner: TinkerModel | Sampler, job: JobRecord) -> web.Response:
        waits, why = job.state is not JobState.RUNNING, ""
        if waits:
            for_what = job.waiting_for or job.reason
            why = f"the Tinker server {job.id} is {job.state}" + (f" and waits for {for_what}" if for_what else "")
        elif isinstance(owner, TinkerModel) and (queue := await queue_of(self._access.ctx.store, job)):
            why = f"the trainer: {queue}"
        body = {"type": "try_again", "request_id": id, "queue_state": "paused_capacity" if waits else "active"}
        return json_response(body | ({"queue_state_reason": why} if why else {}), status=408)


def _ended(job: JobRecord) -> web.Response | None:
    """Return a failure if the server that would answer has ended."""
    if not job.state.final:
        return None
    error = f"the Tinker server {job.id} has {job.state}: {job.reason or 'no reason given'}"
    return json_response({"error": f"{error}; load a checkpoint to continue on another one", "category": "server"})
