"""Frames between the env worker and its child processes: four bytes of length, then msgpack."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from opentinker.shared.types import codec
from opentinker.shared.types.env_protocol import SessionReply

HEAD = struct.Struct("<I")
LARGEST = 2 * 1024**2
"""Bytes of an answer: more than any that the worker would pass on."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Worker -> child."""

    serial: int
    verb: str
    """import | open | step | close | check | rehearse"""
    body: msgspec.Raw
    """OpenSession, StepSession, CloseSession or EnvCheck."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Child -> worker."""

    serial: int
    reply: SessionReply
    errors: list[dict[str, Any]] = []
    """To `check` and `rehearse`: the mistakes, as EnvCheckReply has them."""
    cost: float = 1.0
    """To `open`: what the environment declares that a session of it takes."""
    spent: bool = False
    """The process should be replaced once its sessions are over: it has played enough of them, or holds too much."""


def frame(noun: Any) -> bytes:
    payload = codec.encode(noun)
    return HEAD.pack(len(payload)) + payload
