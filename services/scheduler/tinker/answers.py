"""Results as clients read them: protobuf where they accept it and the result has such a form, JSON elsewhere."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.tinker import schema
from opentinker.services.scheduler.tinker.bodies import PROTOBUF
from opentinker.shared.state.tinker.requests import TRAINED
from opentinker.shared.types.tinker import (
    SMALL_RESULT,
    Failed,
    Forwarded,
    Likely,
    Loaded,
    Result,
    Sampled,
    Saved,
    Stepped,
    bytes_in,
)

MASKED = -99999.0


async def response_of(request: web.Request, owner: str, result: Result) -> web.Response:
    """Return the answer to retrieve_future. `owner`: the model or sampler of the request."""
    if isinstance(result, Failed):
        if result.lost:
            raise web.HTTPGone(text=result.error if TRAINED in owner else f"{result.error}; send the request again")
        return json_response({"error": result.error, "category": result.category})
    protobuf = PROTOBUF in request.headers.get("Accept", "") and isinstance(result, Forwarded | Sampled)
    is_small = bytes_in(result) <= SMALL_RESULT  # a large one is encoded in a thread, so that others are answered
    encode = partial(_encoded, owner, result, protobuf=protobuf)
    body = encode() if is_small else await asyncio.to_thread(encode)
    return web.Response(body=body, content_type=PROTOBUF if protobuf else "application/json")


def _encoded(owner: str, result: Forwarded | Stepped | Saved | Loaded | Sampled, *, protobuf: bool) -> bytes:
    if protobuf and isinstance(result, Forwarded | Sampled):
        message = _forwarded(result) if isinstance(result, Forwarded) else _sampled(result)
        return bytes(message.SerializeToString())
    return orjson.dumps(_as_json(owner, result))


def _as_json(owner: str, result: Forwarded | Stepped | Saved | Loaded | Sampled) -> dict[str, Any]:
    match result:
        case Stepped(metrics=metrics):
            return {"type": "optim_step", "metrics": _finite(metrics)}
        case Saved(path=path, sampler=sampler):
            return {"path": path or None, "sampling_session_id": sampler or None}
        case Loaded(path=path):
            return {"model_id": owner, "path": path or None}
        case Forwarded():
            return _forwarded_json(result)
        case Sampled():
            return _sampled_json(result)


def _piece(data: Any) -> orjson.Fragment:
    """Encode one part. A single call that encodes everything would hold the interpreter and block other threads."""
    return orjson.Fragment(orjson.dumps(data))


def _finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """JSON has no NaN, and clients read no null here."""
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


# --- forward passes -------------------------------------------------------------------------------------------------


def _shape(logprobs: bytes, width: int) -> list[int]:
    cells = len(logprobs) // 4
    return [cells] if width == 1 else [cells // width, width]


def _forwarded_json(result: Forwarded) -> dict[str, Any]:
    outputs = [
        _piece({"logprobs": {"data": _numbers(one, "<f4"), "dtype": "float32", "shape": _shape(one, width)}})
        for one, width in zip(result.logprobs, result.widths, strict=True)
    ]
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": _finite(result.metrics)}


def _forwarded(result: Forwarded) -> Any:
    """Data of one width follow each other in a record; where the width changes, the next one begins."""
    message = schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in result.metrics.items():
        message.metrics[name] = math.nan if value is None else value
    start = 0
    for end in range(1, len(result.widths) + 1):
        if end == len(result.widths) or result.widths[end] != result.widths[start]:
            _add_record(message, result.logprobs[start:end], result.widths[start])
            start = end
    return message


def _add_record(message: Any, logprobs: Sequence[bytes], width: int) -> None:
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    tensor = record.fields["logprobs"]
    tensor.data, tensor.dtype = b"".join(logprobs), schema.FLOAT32
    tensor.offsets = np.array([0, *accumulate(map(len, logprobs))], "<i8").tobytes()
    if width > 1:
        tensor.trailing_shape.append(width)


# --- samples --------------------------------------------------------------------------------------------------------


def _sampled(result: Sampled) -> Any:
    message = schema.SampleResponse()
    for one in result.sequences:
        sequence = message.sequences.add(stop_reason=int(one.stop == "length"), tokens=one.tokens)
        sequence.logprobs = one.logprobs
        _fill(sequence.topk_sampled_logprobs, one.likely)
    if result.prompt_logprobs:
        message.prompt_logprobs = result.prompt_logprobs
    _fill(message.topk_prompt_logprobs, result.likely_prompt)
    return message


def _fill(field: Any, likely: Likely | None) -> None:
    if likely is not None:
        field.token_ids, field.logprobs, field.k, field.length = likely.ids, likely.logprobs, likely.k, likely.length


def _sampled_json(result: Sampled) -> dict[str, Any]:
    sequences = [
        _piece(
            {
                "stop_reason": one.stop,
                "tokens": _numbers(one.tokens, "<i4"),
                "logprobs": _numbers(one.logprobs, "<f4"),
                "topk_logprobs": _pairs(one.likely),
            }
        )
        for one in result.sequences
    ]
    logprobs = [None if math.isnan(value) else value for value in _numbers(result.prompt_logprobs, "<f4")]
    return {
        "type": "sample",
        "sequences": sequences,
        "prompt_logprobs": logprobs or None,
        "topk_prompt_logprobs": _pairs(result.likely_prompt),
    }


def _numbers(raw: bytes, kind: str) -> list[Any]:
    found: list[Any] = np.frombuffer(raw, kind).tolist()
    return found


def _pairs(likely: Likely | None) -> list[list[tuple[int, float]] | None] | None:
    """Return the likeliest tokens of each place with their log-probabilities; None for a place without any."""
    if likely is None:
        return None
    ids = np.frombuffer(likely.ids, "<i4").reshape(likely.length, likely.k).tolist()
    logprobs = np.frombuffer(likely.logprobs, "<f4").reshape(likely.length, likely.k).tolist()
    rows = [
        [(id, value) for id, value in zip(*row, strict=True) if value > MASKED]
        for row in zip(ids, logprobs, strict=True)
    ]
    return [row or None for row in rows]
