"""Finds `opentinker up` and `run` on this machine, by data directory: state, URL, the operator's key.

Whoever is in the directory in which it was started, and may read its files, needs to say nothing: DATA_DIR
(OPENTINKER_DATA_DIR, else ./data) and ./runs/* are looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from opentinker.shared.security.key_text import parse

DATA_DIR = Path("data")
RUNS = Path("runs")
KEY_FILE = "admin_key_file"
"""The setting, and its name in state.json."""


def is_running(data_dir: Path) -> bool:
    import fcntl  # not where `up` cannot run either

    try:
        with (data_dir / "run" / "lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def read_state(data_dir: Path) -> dict[str, Any]:
    """Read state.json; {} if it is absent."""
    try:
        state: dict[str, Any] = orjson.loads((data_dir / "run" / "state.json").read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return {}
    return state


def usual_data_dir() -> Path:
    return Path(os.environ.get("OPENTINKER_DATA_DIR", DATA_DIR))


def key_for(url: str) -> str:
    """Return the key of the server with this URL if it runs in one of our directories; otherwise an empty string."""
    return next((key_in(state) for state in _running(url)), "")


def key_file_for(url: str) -> Path | None:
    """Return the file of the key that `key_for` returns, if there is one."""
    return next((Path(state[KEY_FILE]) for state in _running(url) if key_in(state)), None)


def finds(data_dir: Path) -> bool:
    """Return whether `key_for` searches this data directory."""
    return data_dir.resolve() in (place.resolve() for place in _places())


def _places() -> list[Path]:
    return [usual_data_dir(), *sorted(RUNS.glob("*"))]


def _running(url: str) -> Iterator[dict[str, Any]]:
    for place in _places():
        try:
            state = read_state(place) if _is_ours(place / "run" / "state.json") and is_running(place) else {}
        except OSError:  # none, or none that we may read
            continue
        if state and _same_place(str(state.get("url", "")), url):
            yield state


def _is_ours(file: Path) -> bool:
    """Nobody else says to whom a key of ours is sent. Raises OSError."""
    return file.stat().st_uid in (0, os.geteuid())


def key_in(state: dict[str, Any]) -> str:
    """Return the key of the server with this state; empty if it requires none."""
    try:
        text = Path(str(state.get(KEY_FILE, ""))).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return text if parse(text) is not None else ""


def _same_place(one: str, other: str) -> bool:
    try:
        first, second = (urlsplit(url.replace("//localhost", "//127.0.0.1", 1)) for url in (one, other))
        return (first.scheme, first.hostname, first.port) == (second.scheme, second.hostname, second.port)
    except ValueError:  # no URL
        return False
