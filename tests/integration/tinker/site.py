"""A scheduler with a Tinker server whose trainer and rollout worker are played by the test: they read COMMAND and
SAMPLE, and write answers."""

from __future__ import annotations

import io
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson

from opentinker.services.scheduler.tinker.schema import ForwardBackwardRequest
from opentinker.shared.messaging.subjects import ANSWERED, COMMAND, SAMPLE
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.tinker import (
    Answer,
    Answered,
    Command,
    Create,
    Failed,
    ForwardBackward,
    Forwarded,
    Loaded,
    LoraShape,
    OptimStep,
    Result,
    Sampled,
    SampleRequest,
    SampleSequence,
    Save,
    Saved,
    Skip,
    Stepped,
    TinkerCheckpoint,
    tinker_place,
)
from tests.conftest import until
from tests.support.api import Http

BASE = "some/model"


def key_of(key: str) -> dict[str, str]:
    """Headers as a client of Tinker sends them."""
    return {"X-API-Key": f"tml-{key}"}


class FakeWorkers:
    """Trainer and rollout worker of one job. `answers` off: they hear and say nothing."""

    def __init__(self, ctx: Context, job: str) -> None:
        self.ctx, self.job, self.store = ctx, job, TinkerStore(ctx.store.redis)
        self.commands: list[Command] = []
        self.samples: list[SampleRequest] = []
        self.answers = True

    @asynccontextmanager
    async def work(self) -> AsyncIterator[FakeWorkers]:
        trains = await self.ctx.bus.listen(COMMAND, self._carry_out, job=self.job)
        samples = await self.ctx.bus.listen(SAMPLE, self._sample, job=self.job, tenant="*")
        await self.ctx.bus.flush()
        yield self
        await trains.unsubscribe()
        await samples.unsubscribe()

    async def _carry_out(self, command: Command) -> None:
        if command.request in {one.request for one in self.commands}:
            return  # it was stored once: a live subscription hears the repetition too
        self.commands.append(command)
        if self.answers:
            await self.say(command.request, self.result_of(command))

    async def _sample(self, asked: SampleRequest) -> None:
        self.samples.append(asked)
        if self.answers:
            await self.say(asked.request, sampled(asked))

    async def draw(self, request: str) -> None:
        """Draw the samples that a client has asked for, as soon as they are heard of."""
        asked = await until(self._asked, lambda found: request in found)
        await self.say(request, sampled(asked[request]))

    async def _asked(self) -> dict[str, SampleRequest]:
        return {one.request: one for one in self.samples}

    async def say(self, request: str, result: Result) -> None:
        await self.store.answer(Answer(request=request, result=result))
        await self.ctx.bus.emit(ANSWERED, Answered(request=request), job=self.job)

    @staticmethod
    def result_of(command: Command) -> Result:
        match command.body:
            case ForwardBackward(data=data):
                widths = [datum.width for datum in data]
                logprobs = [np.full(len(one.targets) // 4, -0.5, "<f4").tobytes() for one in data]
                return Forwarded(logprobs=logprobs, widths=widths, metrics={"loss:sum": 1.5})
            case OptimStep():
                return Stepped(metrics={"grad_norm": 2.0})
            case Save(name=name, kind=kind, sampler=sampler):
                return Saved(path=f"tinker://{command.model}/{kind}/{name}" if name else "", sampler=sampler)
            case Skip(error=error):
                return Failed(error=error)
            case Create(start=directory):
                return Loaded(path=directory)  # as trainers of earlier releases
            case _:
                return Loaded()


def sampled(asked: SampleRequest) -> Sampled:
    tokens = np.arange(3, dtype="<i4")
    one = SampleSequence(stop="stop", tokens=tokens.tobytes(), logprobs=np.full(3, -1.0, "<f4").tobytes())
    prompt = np.full(len(asked.prompt) // 4, -2.0, "<f4")
    prompt[0] = np.nan
    return Sampled(sequences=[one] * asked.count, prompt_logprobs=prompt.tobytes() if asked.prompt_logprobs else b"")


class Client:
    """Sends requests of the raw wire with a key."""

    def __init__(self, http: Http, key: str) -> None:
        self.http, self.headers = http, key_of(key)

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        return await self.http("GET", f"/api/v1/{path}", headers=self.headers, **more)

    async def send(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        return await self.http(
            method, f"/api/v1/{path}", headers=self.headers, data=io.BytesIO(orjson.dumps(body or {}))
        )

    async def post(self, route: str, /, **body: Any) -> tuple[int, Any]:
        return await self.send("POST", route, body)

    async def ok(self, route: str, /, **body: Any) -> Any:
        status, answer = await self.post(route, **body)
        assert status == 200, answer
        return answer

    async def raw(self, path: str, data: bytes | AsyncIterator[bytes], **headers: str) -> tuple[int, Any]:
        headers = {**self.headers, "Content-Type": "application/x-protobuf", **headers}
        body = io.BytesIO(data) if isinstance(data, bytes) else data
        return await self.http("POST", f"/api/v1/{path}", headers=headers, data=body)

    async def result(self, promise: dict[str, Any], *, protobuf: bool = False) -> Any:
        headers = {**self.headers, **({"Accept": "application/x-protobuf"} if protobuf else {})}
        data = orjson.dumps({"request_id": promise["request_id"]})
        status, answer = await self.http("POST", "/api/v1/retrieve_future", headers=headers, data=data)
        assert status == 200, answer
        return answer

    async def session(self) -> str:
        answer = await self.ok("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")
        return str(answer["session_id"])

    async def model(self, session: str = "", number: int = 0, **lora: Any) -> str:
        """Create a model and wait until it is there."""
        session = session or await self.session()
        body = {"session_id": session, "model_seq_id": number, "base_model": BASE, "lora_config": {"rank": 8, **lora}}
        made = await self.result(await self.ok("create_model", **body))
        assert made["model_id"] == f"{session}:train:{number}"
        return str(made["model_id"])


def passes(model: str, seq: int, loss: str = "cross_entropy", change: Callable[[Any], None] | None = None) -> bytes:
    """A forward_backward in protobuf: one datum of three tokens."""
    message = ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2, 3], "<i4").tobytes()
    names = {"cross_entropy": {"weights": 1.0}}.get(loss, {"logprobs": -1.0, "advantages": 0.5})
    for name, value in names.items():
        fill(datum.loss_fn_inputs[name], np.full(3, value, "<f4"), 1)
    fill(datum.loss_fn_inputs["target_tokens"], np.array([2, 3, 4], "<i8"), 2)
    if change is not None:
        change(message)
    return bytes(message.SerializeToString())


def fill(tensor: Any, array: Any, dtype: int) -> None:
    tensor.dense, tensor.dtype = array.tobytes(), dtype
    del tensor.shape[:]
    tensor.shape.extend(array.shape)


async def start_server(
    ctx: Context, tenant: str = "default", base: str = BASE, context: int | None = None, **tinker: Any
) -> str:
    """An active job of kind `tinker`; nothing places it."""
    id = f"j-{uuid.uuid4().hex[:10]}"
    rollout = {} if context is None else {"context_length": context}
    spec = parse_spec(
        {"name": "tinker", "kind": "tinker", "model": {"base": base}, "tinker": tinker, "rollout": rollout}
    )
    await ctx.store.create_job(id=id, spec=spec.model_dump(mode="json"), tenant=tenant)
    return id


def checkpoint_of(ctx: Context, model: str, tenant: str = "default", **changes: Any) -> TinkerCheckpoint:
    """A checkpoint as a trainer leaves it, files included; its record is not stored."""
    fields: dict[str, Any] = {
        "model": model, "tenant": tenant, "kind": "weights", "name": "first", "base": BASE, "step": 3, "size": 7,
        "lora": LoraShape(rank=8), "created": time.time(),
    }  # fmt: skip
    found = TinkerCheckpoint(**(fields | changes))
    place = tinker_place(ctx.settings.data_dir, model) / found.kind / found.name
    place.mkdir(parents=True, exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors", "state.safetensors"):
        (place / name).write_bytes(f"{name} of {found.path}".encode())
    return found


async def sampler_in(user: Client, session: str, number: int = 0) -> str:
    """Return the id of a new sampler of the base model."""
    made = {"session_id": session, "sampling_session_seq_id": number, "base_model": BASE}
    return str((await user.ok("create_sampling_session", **made))["sampling_session_id"])
