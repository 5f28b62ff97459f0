"""A run of Trackio, named after the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentinker.shared.spec.labels import file_name


class Trackio:
    def __init__(self, library: Any, run: Any) -> None:
        self._library, self._run = library, run

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log(dict(values), step=step)

    def close(self, state: str) -> None:
        self._library.finish()


def open_sink(where: str, job: Mapping[str, Any]) -> Trackio:
    import trackio

    name = f"{file_name(job['name'])}-{job['id']}"
    return Trackio(trackio, trackio.init(project=where, name=name, config=dict(job.get("spec") or {}), resume="allow"))
