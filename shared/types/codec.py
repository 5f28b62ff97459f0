"""Nouns <-> bytes: msgpack with bin fields on the wire (self-describing, no copies), JSON for people."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from opentinker.shared.types.errors import OpenTinkerError

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_WRONG = (msgspec.DecodeError, UnicodeError, RecursionError)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


class WireError(OpenTinkerError):
    """Bytes that are not the noun they should be."""


def encode(noun: Any) -> bytes:
    return _encoder.encode(noun)


def decode(kind: type[T], data: bytes) -> T:
    """Raises WireError. Arrays of the result are views of `data`: read-only, no copy."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        noun: T = decoder.decode(data)
    except _WRONG as error:
        raise WireError(f"not a {kind.__name__}: {error}") from None
    return noun


def to_json(noun: Any) -> bytes:
    return msgspec.json.encode(noun)


def from_json(kind: type[T], data: bytes | str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except _WRONG as error:
        raise WireError(f"not a {kind.__name__}: {error}") from None
