"""Handlers of sampling: samplers, requests for samples, and requests that are given up.

asample   consumes a prompt and parameters; produces SAMPLE, and the promise of its answer
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import msgspec
import numpy as np
from aiohttp import web

from opentinker.services.scheduler.http.auth import tenant_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.services.scheduler.jobs.disk_threads import on_disk
from opentinker.services.scheduler.tinker.access import Access, base_of, context_of, shown_base, too_many
from opentinker.services.scheduler.tinker.bodies import (
    INT64,
    MIDDLE,
    SMALL,
    FutureBody,
    ParamsBody,
    SampleBody,
    SamplerBody,
    aside,
    finite,
    parse_body,
    read_body,
    read_raw,
    seq_of,
)
from opentinker.services.scheduler.tinker.commands import PUBLISH_S
from opentinker.services.scheduler.tinker.large_bodies import Places, may_be_beyond
from opentinker.shared.messaging.subjects import SAMPLE
from opentinker.shared.openai.sampling import MAX_TEMPERATURE
from opentinker.shared.security.authorization import Action
from opentinker.shared.types import codec
from opentinker.shared.types.errors import Conflict, NotFound, SpecError
from opentinker.shared.types.tinker import (
    Answer,
    Failed,
    SampleParams,
    Sampler,
    SampleRequest,
    most_bytes,
    prompt_too_long,
    too_many_cells,
)

JSON = "application/json"
MAX_SAMPLES, MAX_LIKELY, MAX_STOPS = 256, 20, 64
MAX_TOKENS, PIECE = 1 << 20, 1 << 16
ASSUMED_TOKENS = 4096
"""Tokens counted for a sample until it is drawn, also in the bytes of its answer, where neither `max_tokens` nor the
server's job bounds it."""


class SamplingApi:
    def __init__(self, access: Access, places: Places) -> None:
        self._access, self._store, self._bus, self._places = access, access.store, access.ctx.bus, places

    @Route("POST", "/api/v1/create_sampling_session", Action.INFERENCE_USE, takes=JSON)
    async def create(self, request: web.Request) -> web.Response:
        """Make a sampler of a base model or of a checkpoint (Tinker)."""
        body = await read_body(request, SamplerBody)
        session = await self._access.session(request, body.session_id)
        number = seq_of("sampling_session_seq_id", body.sampling_session_seq_id)
        sampler = await self._sampler(request, f"{session.id}:sampler:{number}", session.id, body)
        try:
            known = await self._access.sampler(request, sampler.id)
        except NotFound:
            await self._store.make_room_for_sampler(sampler.tenant)
            await self._store.add_sampler(sampler)
        else:
            if (known.base, known.path) != (sampler.base, sampler.path):
                raise Conflict(f"sampling_session_seq_id {number} was used for another sampler of {session.id}")
        return json_response({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def _sampler(self, request: web.Request, id: str, session: str, body: SamplerBody) -> Sampler:
        tenant = tenant_of(request)
        if body.model_path is None:
            if body.base_model is None:
                raise SpecError.of("base_model", None, "is missing; give base_model or model_path")
            job = await self._access.server_for(request, body.base_model)
            return Sampler(id=id, tenant=tenant, session=session, job=job.id, base=base_of(job))
        found = await self._access.checkpoint(request, body.model_path)
        if body.base_model is not None and not await self._access.is_base(request, body.base_model, found.base):
            raise SpecError.of(
                "base_model", body.base_model[:200], f"is not the checkpoint's base, {shown_base(found.base)}"
            )
        job = await self._access.server_for(request, found.base, full=found.lora.is_full)
        return Sampler(
            id=id, tenant=tenant, session=session, job=job.id, base=found.base, model=found.model, path=found.path,
            directory=str(self._access.directory(found)), version=f"{found.path}@{found.created:.6f}",
            rank=found.lora.rank,
        )  # fmt: skip

    @Route("GET", "/api/v1/samplers/{id}", Action.JOBS_READ)
    async def sampler(self, request: web.Request) -> web.Response:
        """Get a sampler's base and checkpoint (Tinker)."""
        found = await self._access.sampler(request, request.match_info["id"])
        return json_response(
            {"sampler_id": found.id, "base_model": shown_base(found.base), "model_path": found.path or None}
        )

    @Route("POST", "/api/v1/asample", Action.INFERENCE_USE, takes=JSON)
    async def sample(self, request: web.Request) -> web.Response:
        """Ask for samples (Tinker)."""
        async with self._places.of_tenant(request, is_large=may_be_beyond(request, SMALL)):
            raw = await read_raw(request, MIDDLE)
            async with self._places.parsing(is_large=len(raw) > SMALL):
                asked, digest = await aside(len(raw), asked_of, raw, tenant_of(request))
            return await self._promise(request, asked, digest)

    async def _promise(self, request: web.Request, asked: SampleRequest, digest: str) -> web.Response:
        sampler = await self._access.sampler(request, asked.request.rpartition("#")[0])
        await self._refuse_withdrawn(request, sampler)
        job = await self._access.server(sampler.job)
        _refuse_large(asked, context_of(job))
        prompt = len(asked.prompt) // 4
        most = _most_tokens(asked, context_of(job)) or ASSUMED_TOKENS
        with too_many("samples"):
            quota = self._access.quota(sampler.tenant, job)
            noted = await self._store.ask_sample(
                asked.request, digest, quota, prompt=prompt, drawn=asked.count * most, answer=most_bytes(asked, most)
            )
        if noted.state != "known" or not await self._store.answer_size(asked.request):
            # one that was lost needs another id: under the first one the stream takes it for a repetition
            await self._publish(asked, sampler, f"{asked.request}@{noted.lost}" if noted.lost else asked.request)
            await self._store.sent(asked.request, sampler.job, sampler.tenant)
        ids = [f"{asked.request}:{number}" for number in range(asked.count)]
        return json_response({"request_id": asked.request, "sample_sequence_ids": ids})

    async def _refuse_withdrawn(self, request: web.Request, sampler: Sampler) -> None:
        """Raise NotFound once the tenant may not read the sampler's checkpoint any more: it was deleted, has expired,
        or is no longer public. One that was saved again keeps the weights of its samplers."""
        if not sampler.path:
            return
        found = await self._access.checkpoint(request, sampler.path)
        is_replaced = str(self._access.directory(found)) != sampler.directory
        if is_replaced and not await on_disk(self._access.ctx, Path(sampler.directory).is_dir):
            raise NotFound(f"the weights of sampler {sampler.id} were removed; make a sampler of {sampler.path} again")

    async def _publish(self, asked: SampleRequest, sampler: Sampler, msg_id: str) -> None:
        newest = await self._store.newest_of(sampler)
        asked = msgspec.structs.replace(
            asked, model=newest.model, directory=newest.directory, version=newest.version, rank=newest.rank,
            follows=sampler.follows,
        )  # fmt: skip
        await self._store.used_sampler(sampler, newest)
        async with asyncio.timeout(PUBLISH_S):
            await self._bus.publish(SAMPLE, asked, msg_id=msg_id, job=sampler.job, tenant=sampler.tenant)

    @Route("POST", "/api/v1/cancel_future", Action.INFERENCE_USE, takes=JSON)
    async def cancel(self, request: web.Request) -> web.Response:
        """Give up a request for samples, if it is not answered yet (Tinker)."""
        body = await read_body(request, FutureBody)
        owner, _, _ = body.request_id.partition("#")
        await self._access.sampler(request, owner)
        if await self._store.was_asked(body.request_id):
            failed = Failed(error="the client has cancelled the request")
            await self._store.answer(Answer(request=body.request_id, result=failed), cancelled=True)
        return json_response({})


def asked_of(raw: bytes, tenant: str) -> tuple[SampleRequest, str]:
    """Return the request for samples in a body, still without weights, and its digest. Raises SpecError."""
    body = parse_body(raw, SampleBody)
    if body.sampling_session_id is None:
        raise SpecError.of("sampling_session_id", None, "is missing; make a sampling client first")
    asked = sample_of(body, f"{body.sampling_session_id}#{seq_of('seq_id', body.seq_id, below=INT64)}", tenant)
    return asked, hashlib.sha256(codec.encode(asked)).hexdigest()[:24]


def sample_of(body: SampleBody, request: str, tenant: str) -> SampleRequest:
    """Return the request for samples, still without weights. Raises SpecError."""
    prompt = _prompt(body)
    _refuse_unsupported(body)
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and 1 <= last < max(2, len(prompt))):
        problem = "must be 1 to one less than the prompt's tokens, with prompt_logprobs"
        raise SpecError.of("prompt_logprobs_last_n", last, problem)
    return SampleRequest(
        request=request,
        tenant=tenant,
        prompt=prompt.astype("<i4").tobytes(),
        count=_whole("num_samples", body.num_samples, 1, MAX_SAMPLES),
        params=params_of(body.sampling_params),
        prompt_logprobs=bool(body.prompt_logprobs),
        last_prompt=last or 0,
        likely_prompt=_whole("topk_prompt_logprobs", body.topk_prompt_logprobs, 0, MAX_LIKELY),
        likely=_whole("topk_sample_logprobs", body.topk_sample_logprobs, 0, MAX_LIKELY),
    )


def _prompt(body: SampleBody) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
        raise SpecError.of("prompt", None, "must be chunks of token ids; images and audio are not served")
    pieces = [  # numpy holds the interpreter for a whole list: other threads run between small ones
        np.array(chunk.tokens[start : start + PIECE], np.int64)
        for chunk in body.prompt.chunks
        for start in range(0, len(chunk.tokens), PIECE)
    ]
    prompt: np.ndarray[tuple[int], np.dtype[np.int64]] = np.concatenate([np.zeros(0, np.int64), *pieces])
    if not 0 < prompt.size <= MAX_TOKENS:
        raise SpecError.of("prompt", None, f"has {prompt.size} tokens; it must have 1 to {MAX_TOKENS}")
    if prompt.min() < 0 or prompt.max() >= 2**31:
        raise SpecError.of("prompt", None, "must be token ids, whole numbers from 0")
    return prompt


def _refuse_large(asked: SampleRequest, context: int | None) -> None:
    """Raise SpecError for a prompt or an answer that is too large, as far as it is known without the base's own
    context."""
    if context is not None and (tokens := len(asked.prompt) // 4) >= context:
        raise SpecError.of("prompt", None, prompt_too_long(tokens, context))
    if problem := too_many_cells(asked, _most_tokens(asked, context) or 1):
        raise SpecError.of("num_samples", asked.count, problem)


def _most_tokens(asked: SampleRequest, context: int | None) -> int | None:
    """Return how many tokens a sample may have; None: the base's own context alone says it."""
    room = None if context is None else max(1, context - len(asked.prompt) // 4)
    return min((length for length in (asked.params.max_tokens, room) if length is not None), default=None)


def _refuse_unsupported(body: SampleBody) -> None:
    if body.target_prompt_logprobs is not None:
        raise SpecError.of("target_prompt_logprobs", None, "is not served; use topk_prompt_logprobs")
    if body.prompt_alt_tokens_k:
        raise SpecError.of("prompt_alt_tokens_k", body.prompt_alt_tokens_k, "is not served; leave it 0")
    if body.record_stability_info:
        problem = "is not served, nor is stable_reinforce; pass loss_fn=importance_sampling to the recipe"
        raise SpecError.of("record_stability_info", True, problem)


def params_of(params: ParamsBody) -> SampleParams:
    """Raises SpecError."""
    stop, stop_ids = _stops(params.stop)
    top_k = _whole("top_k", params.top_k, -1, 2**31 - 1)
    return SampleParams(
        max_tokens=None if params.max_tokens is None else _whole("max_tokens", params.max_tokens, 1, MAX_TOKENS),
        temperature=finite("temperature", params.temperature, 0.0, MAX_TEMPERATURE),
        top_p=finite("top_p", params.top_p, 1e-6, 1.0),
        top_k=top_k or -1,
        seed=None if params.seed is None else _whole("seed", params.seed, 0, INT64 - 1),
        stop=stop,
        stop_ids=stop_ids,
    )


def _stops(stop: str | list[str | int] | None) -> tuple[list[str] | None, list[int] | None]:
    """Split what ends a sample into texts and tokens. An empty list ends none, not even at the model's own tokens."""
    if stop is None:
        return None, None
    stops = [stop] if isinstance(stop, str) else stop
    texts, ids = [one for one in stops if isinstance(one, str)], [one for one in stops if isinstance(one, int)]
    if len(stops) > MAX_STOPS or (texts and ids):
        raise SpecError.of("stop", None, f"must be at most {MAX_STOPS} strings, or as many token ids")
    if any(not 0 < len(text) <= 1000 for text in texts) or any(not 0 <= id < 2**31 for id in ids):
        raise SpecError.of("stop", None, "must be strings of 1 to 1000 characters, or token ids")
    return (texts, None) if texts else (None, ids)


def _whole(field: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise SpecError.of(field, value, f"must be a whole number, {low} to {high}")
    return value
