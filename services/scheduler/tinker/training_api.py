"""Handlers of commands to models: create, forward and backward, optimizer steps, saves and loads.

Each responds immediately with a promise; `futures_api.py` delivers the answers. An error in the content of a numbered
command becomes its answer: later commands of the model would wait for a number that never comes.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from opentinker.services.scheduler.http.auth import tenant_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.services.scheduler.tinker import training_data
from opentinker.services.scheduler.tinker.access import Access, base_of, context_of, settings_of, shown_base
from opentinker.services.scheduler.tinker.bodies import (
    INT64,
    LARGE,
    MIDDLE,
    PROTOBUF,
    AdamBody,
    ForwardBody,
    LoadBody,
    Lora,
    ModelBody,
    ModelId,
    OptimizerKind,
    Refused,
    SaveBody,
    StepBody,
    aside,
    beyond,
    finite,
    metadata_of,
    name_of,
    parse_command,
    read_body,
    read_command,
    read_raw,
    seq_of,
    ttl_of,
)
from opentinker.services.scheduler.tinker.commands import Body, Commands, or_skip
from opentinker.services.scheduler.tinker.endings import Endings
from opentinker.services.scheduler.tinker.large_bodies import Places, may_be_beyond
from opentinker.shared.security.authorization import Action
from opentinker.shared.state.tinker.sessions import TooManyRecords
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import NotFound, SpecError
from opentinker.shared.types.tinker import (
    SMALLEST_EPS,
    CheckpointKind,
    Create,
    Load,
    LoraShape,
    OptimStep,
    Save,
    Skip,
    TinkerCheckpoint,
    TinkerModel,
)

JSON = "application/json"
LARGEST_SETTING = 1e6
"""Of an optimizer step; the trainer computes with float32."""
FULL = LoraShape(rank=0)

G = TypeVar("G")
Make = Callable[[G, TinkerModel, int], Awaitable[Body]]


class TrainingApi:
    def __init__(self, access: Access, commands: Commands, endings: Endings, places: Places) -> None:
        self._access, self._commands, self._endings, self._places = access, commands, endings, places

    # --- models -----------------------------------------------------------------------------------------------------

    @Route("POST", "/api/v1/create_model", Action.JOBS_WRITE, takes=JSON)
    async def create_model(self, request: web.Request) -> web.Response:
        """Create a model that a Tinker server trains: an adapter, or without lora_config all weights (Tinker)."""
        body = await read_body(request, ModelBody)
        session = await self._access.session(request, body.session_id)
        refuse_optimizer(body.optimizer_config)
        id = f"{session.id}:train:{seq_of('model_seq_id', body.model_seq_id)}"
        lora = _shape(id, body.lora_config)
        job = await self._access.server_for(request, body.base_model, full=lora.is_full)
        model = self._model(request, id, job, lora, body.user_metadata)
        return json_response(await self._create(request, model, Create(lora=lora)))

    @Route("POST", "/api/v1/load_weights", Action.JOBS_WRITE, takes=JSON)
    async def load_weights(self, request: web.Request) -> web.Response:
        """Load a checkpoint into a model, or create a model from it (Tinker)."""
        body = await read_command(request, LoadBody)
        if isinstance(body, LoadBody) and body.session_id is not None:
            return json_response(await self._create_from(request, body))

        async def load(body: LoadBody, model: TinkerModel, _: int) -> Body:
            try:
                checkpoint = await self._loadable(request, body)
            except NotFound:  # `_refusal` answers it: sent again, it is the same request whenever the checkpoint went
                return Load(path=body.path, directory="", optimizer=body.optimizer)
            if (checkpoint.base, checkpoint.lora.rank) != (model.base, model.lora.rank):
                has = f"base {checkpoint.base}, {checkpoint.lora}"
                problem = f"has {has}, and the model base {model.base}, {model.lora}; create a model from it"
                raise SpecError.of("path", body.path[:200], problem)
            return Load(path=body.path, directory=self._place(checkpoint), optimizer=body.optimizer)

        return await self._send(request, body, load)

    async def _create_from(self, request: web.Request, body: LoadBody) -> dict[str, Any]:
        session = await self._access.session(request, body.session_id or "")
        id = f"{session.id}:train:{seq_of('model_seq_id', body.model_seq_id)}"
        try:
            checkpoint = await self._loadable(request, body)
        except NotFound as error:
            return await self._create_again(request, id, body, error)
        base = body.base_model or checkpoint.base
        job = await self._access.server_for(request, base, full=checkpoint.lora.is_full)
        if base_of(job) != checkpoint.base:
            raise SpecError.of("base_model", base[:200], f"is not the checkpoint's base, {checkpoint.base}")
        metadata = body.user_metadata if body.user_metadata is not None else dict(checkpoint.metadata)
        model = self._model(request, id, job, checkpoint.lora, metadata, start=body.path)
        create = Create(lora=checkpoint.lora, start=self._place(checkpoint), optimizer=body.optimizer)
        return await self._create(request, model, create)

    async def _create_again(self, request: web.Request, id: str, body: LoadBody, gone: NotFound) -> dict[str, Any]:
        """Return the promise of a model that was asked for before its checkpoint was removed. Raises `gone` if it was
        not."""
        with contextlib.suppress(NotFound):
            known = await self._access.model(request, id)
            if known.start == body.path:  # if the first request was not sent, the model cannot be created any more
                create = Create(lora=known.lora, optimizer=body.optimizer)
                return await self._commands.send(known, 0, create, Skip(error=str(gone)))
        raise gone

    async def _loadable(self, request: web.Request, body: LoadBody) -> TinkerCheckpoint:
        refuse_optimizer(body.optimizer_config)
        if body.weights_access_token:
            problem = "is not supported; publish the checkpoint instead, then every tenant can load it"
            raise SpecError.of("weights_access_token", None, problem)
        checkpoint = await self._access.checkpoint(request, body.path)
        if body.optimizer and checkpoint.kind != "weights":
            problem = "has no optimizer state; load it without, or load a checkpoint of save_state"
            raise SpecError.of("path", body.path[:200], problem)
        return checkpoint

    def _place(self, checkpoint: TinkerCheckpoint) -> str:
        return str(self._access.directory(checkpoint))

    def _model(
        self,
        request: web.Request,
        id: str,
        job: JobRecord,
        lora: LoraShape,
        metadata: dict[str, Any] | None,
        start: str = "",
    ) -> TinkerModel:
        """Raises SpecError."""
        largest = settings_of(job).max_rank
        if not lora.is_full and not 1 <= lora.rank <= largest:
            raise SpecError.of(
                "lora_config.rank", lora.rank, f"must be 1 to {largest} on this server (tinker.max_rank)"
            )
        if not (lora.train_mlp or lora.train_attn):
            raise SpecError.of("lora_config", None, "trains no layer; set train_mlp or train_attn")
        return TinkerModel(
            id=id, tenant=tenant_of(request), job=job.id, base=base_of(job), lora=lora, created=time.time(),
            metadata=metadata_of(metadata), start=start,
        )  # fmt: skip

    async def _create(self, request: web.Request, model: TinkerModel, create: Create) -> dict[str, Any]:
        with contextlib.suppress(NotFound):  # a repeated request stays with the server that it was first given to
            known = await self._access.model(request, model.id)
            model = msgspec.structs.replace(model, job=known.job)
        await self._endings.with_room(model.tenant, partial(self._access.store.add_model, model), models=True)
        return await self._commands.send(model, 0, create)

    @Route("POST", "/api/v1/unload_model", Action.JOBS_WRITE, takes=JSON)
    async def unload_model(self, request: web.Request) -> web.Response:
        """Unload a model after the requests that it has had; its checkpoints stay (Tinker)."""
        model = await self._access.model(request, (await read_body(request, ModelId)).model_id)
        return json_response(await self._commands.unload(model))

    @Route("POST", "/api/v1/get_info", Action.JOBS_READ, takes=JSON)
    async def get_info(self, request: web.Request) -> web.Response:
        """Get a model's base and rank (Tinker)."""
        body = await read_body(request, ModelId)
        model = await self._access.model(request, body.model_id)
        job = await self._access.server(model.job)
        return json_response(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_name": shown_base(model.base),
                "model_data": {"model_name": shown_base(model.base), "max_context_length": context_of(job)},
                "is_lora": not model.lora.is_full,
                "lora_rank": model.lora.rank or None,
            }
        )

    # --- training -----------------------------------------------------------------------------------------------------

    @Route("POST", "/api/v1/forward_backward", Action.JOBS_WRITE, takes=JSON, frequent=True)
    async def forward_backward(self, request: web.Request) -> web.Response:
        """Add the gradient of a loss over data to the model's, or compute the loss alone (Tinker).

        The body may be application/x-protobuf too, as newer clients send it."""
        if PROTOBUF not in request.headers.get("Content-Type", ""):
            return await self._forward_json(request, backward=True)
        most = beyond(training_data.PROTOBUF_BYTES)
        return await self._forward(request, most, _from_protobuf, training_data.forward_of_protobuf)

    @Route("POST", "/api/v1/forward", Action.JOBS_WRITE, takes=JSON, frequent=True)
    async def forward(self, request: web.Request) -> web.Response:
        """Compute a loss over data, without a gradient (Tinker, older clients)."""
        return await self._forward_json(request, backward=False)

    async def _forward_json(self, request: web.Request, *, backward: bool) -> web.Response:
        make = partial(training_data.forward_of_json, backward=backward)
        return await self._forward(request, beyond(LARGE), _from_json, make)

    async def _forward(
        self,
        request: web.Request,
        most: int,
        parse: Callable[[bytes], Awaitable[G | Refused]],
        make: Callable[[G], Body],
    ) -> web.Response:
        """Read the data of a pass and send its command."""
        async with self._places.of_tenant(request, is_large=may_be_beyond(request, MIDDLE)):
            raw = await read_raw(request, most)
            async with self._places.parsing(is_large=len(raw) > MIDDLE):
                given: Any = await parse(raw)
                body = await _body_of(given, lambda: aside(len(raw), make, given))
            return await self._send_body(request, given, body)

    @Route("POST", "/api/v1/optim_step", Action.JOBS_WRITE, takes=JSON, frequent=True)
    async def optim_step(self, request: web.Request) -> web.Response:
        """Step a model's optimizer with the gradient so far, and clear it (Tinker)."""
        body = await read_command(request, StepBody)

        async def step(body: StepBody, _: TinkerModel, __: int) -> Body:
            refuse_optimizer(body.optimizer_params, "optimizer_params")
            return step_of(body.adam_params or AdamBody())

        return await self._send(request, body, step)

    # --- saves --------------------------------------------------------------------------------------------------------

    @Route("POST", "/api/v1/save_weights", Action.JOBS_WRITE, takes=JSON)
    async def save_weights(self, request: web.Request) -> web.Response:
        """Save a checkpoint with the optimizer's state (Tinker)."""
        return await self._save(request, "weights")

    @Route("POST", "/api/v1/save_weights_for_sampler", Action.JOBS_WRITE, takes=JSON, frequent=True)
    async def save_weights_for_sampler(self, request: web.Request) -> web.Response:
        """Save weights to sample with, under a name or for one sampler (Tinker)."""
        return await self._save(request, "sampler_weights")

    @Route("POST", "/api/v1/save_weights_external", Action.JOBS_WRITE, takes=JSON)
    async def save_weights_external(self, request: web.Request) -> web.Response:
        """Save a PEFT adapter, or all weights, to download (Tinker)."""
        return await self._save(request, "external_weights")

    async def _save(self, request: web.Request, kind: CheckpointKind) -> web.Response:
        async def save(body: SaveBody, model: TinkerModel, seq: int) -> Body:
            return save_of(body, model, kind, seq)

        return await self._send(request, await read_command(request, SaveBody), save)

    async def _refusal(self, model: TinkerModel, body: Body) -> Skip | None:
        """Return what is answered to a save for which there is no room, and to a load of what does not exist."""
        if isinstance(body, Load) and not body.directory:
            return Skip(error=f"checkpoint {body.path} does not exist")
        if not isinstance(body, Save):
            return None
        store = self._access.store
        try:
            path = f"tinker://{model.id}/{body.kind}/{body.name}"
            await store.require_room_for_save(model.tenant, model.job, body.name, path)
            if not body.name:
                await store.make_room_for_sampler(model.tenant)
        except TooManyRecords as error:
            return Skip(error=str(error))
        return None

    # --- all of them --------------------------------------------------------------------------------------------------

    async def _send(self, request: web.Request, given: G | Refused, make: Make[G]) -> web.Response:
        """Send the command that `make` returns; what it refuses has its place in the order too."""
        asked: Any = given
        model = await self._access.model(request, asked.model_id or "")
        seq = seq_of("seq_id", asked.seq_id, 1)
        return await self._promise(model, seq, await _body_of(given, partial(make, asked, model, seq)))

    async def _send_body(self, request: web.Request, asked: Any, body: Body) -> web.Response:
        """Send the command of a request with this body."""
        model = await self._access.model(request, asked.model_id or "")
        return await self._promise(model, seq_of("seq_id", asked.seq_id, 1), body)

    async def _promise(self, model: TinkerModel, seq: int, body: Body) -> web.Response:
        return json_response(await self._commands.send(model, seq, body, await self._refusal(model, body)))


async def _body_of(given: Any, make: Callable[[], Awaitable[Body]]) -> Body:
    return Skip(error=given.error) if isinstance(given, Refused) else await or_skip(make)


async def _from_protobuf(raw: bytes) -> Any:
    return await aside(len(raw), training_data.from_protobuf, raw)


async def _from_json(raw: bytes) -> ForwardBody | Refused:
    return await parse_command(raw, ForwardBody, LARGE)


def step_of(adam: AdamBody) -> OptimStep:
    """Raises SpecError."""
    return OptimStep(
        lr=finite("learning_rate", adam.learning_rate, 0.0, LARGEST_SETTING),
        beta1=finite("beta1", adam.beta1, 0.0, 0.999999),
        beta2=finite("beta2", adam.beta2, 0.0, 0.9999999),
        eps=finite("eps", adam.eps, SMALLEST_EPS, LARGEST_SETTING),
        weight_decay=finite("weight_decay", adam.weight_decay, 0.0, LARGEST_SETTING),
        clip=max(0.0, finite("grad_clip_norm", adam.grad_clip_norm)),
    )


def save_of(body: SaveBody, model: TinkerModel, kind: CheckpointKind, seq: int) -> Save:
    """Return the command of a save; sampler weights have a name or are for a sampler. Raises SpecError."""
    ttl_s = ttl_of(body.ttl_seconds)
    if body.age_encryption_recipients:
        raise SpecError.of("age_encryption_recipients", None, "is not supported; encrypt the files after the download")
    if body.path is None and kind == "sampler_weights" and body.sampling_session_seq_id is not None:
        if body.kind not in ("snapshot", "inflight"):
            raise SpecError.of("kind", body.kind[:100], "must be snapshot or inflight")
        session = model.id.partition(":")[0]
        sampler = f"{session}:sampler:{seq_of('sampling_session_seq_id', body.sampling_session_seq_id)}"
        return Save(kind=kind, sampler=sampler, follows=body.kind == "inflight")
    name = name_of("path", body.path if body.path is not None or kind != "weights" else f"seq-{seq:06d}")
    overwrite = body.overwrite or kind != "weights"
    return Save(kind=kind, name=name, ttl_s=ttl_s, overwrite=overwrite, metadata=metadata_of(body.user_metadata))


def refuse_optimizer(optimizer: OptimizerKind | None, field: str = "optimizer_config") -> None:
    """Raises SpecError for any but AdamW."""
    if optimizer is not None and optimizer.type != "adamw":
        raise SpecError.of(f"{field}.type", optimizer.type[:100], "is not served; the optimizer is adamw")


def _seed(id: str, seed: int | None) -> int:
    """Return the client's seed, or one of the model's id. Raises SpecError."""
    if seed is None:
        return int.from_bytes(hashlib.sha256(id.encode()).digest()[:4], "big")
    return seq_of("lora_config.seed", seed, below=INT64)


def _shape(id: str, given: Lora | None) -> LoraShape:
    """Return what of a model is trained. Raises SpecError."""
    if given is not None and given.rank != 0:
        seed = _seed(id, given.seed)
        return LoraShape(rank=given.rank, seed=seed, train_mlp=given.train_mlp, train_attn=given.train_attn)
    for name in ("train_mlp", "train_attn"):
        if given is not None and not getattr(given, name):
            raise SpecError.of(f"lora_config.{name}", False, "does not apply with rank 0, which trains all weights")
    return FULL
