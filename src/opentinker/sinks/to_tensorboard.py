"""Event files of TensorBoard, written without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opentinker.shared.spec.labels import file_name


class TensorBoard:
    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=time, step=step, summary=Summary(value=found)))

    def close(self, state: str) -> None:
        self._writer.close()


def open_sink(where: str, job: Mapping[str, Any]) -> TensorBoard:
    """Open a sink that writes into a directory of the job below `where`."""
    return TensorBoard(Path(where) / f"{file_name(job['name'])}-{job['id']}")
