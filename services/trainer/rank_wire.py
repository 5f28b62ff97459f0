"""Frames between the trainer (rank 0) and the ranks it has started: eight bytes of length, then msgpack."""

from __future__ import annotations

import struct

import msgspec

from opentinker.shared import codec
from opentinker.shared.trajectories import Group
from opentinker.shared.types import WeightVersion

HEAD = struct.Struct("<Q")


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first command: who we are together."""

    device: str
    port: int
    """Of rank 0's store."""
    world: int


class Load(msgspec.Struct, frozen=True, tag=True):
    spec: bytes
    """JSON."""
    checkpoint: str | None
    """Directory; None: the base model."""
    resume: bool
    """Otherwise another job's checkpoint gives the weights, and the moments if `optimizer`."""
    optimizer: bool


class Step(msgspec.Struct, frozen=True, tag=True):
    groups: list[Group]
    version: WeightVersion


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Help rank 0 to gather what is shared: the weights, for a checkpoint the optimizer's state too."""

    checkpoint: bool


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The command was not carried out: `finite` tells a refused step from what fails the job."""

    why: str
    finite: bool


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Once a second: this process runs."""


Command = Join | Load | Step | Gather
Answer = Done | Refused | Beat


class ToRank(msgspec.Struct, frozen=True):
    command: Command


class FromRank(msgspec.Struct, frozen=True):
    answer: Answer


def frame(noun: ToRank | FromRank) -> bytes:
    payload = codec.encode(noun)
    return HEAD.pack(len(payload)) + payload
