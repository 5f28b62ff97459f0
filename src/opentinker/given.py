"""What a user gives the client: a spec in one of several forms, and a place for a download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opentinker.http import ApiError
from opentinker.shared.spec import JobSpec, load_spec


def plain(spec: Mapping[str, Any] | JobSpec | str | Path) -> Any:
    match spec:
        case JobSpec():
            return _found_here(spec.model_dump(mode="json"))
        case str() | Path():
            return _found_here(load_spec(Path(spec)))
        case _:
            return _found_here(dict(spec))


def started(data: Any, checkpoint: str | None, optimizer: bool) -> Any:
    """The spec's data with another [start]. Raises ApiError."""
    if checkpoint is None:
        if optimizer:
            raise ApiError("the optimizer's state comes from a checkpoint: say which one")
        return data
    return {**data, "start": {"from": checkpoint, "optimizer": optimizer}} if isinstance(data, dict) else data


def _found_here(data: Any) -> Any:
    """A model directory that is relative to here becomes absolute: the server runs elsewhere."""
    match data:
        case {"model": {"base": str(base)} as model} if base:
            try:
                path = Path(base).expanduser()
                return {**data, "model": {**model, "base": str(path.resolve())}} if path.is_dir() else data
            except (OSError, RuntimeError):  # no such user's home, a name too long: the server says what is wrong
                return data
        case _:
            return data


def empty_place(directory: str | Path) -> Path:
    target = Path(directory).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ApiError(f"{target} exists and is not an empty directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target
