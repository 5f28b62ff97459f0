"""Selects the weights of a job without a trainer: those of its base, or of a checkpoint kept for it, and the adapters
served with them. Blocking."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import orjson

from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import ADAPTER, Manifest, adapter_of, read_manifest, start_of


class Beside(NamedTuple):
    """An adapter of the base, for the requests that name it."""

    name: str
    version: WeightVersion
    """Version of its checkpoint."""
    place: Path
    rank: int


def weights_of(spec: JobSpec, data_dir: Path, job: str) -> tuple[WeightVersion, Path | None, Path | None] | None:
    """Which version the job serves, and, of a checkpoint, the directory of its full weights or of its adapter; None if
    they come from another job's trainer. Raises JobFailed."""
    if spec.start is not None and spec.start.live:
        return None
    if spec.start is None:
        return WeightVersion(0, 0), None, None
    place = start_of(data_dir, job)
    manifest = _manifest(place, spec.start.checkpoint)
    return (manifest.version, None, place) if ADAPTER in manifest.files else (manifest.version, place, None)


def adapters_beside(spec: JobSpec, data_dir: Path, job: str) -> list[Beside]:
    """In the order of the spec. Raises JobFailed."""
    found = []
    for adapter in spec.serving.adapters:
        place = adapter_of(data_dir, job, adapter.name)
        version = _manifest(place, adapter.checkpoint).version
        try:
            rank = int(orjson.loads((place / "adapter_config.json").read_bytes())["r"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JobFailed(_unreadable(adapter.checkpoint, f"adapter_config.json: {error!r}")) from None
        found.append(Beside(adapter.name, version, place, rank))
    return found


def _manifest(place: Path, checkpoint: str) -> Manifest:
    try:
        return read_manifest(place)
    except (OSError, ValueError) as error:
        raise JobFailed(_unreadable(checkpoint, str(error))) from None


def _unreadable(checkpoint: str, why: str) -> str:
    return f"the checkpoint {checkpoint} that was kept for this job cannot be read: {why}"
