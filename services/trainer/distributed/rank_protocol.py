"""Frames between rank 0 and the other ranks: eight bytes of length, then msgpack."""

from __future__ import annotations

import struct

import msgspec
import numpy as np

from opentinker.services.trainer.data.chat import Tokens
from opentinker.services.trainer.data.examples import Example
from opentinker.shared.types import codec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.trajectories import Group

HEAD = struct.Struct("<Q")


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first command: join the process group."""

    device: str
    address: str
    """Address of rank 0's store, and port."""
    port: int
    secret: str
    world: int
    separate: bool
    """See `ProcessGroup.join`."""


class Load(msgspec.Struct, frozen=True, tag=True):
    spec: bytes
    """JSON."""
    checkpoint: str | None
    """Directory; None: the base model."""
    resume: bool
    """False: load the weights, and the moments if `optimizer`, from another job's checkpoint."""
    optimizer: bool
    total_steps: int
    """Length of the learning-rate schedule."""


class RankStep(msgspec.Struct, frozen=True, tag=True):
    groups: list[Group]
    version: WeightVersion


class RankRow(msgspec.Struct, frozen=True):
    """An example: for each part its token ids (int32) and which of them are learned (bool)."""

    parts: list[tuple[bytes, bytes]]
    reference: tuple[float, ...]


def rows_of(examples: list[Example]) -> list[RankRow]:
    return [
        RankRow([(part.ids_T.tobytes(), part.learned_T.tobytes()) for part in example.parts], example.reference)
        for example in examples
    ]


def examples_of(rows: list[RankRow]) -> list[Example]:
    return [
        Example(
            tuple(Tokens(np.frombuffer(ids, np.int32), np.frombuffer(learned, np.bool_)) for ids, learned in row.parts),
            row.reference,
        )
        for row in rows
    ]


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """See `RowLearner.prepare`."""

    rows: list[RankRow]
    home: str


class RowStep(msgspec.Struct, frozen=True, tag=True):
    rows: list[RankRow]


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    rows: list[RankRow]


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Help rank 0 to gather partitioned weights, and for a checkpoint the optimizer state too."""

    checkpoint: bool


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


class StepRefused(msgspec.Struct, frozen=True, tag=True):
    """The command was not executed. `finite` false: the step was refused; true: the job fails."""

    why: str
    finite: bool


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat, once a second."""


Command = Join | Load | RankStep | Prepare | RowStep | Evaluate | Gather
Answer = Done | StepRefused | Beat


class ToRank(msgspec.Struct, frozen=True):
    command: Command


class FromRank(msgspec.Struct, frozen=True):
    answer: Answer


class Hello(msgspec.Struct, frozen=True):
    """The first message of a connection from another trainer: which rank will speak, and the group's token."""

    rank: int
    token: bytes


def frame(noun: ToRank | FromRank | Hello) -> bytes:
    payload = codec.encode(noun)
    return HEAD.pack(len(payload)) + payload
