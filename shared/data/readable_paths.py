"""Decides which files and directories of a machine the jobs of a tenant may read: one rule, applied twice.

The scheduler checks every text of a submitted spec, in any field. Trainers, rollout workers, reference-forward and env
workers check again when they are about to open what the stored spec names, since a link may have changed. Paths are
judged after resolution. Only the coroutines do not block.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson

from opentinker.shared.config import Settings
from opentinker.shared.data.jsonl import rows_path
from opentinker.shared.durable_files import HUB_ID, local_path
from opentinker.shared.state.store import Store
from opentinker.shared.types.errors import JobFailed

KEPT = ("artifacts", "audit", "environments", "fetched", "harbor", "jobs", "logs", "nats", "run", "staged", "valkey")
"""The server's directories in data_dir."""
JOBS = "jobs"
MACHINE = (Path("/proc"), Path("/sys"), Path("/dev"))
"""Nothing in them is a file of a job, and links in /proc lead anywhere."""
SHARED_MEMORY = Path("/dev/shm")
"""The exception: an ordinary file system."""
MAX_LINKS = 40
"""The kernel follows no more of them in one path."""
MAX_NAME_BYTES = 255
MAX_ENTRIES = 100_000
"""Entries of a directory that a job names, including its subdirectories."""
DEPTH = 2
TOKENIZER_CONFIG, INDEX = "tokenizer_config.json", ".index.json"
"""Files of a model that name other files: transformers opens those wherever they are."""
MAX_CONFIG_BYTES = 64 << 20
SHOWN = 200
"""Characters of a wrong text."""
RESERVED = "is kept by the server: of its directories only those of your own jobs may be named"
NO_FILE = "is neither a file nor a directory: give one of these"
Mistakes = list[dict[str, Any]]


class Readable:
    """Files that the jobs of one tenant may read here. `own`: ids of the tenant's jobs, as far as they are named."""

    def __init__(self, settings: Settings, own: Collection[str] = ()) -> None:
        self._here = resolved(Path.cwd())
        self._home = resolved(settings.data_dir, self._here)
        self.own = frozenset(own)
        kept = [self._home / name for name in KEPT]
        if (store := settings.artifact_directory) is not None:
            kept.append(resolved(store, self._here))
        self._kept = [*kept, *(resolved(file, self._here) for file in settings.secret_files)]
        self._is_inside = _is_below(self._here, self._home)
        self._meant: dict[str, set[Path]] = {}
        self._seen: dict[Path, tuple[int, int] | None] = {}
        self._same = {identity: place for place in self._kept if (identity := _identity(place)) is not None}

    def refusal(self, path: Path) -> str:
        """Return why a resolved path may not be read; empty if it may. Paths that do not exist are judged alike."""
        if self._job_of(path) in self.own:
            return ""
        if any(_is_below(path, place) for place in MACHINE) and not _is_below(path, SHARED_MEMORY):
            return "is part of this machine's own state, no place for files of a job"
        return RESERVED if self._kept_place(path) is not None else ""

    def mistakes_in(self, data: Any, *, files: bool = False) -> Mistakes:
        """Return a mistake for every text of a spec that may be understood as a path to an unreadable place; without
        such a text, and with `files`, mistakes in the files that the spec names."""
        found = []
        for field, text in texts_in(data):
            for path in self._meanings(text):
                if why := self.refusal(path):
                    found.append({"field": field, "value": text[:SHOWN], "problem": why})
                    break
        return found or (self._mistakes_in_files(data) if files else [])

    def _mistakes_in_files(self, spec: Any) -> Mistakes:
        """Return mistakes that keep the models and rows of a spec from being opened."""
        found = []
        for field, text in _opened_by(spec):
            if field.startswith("data."):
                path = rows_path(text)
                places = [] if path is None else [path]
            else:
                path = local_path(text)
                places = _downloaded(text) if path is None else [path]
            if why := next(filter(None, map(self.why_closed, places)), ""):
                found.append({"field": field, "value": text[:SHOWN], "problem": why})
        return found

    def jobs_in(self, data: Any) -> set[str]:
        """Ids of the jobs whose directories are named in it."""
        return {job for _, text in texts_in(data) for path in self._meanings(text) if (job := self._job_of(path))}

    def why_closed(self, path: Path) -> str:
        """Return why this file or directory, or a file in it, may not be opened; empty if it may, or if it does not
        exist."""
        place = resolved(path, self._here)
        try:
            return self.refusal(place) or self._why_closed(place, place, DEPTH, iter(range(MAX_ENTRIES)))
        except OSError:  # absent or unreadable: the reader reports it
            return ""

    def _why_closed(self, place: Path, called: Path, depth: int, budget: Iterator[int]) -> str:
        """Links lead out of a directory: each is judged by where it leads. `called`: the link, or the same; its name
        is what loaders go by. Raises OSError."""
        mode = place.stat().st_mode
        if not stat.S_ISDIR(mode):
            return self._why_named_closed(place, called) if stat.S_ISREG(mode) else NO_FILE
        with os.scandir(place) as entries:
            for entry in entries:
                if next(budget, None) is None:
                    return f"holds more than {MAX_ENTRIES} files: give a directory of a model or a data set alone"
                link = inner = Path(entry.path)
                if entry.is_symlink():
                    inner = resolved(link)
                    if why := self.refusal(inner):
                        return f"holds {entry.name!r}, which {why}"
                if entry.is_dir() and not depth:
                    continue
                try:
                    why = self._why_closed(inner, link, depth - 1, budget)
                except OSError:
                    continue
                if why:
                    return why if _names_files(link) else f"holds {entry.name!r}, which {why}"
        return ""

    def _why_named_closed(self, file: Path, called: Path) -> str:
        """Explain why a file that names weights or vocabularies for transformers is refused."""
        if not _names_files(called):
            return ""
        if file.stat().st_size > MAX_CONFIG_BYTES:
            return f"has a {called.name} of more than {MAX_CONFIG_BYTES >> 20} MiB"
        try:
            told = orjson.loads(file.read_bytes())
        except orjson.JSONDecodeError:
            return ""  # the loader says so
        if called.name == TOKENIZER_CONFIG:
            named = {key: text for key, text in _texts_of(told).items() if key != "name_or_path"}
            return next((f"has a {called.name} whose {m['field']} {m['problem']}" for m in self.mistakes_in(named)), "")
        for name in set(_texts_of(told.get("weight_map") if isinstance(told, dict) else None).values()):
            if why := self.refusal(resolved(called.parent / name)):
                return f"has a {called.name} that names {name[:SHOWN]!r}, which {why}"
        return ""

    def _leads_nowhere(self, text: str) -> bool:
        """Return whether the text cannot be a path here: most texts are not, and a missing first part is cheaper to
        find than a resolved path."""
        first = text.partition("/")[0]
        if not first or first[0] == "~" or (".." in text and "/" in text) or self._is_inside:
            return False
        return len(first) > MAX_NAME_BYTES or not os.path.lexists(first)

    def _kept_place(self, path: Path) -> Path | None:
        """Return the server's own name for the path if it is below a directory of the server: by name, or because a
        parent is the same directory (another mount, another spelling on a case-insensitive file system)."""
        if any(_is_below(path, place) for place in self._kept):
            return path
        part = Path("/")
        for depth, name in enumerate(path.parts[1:], 2):
            part /= name
            if part not in self._seen:
                self._seen[part] = _identity(part)
            if (identity := self._seen[part]) is None:
                return None
            if (place := self._same.get(identity)) is not None:
                return place.joinpath(*path.parts[depth:])
        return None

    def _job_of(self, path: Path) -> str:
        place, jobs = self._kept_place(path), self._home / JOBS
        if place is None or not _is_below(place, jobs):
            return ""
        return next(iter(place.parts[len(jobs.parts) :]), "")

    def _meanings(self, text: str) -> set[Path]:
        """Return every path that the text may mean to any reader of it. A text that no file can be called means
        none."""
        if (found := self._meant.get(text)) is None:
            found = self._meant[text] = self._read(text)
        return found

    def _read(self, text: str) -> set[Path]:
        cut = text.partition("\0")[0]  # where C would end it
        spellings = {text, text.strip(), cut, cut.strip()}
        for spelling in tuple(spellings):
            if spelling[:5].lower() == "file:":
                spellings |= {spelling[5:], unquote(spelling[5:]), spelling[7:], unquote(_url_path(spelling))}
        found = set()
        for spelling in spellings:
            if "\0" in spelling or not spelling:
                continue
            try:
                if self._leads_nowhere(spelling):
                    continue
                found.add(resolved(Path(os.path.expanduser(spelling)), self._here))
            except UnicodeEncodeError:  # half of a character: no file can have it in its name
                continue
        return found


def _opened_by(data: Any) -> list[tuple[str, str]]:
    """Fields of a spec that name files or directories of this machine, or something of a hub, and what they say."""
    players = r"seats\..+\.model|validation\.against\.[0-9]+\.model"
    models = rf"(policies\.[^.]+\.)?(model|teacher|value_model)|{players}|reward_models\.[0-9]+"
    named = re.compile(rf"({models})\.base|data\.(path|validation)")
    return [(field, text) for field, text in texts_in(data) if named.fullmatch(field)]


def _names_files(path: Path) -> bool:
    return path.name == TOKENIZER_CONFIG or path.name.endswith(INDEX)


def _texts_of(table: Any) -> dict[str, str]:
    return {key: text for key, text in table.items() if isinstance(text, str)} if isinstance(table, dict) else {}


def _downloaded(hub_id: str) -> list[Path]:
    """Return the directories of a model in the hub client's cache, whose files may name anything."""
    if not HUB_ID.fullmatch(hub_id):
        return []
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return []  # then no download happens here
    return sorted(Path(HF_HUB_CACHE, f"models--{hub_id.replace('/', '--')}", "snapshots").glob("*"))


async def readable_by(
    store: Store,
    settings: Settings,
    tenant: str,
    data: Any,
    in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread,
) -> Readable:
    """Return the tenant's readable files for a spec. `in_thread`: runs file system checks."""
    readable: Readable = await in_thread(Readable, settings)
    jobs: set[str] = await in_thread(readable.jobs_in, data)
    readable.own = frozenset(job.id for job in await store.jobs(sorted(jobs)) if job.tenant == tenant)
    return readable


@contextlib.asynccontextmanager
async def opening(store: Store, settings: Settings, job: str) -> AsyncIterator[None]:
    """Around the opening of what a stored spec names: what leads elsewhere by then, or while it is read, is noticed.
    Raises JobFailed, NotFound."""
    await check_opened(store, settings, job)
    yield
    await check_opened(store, settings, job)


async def check_opened(store: Store, settings: Settings, job: str) -> None:
    """Raises JobFailed if what a stored spec names may not be opened here, NotFound if there is no such job."""
    record = await store.job(job)
    readable = await readable_by(store, settings, record.tenant, record.spec)
    if mistakes := await asyncio.to_thread(readable.mistakes_in, record.spec, files=True):
        raise JobFailed("; ".join(f"{m['field']}: {m['value']} {m['problem']}" for m in mistakes))


def resolved(path: Path, here: Path | None = None) -> Path:
    """The absolute path without links and `..`, of any length; what is not there, or may not be looked at, is taken as
    it is written. `here`: what a relative path begins with, already resolved; default: the working directory.

    `Path.resolve` raises where it may not look, and takes quadratic time for long paths.
    """
    absolute = path.is_absolute()
    found = [] if absolute else list((here or resolved(Path.cwd())).parts[1:])
    rest = list(reversed(path.parts[1:] if absolute else path.parts))
    there, links = len(found), 0  # this many parts of `found` exist
    while rest:
        name = rest.pop()
        if name == "..":
            del found[-1:]
            there = min(there, len(found))
            continue
        found.append(name)
        if there < len(found) - 1 or links == MAX_LINKS:
            continue
        try:
            target = Path(os.readlink("/" + "/".join(found)))
        except OSError as error:
            there += error.errno == errno.EINVAL  # it is no link
            continue
        links += 1
        del found[-1:]
        if target.is_absolute():
            found, there = [], 0
        rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return Path("/", *found)


def texts_in(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of plain data, with the names that lead there."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from texts_in(inner, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from texts_in(inner, f"{field}.{number}" if field else str(number))


def _is_below(path: Path, place: Path) -> bool:
    """Or the same. `Path.is_relative_to` takes quadratic time for long paths."""
    return path.parts[: len(place.parts)] == place.parts


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _url_path(url: str) -> str:
    try:
        return urlsplit(url).path
    except ValueError:
        return ""
