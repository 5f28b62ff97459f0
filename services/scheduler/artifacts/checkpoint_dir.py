"""Checkpoints as the API shows them: those in a job's directory, and one tar stream made on the fly. Read only.

The trainer writes `{data_dir}/jobs/{job}/checkpoints/step-NNNNNN` with `manifest.json`; only what a manifest names
leaves the machine. The tar is the same to the byte whenever it is made, so that a download can resume where it broke
off.

On its way into the artifact store a checkpoint is staged: its files get second names, which no trainer sweeps.

    {data_dir}/staged/{tenant}/{job}/step-000050.{mark}    whole; the mark is never used twice
    {data_dir}/staged/{tenant}/{job}/.*                    on its way there, or going

A checkpoint has its mark in the store too. So a process that was stopped and puts or drops one late touches nothing
that another scheduler has made since.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tarfile
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from opentinker.services.scheduler.artifacts.store import ArtifactStore, CorruptCheckpoint, Opened, hard_link, inside
from opentinker.shared.durable_files import make_directories, sync_directory, write_durably
from opentinker.shared.types.errors import NotFound
from opentinker.shared.types.manifest import (
    MANIFEST,
    TRAINER_STATE,
    Manifest,
    fenced_epoch,
    instead,
    read_manifest,
    short_list,
)

_STEP = re.compile(r"^step-(\d{1,12})$")


@dataclass(frozen=True)
class CheckpointView:
    """A committed checkpoint, and where it is."""

    manifest: Manifest
    store: ArtifactStore
    prefix: str
    """Key of its directory."""
    metric: float | None = None
    """See ArtifactEntry."""
    awaited: bool = False
    """The metric is still to come: its step is about to be evaluated."""
    here: bool = False
    """In its job's directory, where the trainer wrote it."""

    @property
    def size(self) -> int:
        return sum(entry.bytes for entry in self.manifest.files.values())


def committed(root: Path) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints in a job's directory, oldest first, without those that have no readable manifest.
    Blocking."""
    found = []
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        try:
            if _STEP.match(name):
                found.append((root / name, read_manifest(root / name)))
        except (OSError, msgspec.MsgspecError):
            continue  # removed since, or damaged: the trainer reports it
    return sorted(found, key=lambda pair: pair[1].age)


def second_names(directory: Path, manifest: Manifest, place: Path, link: Callable[[Path, Path], None]) -> None:
    """Make links or copies of a checkpoint's files, which stay when a trainer deletes the originals: each by
    `link(source, target)`. Blocking.

    Raises CorruptCheckpoint: it has gone, or is another one by now; OSError: the disk refuses; what `link` raises. What
    was made of it is left."""
    for name, entry in manifest.files.items():
        source, target = directory / inside(name), place / inside(name)
        check(source, name, entry.bytes)
        make_directories(target.parent)
        try:
            link(source, target)
        except FileNotFoundError:
            check(source, name, entry.bytes)
            raise
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):  # it is removed by now: we have it all
        if read_manifest(directory) != manifest:  # a trainer that resumed wrote the same step again
            raise CorruptCheckpoint(0, "it was written again just now")
    make_directories(place)
    write_durably(place / MANIFEST, msgspec.json.encode(manifest))
    for made in (*(path for path in place.rglob("*") if path.is_dir()), place, place.parent):
        sync_directory(made)


def check(file: Path, name: str, size: int) -> None:
    """Check that a file exists and has this size. Blocking. Raises CorruptCheckpoint, OSError."""
    try:
        found = file.lstat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpoint(0, f"{name} is not there") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        raise CorruptCheckpoint(0, f"{name} is not the file of {size} bytes that its manifest names")


def whole(place: Path) -> Manifest:
    """Return the manifest of a directory made by `second_names`, after checking its files. Blocking. Raises
    CorruptCheckpoint, OSError."""
    try:
        manifest = read_manifest(place)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError) as error:
        raise CorruptCheckpoint(0, f"{MANIFEST} cannot be read: {error}") from error
    for name, entry in manifest.files.items():
        check(place / inside(name), name, entry.bytes)
    return manifest


def stage(source: Path, manifest: Manifest, home: Path) -> Path:
    """Return the place in `home` where the checkpoint is staged, now or already. Raises CorruptCheckpoint: it is
    damaged, or the trainer has deleted it since; OSError: the disk refuses."""
    for place in home.glob(f"{manifest.name}.*"):
        with contextlib.suppress(CorruptCheckpoint):
            if whole(place) == manifest:
                return place
    mark = uuid.uuid4().hex
    work, place = home / f".{manifest.name}-{mark}", home / f"{manifest.name}.{mark[:16]}"
    try:
        second_names(source, manifest, work, hard_link)
        work.rename(place)
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return place


def staged(root: Path) -> list[Path]:
    """Return the directories of all staged checkpoints, of all jobs."""
    found = []
    with contextlib.suppress(FileNotFoundError):  # the last of a job's has just been put: a moment later, then
        for place in sorted(root.glob("*/*/step-*")):
            marked = place.with_name(f"{place.name}.{uuid.uuid4().hex[:16]}")
            found.append(place if place.suffix else place.rename(marked))  # of a release that had no marks
    return found


def drop_staged(place: Path) -> None:
    """Renamed before it is removed: what has its name is whole."""
    doomed = place.with_name(f".{place.name}-{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        place.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def newest_epoch(root: Path) -> int:
    """Return the newest epoch that may have written here, or 0. Blocking."""
    return max([fenced_epoch(root), *(manifest.epoch for _, manifest in committed(root))])


def listed(found: Sequence[CheckpointView]) -> list[dict[str, Any]]:
    """Step, epoch, version, created, bytes, files; in the order given."""
    return [
        {
            "step": held.manifest.step,
            "epoch": held.manifest.epoch,
            "version": msgspec.to_builtins(held.manifest.version),
            "created": held.manifest.created,
            "bytes": held.size,
            "model_bytes": sum(e.bytes for n, e in held.manifest.files.items() if not n.startswith(TRAINER_STATE)),
            "files": msgspec.to_builtins(held.manifest.files),
        }
        for held in found
    ]


def choose(found: Sequence[CheckpointView], step: int | None) -> CheckpointView:
    """Return the checkpoint of `step`; None: the newest. Raises NotFound."""
    by_step = {held.manifest.step: held for held in found}
    if not by_step or (step is not None and step not in by_step):
        have = short_list(sorted(by_step)) or "none yet"
        raise NotFound(f"no checkpoint of step {'latest' if step is None else step}; there are: {have}")
    return found[-1] if step is None else by_step[step]


@dataclass
class Archive:
    """A checkpoint opened as a tar: files of a directory stay readable even if they are removed in between."""

    step: int
    etag: str
    """ETag of exactly these bytes."""
    parts: list[bytes | Opened] = field(default_factory=list)
    """One after the other they are the tar."""

    @property
    def size(self) -> int:
        return sum(map(_size, self.parts))

    def add(self, name: str, part: bytes | Opened, mtime: int) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = _size(part), mtime, 0o644
        self.parts += [info.tobuf(tarfile.GNU_FORMAT), part, b"\0" * (-info.size % tarfile.BLOCKSIZE)]

    async def chunks(self, first: int, length: int) -> AsyncIterator[bytes]:
        last = first + length
        at = 0
        for part in self.parts:
            size = _size(part)
            begin, end = max(first - at, 0), min(last - at, size)
            if begin < end:
                if isinstance(part, bytes):
                    yield part[begin:end]
                else:
                    async for chunk in part.chunks(begin, end - begin):
                        yield chunk
            at += size

    def close(self) -> None:
        for part in self.parts:
            if not isinstance(part, bytes):
                part.close()


def _size(part: bytes | Opened) -> int:
    return len(part) if isinstance(part, bytes) else part.size


async def open_archive(found: Sequence[CheckpointView], step: int | None, everything: bool) -> Archive:
    """The checkpoint of `step` (None: the newest), its model files or also the trainer's state. Raises NotFound."""
    held = choose(found, step)
    manifest = held.manifest
    said = msgspec.json.encode(manifest)
    digest = hashlib.sha256(said).hexdigest()
    archive = Archive(manifest.step, f'"{digest[:32]}{"-all" if everything else ""}"')
    archive.add(MANIFEST, said, int(manifest.created))  # the files of that name differ from place to place, in spaces
    try:
        for name in sorted(manifest.files):
            if everything or not name.startswith(TRAINER_STATE):
                opened = await held.store.open(f"{held.prefix}/{inside(name)}")
                archive.add(name, opened, int(manifest.created))
    except (NotFound, OSError) as error:
        archive.close()
        others = [known.manifest.step for known in reversed(found) if known is not held]
        why = error.strerror if isinstance(error, OSError) else error
        raise NotFound(
            f"the checkpoint of step {manifest.step} cannot be read: {why}; {instead(manifest.job, others)}"
        ) from None
    archive.parts.append(b"\0" * (2 * tarfile.BLOCKSIZE))  # the end of a tar
    return archive
