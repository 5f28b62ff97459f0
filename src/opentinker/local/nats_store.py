"""Streams of an embedded NATS server that may forget (metrics, logs, timelines), as they lie on its disk.

nats-server syncs nothing of them, not even what they are: a power cut soon after they were made leaves
`STORE/jetstream/ACCOUNT/streams/NAME/meta.{inf,sum}` empty, and the server then says that it is not well, for ever.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import structlog
from nats.js.api import PersistMode

from opentinker.shared.durable_files import is_blank, sync_directory, sync_file
from opentinker.shared.messaging.subjects import STREAMS

METADATA = ("meta.inf", "meta.sum")

log = structlog.get_logger()


def drop_torn(store: Path) -> None:
    """Remove torn stores, which the server cannot restore, before it starts; the scheduler recreates them. Blocking."""
    for stream in _forgetful(store):
        if any(is_blank(stream / name) for name in METADATA):
            log.warning("history_lost", stream=stream.name, reason="a power cut left nothing of what the stream is")
            shutil.rmtree(stream)


def sync_metadata(store: Path) -> None:
    """Once the streams are made: from here on a power cut takes no more of them than their last second. Blocking."""
    for stream in _forgetful(store):
        for name in METADATA:
            sync_file(stream / name)
        for directory in (stream, stream.parent, stream.parent.parent):
            sync_directory(directory)


def _forgetful(store: Path) -> list[Path]:
    names = [stream.name for stream in STREAMS if stream.persist_mode is PersistMode.ASYNC]
    return [path for name in names for path in sorted(store.glob(f"jetstream/*/streams/{name}"))]
