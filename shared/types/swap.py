"""Messages of a weight swap: trainer -> rollout worker and back."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from opentinker.shared.types.core import WeightVersion


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """Name, dtype and shape of a tensor, in the order in which it travels."""

    name: str
    dtype: str
    shape: list[int]


Transport = Literal["ipc", "shared", "nccl", "gloo"]
"""How the bytes of a version travel to a member: in memory of the GPU, or of the machine, that it shares with the
trainer; from GPU to GPU by NCCL; over TCP."""

SIMULATED = "none"
"""`SwapCommand.device` of a learner without tensors: there is no weight group, only versions."""

MEMBER = ("address", "port", "secret", "rank", "world", "device", "transports")
"""Fields of a `join` that say which place to take in which group."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A few tokens, and what the trainer computes for them under the version that it sends them with."""

    ids: list[int]
    logprobs: list[float]
    """Log-probability of each token but the first, in nats, at temperature 1."""


class SwapCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer -> one rollout worker: join the job's weight group, receive one version through it, sleep during a step,
    or say hello."""

    job: str
    epoch: int
    policy: str = ""
    """Policy of the weights, in a job with several."""
    action: str
    """join | receive | sleep | wake | ping"""
    generation: int
    """Number of the group; a receive for another generation is refused."""
    address: str = ""
    port: int = 0
    secret: str = ""
    """Secret of the group's store, see `shared/nn/transport.py`."""
    rank: int = 0
    world: int = 0
    device: str = "cpu"
    transports: list[Transport] = []
    """Transports of ranks 1, 2, ..., chosen by where they are; empty: NCCL on GPUs, gloo elsewhere."""
    version: WeightVersion | None = None
    manifest: list[TensorInfo] = []
    fingerprints: list[int] = []
    """One per bucket, in order."""
    bucket_bytes: int = 0
    probe: Probe | None = None
    """With a version: what its weights say of some tokens."""

    @property
    def member(self) -> dict[str, Any]:
        """Return the place in the group that a join takes, as arguments of `WeightGroup.join`."""
        return {name: getattr(self, name) for name in MEMBER}


class SwapReply(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    incarnation: str
    ok: bool
    error: str = ""
    version: WeightVersion | None = None
    sleeps: bool = False
    """The engine must sleep while the trainer takes a step."""
    seconds: dict[str, float] = {}
    """pause, transfer, load, resume."""
    mismatch: float | None = None
    """To a receive: of the newest version whose probe the engine has computed since the last one, the mean absolute
    difference of the engine's and the trainer's logprobs, nats."""
