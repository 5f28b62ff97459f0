"""A job's log, read again from its beginning: what it says of the state must be what the record says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import Conflict


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    state: JobState
    version: int
    epoch: int = 0
    reason: str = ""
    finished: float = 0.0


def replay(events: Iterable[Mapping[str, Any]]) -> Replayed:
    """Of the events that `Store.states` gives. Raises Conflict if one is missing."""
    now: Replayed | None = None
    for event in events:
        before = -1 if now is None else now.version
        if event["version"] != before + 1:
            raise Conflict(f"the log goes from version {before} to {event['version']}")
        last = now or Replayed(state=JobState.QUEUED, version=0)
        now = Replayed(
            state=JobState(event["state"]),
            version=event["version"],
            epoch=max(last.epoch, event.get("epoch", 0)),
            reason=event.get("reason", last.reason),
            finished=event.get("finished", last.finished),
        )
    if now is None:
        raise Conflict("the log is empty")
    return now
