"""Checkpoints between a trainer's directory and the artifact store: second names of their files, which no trainer
sweeps.

    {data_dir}/staged/{tenant}/{job}/step-000050.{mark}    whole; the mark is never used twice
    {data_dir}/staged/{tenant}/{job}/.*                    on its way there, or going

A checkpoint has its mark in the store too. So a process that was stopped and puts or drops one late touches nothing
that another scheduler has made since. Functions block.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from pathlib import Path

from opentinker.services.scheduler.artifacts import checkpoint_dir
from opentinker.services.scheduler.artifacts.store import CorruptCheckpoint
from opentinker.shared.types.manifest import Manifest


def stage(source: Path, manifest: Manifest, home: Path) -> Path:
    """Return the place in `home` where the checkpoint is staged, now or already. Raises CorruptCheckpoint: it is
    damaged, or the trainer has deleted it since; OSError: the disk refuses."""
    for place in home.glob(f"{manifest.name}.*"):
        if holds(place, manifest):
            return place
    mark = uuid.uuid4().hex
    work, place = home / f".{manifest.name}-{mark}", home / f"{manifest.name}.{mark[:16]}"
    try:
        checkpoint_dir.second_names(source, manifest, work)
        work.rename(place)
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return place


def staged(root: Path) -> list[Path]:
    """All that is, of all jobs."""
    found = []
    with contextlib.suppress(FileNotFoundError):  # the last of a job's has just been put: a moment later, then
        for place in sorted(root.glob("*/*/step-*")):
            marked = place.with_name(f"{place.name}.{uuid.uuid4().hex[:16]}")
            found.append(place if place.suffix else place.rename(marked))  # of a release that had no marks
    return found


def drop(place: Path) -> None:
    """Renamed before it is removed: what has its name is whole."""
    doomed = place.with_name(f".{place.name}-{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        place.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def holds(place: Path, manifest: Manifest) -> bool:
    try:
        return checkpoint_dir.whole(place) == manifest
    except CorruptCheckpoint:
        return False
