"""Frames between the env worker and its child processes: four bytes of length, then msgpack."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from opentinker.shared.types import codec
from opentinker.shared.types.env_protocol import EnvAbout, EnvRowsReply, SessionReply

HEAD = struct.Struct("<I")
MAX_MESSAGE_BYTES = 2 * 1024**2
"""Largest answer in bytes: larger than any that the worker accepts."""


class ChildCall(msgspec.Struct, frozen=True, array_like=True):
    """Worker -> child."""

    serial: int
    verb: str
    """import | open | step | close | check | rehearse | rows"""
    body: msgspec.Raw
    """OpenSession, StepSession, CloseSession, EnvCheck or EnvRows."""


class ChildAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Child -> worker."""

    serial: int
    reply: SessionReply
    errors: list[dict[str, Any]] = []
    """Answer to `check` and `rehearse`: mistakes as in EnvCheckReply."""
    cost: float = 1.0
    """Answer to `open`: the declared cost of a session."""
    spent: bool = False
    """Asks for replacement after its sessions, because of their number or its memory."""
    seats: list[str] = []
    """Answer to `check` and `rehearse`: as in EnvCheckReply."""
    rows: EnvRowsReply | None = None
    """Answer to `rows`."""
    about: EnvAbout | None = None
    """Answer to `check`: as in EnvCheckReply."""


def frame(noun: Any) -> bytes:
    payload = codec.encode(noun)
    return HEAD.pack(len(payload)) + payload
