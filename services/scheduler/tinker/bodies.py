"""Bodies of requests of the Tinker API: read within bounds, decompressed within them, and parsed into these types.

Fields that this server does not know are ignored, because newer clients send more; a field that would change the result
and is not supported is here, to be refused by `sampling_api.py` and others. Every default is stated, because clients up
to 0.16 leave fields with their default out.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
import zstandard
from aiohttp import web

from opentinker.services.scheduler.http.errors import SMALL_BODY, BrokenBody, body_read
from opentinker.shared.types.errors import SpecError

B = TypeVar("B")
R = TypeVar("R")
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

SMALL, MIDDLE, LARGE = 1 << 16, 1 << 21, 1 << 24
"""Bytes of a body: of most requests; of one with a prompt; of one with training data."""
MAX_SEQ = 2**53
"""Numbers of commands, models and samplers are below it: scripts of Redis compute with them as doubles."""
INT64 = 2**63
"""Numbers of requests for samples are below it, which are text everywhere: copies of a client's sampler number theirs
from a random multiple of a billion on. Seeds are below it too."""
LONGEST_TTL_S = 10 * 366 * 86400.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of checkpoints."""
PROTOBUF = "application/x-protobuf"


class SessionBody(msgspec.Struct, frozen=True, kw_only=True):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionId(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    rank: Whole
    seed: Whole | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerKind(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "adamw"


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    model_seq_id: Whole = 0
    base_model: str
    lora_config: Lora | None = None
    optimizer_config: OptimizerKind | None = None
    user_metadata: dict[str, Any] | None = None


class ModelId(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str


class AdamBody(msgspec.Struct, frozen=True, kw_only=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class StepBody(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str
    seq_id: Whole | None = None
    adam_params: AdamBody | None = None
    optimizer_params: OptimizerKind | None = None


class SaveBody(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str
    seq_id: Whole | None = None
    path: str | None = None
    ttl_seconds: float | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None
    sampling_session_seq_id: Whole | None = None
    kind: str = "snapshot"
    age_encryption_recipients: list[str] | None = None


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: Whole | None = None
    session_id: str | None = None
    model_seq_id: Whole | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerKind | None = None
    weights_access_token: str | None = None


class ChunkBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "encoded_text"
    tokens: list[Whole] = []


class PromptBody(msgspec.Struct, frozen=True, kw_only=True):
    chunks: list[ChunkBody] = []


class TensorBody(msgspec.Struct, frozen=True, kw_only=True):
    data: list[float]
    dtype: str = "float32"
    shape: list[Whole] | None = None
    sparse_crow_indices: list[Whole] | None = None
    sparse_col_indices: list[Whole] | None = None


class DatumBody(msgspec.Struct, frozen=True, kw_only=True):
    model_input: PromptBody
    loss_fn_inputs: dict[str, TensorBody] = {}


class ForwardInput(msgspec.Struct, frozen=True, kw_only=True):
    data: list[DatumBody]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBody(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str
    seq_id: Whole | None = None
    forward_backward_input: ForwardInput | None = None
    forward_input: ForwardInput | None = None


class SamplerBody(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    sampling_session_seq_id: Whole = 0
    base_model: str | None = None
    model_path: str | None = None


class ParamsBody(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: Whole | None = None
    seed: Whole | None = None
    stop: str | list[str | Whole] | None = None
    temperature: float = 1.0
    top_k: Whole = -1
    top_p: float = 1.0


class SampleBody(msgspec.Struct, frozen=True, kw_only=True):
    prompt: PromptBody
    sampling_params: ParamsBody = ParamsBody()
    num_samples: Whole = 1
    sampling_session_id: str | None = None
    seq_id: Whole | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Whole = 0
    topk_sample_logprobs: Whole = 0
    prompt_logprobs_last_n: Whole | None = None
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: Whole = 0
    record_stability_info: bool | None = None


class FutureBody(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    allow_metadata_only: bool = False


class PathBody(msgspec.Struct, frozen=True, kw_only=True):
    tinker_path: str


class TtlBody(msgspec.Struct, frozen=True, kw_only=True):
    ttl_seconds: float | None = None


class FinishBody(msgspec.Struct, frozen=True, kw_only=True):
    reason: dict[str, Any] = {}
    detail: str | None = None


class CursorBody(msgspec.Struct, frozen=True, kw_only=True):
    last_session_id: str
    last_created_at: str = ""


class SearchBody(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    limit: Whole = 50
    cursor: CursorBody | None = None


async def read_raw(request: web.Request, limit: int) -> bytes:
    """Return the body, decompressed. Raises HTTPRequestEntityTooLarge, HTTPUnsupportedMediaType, BrokenBody,
    SlowBody."""
    parts, size = [], 0
    async with body_read(request, "the body"):
        async for part in request.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > limit:
                raise too_large(limit)
    raw = b"".join(parts)
    return await asyncio.to_thread(_decompressed, raw, limit) if is_compressed(request) else raw


def is_compressed(request: web.Request) -> bool:
    """Return whether the body may have more bytes than are sent."""
    return request.headers.get("Content-Encoding", "").strip().lower() == "zstd"


def _decompressed(raw: bytes, limit: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 23).stream_reader(raw) as reader:
            found = reader.read(limit + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise BrokenBody(f"the body is not zstd data: {error}") from None
    if len(found) > limit:
        raise too_large(limit)
    return found


def too_large(limit: int) -> web.HTTPRequestEntityTooLarge:
    return web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=limit + 1)


async def read_body(request: web.Request, kind: type[B], limit: int = SMALL) -> B:
    """Return the JSON body. Raises SpecError and what `read_raw` raises."""
    raw = await read_raw(request, limit)
    return await aside(len(raw), parse_body, raw, kind)


async def aside(size: int, work: Callable[..., R], *of: Any) -> R:
    """Return work(*of); that of a large body is done in a thread, so that other requests are answered."""
    return work(*of) if size <= SMALL_BODY else await asyncio.to_thread(work, *of)


def parse_body(raw: bytes, kind: type[B]) -> B:
    """Raises SpecError."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        raise SpecError.of(where.strip("`.") or "(body)", None, what) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise SpecError.of("(body)", None, f"invalid JSON: {error}") from None


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A command whose number can be read, though the rest cannot."""

    model_id: str
    seq_id: Whole
    error: str


class _Number(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str
    seq_id: Whole


async def read_command(request: web.Request, kind: type[B], limit: int = SMALL) -> B | Refused:
    """Return the JSON body of a command, or Refused. Raises SpecError and what `read_raw` raises."""
    return await parse_command(await read_raw(request, beyond(limit)), kind, limit)


async def parse_command(raw: bytes, kind: type[B], limit: int) -> B | Refused:
    """Return the command in a JSON body; Refused if its number alone is as it must be, because later commands of the
    model wait for it. Raises SpecError, HTTPRequestEntityTooLarge."""
    try:
        if len(raw) > limit:
            raise oversized(len(raw), limit)
        return await aside(len(raw), parse_body, raw, kind)
    except SpecError as error:
        try:
            number = await aside(len(raw), parse_body, raw, _Number)
        except SpecError:
            raise (too_large(limit) if len(raw) > limit else error) from None
        return Refused(model_id=number.model_id, seq_id=number.seq_id, error=str(error))


def beyond(limit: int) -> int:
    """Bytes of a body that are read for its number, where `limit` bytes are carried out."""
    return min(4 * limit, 2 * LARGE)


def oversized(size: int, limit: int) -> SpecError:
    return SpecError.of(
        "(body)", None, f"has {size} bytes, and may have {limit}; send fewer or shorter data in one request"
    )


def metadata_of(given: dict[str, Any] | None, field: str = "user_metadata") -> dict[str, str]:
    """Return metadata as texts. Raises SpecError beyond its bounds."""
    given = given or {}
    found = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode() for key, value in given.items()
    }
    if len(found) > 64 or any(len(key) > 128 or len(value) > 4096 for key, value in found.items()):
        raise SpecError.of(field, None, "may have 64 entries, with keys of 128 characters and values of 4096")
    return found


def text_of(field: str, text: str | None, longest: int = 200) -> str:
    """Return a text of at most this length. Raises SpecError."""
    if text is not None and (len(text) > longest or not text.isprintable()):
        raise SpecError.of(field, text[:100], f"must have at most {longest} printable characters")
    return text or ""


def seq_of(field: str, seq: int | None, low: int = 0, below: int = MAX_SEQ) -> int:
    """Return a number of the client's own. Raises SpecError."""
    if seq is None:
        raise SpecError.of(field, None, "is missing; use tinker 0.13 or newer, which numbers its requests")
    if not low <= seq < below:
        raise SpecError.of(field, seq, f"must be a whole number, {low} or more and below {below}")
    return seq


def ttl_of(seconds: float | None) -> float:
    """Return a time to live in seconds; 0 for None, which is for ever. Raises SpecError."""
    if seconds is None:
        return 0.0
    if not 1.0 <= seconds <= LONGEST_TTL_S:
        problem = (
            f"must be 1 to {LONGEST_TTL_S:g} seconds; leave it out (null) to keep the checkpoint until it is deleted"
        )
        raise SpecError.of("ttl_seconds", seconds if math.isfinite(seconds) else str(seconds), problem)
    return seconds


def name_of(field: str, name: str | None) -> str:
    """Return the name of a checkpoint. Raises SpecError."""
    if name is None or not NAME.fullmatch(name):
        problem = "must be 1 to 128 letters, digits, `.`, `_` or `-`, the first a letter or a digit"
        raise SpecError.of(field, None if name is None else name[:100], problem)
    return name


def finite(field: str, value: float, low: float = -math.inf, high: float = math.inf) -> float:
    """Return a number between these bounds. Raises SpecError."""
    if not math.isfinite(value) or not low <= value <= high:
        bounds = f", {low:g} to {high:g}" if math.isfinite(high) else f", {low:g} or more" if math.isfinite(low) else ""
        raise SpecError.of(field, value if math.isfinite(value) else str(value), f"must be a finite number{bounds}")
    return value
