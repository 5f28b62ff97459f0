"""The base models of trainers that several jobs share, as far as leases and heartbeats tell. Plain memory, no I/O."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from opentinker.services.scheduler.placement.trainer_groups import shared_need
from opentinker.services.scheduler.placement.types import Need
from opentinker.shared.types.core import ENDLESS, JobRecord, JobState, Lease, Pool
from opentinker.shared.types.workers import WorkerInfo

UNCLEAR = "?"
"""Base of a process in transition: no job needs it."""


def shared_bases(
    workers: Iterable[WorkerInfo], leases: Iterable[Lease], jobs: Sequence[JobRecord], waits_since: float
) -> tuple[dict[str, str], set[str]]:
    """Return the base of each worker in such a process (`Gpus.base`), and those to which nothing may be given: a new
    process may have begun to report in the place of one that has died with all of its workers.

    If a job of another base is in the queue since before `waits_since`, the process with the fewest jobs, of those with
    enough places for it, gets no more of them, and is for that base when they have ended.
    """
    needs = {job.id: shared_need(job.spec) for job in jobs}
    wanted = {id: need.base if need else "" for id, need in needs.items()}
    lost = _lost_bases(jobs, leases := list(leases), wanted)
    leased = {lease.worker: lease for lease in leases}
    processes: dict[str, list[WorkerInfo]] = {}
    for worker in workers:
        if worker.bank:
            processes.setdefault(worker.bank, []).append(worker)
    bases = dict[str, str]()
    of_process = {name: _base_of(members, leased, wanted) for name, members in processes.items()}
    endless = {job.id for job in jobs if job.kind in ENDLESS}
    stay = {lease.worker for lease in leases if lease.job in endless}
    sizes = [(of_process[name], sum(one.id not in stay for one in members)) for name, members in processes.items()]
    due = _due_need(jobs, needs, sizes, waits_since)
    large = {name: members for name, members in processes.items() if due and len(members) >= due.places}
    drained = _drained(large, leased, of_process, endless)
    for name, members in processes.items():
        base = of_process[name]
        if not base and lost:
            base = lost.pop(0)
        elif not base and due and name in large:
            base, due, drained = due.base, None, ""
        bases |= {one.id: base for one in members}
    replaced = [members for members in processes.values() if len({(one.host, one.pid) for one in members}) > 1]
    kept = [*replaced, *([processes[drained]] if drained else [])]
    return bases, {one.id for members in kept for one in members if one.id not in leased}


def _base_of(members: Sequence[WorkerInfo], leased: Mapping[str, Lease], wanted: Mapping[str, str]) -> str:
    """Return the base that a process trains; empty if it trains nothing."""
    found = {base for one in members if (base := _base(one, leased.get(one.id), wanted))}
    return found.pop() if len(found) == 1 else UNCLEAR if found else ""


def _due_need(
    jobs: Sequence[JobRecord], needs: Mapping[str, Need | None], sizes: Sequence[tuple[str, int]], waits_since: float
) -> Need | None:
    """Return what the first queued job needs that has waited long while no process of its base has enough places;
    nothing if there is none, or no process of any base has. `sizes`: base of each process, and its places without
    those that jobs without an end hold."""
    most = max((places for _, places in sizes), default=0)
    queued = [job for job in jobs if job.state == JobState.QUEUED and job.since < waits_since]
    fit = [job for job in queued if (need := needs[job.id]) and need.places <= most]
    first = min(fit, key=lambda job: (-job.spec["resources"].get("priority", 0), job.created), default=None)
    need = needs[first.id] if first else None
    there = need and any(base == need.base and places >= need.places for base, places in sizes)
    return None if there else need


def _drained(
    processes: Mapping[str, Sequence[WorkerInfo]],
    leased: Mapping[str, Lease],
    bases: Mapping[str, str],
    endless: Container[str],
) -> str:
    """Return the process with the fewest jobs, among those whose jobs all have an end."""
    held = {name: [leased[one.id].job for one in members if one.id in leased] for name, members in processes.items()}
    ends = [name for name, jobs in held.items() if bases[name] != UNCLEAR and not any(job in endless for job in jobs)]
    return min(ends, key=lambda name: (len(held[name]), name), default="")


def _lost_bases(jobs: Sequence[JobRecord], leases: Sequence[Lease], wanted: dict[str, str]) -> list[str]:
    """Return the bases of begun jobs that have lost their trainer: a process that crashed is theirs when it is back."""
    trained = {lease.job for lease in leases if lease.pool == Pool.TRAINER}
    alive = {wanted[job] for job in trained if wanted.get(job)}
    begun = (wanted[job.id] for job in jobs if job.state.held and job.id not in trained)
    return [base for base in dict.fromkeys(begun) if base and base not in alive]


def _base(worker: WorkerInfo, lease: Lease | None, wanted: Mapping[str, str]) -> str:
    """Return the base that the worker's job trains; empty without a job."""
    if lease is not None and (base := wanted.get(lease.job)):
        return base
    if lease is None and worker.job is None:
        return ""
    return str(worker.detail.get("base") or UNCLEAR)
