"""Workers as they report themselves: the heartbeat of a process, and what it runs on."""

from __future__ import annotations

from typing import Any

import msgspec

from opentinker.shared.types.core import Pool


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One that a worker may use, as its driver describes it."""

    index: int
    """On its machine."""
    uuid: str
    model: str
    memory: int
    """Bytes."""
    numa: int = -1
    """Node of the host's memory that is nearest; -1: unknown."""
    links: list[int] = []
    """Indices of the GPUs that NVLink joins it with."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """State that a worker reports with every heartbeat; removed from Redis when the scheduler finds it dead."""

    id: str
    """Stable name of the slot, e.g. `rollout-0`; the same after a restart."""
    incarnation: str
    """New at every process start: a lease names it, so a restarted process does not inherit one."""
    pool: Pool
    host: str
    pid: int
    job: str | None = None
    epoch: int = 0
    status: str = "idle"
    """idle | loading | ready | draining"""
    address: str = ""
    """Address of a rollout worker on SWAP once it is ready; new with every lease, because the engine is new."""
    detail: dict[str, Any] = {}
    """An env worker reports its sessions and environments; a rollout worker of an inference job its requests, and as
    `follows` the job whose live policy it serves."""
    gpus: list[Gpu] = []
    max_ranks: int = 0
    """Ranks of one job that a trainer takes; 0: any number."""
    bank: str = ""
    """Name of the trainer process in which it is one of several, whose jobs share a base model; empty: it trains one
    job alone. `detail` then names the base as long as it has a job."""
    bank_tokens: int = 0
    """Tokens of a pass of that process; 0: it did not say, or there is none."""
    cores: int = 0
    """CPUs of its machine; 0: it did not say."""
    machine: str = ""
    """The same for all workers of one machine, in containers too; empty: it did not say."""

    def ready_for(self, job: str) -> bool:
        """A rollout worker of the job that has loaded its model."""
        return self.pool == Pool.ROLLOUT and self.job == job and self.status == "ready"

    def takes_weights_of(self, job: str) -> bool:
        """Return whether the worker is one of the job's own, or serves the job's live policy."""
        follows = self.pool == Pool.ROLLOUT and bool(self.address) and self.detail.get("follows") == job
        return follows or self.ready_for(job)


class Heartbeat(WorkerInfo, frozen=True, kw_only=True):
    """A heartbeat as Redis keeps it. Readers check whether its number moves (liveness.py)."""

    number: int = 0
    """Grows with every beat of the incarnation."""
    ttl_s: float = 0.0
    """Time for which the number may stay unchanged; 0: not watched, see liveness.py."""
