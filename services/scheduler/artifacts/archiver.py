"""Archives job artifacts in the artifact store and applies retention.

scan loop   consumes checkpoints that trainers commit, by the rules of their jobs (`retention.py`); produces second
            names of their files in {data_dir}/staged, which no trainer sweeps, and what is to be removed; scans once a
            second
put loop    consumes what is staged and what is to be removed; produces what is in the store and its index; woken by
            scan

When a job is over and its workers have let go, its log, its events, metrics and episodes follow, as files of JSON
lines. All of it may be done twice: a scheduler that is killed leaves nothing half done that the next one does not
finish. One that was stopped, and wakes when another one leads, records nothing and deletes nothing but what is to be
deleted anyway: every script carries the number of its leadership, and no place in the store is used twice
(`shared/state/artifacts.py`, `checkpoint_dir.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import nats.errors
import structlog

from opentinker.services.scheduler.artifacts import checkpoint_dir
from opentinker.services.scheduler.artifacts.catalog import ArtifactCatalog, key_of
from opentinker.services.scheduler.artifacts.checkpoint_dir import CheckpointView
from opentinker.services.scheduler.artifacts.history import delete_history, write_history
from opentinker.services.scheduler.artifacts.retention import DAY_S, CheckpointMetrics, Rule, steps_of, used_by
from opentinker.services.scheduler.artifacts.store import (
    CorruptCheckpoint,
    DirectoryStore,
    StoreUnavailable,
    drop_old,
    remove_empty,
    sweep,
)
from opentinker.shared.asyncio_tools import sleep, wait_event
from opentinker.shared.messaging.bus import NoReply
from opentinker.shared.runtime.service import Context, first_failure
from opentinker.shared.state.artifacts import CHECKPOINTS, ArtifactEntry, checkpoint_path
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import JobRecord, split_part
from opentinker.shared.types.errors import Fenced, NotFound
from opentinker.shared.types.manifest import MANIFEST, Manifest

log = structlog.get_logger()

ORPHAN_S = 3600.0
"""Half-finished work of this age belongs to no running process."""
COUNT_S = 30.0
"""Interval at which stored bytes are added to the day's usage."""

STORE_ERRORS = (StoreUnavailable, OSError)
JOB_ERRORS = (*STORE_ERRORS, NoReply, nats.errors.Error, TimeoutError, NotFound)


class Archiver:
    def __init__(self, ctx: Context, leadership: int = UNFENCED, *, poll_s: float = 1.0, linger_s: float = 5.0) -> None:
        """`leadership`: without one only `archive` may be called. `linger_s`: services still log after a job's end."""
        self.ctx, self.store, self.leader = ctx, ctx.store, leadership
        self._poll_s, self._linger_s = poll_s, linger_s
        self.artifacts = ArtifactCatalog(ctx)
        self.index = self.artifacts.index
        self._staged = ctx.settings.data_dir / "staged"
        self._news = asyncio.Event()
        self._usage = UsageStore(ctx.store.redis)
        self._sweeps = SweepStore(ctx.store.redis)
        self._metrics = CheckpointMetrics()
        self._mark = uuid.uuid4().hex[:8]
        """Unique to this leadership."""
        self._logged: set[tuple[str, int, int]] = set()
        """Corrupt checkpoints that were logged, by job, epoch and step."""

    async def run(self) -> None:
        await asyncio.to_thread(self.sweep)
        await first_failure({"scan": self._scan_loop(), "put": self._put_loop()})

    def sweep(self, orphan_s: float = ORPHAN_S) -> None:
        """Remove half-finished work of schedulers that were killed. Blocking."""
        for place in list(self._staged.glob("*/*/.*")):
            drop_old(place, orphan_s)
        for home in list(self._staged.glob("*/*")):
            with contextlib.suppress(OSError):  # it stays until the next time
                remove_empty(home, self._staged)
        for store in (self.artifacts.workshop, self.artifacts.store):
            if isinstance(store, DirectoryStore):
                sweep(store.root, orphan_s)

    async def _scan_loop(self) -> None:
        counted_at = float("-inf")
        while True:
            await self.scan()
            if time.monotonic() - counted_at > COUNT_S:
                await self.count()
                counted_at = time.monotonic()
            await sleep(self._poll_s)

    async def _put_loop(self) -> None:
        while True:
            self._news.clear()
            await self.put()
            await wait_event(self._news, self._poll_s)

    # --- scan ----------------------------------------------------------------------------------------------------

    async def scan(self) -> None:
        """Once over all jobs that may have left something new, or have something that is to go."""
        active = await self.store.active_jobs()
        begun = [id for job in active if job.epoch > 0 for id in job.artifact_ids]
        await self.index.open(*begun, leader=self.leader)
        in_use = used_by(active)
        for uses in (await self._sweeps.active_uses()).values():
            for id, steps in steps_of(uses).items():
                in_use.setdefault(id, set()).update(steps)
        ending = set(await self.store.ending_jobs())
        for job in await self.store.jobs(await self.index.opened()):
            with _retried_later(job=job.id):
                over = job.state.final and split_part(job.id)[0] not in ending
                await self._archive(job, in_use.get(job.id, set()), over=over)
        expired = await self.index.expired(time.time())
        for job in await self.store.jobs(list(dict.fromkeys(split_part(id)[0] for id in expired))):
            with _retried_later(job=job.id):
                await self._expire(job, [id for id in job.artifact_ids if id in expired], in_use)
        self._news.set()

    async def count(self) -> None:
        """Add the stored bytes to the day's usage."""
        for tenant in await self.index.tenants():
            size = sum((await self.index.stored(tenant)).values())
            await self._usage.store(tenant, size, leader=self.leader)

    async def _archive(self, job: JobRecord, used: set[int], *, over: bool) -> None:
        """Archive or close one job. `over`: no process writes in its directory any longer."""
        rule, home = Rule.of(job.spec), self.artifacts.home(job)
        kept = {e.manifest.step: e for e in (await self.index.of(job.id)).values() if e.manifest is not None}
        here = {m.step: m for _, m in await asyncio.to_thread(checkpoint_dir.committed, home / CHECKPOINTS)}
        found = await self.artifacts.checkpoints(job)
        if rule.best:
            found = await asyncio.to_thread(self._metrics.add, home, found, rule, over=job.state.final)
        await self._note(job, found, kept)
        stay = rule.stay(found) | used
        published = {p.step for p in (await self.index.published(job.tenant)).values() if p.job == job.id}
        new = {
            step
            for step in stay & here.keys()
            if step not in kept or (kept[step].manifest != here[step] and step not in published)
        }
        made = [await asyncio.to_thread(self.stage, job, here[step]) for step in sorted(new)]
        gone = kept.keys() - stay - (set() if over else here.keys())
        removed = await self._remove(job, gone)
        if over:
            removed |= await self.index.sweep(job.tenant, job.id, here.keys() - stay - published, leader=self.leader)
            await self.clean()
        if removed:
            detail = {"steps": sorted(removed), "kept": str(rule)}
            await self.store.update(job.id, event="checkpoints_removed", detail=detail, leader=self.leader)
        if over and not any(made) and time.time() - job.finished > self._linger_s:
            await self._close(job, rule)

    async def _note(self, job: JobRecord, found: list[CheckpointView], kept: dict[int, ArtifactEntry]) -> None:
        """Store metrics and evaluations, which stay known after the files are removed."""
        evaluated = await asyncio.to_thread(self._metrics.evaluations, self.artifacts.home(job), kept.values())
        for held in found:
            entry = kept.get(held.manifest.step)
            if entry is not None and entry.manifest == held.manifest:
                evaluation = evaluated.get(held.manifest.step, entry.evaluation)
                if (new := msgspec.structs.replace(entry, metric=held.metric, evaluation=evaluation)) != entry:
                    await self.index.note(job.id, entry, new, leader=self.leader)

    def stage(self, job: JobRecord, manifest: Manifest) -> Path | None:
        """Stage a checkpoint; None: it is damaged, or the trainer has deleted it since. Blocking. Raises OSError if the
        disk refuses."""
        source = self.artifacts.home(job) / CHECKPOINTS / manifest.name
        try:
            return checkpoint_dir.stage(source, manifest, self._staged / job.tenant / job.id)
        except CorruptCheckpoint as error:
            if (known := (job.id, *manifest.age)) not in self._logged:
                self._logged.add(known)
                log.warning("checkpoint_not_kept", job=job.id, step=manifest.step, error=str(error))
            return None

    async def _remove(self, job: JobRecord, steps: Iterable[int]) -> set[int]:
        """Remove checkpoints, except published ones. Return the removed steps."""
        by_path = {checkpoint_path(step): step for step in steps}
        gone = await self.index.remove(job.tenant, job.id, list(by_path), leader=self.leader)
        return {by_path[path] for path in gone}

    async def _expire(self, job: JobRecord, expired: Sequence[str], in_use: Mapping[str, set[int]]) -> None:
        """Remove what is kept under these ids of a job; its history once nothing is left under any of them."""
        gone: list[ArtifactEntry] = []
        for part in await self.store.jobs(expired):
            gone += await self._expire_part(part, in_use.get(part.id, set()))
        awaited = set(await self.index.opened()) - set(expired)
        everything = not any([id in awaited or await self.index.of(id) for id in job.artifact_ids])
        if everything:
            for id in job.artifact_ids:
                await delete_history(self.ctx.bus, self.store, id, leader=self.leader)
        if gone or everything:
            detail = {"artifacts": len(gone), "bytes": sum(entry.bytes for entry in gone)}
            deleted = time.time() if everything else job.deleted
            event = "artifacts_expired"
            await self.store.update(job.id, event=event, detail=detail, leader=self.leader, deleted=deleted)
            log.info("artifacts_expired", job=job.id, **detail)
        if everything:
            for id in job.artifact_ids:
                await self.index.over(id, leader=self.leader)

    async def _expire_part(self, part: JobRecord, used: set[int]) -> list[ArtifactEntry]:
        """Return what went: what is published, or in use, stays."""
        kept = await self.index.of(part.id)
        stays = {checkpoint_path(step) for step in used}
        paths = [path for path in kept if path not in stays]
        gone = await self.index.remove(part.tenant, part.id, paths, leader=self.leader)
        if gone or self.artifacts.home(part).exists():
            await self.index.sweep_all(part.id, leader=self.leader)
            await self.clean()
        return [kept[path] for path in gone]

    # --- put -----------------------------------------------------------------------------------------------------

    async def put(self) -> None:
        """Store everything that is staged, and remove what is due. A failure delays nothing else and is tried again."""
        await self.remove()
        await self.clean()
        for place in await asyncio.to_thread(checkpoint_dir.staged, self._staged):
            for job in await self.store.jobs([place.parent.name]):
                with _retried_later(STORE_ERRORS, job=job.id, checkpoint=place.name):
                    await self.put_staged(job, place)

    async def remove(self) -> None:
        """Delete files in the store that have left the index. Their places are never reused, so a late deletion is
        safe."""
        for key in await self.index.removing():
            with _retried_later(STORE_ERRORS, key=key):
                await self.artifacts.store.delete(key)
                await self.index.removed(key, leader=self.leader)

    async def clean(self) -> None:
        """Remove unneeded files from the directories of jobs that are over."""
        for name in await self.index.sweeping():
            with _retried_later(STORE_ERRORS, key=name):
                await self.artifacts.workshop.delete(name)
                await self.index.swept(name, leader=self.leader)

    async def put_staged(self, job: JobRecord, place: Path) -> None:
        """The manifest comes last: a checkpoint that has one is whole."""
        path = f"{CHECKPOINTS}/{place.stem}"
        kept = ArtifactEntry(path=path, place=f"{CHECKPOINTS}/{place.name}", bytes=0, created=0.0)
        try:
            manifest = await asyncio.to_thread(checkpoint_dir.whole, place)
        except CorruptCheckpoint as error:  # by a power cut, or another scheduler has put it: staged again if needed
            log.warning("staged_checkpoint_dropped", job=job.id, checkpoint=place.name, error=str(error))
            await self._drop(job, kept, place)
            return
        size = sum(entry.bytes for entry in manifest.files.values())
        kept = msgspec.structs.replace(kept, bytes=size, created=manifest.created, manifest=manifest)
        before = (await self.index.of(job.id)).get(path)
        if before is None or before.manifest is None or _newer(manifest, before.manifest):
            files = [(name, place / name) for name in [*manifest.files, MANIFEST]]
            if await self._put(job, kept, before, files) == "published":
                why = "another of its step is published"
                log.warning("checkpoint_not_kept", job=job.id, step=manifest.step, error=why)
        await self._drop(job, kept, place)

    async def _put(
        self, job: JobRecord, kept: ArtifactEntry, before: ArtifactEntry | None, files: list[tuple[str, Path]]
    ) -> str:
        """Store a file at its place, then enter it into the index: `ok`, or `published`: its predecessor is published.
        Raises StoreUnavailable, OSError, Fenced."""
        key = f"{key_of(job)}/{kept.place}"
        if await self.index.is_removed(key):
            return "removed"
        try:
            for name, file in files:
                await self.artifacts.store.put(f"{key}/{name}" if name else key, file)
            answer = await self.index.add(job.tenant, job.id, kept, before=before, leader=self.leader)
        except Fenced:  # we were stopped, and have put what others do not know of, or had deleted
            known = (await self.index.of(job.id)).get(kept.path)
            ours = kept.manifest is None and (known is None or known.at != kept.at)
            if ours or await self.index.is_removed(key):
                await self.artifacts.store.delete(key)
            raise
        if answer == "changed":
            raise StoreUnavailable("another of its step has come meanwhile")
        return answer

    async def _drop(self, job: JobRecord, kept: ArtifactEntry, place: Path) -> None:
        """Delete a staged checkpoint, and what was stored of it unless the index has it."""
        await self.index.discard(job.tenant, job.id, kept.path, kept.place, leader=self.leader)
        await asyncio.to_thread(checkpoint_dir.drop_staged, place)
        await asyncio.to_thread(remove_empty, place.parent, self._staged)

    async def archive(self, job: JobRecord, held: CheckpointView) -> ArtifactEntry:
        """Archive one checkpoint immediately, regardless of the rule. Raises Conflict, NotFound, StoreUnavailable."""
        path = checkpoint_path(held.manifest.step)
        kept = (await self.index.of(job.id)).get(path)
        if kept is not None and kept.manifest == held.manifest:
            return kept
        try:
            place = await asyncio.to_thread(self.stage, job, held.manifest) if held.here else None
            if place is not None:
                await self.put_staged(job, place)
        except (StoreUnavailable, OSError):  # perhaps the scheduler that leads was faster, and took what is staged
            kept = (await self.index.of(job.id)).get(path)
            if kept is None or kept.manifest != held.manifest:
                raise
            return kept
        kept = (await self.index.of(job.id)).get(path)
        if kept is None:
            raise NotFound(f"the checkpoint of step {held.manifest.step} has just been removed, or is damaged")
        return kept

    # --- a job's end ---------------------------------------------------------------------------------------------

    async def _close(self, job: JobRecord, rule: Rule) -> None:
        """Store the history of a job, after which all its files are in the store; where the store is separate, remove
        the local copies of its checkpoints."""
        expires = await self.index.expires(job.id)
        if expires is not None and expires < time.time():  # what is left of it is published, or in use
            await self.index.close(job.id, expires, leader=self.leader)
            return
        kept = await self.index.of(job.id)
        work = self._staged / job.tenant / job.id / f".files-{uuid.uuid4().hex}"
        try:
            await asyncio.to_thread(work.mkdir, parents=True)
            for path in await write_history(self.ctx, self.artifacts.home(job), job.id, work):
                if path not in kept:
                    entry = await asyncio.to_thread(_measure, work / path, path, self._mark)
                    await self._put(job, entry, None, [("", work / path)])
        finally:
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
            await asyncio.to_thread(remove_empty, work.parent, self._staged)
        if self.artifacts.store.apart:
            kept = await self.index.of(job.id)
            known = {e.manifest.step: e.manifest for e in kept.values() if e.manifest is not None}
            found = [held.manifest for held in await self.artifacts.checkpoints(job) if held.here]
            there = [manifest.step for manifest in found if known.get(manifest.step) == manifest]
            await self.index.sweep(job.tenant, job.id, there, kept=True, leader=self.leader)
            await self.clean()
        await self._tidy(job)
        days = rule.expire_days
        expires = None if days is None else job.finished + days * DAY_S
        await self.index.close(job.id, expires, leader=self.leader)
        log.info("artifacts_kept", job=job.id)

    async def _tidy(self, job: JobRecord) -> None:
        """Delete stored files of killed schedulers that the index does not know. Raises StoreUnavailable."""
        prefix = key_of(job) + "/"
        found = {_place_of(key.removeprefix(prefix)) for key in await self.artifacts.store.list(key_of(job))}
        waiting = await asyncio.to_thread(checkpoint_dir.staged, self._staged)
        found -= {f"{CHECKPOINTS}/{place.name}" for place in waiting if place.parent.name == job.id}
        for place in sorted(found - {entry.at for entry in (await self.index.of(job.id)).values()}):
            path, _, _ = place.rpartition(".")
            await self.index.discard(job.tenant, job.id, path, place, leader=self.leader)


@contextmanager
def _retried_later(errors: tuple[type[Exception], ...] = JOB_ERRORS, **context: str) -> Iterator[None]:
    """Log these errors; the next round tries the same again."""
    try:
        yield
    except errors as error:
        log.warning("artifacts_deferred", **context, error=str(error))


def _newer(manifest: Manifest, before: Manifest) -> bool:
    """Return whether a checkpoint written after a resume replaces this one."""
    return (manifest.age, manifest.created) > (before.age, before.created)


def _place_of(name: str) -> str:
    """Return the store directory of a file below its job: all files of a checkpoint share one."""
    return "/".join(name.split("/")[:2]) if name.startswith(f"{CHECKPOINTS}/") else name


def _measure(file: Path, path: str, mark: str) -> ArtifactEntry:
    """Return a file's description with a place that no other scheduler, and no other content, uses."""
    with file.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    place = f"{path}.{mark}-{sha256[:16]}"
    return ArtifactEntry(path=path, place=place, bytes=file.stat().st_size, created=time.time(), sha256=sha256)
