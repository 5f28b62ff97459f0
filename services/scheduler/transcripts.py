"""Kept validation episodes, as the API shows them. Read only; the trainer writes `transcripts/step-NNNNNN.jsonl`.

All functions block: call them in a thread.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson

from opentinker.shared.errors import NotFound
from opentinker.shared.manifest import name_of

_FILE = re.compile(r"^step-(\d{1,12})\.jsonl$")


def read(home: Path, step: int | None) -> dict[str, Any]:
    """The steps that have transcripts, and those of one (None: the newest). Raises NotFound."""
    folder = home / "transcripts"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    steps = sorted(int(match[1]) for name in names if (match := _FILE.match(name)))
    if step is None and not steps:
        return {"steps": [], "step": None, "transcripts": []}
    shown = steps[-1] if step is None else step
    try:
        lines = (folder / f"{name_of(shown)}.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        have = ", ".join(map(str, steps)) or "none yet"
        raise NotFound(f"no transcripts of step {shown}; there are: {have}") from None
    return {"steps": steps, "step": shown, "transcripts": [orjson.loads(line) for line in lines]}
