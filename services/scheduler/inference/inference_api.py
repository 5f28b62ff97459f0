"""The endpoint of inference jobs, in the forms of OpenAI and Anthropic:
/v1/jobs/{id}/v1/{chat/completions,completions,responses,messages,models}.

ask   consumes an HTTP request; produces ASK, and the response, as its pieces come or as a whole;
      ends when the answer is out or the client is gone
"""

from __future__ import annotations

import asyncio
import uuid

import msgspec
import structlog
from aiohttp import web

from opentinker.services.scheduler.http.errors import json_response, read_json
from opentinker.services.scheduler.http.jobs import JobsApi
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.services.scheduler.inference.answers import Answers
from opentinker.services.scheduler.inference.router import InferenceRouter, refuse_unless_served
from opentinker.shared import dialects
from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.dialects import Dialect
from opentinker.shared.openai.answers import card_of, models
from opentinker.shared.openai.fields import InvalidField, Json, unknown_model
from opentinker.shared.openai.inference import GenerateRequest, adapters_in, models_of, names_of
from opentinker.shared.openai.requests import Question
from opentinker.shared.openai.sampling import parse_manner
from opentinker.shared.security.authorization import Action
from opentinker.shared.types.core import JobRecord

log = structlog.get_logger()

GONE_S = 0.2
"""How often it is looked whether the client is still there."""


class InferenceApi:
    def __init__(self, jobs: JobsApi, replicas: InferenceRouter) -> None:
        self.jobs, self.replicas = jobs, replicas

    @Route("GET", "/v1/jobs/{id}/v1/models", Action.INFERENCE_USE)
    async def models(self, request: web.Request) -> web.Response:
        """List the models of an inference job (OpenAI)."""
        return json_response(self._cards(await self._job(request)))

    @staticmethod
    def _cards(job: JobRecord) -> Json:
        first, *others = names_of(job.id, job.spec)
        length = job.spec["rollout"]["context_length"] or 0
        return models(first, length, *others, adapters=adapters_in(job.spec))

    @Route("GET", "/v1/jobs/{id}/v1/models/{model}", Action.INFERENCE_USE, slashes="model")
    async def model(self, request: web.Request) -> web.Response:
        """Get a model of an inference job by any of its names (OpenAI)."""
        job, name = await self._job(request), request.match_info["model"]
        return json_response(card_of(self._cards(job), name))

    @Route("POST", "/v1/jobs/{id}/v1/chat/completions", Action.INFERENCE_USE, takes="application/json")
    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Create a chat completion, optionally streamed (OpenAI)."""
        return await self._ask(request, dialects.CHAT)

    @Route("POST", "/v1/jobs/{id}/v1/completions", Action.INFERENCE_USE, takes="application/json")
    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Create a completion of text or token ids (OpenAI)."""
        return await self._ask(request, dialects.COMPLETIONS)

    @Route("POST", "/v1/jobs/{id}/v1/responses", Action.INFERENCE_USE, takes="application/json")
    async def responses(self, request: web.Request) -> web.StreamResponse:
        """Create a response, optionally streamed (OpenAI)."""
        return await self._ask(request, dialects.RESPONSES)

    @Route("POST", "/v1/jobs/{id}/v1/messages", Action.INFERENCE_USE, takes="application/json")
    async def messages(self, request: web.Request) -> web.StreamResponse:
        """Create a message, optionally streamed (Anthropic)."""
        return await self._ask(request, dialects.MESSAGES)

    async def _job(self, request: web.Request) -> JobRecord:
        job = await self.jobs.found(request)
        refuse_unless_served(job)
        return job

    async def _ask(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        job = await self._job(request)
        body = await read_json(request)
        if not isinstance(body, dict):
            raise InvalidField("the body must be a JSON object")
        manner, asked = parse_manner(body, dialect.route), dialect.parse(body, serving=True)
        models = models_of(job.id, job.spec)
        if asked.model and asked.model not in models:
            raise unknown_model(asked.model, models)
        asked = msgspec.structs.replace(asked, model=asked.model or next(iter(models)))
        ask = GenerateRequest(
            id=f"q-{uuid.uuid4().hex}",
            asker=self.replicas.name,
            job=job.id,
            model=models[asked.model],
            manner=manner,
            tokens=asked.logprobs,
            offsets=asked.logprobs and dialect is dialects.COMPLETIONS,
            **{name: getattr(asked, name) for name in Question.__struct_fields__},
        )
        answers = Answers(lambda ask: self.replicas.answer(job, ask), asked, ask, dialect)
        answering = answers.streamed(request) if asked.stream else answers.whole()
        return await _while_there(request, asyncio.create_task(answering))


async def _while_there(request: web.Request, answering: asyncio.Task[web.StreamResponse]) -> web.StreamResponse:
    """The response, as long as the client waits for it."""
    try:
        while not answering.done():
            await asyncio.wait([answering], timeout=GONE_S)
            if request.transport is None or request.transport.is_closing():
                await cancel_and_wait(answering)
                log.info("client_disconnected", path=request.path)
                return web.Response(status=499, reason="Client closed request")
        return answering.result()
    except ConnectionResetError:
        return web.Response(status=499, reason="Client closed request")
    finally:
        await cancel_and_wait(answering)
