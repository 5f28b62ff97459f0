"""A job's metrics in the tools that people look at them with: `opentinker sink JOB --to tensorboard:DIR`.

    watch_metrics --point--> Sink.log(step, values, time), until the job has ended; then Sink.close(state)

A separate process that reads only what any user may read: the trainer never waits for it. One short file per tool,
using the tool's library, which is imported where it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from opentinker.shared.types.errors import OpenTinkerError

KINDS = {
    "tensorboard": "a directory for event files",
    "mlflow": "a tracking URI, and after # an experiment",
    "wandb": "PROJECT or ENTITY/PROJECT",
    "trackio": "a project",
}
"""Meaning of the text after the colon of `--to KIND:...`."""


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """`time`: Unix seconds."""
        ...

    def close(self, state: str) -> None:
        """`state`: the job's final state; `running` if it continues without us."""
        ...


def open_sink(target: str, job: Mapping[str, Any]) -> Sink:
    """`target`: KIND:WHERE; `job`: an answer of GET /v1/jobs/{id}. Raises OpenTinkerError."""
    kind, colon, where = target.partition(":")
    if kind not in KINDS or not colon or not where:
        forms = "; ".join(f"{name}:{meaning}" for name, meaning in KINDS.items())
        raise OpenTinkerError(f"--to {target!r} is not one of: {forms}")
    module = importlib.import_module(f"opentinker.sinks.to_{kind}")
    try:
        sink: Sink = module.open_sink(where, job)
    except ImportError as error:
        raise OpenTinkerError(f"{error.name} is not installed here: pip install 'opentinker[{kind}]'") from None
    except (ValueError, OSError) as error:
        raise OpenTinkerError(f"--to {target}: {error}") from None
    return sink
