"""Lists a job's artifacts: files in its directory and in the artifact store. Read only.

    {data_dir}/jobs/{job}           the workshop: what trainers and others write while the job runs
    artifact store {tenant}/{job}   what `archiver.py` has put there, by the job's rules; the index is in Redis

If both have a checkpoint of the same step, the workshop's wins: a resumed trainer may have written it again.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import shutil
import time
import uuid
from pathlib import Path

import msgspec

from opentinker.services.scheduler.artifacts import checkpoint_dir
from opentinker.services.scheduler.artifacts.checkpoint_dir import CheckpointView
from opentinker.services.scheduler.artifacts.store import ArtifactStore, DirectoryStore, Opened, inside, store_of
from opentinker.shared.api_types.artifacts import Artifact, Kind
from opentinker.shared.durable_files import sync_tree
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.artifacts import CHECKPOINTS, ArtifactIndex
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import NotFound
from opentinker.shared.types.manifest import ADAPTER, MANIFEST, TRAINER_STATE

METRICS = ("metrics.jsonl", "validation.jsonl", "distributions.jsonl", "rows.jsonl", "matches.jsonl")
LOG, EVENTS = "logs.jsonl", "events.jsonl"
"""Made when the job is over."""
EPISODES = ("transcripts", "rollouts")
"""Directories of files, one per step."""
FETCHED_S = 3600.0
"""Longer than a submission takes."""


class ArtifactCatalog:
    def __init__(self, ctx: Context) -> None:
        """Raises SpecError: the settings name no store that could be."""
        self.store: ArtifactStore = store_of(ctx.settings)
        self.index = ArtifactIndex(ctx.store.redis)
        self._data_dir = ctx.settings.data_dir
        self.workshop = DirectoryStore(ctx.settings.data_dir / "jobs")

    def home(self, job: JobRecord) -> Path:
        return self.workshop.root / job.id

    async def checkpoints(self, job: JobRecord) -> list[CheckpointView]:
        """Oldest first. What moves into the store is in its index before it leaves the directory, so that is read
        first."""
        here = await asyncio.to_thread(checkpoint_dir.committed, self.home(job) / CHECKPOINTS)
        kept = (await self.index.of(job.id)).values()
        found = {
            entry.manifest.step: CheckpointView(entry.manifest, self.store, f"{key_of(job)}/{entry.at}", entry.metric)
            for entry in kept
            if entry.manifest is not None
        }
        for directory, manifest in here:
            known = found.get(manifest.step)
            metric = known.metric if known is not None and known.manifest == manifest else None
            prefix = f"{job.id}/{CHECKPOINTS}/{directory.name}"
            found[manifest.step] = CheckpointView(manifest, self.workshop, prefix, metric, here=True)
        return sorted(found.values(), key=lambda held: held.manifest.age)

    async def listed(self, job: JobRecord) -> list[Artifact]:
        """Return every file."""
        kept = await self.index.of(job.id)
        found = [
            _entry(f"{CHECKPOINTS}/{held.manifest.name}/{name}", file.bytes, file.sha256, held.manifest.created)
            for held in await self.checkpoints(job)
            for name, file in held.manifest.files.items()
        ]
        files = {path: entry for path, entry in kept.items() if entry.manifest is None}
        found += [_entry(path, file.bytes, file.sha256, file.created) for path, file in files.items()]
        live = await asyncio.to_thread(live_files, self.home(job))
        found += [_entry(path, s.st_size, "", s.st_mtime) for path, s in live.items() if path not in files]
        return sorted(found, key=lambda entry: entry["path"])

    async def open_checkpoint(self, job: JobRecord, step: int | None, everything: bool) -> checkpoint_dir.Archive:
        """As `checkpoint_dir.open_archive`. One that has just moved into the store is opened there. Raises NotFound."""
        try:
            return await checkpoint_dir.open_archive(await self.checkpoints(job), step, everything)
        except NotFound:
            return await checkpoint_dir.open_archive(await self.checkpoints(job), step, everything)

    async def open(self, job: JobRecord, path: str) -> tuple[Opened, str]:
        """A file of the list, and its SHA-256. One that has just moved into the store is opened there. Raises
        NotFound."""
        try:
            return await self._open(job, path)
        except NotFound:
            return await self._open(job, path)

    async def _open(self, job: JobRecord, path: str) -> tuple[Opened, str]:
        kept = (await self.index.of(job.id)).get(path)
        if kept is not None and kept.manifest is None:
            return await self.store.open(f"{key_of(job)}/{kept.at}"), kept.sha256
        if path in await asyncio.to_thread(live_files, self.home(job)):
            opened = await self.workshop.open(f"{job.id}/{path}")
            digest = hashlib.sha256()
            async for chunk in opened.chunks(0, opened.size):
                digest.update(chunk)
            return opened, digest.hexdigest()
        for held in await self.checkpoints(job):
            name = path.removeprefix(f"{CHECKPOINTS}/{held.manifest.name}/")
            if name in held.manifest.files:
                return await held.store.open(f"{held.prefix}/{inside(name)}"), held.manifest.files[name].sha256
        raise NotFound(f"job {job.id} has no {path[:200]!r}; `opentinker artifacts {job.id}` lists what there is")

    async def open_metrics(self, job: JobRecord) -> Opened | None:
        """Open the job's metrics.jsonl, without its SHA-256. None: the file is missing. Raises StoreUnavailable."""
        name = METRICS[0]
        kept = (await self.index.of(job.id)).get(name)
        try:
            if kept is not None:
                return await self.store.open(f"{key_of(job)}/{kept.at}")
            return await self.workshop.open(f"{job.id}/{name}")
        except NotFound:
            return None

    async def size(self, job: JobRecord) -> int:
        return sum(entry["bytes"] for entry in await self.listed(job))

    async def on_disk(self, held: CheckpointView) -> Path:
        """Return its directory on this machine; from an object store it is fetched, for an hour. Raises NotFound,
        StoreUnavailable, OSError."""
        if isinstance(held.store, DirectoryStore):
            return held.store.path(held.prefix)
        text = msgspec.json.encode(held.manifest)
        place = self._data_dir / "fetched" / f"{held.manifest.job}-{hashlib.sha256(text).hexdigest()[:16]}"
        if place.is_dir():
            os.utime(place)
            return place
        work = place.with_name(f".{place.name}-{uuid.uuid4().hex}")
        try:
            for name, entry in held.manifest.files.items():
                await self._fetch(f"{held.prefix}/{inside(name)}", work / inside(name), entry.sha256)
            (work / MANIFEST).write_bytes(text)
            await asyncio.to_thread(sync_tree, work)
            if not place.is_dir():
                work.rename(place)
        finally:
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
        return place

    async def _fetch(self, key: str, target: Path, sha256: str) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        digest, opened = hashlib.sha256(), await self.store.open(key)
        try:
            with target.open("wb") as file:
                async for chunk in opened.chunks(0, opened.size):
                    digest.update(chunk)
                    await asyncio.to_thread(file.write, chunk)
        finally:
            opened.close()
        if digest.hexdigest() != sha256:
            raise OSError(0, f"{key} in the artifact store does not have its recorded sha256")


def key_of(job: JobRecord) -> str:
    """Return the prefix of all of a job's keys in the store."""
    return f"{job.tenant}/{job.id}"


def live_files(home: Path) -> dict[str, os.stat_result]:
    """Metrics and episodes in a job's directory, by path. Blocking."""
    places = [home / name for name in METRICS] + [p for kind in EPISODES for p in sorted((home / kind).glob("*.jsonl"))]
    found = {}
    for place in places:
        if place.is_file() and not place.is_symlink():
            found[place.relative_to(home).as_posix()] = place.stat()
    return found


def kind_of(path: str) -> Kind:
    if path.startswith(f"{CHECKPOINTS}/"):
        name = path.split("/", 2)[2]
        return "state" if name.startswith(TRAINER_STATE) else "adapter" if name == ADAPTER else "checkpoint"
    return "metrics" if path in METRICS else "log" if path in (LOG, EVENTS) else "transcripts"


def _entry(path: str, size: int, sha256: str, created: float) -> Artifact:
    return {"path": path, "kind": kind_of(path), "bytes": size, "sha256": sha256, "created": created}


def repr_digest(sha256: str) -> str:
    """Format a digest as the value of the HTTP field Repr-Digest (RFC 9530)."""
    return f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:"


def drop_fetched(data_dir: Path) -> None:
    """Delete checkpoints fetched for submissions that have finished. Blocking."""
    for place in (data_dir / "fetched").glob("*"):
        if time.time() - place.stat().st_mtime > FETCHED_S:
            shutil.rmtree(place, ignore_errors=True)
