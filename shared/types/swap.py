"""Messages of a weight swap: trainer -> rollout worker and back."""

from __future__ import annotations

from typing import Any

import msgspec

from opentinker.shared.types.core import WeightVersion


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """Name, dtype and shape of a tensor, in the order in which it travels."""

    name: str
    dtype: str
    shape: list[int]


SIMULATED = "none"
"""`SwapCommand.device` of a learner without tensors: there is no weight group, only versions."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A few tokens, and what the trainer computes for them under the version that it sends them with."""

    ids: list[int]
    logprobs: list[float]
    """Log-probability of each token but the first, in nats, at temperature 1."""


class SwapCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer -> one rollout worker: join the job's weight group, or receive one version through it, or say hello."""

    job: str
    epoch: int
    policy: str = ""
    """Policy of the weights, in a job with several."""
    action: str
    """join | receive | ping"""
    generation: int
    """Number of the group; a receive for another generation is refused."""
    address: str = ""
    port: int = 0
    rank: int = 0
    world: int = 0
    device: str = "cpu"
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
        return {name: getattr(self, name) for name in ("address", "port", "rank", "world", "device")}


class SwapReply(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    incarnation: str
    ok: bool
    error: str = ""
    version: WeightVersion | None = None
    seconds: dict[str, float] = {}
    """pause, transfer, load, resume."""
    mismatch: float | None = None
    """To a receive: of the newest version whose probe the engine has computed since the last one, the mean absolute
    difference of the engine's and the trainer's logprobs, nats."""
