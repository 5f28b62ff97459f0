"""Chooses how a version reaches each member of a weight group, by where the trainer and the members are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from opentinker.shared.types.swap import Transport
from opentinker.shared.types.workers import WorkerInfo


class Place(NamedTuple):
    machine: str
    """Identifies the machine, across its containers; empty: unknown."""
    gpu: str = ""
    """UUID of the GPU on which the process holds its weights; empty: in the machine's memory."""


def place_of(worker: WorkerInfo, *, on_gpu: bool = True) -> Place:
    """Return where a worker holds its weights: on its first GPU, if it has one and uses it."""
    return Place(worker.machine, worker.gpus[0].uuid if on_gpu and worker.gpus else "")


def transports(trainer: Place, members: Sequence[Place]) -> list[Transport]:
    """Return the transport of each member, in order.

    From a trainer on a GPU: `ipc` to members on that GPU, `nccl` to other GPUs, each of which takes part once, and
    `shared` to others on its machine. Everywhere else, and from a trainer on the CPU, `gloo`: from CPU to CPU it
    needs less processor time than shared memory. A member that cannot use what is chosen takes another one when the
    group forms, see `shared/nn/transport.py`.
    """
    in_nccl = {trainer.gpu}
    found: list[Transport] = []
    for member in members:
        if trainer.gpu and member.gpu == trainer.gpu:
            found.append("ipc")
        elif trainer.gpu and member.gpu and member.gpu not in in_nccl:
            in_nccl.add(member.gpu)
            found.append("nccl")
        elif trainer.gpu and trainer.machine and member.machine == trainer.machine:
            found.append("shared")
        else:
            found.append("gloo")
    return found
