"""Selects the weights that no trainer sends: those of a job's base, or of a checkpoint kept for it, the adapters served
with them, and the frozen checkpoints that play seats. Blocking."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import orjson

from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import ADAPTER, Manifest, adapter_of, frozen_of, read_manifest, start_of


class FixedWeights(NamedTuple):
    """Weights that an engine serves from its start to its end."""

    version: WeightVersion
    full: Path | None
    """Directory of full weights; None: those of model.base."""
    adapter: Path | None
    """Directory of an adapter of model.base."""


class ServedAdapter(NamedTuple):
    """An adapter of the base, for the requests that name it."""

    name: str
    version: WeightVersion
    """Version of its checkpoint."""
    place: Path
    rank: int


def weights_of(spec: JobSpec, data_dir: Path, job: str) -> FixedWeights | None:
    """Return what the job serves; None if it comes from another job's trainer. Raises JobFailed."""
    if spec.start is not None and spec.start.live:
        return None
    if spec.start is None:
        return FixedWeights(WeightVersion(0, 0), None, None)
    return _kept(start_of(data_dir, job), spec.start.checkpoint)


def frozen_weights(data_dir: Path, job: str, checkpoint: str) -> FixedWeights:
    """Return the weights of a checkpoint that plays seats of the job. Raises JobFailed."""
    return _kept(frozen_of(data_dir, job, checkpoint), checkpoint)


def _kept(place: Path, checkpoint: str) -> FixedWeights:
    manifest = _manifest(place, checkpoint)
    if ADAPTER in manifest.files:
        return FixedWeights(manifest.version, None, place)
    return FixedWeights(manifest.version, place, None)


def served_adapters(spec: JobSpec, data_dir: Path, job: str) -> list[ServedAdapter]:
    """Return the adapters that the job serves, in the order of the spec. Raises JobFailed."""
    found = []
    for adapter in spec.serving.adapters:
        place = adapter_of(data_dir, job, adapter.name)
        version = _manifest(place, adapter.checkpoint).version
        try:
            rank = int(orjson.loads((place / "adapter_config.json").read_bytes())["r"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JobFailed(_unreadable(adapter.checkpoint, f"adapter_config.json: {error!r}")) from None
        found.append(ServedAdapter(adapter.name, version, place, rank))
    return found


def _manifest(place: Path, checkpoint: str) -> Manifest:
    try:
        return read_manifest(place)
    except (OSError, ValueError) as error:
        raise JobFailed(_unreadable(checkpoint, str(error))) from None


def _unreadable(checkpoint: str, why: str) -> str:
    return f"the checkpoint {checkpoint} that was kept for this job cannot be read: {why}"
