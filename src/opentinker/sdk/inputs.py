"""Inputs of client calls: a spec in one of several forms, and the target of a download.

A relative path in a spec is looked for in the current directory, then in that of the spec's file. What is there is sent
as its whole path, if the server sees the same files; everything else is sent as it was written, and is relative to the
directory in which the server was started.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from opentinker.sdk.http import ApiError, Http
from opentinker.shared.api_types import WhoAmI
from opentinker.shared.durable_files import file_system
from opentinker.shared.types.spec_text import load_spec
from opentinker.shared.types.sweeps import is_sweep

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

DIRECTORIES = (("model", "base"), ("teacher", "base"), ("value_model", "base"))
PLACES = (
    *(("data", name) for name in ("path", "validation")),
    *((part, "config", name) for part in ("environment", "validation") for name in ("path", "directory")),
)
"""Settings that name files or directories."""
Spec = Union[Mapping[str, Any], "JobSpec", str, Path]


async def prepared(http: Http, spec: Spec, beside: str | Path | None = None) -> Any:
    """The spec's data as it is sent. Raises SpecError for a file that cannot be read, ApiError.

    `beside`: where relative paths are looked for after the current directory; default: the directory of the file.
    """
    data = await asyncio.to_thread(plain, spec)
    if beside is None and isinstance(spec, str | Path):
        beside = Path(spec).parent
    here = await asyncio.to_thread(with_whole_paths, data, beside)
    if here == data or (await http.json(WhoAmI, "GET", "/v1/whoami")).get("files") != file_system():
        return data
    return here


def plain(spec: Spec) -> Any:
    """Return the data of a spec. Raises SpecError for a file that cannot be read."""
    match spec:
        case str() | Path():
            return load_spec(Path(spec))
        case Mapping():
            return dict(spec)
        case _:
            return spec.model_dump(mode="json")


def refuse_sweep(spec: Spec) -> None:
    """Raises ApiError if the spec is a sweep, where one job is wanted."""
    if is_sweep(plain(spec)):
        raise ApiError("this spec is a sweep: client.start_sweep(spec) submits it")


def started(data: Any, checkpoint: str | None, optimizer: bool) -> Any:
    """The spec's data with another [start]. Raises ApiError."""
    if checkpoint is None:
        if optimizer:
            raise ApiError("the optimizer's state comes from a checkpoint: say which one")
        return data
    return {**data, "start": {"from": checkpoint, "optimizer": optimizer}} if isinstance(data, dict) else data


def refers_to_checkpoints(data: Any) -> bool:
    """Return whether the spec's data names checkpoints, which the server may copy for the job."""
    if not isinstance(data, dict):
        return False
    serving, seats, validation = data.get("serving"), data.get("seats"), data.get("validation")
    against = validation.get("against") if isinstance(validation, dict) else None
    players = [*(seats.values() if isinstance(seats, dict) else ()), *(against if isinstance(against, list) else ())]
    plays = any(isinstance(player, dict) and player.get("frozen") for player in players)
    policies = data.get("policies")
    parts = [data, *(policies.values() if isinstance(policies, dict) else ())]
    starts = any(isinstance(part, dict) and part.get("start") for part in parts)
    return bool(plays or starts or (isinstance(serving, dict) and serving.get("adapters")))


def with_whole_paths(data: Any, beside: str | Path | None = None) -> Any:
    """The spec's data with the whole path of what its relative ones lead to from here. Blocking."""
    found = copy.deepcopy(data)
    for table, name, only_directories in _settings(found):
        for directory in (Path(), *([] if beside is None else [Path(beside)])):
            if (path := _there(directory, table[name], only_directories)) is not None:
                table[name] = str(path)
                break
    return found


def _settings(data: Any) -> Iterator[tuple[dict[str, Any], str, bool]]:
    """Yield each setting that names a place: its table, its name, whether only a directory can be meant."""
    for path, only_directories in (*((path, True) for path in DIRECTORIES), *((path, False) for path in PLACES)):
        table = data
        for part in path[:-1]:
            table = table.get(part) if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(table.get(path[-1]), str):
            yield table, path[-1], only_directories
    judges, policies = (data.get(name) if isinstance(data, dict) else None for name in ("reward_models", "policies"))
    named = [*judges] if isinstance(judges, list) else []
    owns = policies.values() if isinstance(policies, dict) else ()
    named += [own.get(part) for own in owns if isinstance(own, dict) for part, _ in DIRECTORIES]
    for table in named:
        if isinstance(table, dict) and isinstance(table.get("base"), str):
            yield table, "base", True


def _there(directory: Path, name: str, only_directories: bool) -> Path | None:
    if not name:
        return None
    try:
        path = directory / Path(name).expanduser()
        return path.resolve() if path.is_dir() or (not only_directories and path.is_file()) else None
    except (OSError, RuntimeError, ValueError):  # a name too long, no such user's home: the server says what is wrong
        return None


def empty_place(directory: str | Path) -> Path:
    target = Path(directory).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ApiError(f"{target} exists and is not an empty directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target
