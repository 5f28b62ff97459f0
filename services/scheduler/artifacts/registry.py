"""The checkpoints of a tenant as one list: where each comes from, what it is called, how it was evaluated, by eval jobs
and while its own job trained. Read only.

Everything is read from the index of the artifact store, the records of jobs and the published names. A checkpoint is
listed once it is in the store.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial

import orjson

from opentinker.shared.api_types.artifacts import Evaluation, RegisteredCheckpoint
from opentinker.shared.evaluation.categories import categories_of
from opentinker.shared.evaluation.setting_text import setting_of
from opentinker.shared.single_flight import SingleFlight
from opentinker.shared.state.artifacts import ArtifactEntry, ArtifactIndex
from opentinker.shared.state.list_rows import ListRow, ListRows
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobRecord, JobState, split_part
from opentinker.shared.types.manifest import ADAPTER, TRAINER_STATE

MOST_EVALUATIONS = 1000
"""Eval jobs of a tenant whose results are shown: the newest."""
MOST_ANCESTORS = 64
"""Continuations that a lineage follows back."""
FRESH_S = 0.5
TRAINS = ("rl", "sft", "dpo")


class Registry:
    def __init__(self, store: Store, index: ArtifactIndex, *, most: int = 1000, jobs_at_once: int = 100) -> None:
        """`most`: checkpoints of a tenant that are listed, the newest; published ones are listed always."""
        self.most, self._jobs_at_once = most, jobs_at_once
        self._store, self._index, self._rows = store, index, ListRows(store.redis)
        self._all = SingleFlight[list[RegisteredCheckpoint]](FRESH_S)

    async def of(self, tenant: str) -> list[RegisteredCheckpoint]:
        """Return the tenant's checkpoints, newest first."""
        listed = await self._all.get(tenant, partial(self._read, tenant))
        names = await self._names(tenant)
        return [{**one, "published": names.get(one["checkpoint"], [])} for one in listed]

    async def _names(self, tenant: str) -> dict[str, list[str]]:
        """Return the published names by JOB@STEP."""
        found: dict[str, list[str]] = {}
        for name, one in (await self._index.published(tenant)).items():
            found.setdefault(f"{one.job}@{one.step}", []).append(name)
        return found

    async def _read(self, tenant: str) -> list[RegisteredCheckpoint]:
        rows = {row.id: row for row in await self._rows.of(tenant)}
        named = await self._names(tenant)
        entries = await self._newest(tenant, rows, named)
        records = await self._records(tenant, {part for part, _ in entries})
        evaluations = await self._evaluations([row for row in rows.values() if row.kind == "eval"])
        return [
            _registered(records[part], entry, records, evaluations[f"{part}@{_step(entry)}"])
            for part, entry in entries
            if part in records
        ]

    async def _newest(
        self, tenant: str, rows: Mapping[str, ListRow], named: Iterable[str]
    ) -> list[tuple[str, ArtifactEntry]]:
        """Return the checkpoints that are listed, newest first, each with the id of its job or policy.

        A checkpoint is not newer than the last change of its job, so jobs without a change since the oldest of those
        that are listed are not read."""
        stored = [part for part in await self._index.stored(tenant) if _trains(rows.get(split_part(part)[0]))]
        stored.sort(key=lambda part: rows[split_part(part)[0]].updated, reverse=True)
        found: dict[str, tuple[str, ArtifactEntry]] = {}
        for parts in self._chunks(stored):
            if _newer_than(found, rows[split_part(parts[0])[0]].updated) >= self.most:
                break
            found |= await self._entries(parts)
        newest = heapq.nlargest(self.most, found.items(), key=lambda item: _age(*item[1]))
        listed = dict(newest)
        for parts in self._chunks(sorted({name.partition("@")[0] for name in named if name not in listed})):
            read = await self._entries(parts)
            listed |= {name: entry for name, entry in read.items() if name in named}
        return sorted(listed.values(), key=lambda one: _age(*one), reverse=True)

    async def _entries(self, parts: list[str]) -> dict[str, tuple[str, ArtifactEntry]]:
        """Return checkpoints by JOB@STEP."""
        found = await self._index.checkpoints_of(parts, self.most)
        return {
            f"{part}@{_step(entry)}": (part, entry)
            for part, entries in zip(parts, found, strict=True)
            for entry in entries
            if entry.manifest is not None
        }

    async def _records(self, tenant: str, parts: Iterable[str]) -> dict[str, JobRecord]:
        """Return the records of these jobs and policies, and of those from whose checkpoints they descend, by id."""
        found: dict[str, JobRecord] = {}
        wanted = set(parts)
        for _ in range(MOST_ANCESTORS):
            for chunk in self._chunks(sorted(wanted)):
                found |= {job.id: job for job in await self._store.jobs(chunk) if job.tenant == tenant}
            origins = {origin_of(found[part])[0] for part in wanted if part in found}
            wanted = origins - found.keys() - {""}
            if not wanted:
                break
        return found

    async def _evaluations(self, rows: list[ListRow]) -> dict[str, list[Evaluation]]:
        """Return the eval jobs by the checkpoint that they played, newest first. `rows`: newest first."""
        found: dict[str, list[Evaluation]] = defaultdict(list)
        for chunk in self._chunks([row.id for row in rows[:MOST_EVALUATIONS]]):
            for job in await self._store.jobs(chunk):
                part, step = origin_of(job)
                if part:
                    found[f"{part}@{step}"].append(evaluation_of(job))
        return found

    def _chunks(self, ids: list[str]) -> Iterable[list[str]]:
        return (ids[start : start + self._jobs_at_once] for start in range(0, len(ids), self._jobs_at_once))


def origin_of(job: JobRecord) -> tuple[str, int]:
    """Return the job or policy from whose checkpoint it starts, and the step; an empty id if it starts from none."""
    part, _, step = ((job.spec.get("start") or {}).get("from") or "").partition("@")
    return (part, int(step)) if step.isdigit() else ("", 0)


def evaluation_of(job: JobRecord) -> Evaluation:
    """Return an eval job of a checkpoint as lists have it."""
    part, step = origin_of(job)
    values = orjson.loads(job.result)["values"] if job.result else {}
    return {
        "job": job.id,
        "name": job.name,
        "policy": split_part(part)[1],
        "step": step,
        "state": job.state,
        "environment": job.spec["environment"]["name"],
        "setting": setting_of(job.spec),
        "finished": job.finished or None,
        "values": values,
        "categories": categories_of(values),
        "during_training": False,
    }


def _evaluations_of(part: JobRecord, entry: ArtifactEntry, by_jobs: list[Evaluation]) -> list[Evaluation]:
    """Return all evaluations of a checkpoint, newest first, those that are not over before all others."""
    found = [*by_jobs]
    if entry.evaluation is not None:
        values = entry.evaluation.values
        found.append(
            {
                "job": split_part(part.id)[0],
                "name": part.name,
                "policy": split_part(part.id)[1],
                "step": _step(entry),
                "state": JobState.SUCCEEDED,
                "environment": (part.spec.get("environment") or {}).get("name", ""),
                "setting": setting_of(part.spec, split_part(part.id)[1]),
                "finished": entry.evaluation.finished,
                "values": values,
                "categories": categories_of(values),
                "during_training": True,
            }
        )
    return sorted(found, key=lambda one: one["finished"] or math.inf, reverse=True)


def compared(evaluations: list[Evaluation]) -> dict[str, int]:
    """Return by setting the place of the evaluation that counts: the first with values, of the newest first."""
    found: dict[str, int] = {}
    for place, one in enumerate(evaluations):
        if one["values"]:
            found.setdefault(one["setting"], place)
    return found


def lineage_of(part: JobRecord, records: Mapping[str, JobRecord]) -> list[str]:
    """Return the base model, then JOB@STEP of each checkpoint from which training continued, the oldest first."""
    chain: list[str] = []
    at = part
    while len(chain) < MOST_ANCESTORS:
        source, step = origin_of(at)
        if not source:
            break
        chain.append(f"{source}@{step}")
        if source not in records:
            break
        at = records[source]
    return [at.spec["model"]["base"], *reversed(chain)]


def _registered(
    part: JobRecord, entry: ArtifactEntry, records: Mapping[str, JobRecord], evaluations: list[Evaluation]
) -> RegisteredCheckpoint:
    assert entry.manifest is not None
    files, lora = entry.manifest.files, part.spec["model"].get("lora")
    job, policy = split_part(part.id)
    weights = any(name.endswith(".safetensors") and "/" not in name for name in files)
    listed = _evaluations_of(part, entry, evaluations)
    return {
        "checkpoint": f"{part.id}@{entry.manifest.step}",
        "job": job,
        "job_name": part.name,
        "kind": part.kind,
        "policy": policy,
        "step": entry.manifest.step,
        "created": entry.created,
        "bytes": entry.bytes,
        "model_bytes": sum(file.bytes for name, file in files.items() if not name.startswith(TRAINER_STATE)),
        "project": part.project,
        "tags": part.tags,
        "base_model": part.spec["model"]["base"],
        "weights": "lora" if ADAPTER in files else "whole" if weights else "none",
        "lora_rank": lora["rank"] if ADAPTER in files and lora else None,
        "published": [],
        "lineage": lineage_of(part, records),
        "evaluations": listed,
        "compared": compared(listed),
        "ranked": None,
    }


def _newer_than(found: Mapping[str, tuple[str, ArtifactEntry]], time: float) -> int:
    return sum(entry.created > time for _, entry in found.values())


def _trains(row: ListRow | None) -> bool:
    return row is not None and row.kind in TRAINS


def _step(entry: ArtifactEntry) -> int:
    return 0 if entry.manifest is None else entry.manifest.step


def _age(part: str, entry: ArtifactEntry) -> tuple[float, str, int]:
    return entry.created, part, _step(entry)
