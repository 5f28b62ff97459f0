"""Environments that are down, as the jobs that play them are told: an event when the circuit opens and when it closes.

TicketIssuer --look--> Circuits (shared/state/circuits.py) --> events environment_down, environment_up
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import structlog

from opentinker.shared.state.circuits import Circuit, Circuits, circuit_key
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import Conflict, NotFound

log = structlog.get_logger()

BEGINS, ENDS = "environment_down", "environment_up"
BEFORE_S = 1800.0
"""`rollout.max_env_down_s` of jobs that were submitted before it existed."""


class Outages:
    """`leader`: as of TicketIssuer."""

    def __init__(self, store: Store, leader: int) -> None:
        self._store, self._leader, self._circuits = store, leader, Circuits(store.redis)
        self._told: dict[str, float] = {}
        """By job: when the outage began that it was told of; 0: it was told of none, or of its end."""

    async def look(self, job: JobRecord) -> Circuit:
        """Return the circuit of the job's environment, and tell the job if it has opened or closed."""
        circuit = await self._circuits.find(circuit_key(job.tenant, job.spec["environment"]))
        if job.id not in self._told:
            self._told[job.id] = await self._told_before(job.id)
        told = self._told[job.id]
        if circuit.opened == told:
            return circuit
        if circuit.is_open:
            about = {"since": circuit.opened, "groups": circuit.failures, "error": circuit.error}
            await self._tell(job, BEGINS, about | {"hint": "groups are played for trial until one succeeds"})
        else:
            await self._tell(job, ENDS, {"down_s": round(time.time() - told, 1)})
        self._told[job.id] = circuit.opened
        return circuit

    def keep(self, jobs: Sequence[JobRecord]) -> None:
        """Forget all but these jobs."""
        self._told = {job.id: self._told[job.id] for job in jobs if job.id in self._told}

    async def tried(self, job: JobRecord) -> None:
        """Note that a group of the job is played for trial."""
        await self._circuits.tried(circuit_key(job.tenant, job.spec["environment"]), time.time())

    async def _told_before(self, id: str) -> float:
        """Return when an outage began that another scheduler has reported; 0.0: no outage."""
        began, ended = [await self._store.latest_event(id, event) for event in (BEGINS, ENDS)]
        if began is None or (ended is not None and ended["time"] >= began["time"]):
            return 0.0
        return float(began["since"])

    async def _tell(self, job: JobRecord, event: str, detail: dict[str, Any]) -> None:
        log.warning(event, job=job.id, environment=job.spec["environment"]["name"], **detail)
        try:
            await self._store.update(job.id, only_active=True, leader=self._leader, event=event, detail=detail)
        except (Conflict, NotFound):
            return  # it has ended by itself


def down_too_long(circuit: Circuit, job: JobRecord, now: float) -> str | None:
    """The reason to fail the job, or None. The time before it started is not its own, and a group must have failed
    since then: what failed before may work again."""
    longest = job.spec["rollout"].get("max_env_down_s", BEFORE_S)
    began = max(circuit.opened, job.since)
    if now - began <= longest or circuit.failed_at < began:
        return None
    return f"{outage_text(circuit, job.spec)}, longer than rollout.max_env_down_s = {longest:g}"


def outage_text(circuit: Circuit, spec: dict[str, Any]) -> str:
    """Describe an open circuit. `spec`: as stored."""
    since = datetime.fromtimestamp(circuit.opened, UTC).strftime("%H:%M:%S")
    name = spec["environment"]["name"]
    return f"environment {name} is down since {since} UTC ({circuit.failures} groups failed in a row)"
