"""Data of forward passes: from protobuf or JSON into `Datum`, with every length and number checked.

Errors are SpecErrors that name the datum; they become the answer of the command (`Skip`), because later commands of the
model wait for its number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from opentinker.services.scheduler.tinker import schema
from opentinker.services.scheduler.tinker.bodies import (
    DatumBody,
    ForwardBody,
    Refused,
    TensorBody,
    oversized,
    too_large,
)
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.tinker import LARGEST_OPTION, Datum, ForwardBackward

Array = npt.NDArray[Any]

MAX_DATA = 4096
"""Sequences of one request."""
MAX_FIELDS = 100_000
"""Fields of a protobuf request and of its data: what is parsed takes a hundred bytes for each."""
MAX_TOKENS = 1 << 20
"""Positions of one sequence, and cells of one of its arrays."""
PROTOBUF_BYTES = 8 << 20
"""Largest request."""
DENSE_BYTES = 8 << 20
"""Largest sum of the arrays of a request, sparse rows filled in: the trainer gets them in one message."""
CLIPPED = ("clip_low_threshold", "clip_high_threshold")
LOSSES: dict[str, tuple[str, ...]] = {
    "cross_entropy": (),
    "importance_sampling": (),
    "ppo": CLIPPED,
    "cispo": CLIPPED,
    "dro": ("beta",),
}
"""Names of the settings of each loss."""
INPUTS = {"cross_entropy": ("weights",)}
SAMPLED = ("logprobs", "advantages", "mask")
"""Arrays that cross_entropy and the other losses take in addition to `target_tokens`."""
_KINDS: dict[int, str] = {schema.FLOAT32: "<f4", schema.INT64: "<i8", schema.INT32: "<i4", schema.BFLOAT16: "<u2"}


@dataclass(frozen=True)
class Tensor:
    """An array as it was sent; sparse rows if there are `crow` and `col`."""

    values: Array
    shape: tuple[int, ...] | None
    crow: Array | None = None
    col: Array | None = None


class Room:
    """Counts down the bytes of a request's arrays, so that sparse rows of a small body do not fill the memory."""

    def __init__(self) -> None:
        self._left = DENSE_BYTES

    def take(self, at: int, name: str, cells: int) -> None:
        """Raises SpecError."""
        self._left -= 4 * cells
        if self._left < 0:
            problem = f"is too large: with it the arrays have more than {DENSE_BYTES} bytes, sparse rows filled in"
            raise _bad(at, name, f"{problem}; send fewer or shorter data in one request")


def from_protobuf(raw: bytes, limit: int = PROTOBUF_BYTES) -> Any:
    """Return the message; Refused if its number alone can be read. Raises SpecError, HTTPRequestEntityTooLarge."""
    try:
        if len(raw) > limit:
            raise oversized(len(raw), limit)
        return _parsed(raw)
    except SpecError as error:
        if (number := _number(raw)) is None:
            raise (too_large(limit) if len(raw) > limit else error) from None
        return Refused(model_id=number[0], seq_id=number[1], error=str(error))


def _parsed(raw: bytes) -> Any:
    if _fields(raw, 3) > MAX_FIELDS:
        raise SpecError.of("(body)", None, f"has more than {MAX_FIELDS} fields; send fewer data in one request")
    message = schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except Exception as error:  # noqa: BLE001 - DecodeError, or ValueError for text that is not UTF-8
        raise SpecError.of("(body)", None, f"is no ForwardBackwardRequest: {error}") from None
    return message


def forward_of_protobuf(message: Any) -> ForwardBackward:
    """Raises SpecError."""
    settings: dict[str, Any] = dict(message.loss_fn_config)
    for name, setting in message.loss_fn_config_v2.items():
        settings[name] = setting.text if setting.HasField("text") else setting.number
    if len(message.data) > MAX_DATA:
        raise _too_many(len(message.data))
    room = Room()
    data = [_datum_of_protobuf(at, datum, message.loss_fn, room) for at, datum in enumerate(message.data)]
    return _forward(data, message.loss_fn, settings, backward=not message.forward_only)


def forward_of_json(body: ForwardBody, *, backward: bool) -> ForwardBackward:
    """Raises SpecError."""
    given = body.forward_backward_input if backward else body.forward_input or body.forward_backward_input
    if given is None:
        raise SpecError.of("forward_backward_input" if backward else "forward_input", None, "is missing")
    if len(given.data) > MAX_DATA:
        raise _too_many(len(given.data))
    room = Room()
    data = [_datum_of_json(at, datum, given.loss_fn, room) for at, datum in enumerate(given.data)]
    return _forward(data, given.loss_fn, given.loss_fn_config or {}, backward=backward)


def tokens_in(forward: ForwardBackward) -> int:
    return sum(len(datum.tokens) for datum in forward.data) // 4


# --- the whole --------------------------------------------------------------------------------------------------------


def _forward(data: list[Datum], loss: str, settings: Mapping[str, Any], *, backward: bool) -> ForwardBackward:
    if not data:
        raise SpecError.of("data", None, "is empty; send at least one datum")
    return ForwardBackward(data=data, loss=loss, options=_settings(loss, settings), backward=backward)


def refuse_unknown(loss: str) -> None:
    """Raises SpecError for a loss that there is not."""
    if loss == "stable_reinforce":
        problem = "is not served, its formula is not public; pass loss_fn=importance_sampling"
        raise SpecError.of("loss_fn", loss, problem)
    if loss not in LOSSES:
        problem = f"is not served; choose one of {', '.join(LOSSES)}, or compute the loss in forward_backward_custom"
        raise SpecError.of("loss_fn", loss[:100], problem)


def _settings(loss: str, settings: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in settings.items():
        if name not in LOSSES[loss]:
            known = ", ".join(LOSSES[loss]) or "none"
            raise SpecError.of(f"loss_fn_config.{name[:100]}", None, f"is no setting of {loss}, which has: {known}")
        if isinstance(value, str) or not 0 <= value <= LARGEST_OPTION:
            raise SpecError.of(f"loss_fn_config.{name}", str(value)[:100], f"must be a number, 0 to {LARGEST_OPTION:g}")
        found[name] = float(value)
    low, high = found.get(CLIPPED[0], 0.0), found.get(CLIPPED[1], math.inf)
    if low > high:
        raise SpecError.of("loss_fn_config.clip_low_threshold", low, f"must not be above clip_high_threshold, {high:g}")
    return dict(sorted(found.items()))


def _too_many(count: int) -> SpecError:
    return SpecError.of(
        "data", None, f"has {count} entries, and one request may have {MAX_DATA}; send several requests"
    )


# --- one datum --------------------------------------------------------------------------------------------------------


def _datum_of_protobuf(at: int, datum: Any, loss: str, room: Room) -> Datum:
    parts = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text") or len(chunk.encoded_text.tokens) % 4:
            raise _bad(at, "model_input", "must be chunks of token ids; images and audio are not served")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    if len(datum.loss_fn_inputs) > 16:
        raise _bad(at, "loss_fn_inputs", "has too many arrays")
    inputs = {name: _tensor_of_protobuf(at, name, tensor) for name, tensor in datum.loss_fn_inputs.items()}
    return _datum(at, np.concatenate(parts) if parts else np.zeros(0, "<i4"), inputs, loss, room)


def _tensor_of_protobuf(at: int, name: str, tensor: Any) -> Tensor:
    kind, shape = _KINDS.get(tensor.dtype), tuple(tensor.shape) or None
    if kind is None:
        raise _bad(at, name, "must be of float32, bfloat16, int32 or int64")
    try:
        if tensor.HasField("sparse_csr"):
            rows = tensor.sparse_csr
            crow, col = np.frombuffer(rows.crow_indices, "<i8"), np.frombuffer(rows.col_indices, "<i8")
            return Tensor(_widened(np.frombuffer(rows.values, kind), tensor.dtype), shape, crow, col)
        return Tensor(_widened(np.frombuffer(tensor.dense, kind), tensor.dtype), shape)
    except ValueError:  # the bytes are no whole number of elements
        raise _bad(at, name, "has bytes that do not fit its type") from None


def _widened(values: Array, dtype: int) -> Array:
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == schema.BFLOAT16 else values


def _datum_of_json(at: int, datum: DatumBody, loss: str, room: Room) -> Datum:
    if any(chunk.type != "encoded_text" for chunk in datum.model_input.chunks):
        raise _bad(at, "model_input", "must be chunks of token ids; images and audio are not served")
    tokens = np.array([token for chunk in datum.model_input.chunks for token in chunk.tokens], np.float64)
    inputs = {name: _tensor_of_json(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    return _datum(at, tokens, inputs, loss, room)


def _tensor_of_json(tensor: TensorBody) -> Tensor:
    crow, col = tensor.sparse_crow_indices, tensor.sparse_col_indices
    return Tensor(
        np.array(tensor.data, np.float64),
        None if tensor.shape is None else tuple(tensor.shape),
        None if crow is None else np.array(crow, np.int64),
        None if col is None else np.array(col, np.int64),
    )


def _datum(at: int, tokens: Array, inputs: dict[str, Tensor], loss: str, room: Room) -> Datum:
    refuse_unknown(loss)
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise _bad(at, "model_input", f"has {len(tokens)} tokens; it must have 1 to {MAX_TOKENS}")
    takes = INPUTS.get(loss, SAMPLED)
    if odd := sorted(inputs.keys() - {"target_tokens", *takes}):
        raise _bad(at, odd[0][:100], f"is no input of {loss}, which takes target_tokens, {', '.join(takes)}")
    needed = ("target_tokens",) if loss == "cross_entropy" else ("target_tokens", "logprobs", "advantages")
    if missing := [name for name in needed if name not in inputs]:
        raise _bad(at, missing[0], f"is missing; {loss} needs {', '.join(needed)}")
    targets = _dense(at, "target_tokens", inputs["target_tokens"], len(tokens), room)
    others = {name: _dense(at, name, inputs[name], len(tokens), room) for name in takes if name in inputs}
    for name, array in others.items():
        if array.shape != targets.shape:
            raise _bad(at, name, f"has shape {list(array.shape)}, and target_tokens {list(targets.shape)}")
    floats = {name: _floats(at, name, array) for name, array in others.items()}
    return Datum(
        tokens=_ids(at, "model_input", tokens), targets=_ids(at, "target_tokens", targets),
        width=targets.shape[1], **floats,
    )  # fmt: skip


def _dense(at: int, name: str, tensor: Tensor, length: int, room: Room) -> Array:
    """Return the array as [N, K]."""
    shape = tensor.shape or (tensor.values.size,)
    if len(shape) not in (1, 2) or any(not 0 <= size <= MAX_TOKENS for size in shape) or math.prod(shape) > MAX_TOKENS:
        raise _bad(at, name, f"has shape {list(shape)[:4]}; it must be N or N x K, with at most {MAX_TOKENS} cells")
    if shape[0] != length or math.prod(shape) == 0:
        raise _bad(at, name, f"has {shape[0]} rows, and the input has {length} tokens")
    room.take(at, name, math.prod(shape))
    wide = (shape[0], shape[1] if len(shape) == 2 else 1)
    if tensor.crow is not None or tensor.col is not None:
        return _from_sparse(at, name, tensor, wide)
    if tensor.values.size != math.prod(shape):
        raise _bad(at, name, f"has {tensor.values.size} values, and its shape is {list(shape)}")
    return tensor.values.reshape(wide)


def _from_sparse(at: int, name: str, tensor: Tensor, shape: tuple[int, int]) -> Array:
    crow, col, values = tensor.crow, tensor.col, tensor.values
    if crow is None or col is None:
        raise _bad(at, name, "has row or column indices alone; sparse arrays have both")
    whole = crow.size == shape[0] + 1 and crow[0] == 0 and crow[-1] == values.size == col.size
    if not whole or np.any(np.diff(crow) < 0) or np.any((col < 0) | (col >= shape[1])):
        raise _bad(at, name, f"has indices that do not fit its shape {list(shape)}")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(crow)), col] = values
    return dense


def _ids(at: int, name: str, array: Array) -> bytes:
    if not np.all(np.isfinite(array)) or np.any(array < 0) or np.any(array >= 2**31) or np.any(array % 1):
        raise _bad(at, name, "must be token ids, whole numbers from 0")
    return array.astype("<i4").tobytes()


def _floats(at: int, name: str, array: Array) -> bytes:
    with np.errstate(over="ignore"):
        found = array.astype("<f4")
    if not np.all(np.isfinite(found)):
        raise _bad(at, name, "must be finite numbers")
    return found.tobytes()


def _bad(at: int, name: str, problem: str) -> SpecError:
    return SpecError.of(f"data[{at}].{name}", None, problem)


# --- the bound of protobuf --------------------------------------------------------------------------------------------


def _fields(raw: bytes | memoryview, within: int = 0) -> int:
    """Count the fields of a message, with those of its fields number `within`, up to a little more than MAX_FIELDS.
    Malformed messages are left to the parser."""
    view, at, count = memoryview(raw), 0, 0
    while at < len(view) and count <= MAX_FIELDS:
        key, at = _varint(view, at)
        count += 1
        if key & 7 == 0:
            _, at = _varint(view, at)
        elif key & 7 == 2:
            length, at = _varint(view, at)
            if within and key >> 3 == within:
                count += _fields(view[at : at + length])
            at += length
        else:
            at += {1: 8, 5: 4}.get(key & 7, len(view))
    return count


def _number(raw: bytes) -> tuple[str, int] | None:
    """Return model_id and seq_id, with which a message begins; None if it does not."""
    view, (key, at) = memoryview(raw), _varint(memoryview(raw), 0)
    length, at = _varint(view, at)
    model, (next_key, next_at) = bytes(view[at : at + length]), _varint(view, at + length)
    seq, _ = _varint(view, next_at)
    if (key, next_key) != (1 << 3 | 2, 2 << 3) or len(model) != length or not model.isascii():
        return None
    return model.decode(), seq


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while at < len(view) and shift < 64:
        byte = view[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            break
    return value, at
