"""Frames between the env worker and its child processes: four bytes of length, then msgpack."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from opentinker.shared import codec
from opentinker.shared.sessions import SessionReply

HEAD = struct.Struct("<I")


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Worker -> child."""

    serial: int
    verb: str
    """open | step | close"""
    body: msgspec.Raw
    """OpenSession, StepSession or CloseSession."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Child -> worker."""

    serial: int
    reply: SessionReply


def frame(noun: Any) -> bytes:
    payload = codec.encode(noun)
    return HEAD.pack(len(payload)) + payload
