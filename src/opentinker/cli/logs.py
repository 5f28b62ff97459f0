"""Reading log files: JSON lines made readable, several files followed at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from opentinker.processes import tail

POLL_S = 0.2


def format_line(name: str, line: str) -> str:
    """`12:03:44 trainer-0 info event key=value`; a line that is not JSON is shown as it is."""
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        entry = None
    if not isinstance(entry, dict) or "event" not in entry:
        return f"{name}  {line}"
    fields: dict[str, Any] = {k: v for k, v in entry.items() if k not in ("service", "worker")}
    stamp = str(fields.pop("timestamp", ""))[11:19]
    level, event = fields.pop("level", ""), fields.pop("event")
    trace = fields.pop("exception", None)
    parts = [stamp, f"{name:<12}", f"{level:<7}", str(event), *(f"{key}={value}" for key, value in fields.items())]
    return "  ".join(parts[:3]) + "  " + " ".join(parts[3:]) + (f"\n{trace}" if trace else "")


def follow_logs(files: Mapping[str, Path], lines: int) -> Iterator[tuple[str, str]]:
    """The last lines of each file, then new ones as they come; a rotated file is read on from its start."""
    places: dict[str, int] = {}
    for name, path in files.items():
        places[name] = path.stat().st_size
        for line in tail(path, lines).splitlines():
            yield name, line
    while True:
        for name, path in files.items():
            for line in _new_lines(path, name, places):
                yield name, line
        time.sleep(POLL_S)


def _new_lines(path: Path, name: str, places: dict[str, int]) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(places[name] if places[name] <= size else 0)
            data = file.read()
    except FileNotFoundError:  # between a rotation and the next start
        places[name] = 0
        return []
    whole = data[: data.rfind(b"\n") + 1]
    places[name] = (places[name] if places[name] <= size else 0) + len(whole)
    return whole.decode(errors="replace").splitlines()
