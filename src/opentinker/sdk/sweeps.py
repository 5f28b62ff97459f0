"""Sweeps from Python: calls of `AsyncClient`."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from opentinker.sdk.http import Http, resource
from opentinker.sdk.inputs import Spec, prepared
from opentinker.sdk.labels import label_changes, list_query
from opentinker.shared.api_types import DeletedSweep, Sweep, SweepGroup, SweepGroups, SweepSummary
from opentinker.shared.types.sweeps import TABLE

SUBMIT_S = 720.0
"""Least time limit of a submission: the server checks every value that refers to something."""
POLL_S = 1.0


class SweepCalls:
    _http: Http

    async def sweep(
        self,
        spec: Spec,
        table: Mapping[str, Any] | None = None,
        *,
        beside: str | Path | None = None,
        idempotency_key: str | None = None,
    ) -> SweepSummary:
        """Submit a sweep: a spec with a table `sweep`, or the path of a .toml or .json file with one. `table` is that
        table if the spec has none, or replaces parts of it:

            client.sweep("job.toml", {"parameters": {"train.lr": [1e-5, 1e-4]}, "seeds": [1, 2, 3]})

        Raises ApiError with every mistake. Paths are found as by `submit`.
        """
        data = await prepared(self._http, spec, beside)
        if table is not None and isinstance(data, dict):
            data = {**data, TABLE: {**(data.get(TABLE) or {}), **table}}
        return await self._submit_sweep(data, idempotency_key)

    async def _submit_sweep(self, data: Any, idempotency_key: str | None) -> SweepSummary:
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        limit_s = max(self._http.timeout_s, SUBMIT_S)
        return await self._http.json(SweepSummary, "POST", "/v1/sweeps", noun=data, headers=headers, timeout_s=limit_s)

    async def sweeps(
        self,
        limit: int = 100,
        *,
        states: Collection[str] | None = None,
        kinds: Collection[str] | None = None,
        name: str | None = None,
        notes: str | None = None,
        project: str | None = None,
        tags: Collection[str] | None = None,
        environment: str | None = None,
        model: str | None = None,
        owner: str | None = None,
        search: str | None = None,
        sort: str | None = None,
    ) -> list[SweepSummary]:
        """The first `limit` sweeps, newest first or by `sort`; filters are those of `jobs`. A sweep whose model or
        environment is varied has none."""
        lists = {"state": states, "kind": kinds, "tag": tags}
        texts = {"name": name, "notes": notes, "project": project}
        texts |= {"environment": environment, "model": model, "owner": owner}
        query = list_query(lists, {**texts, "search": search, "sort": sort})
        return await self._http.newest("/v1/sweeps", "sweeps", limit, query)

    async def sweep_groups(self, by: str = "project", filters: Mapping[str, str] | None = None) -> list[SweepGroup]:
        """Count the sweeps of each project, tag, name, state, kind, environment, model or owner, by state. `filters`:
        those of GET /v1/sweeps."""
        return (await self._http.json(SweepGroups, "GET", "/v1/sweeps/groups", {"by": by, **(filters or {})}))["groups"]

    async def label_sweep(
        self,
        id: str,
        *,
        name: str | None = None,
        project: str | None = None,
        tags: Collection[str] | None = None,
        add_tags: Collection[str] | None = None,
        remove_tags: Collection[str] | None = None,
        notes: str | None = None,
    ) -> SweepSummary:
        """Change what a sweep is called and what is noted about it, running or over, as `label` does with a job. Jobs
        that it submits later have the new ones. Raises ApiConflict for more than 19 tags."""
        lists = {"tags": tags, "add_tags": add_tags, "remove_tags": remove_tags}
        changes = label_changes(lists, {"name": name, "project": project, "notes": notes})
        return await self._http.json(SweepSummary, "PATCH", resource("sweeps", id), noun=changes)

    async def sweep_state(self, id: str) -> Sweep:
        """A sweep with its trials, the best so far, and the importance of its settings. Raises ApiNotFound."""
        return await self._http.json(Sweep, "GET", resource("sweeps", id))

    async def cancel_sweep(self, id: str) -> SweepSummary:
        """Cancel a sweep and its jobs. Raises ApiConflict if it has ended otherwise."""
        return await self._http.json(SweepSummary, "POST", resource("sweeps", id, "/cancel"))

    async def delete_sweep(self, id: str) -> DeletedSweep:
        """Delete a sweep that has ended, and the artifacts of its jobs. Raises ApiConflict."""
        return await self._http.json(DeletedSweep, "DELETE", resource("sweeps", id))

    async def wait_sweep(self, id: str, timeout_s: float | None = None) -> Sweep:
        """Wait until a sweep has ended and return it. Raises TimeoutError; the sweep continues."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (found := await self.sweep_state(id))["state"] == "running":
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"sweep {id} is still running after {timeout_s} s")
            await asyncio.sleep(POLL_S)
        return found


def best_job(found: Sweep) -> str:
    """Return the best job of the best trial."""
    assert found["best"] is not None
    sign = 1 if found["goal"] == "minimize" else -1
    jobs = found["all_trials"][found["best"]["number"]]["jobs"]
    return min(jobs, key=lambda job: math.inf if job["value"] is None else sign * job["value"])["id"]
