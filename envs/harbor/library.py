"""The Harbor tasks of this machine: sets that the operator has added, each task kept once.

    data_dir/harbor/tasks/DIGEST/     a task's folder, read-only
    data_dir/harbor/sets/NAME.json    a TaskSet: its tasks in order, with the keys of their images

Env workers on other machines need the same directory. A set that is added again replaces the old one for episodes that
begin later; the tasks of the old one stay.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

import msgspec

from opentinker.envs.harbor.boxes import Boxes
from opentinker.envs.harbor.builder import build
from opentinker.envs.harbor.image import TaskImage
from opentinker.envs.harbor.roots import made_once
from opentinker.envs.harbor.task import CONFIG, MAX_FILES, Task, read_task
from opentinker.envs.harbor.workspace import copy_readable
from opentinker.shared.config import Settings
from opentinker.shared.data.untrusted_tar import Unpacking
from opentinker.shared.durable_files import replace_durably
from opentinker.shared.types import codec
from opentinker.shared.types.errors import SpecError

PREFIX = "harbor:"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
MAX_TASKS = 1000
ARCHIVES = (".tar", ".tar.gz", ".tgz")
MAX_ARCHIVE_BYTES = 1 << 30
NOTHING_HERE = (
    "no Harbor tasks are here: opentinker env add harbor:PATH adds some. environment.isolation must be `process`, the"
    " default: every episode has a separate sandbox anyway"
)


class Entry(msgspec.Struct, frozen=True):
    name: str
    digest: str
    image: str
    """Key of its image."""


class TaskSet(msgspec.Struct, frozen=True):
    name: str
    tasks: list[Entry]


class Added(msgspec.Struct, frozen=True):
    """Result of `add`."""

    set: TaskSet
    built: int
    """Images that were not there before."""


async def add(
    boxes: Boxes, settings: Settings, source: Path, name: str, told: Callable[[str], None] = lambda _: None
) -> Added:
    """Read, build and keep the tasks of a folder or archive. `told` gets the name of each task.

    Raises SpecError with every mistake of every task, Unavailable, OSError.
    """
    if not NAME.fullmatch(name):
        problem = "must be lower case letters, digits, ., - and _, at most 63; give one with --name"
        raise SpecError.of("name", name[:100], problem)
    with opened(source) as folder:
        tasks, mistakes = _read(folder, name, settings)
        if mistakes:
            raise SpecError(mistakes)
        entries, built = [], 0
        for task in tasks:
            told(task.name)
            image, is_new = await build(boxes.runtime, task)
            built += is_new
            entries.append(Entry(task.name, task.digest, image.key))
            _keep(boxes.home, task)
    found = TaskSet(name, entries)
    (boxes.home / "sets").mkdir(parents=True, exist_ok=True)
    replace_durably(boxes.home / "sets" / f"{name}.json", codec.to_json(found))
    return Added(found, built)


def load_set(home: Path, name: str) -> TaskSet:
    """Blocking. Raises ValueError with the sets that there are."""
    try:
        if not NAME.fullmatch(name):
            raise FileNotFoundError
        return codec.from_json(TaskSet, (home / "sets" / f"{name}.json").read_bytes())
    except FileNotFoundError:
        if not home.is_dir():
            raise ValueError(NOTHING_HERE) from None
        known = ", ".join(sorted(path.stem for path in (home / "sets").glob("*.json"))) or "none yet"
        raise ValueError(
            f"no set of Harbor tasks is named {name!r:.70} here; there are: {known} (opentinker env add harbor:PATH)"
        ) from None


def load_task(home: Path, settings: Settings, entry: Entry) -> tuple[Task, TaskImage]:
    """Blocking. Raises SpecError if it can no longer be played with these settings, OSError if it is not there."""
    return read_task(home / "tasks" / entry.digest, entry.name, settings), TaskImage.load(home, entry.image)


def set_name(source: Path) -> str:
    """Return the name of a set that is not given one."""
    name = source.resolve().name
    for ending in ARCHIVES:
        name = name.removesuffix(ending)
    return name.lower()


@contextlib.contextmanager
def opened(source: Path) -> Iterator[Path]:
    """Give the folder, or a temporary one with what an archive holds. Raises SpecError, OSError."""
    if source.is_dir():
        yield source
        return
    if not source.name.endswith(ARCHIVES) or not source.is_file():
        problem = f"is neither a folder nor an archive ({', '.join(ARCHIVES)})"
        raise SpecError.of("path", str(source), problem)
    with tempfile.TemporaryDirectory(prefix="opentinker-") as place, source.open("rb") as file:
        packed = file if source.name.endswith(".tar") else cast(IO[bytes], gzip.GzipFile(fileobj=file))
        most = MAX_FILES * 10
        Unpacking(Path(place), MAX_ARCHIVE_BYTES, most_files=most, programs=True).run(packed)
        entries = list(Path(place).iterdir())
        is_wrapped = len(entries) == 1 and entries[0].is_dir() and not (entries[0] / CONFIG).exists()
        yield entries[0] if is_wrapped else Path(place)


def _read(folder: Path, name: str, settings: Settings) -> tuple[list[Task], list[dict[str, object]]]:
    """Return the tasks of a folder, which is one itself or holds one in each of its folders."""
    if (folder / CONFIG).is_file():
        folders = {name: folder}
    else:
        folders = {entry.name: Path(entry) for entry in sorted(os.scandir(folder), key=lambda one: one.name)
                   if entry.is_dir() and not entry.name.startswith(".")}  # fmt: skip
    if not 1 <= len(folders) <= MAX_TASKS:
        problem = f"holds {len(folders)} tasks; a set has 1 to {MAX_TASKS}, each a folder with {CONFIG}"
        return [], [{"field": "path", "value": str(folder), "problem": problem}]
    tasks: list[Task] = []
    mistakes: list[dict[str, object]] = []
    for title, place in folders.items():
        try:
            tasks.append(read_task(place, title, settings))
        except SpecError as error:
            mistakes += error.mistakes
    return tasks, mistakes


def _keep(home: Path, task: Task) -> None:
    """Copy the task's folder, readable for the sandboxes' user."""
    place = home / "tasks" / task.digest
    if place.is_dir():
        return
    with made_once(place) as work:
        copy_readable(task.folder, work)
