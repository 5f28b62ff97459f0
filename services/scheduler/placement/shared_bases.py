"""The base models of trainers that several jobs share, as far as leases and heartbeats tell. Plain memory, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opentinker.shared.spec.engines import bank_of
from opentinker.shared.types.core import JobRecord, Lease, Pool, WorkerInfo

UNCLEAR = "?"
"""Base of a process in transition: no job needs it."""


def shared_bases(
    workers: Iterable[WorkerInfo], leases: Iterable[Lease], jobs: Sequence[JobRecord]
) -> tuple[dict[str, str], set[str]]:
    """Return the base of each worker in such a process (`Gpus.base`), and those to which nothing may be given yet.

    The first job of a process decides which base it loads: until then one worker of it alone may have a job.
    """
    wanted = {job.id: bank_of(job.spec) for job in jobs}
    lost = _lost_bases(jobs, leases := list(leases), wanted)
    leased = {lease.worker: lease for lease in leases}
    processes: dict[str, list[WorkerInfo]] = {}
    for worker in workers:
        if worker.bank:
            processes.setdefault(worker.bank, []).append(worker)
    bases, unopened = dict[str, str](), set[str]()
    for members in processes.values():
        found = {base for one in members if (base := _base(one, leased.get(one.id), wanted))}
        base = found.pop() if len(found) == 1 else UNCLEAR if found else ""
        if not found and lost:
            base = lost.pop(0)
        bases |= {one.id: base for one in members}
        if not found and not base:
            unopened |= {one.id for one in members[1:]}
    return bases, unopened


def _lost_bases(jobs: Sequence[JobRecord], leases: Sequence[Lease], wanted: dict[str, str]) -> list[str]:
    """Return the bases of begun jobs that have lost their trainer: a process that crashed is theirs when it is back."""
    trained = {lease.job for lease in leases if lease.pool == Pool.TRAINER}
    alive = {wanted[job] for job in trained if wanted.get(job)}
    begun = (wanted[job.id] for job in jobs if job.state.held and job.id not in trained)
    return [base for base in dict.fromkeys(begun) if base and base not in alive]


def _base(worker: WorkerInfo, lease: Lease | None, wanted: dict[str, str]) -> str:
    """Return the base that the worker's job trains; empty without a job."""
    if lease is not None and (base := wanted.get(lease.job)):
        return base
    if lease is None and worker.job is None:
        return ""
    return str(worker.detail.get("base") or UNCLEAR)
