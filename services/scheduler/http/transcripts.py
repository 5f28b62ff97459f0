"""Kept episodes, and how steps were spread, as the API shows them. Read only; the trainer writes them.

    transcripts/step-NNNNNN.jsonl   of evaluations
    rollouts/step-NNNNNN.jsonl      of training
    distributions.jsonl             a line per step

All functions block: call them in a thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from opentinker.shared.types.errors import NotFound
from opentinker.shared.types.manifest import name_of, short_list

_FILE = re.compile(r"^step-(\d{1,12})\.jsonl$")


def read(home: Path, step: int | None, kind: str = "transcripts") -> dict[str, Any]:
    """The steps that have some of this kind, and those of one (None: the newest). Raises NotFound."""
    folder = home / kind
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    steps = sorted(int(match[1]) for name in names if (match := _FILE.match(name)))
    if step is None and not steps:
        return {"steps": [], "step": None, kind: []}
    shown = steps[-1] if step is None else step
    try:
        lines = (folder / f"{name_of(shown)}.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        have = short_list(steps) or "none yet"
        raise NotFound(f"no {kind} of step {shown}; there are: {have}") from None
    return {"steps": steps, "step": shown, kind: list(_whole(lines))}


def _whole(lines: list[bytes]) -> Iterator[Any]:
    """Without those that a kill or a power cut has torn."""
    for line in lines:
        with contextlib.suppress(orjson.JSONDecodeError):
            yield orjson.loads(line)


def distributions(home: Path, step: int | None, after: int, limit: int) -> list[dict[str, Any]]:
    """Lines of one step (None: of the steps above `after`, the newest `limit`), oldest first. Of a step that was
    trained more than once the last one counts."""
    try:
        lines = (home / "distributions.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found: dict[int, dict[str, Any]] = {}
    for line in _whole(lines[::-1]):
        if line["step"] > after and step in (None, line["step"]):
            found.setdefault(line["step"], line)
        if len(found) == (limit if step is None else 1):
            break
    return [found[number] for number in sorted(found)]
