"""Maps the `row` of `open` to a row of a file or data set, for environments whose tasks are numbered.

`row` increases without limit in the order of submission, and a resumed job continues from it. It alone determines the
epoch and the row within it, so epochs are counted in one place and no state is stored.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from opentinker.envs.base import DataRows, EnvironmentConfig
from opentinker.shared.data.dataset import open_rows
from opentinker.shared.data.jsonl import RowError, rows_path
from opentinker.shared.evaluation.validation_metrics import TASK
from opentinker.shared.messaging.reply_validation import NAME_CHARACTERS
from opentinker.shared.types.core import Image, Message, Text

Row = tuple[str, dict[str, Any]]
"""Location, for error messages, and the row."""
Stamp = tuple[tuple[str, int, int], ...]
CACHE_BYTES = 1 << 30
"""Approximate limit on the rows cached in memory."""
MAX_CATEGORIES = 50
"""Different values of a column of categories."""
MAX_TABLES = 16
"""Tables over the same rows."""
SAMPLE_ROWS = 200
"""Rows that are measured to estimate the size of all."""
SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


class DataConfig(EnvironmentConfig):
    """Settings of an environment that has data. `part` and `validation` split the rows."""

    path: Annotated[str, Field(min_length=1)]
    """A .jsonl (also .jsonl.gz, .jsonl.xz), .json (a list) or .parquet file, a directory of .parquet files or one saved
    by Hugging Face datasets, or a data set's hub id; on the env workers' machines."""
    split: Annotated[str, Field(min_length=1)] | None = None
    """Split of a hub id, or of a saved directory that has several; default `train`."""
    subset: Annotated[str, Field(min_length=1)] | None = None
    """Subset of a hub id that has several."""
    validation: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the rows, drawn by `seed`, that is held out from training."""
    part: Literal["train", "validation"] = "train"
    """Rows that are played; [validation] of a job sets {part = "validation"}."""
    shuffle: bool = True
    """Use a new order in every epoch; false: the order of the file."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the order and of the held-out rows."""


class Table:
    """The rows of one path that a config selects, and the order in which they are played."""

    def __init__(self, rows: list[Row], validation: float, part: str, seed: int, path: str) -> None:
        """Raise RowError if no row is left."""
        self.rows, self.seed = rows, seed
        if validation:
            order = np.random.default_rng([seed, 1]).permutation(len(self.rows))
            held = max(1, round(validation * len(self.rows)))
            kept = sorted(order[:held] if part == "validation" else order[held:])
            self.rows = [self.rows[at] for at in kept]
        if not self.rows:
            raise RowError(f"{path}: validation = {validation} leaves no row to train on")
        self._order = lru_cache(maxsize=4)(self._shuffle)

    def __len__(self) -> int:
        return len(self.rows)

    def _shuffle(self, epoch: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng([self.seed, 0, epoch]).permutation(len(self.rows))

    def number(self, row: int, *, shuffle: bool) -> int:
        """Return the place among `rows` of row number `row`, counted from 0 over all epochs."""
        epoch, place = divmod(row, len(self.rows))
        return int(self._order(epoch)[place]) if shuffle else place

    def at(self, row: int, *, shuffle: bool) -> Row:
        """Return row number `row`, counted from 0 over all epochs."""
        return self.rows[self.number(row, shuffle=shuffle)]


class TableRows(DataRows):
    """The rows of a table. `prompt_of`: returns the first messages of one."""

    def __init__(self, table: Table, config: DataConfig, prompt_of: Callable[[Row], list[Message]]) -> None:
        self._table, self._shuffle, self._prompt_of = table, config.shuffle, prompt_of

    def __len__(self) -> int:
        return len(self._table)

    def number(self, row: int) -> int:
        return self._table.number(row, shuffle=self._shuffle)

    def prompt(self, number: int) -> list[Message]:
        return self._prompt_of(self._table.rows[number])

    def place(self, number: int) -> str:
        return self._table.rows[number][0]


Key = tuple[str, str | None, str | None]


class CachedRows:
    """The rows of one path, and the tables over them."""

    def __init__(self, stamp: Stamp) -> None:
        self.stamp = stamp
        self.reading = threading.Lock()
        self.rows: list[Row] | None = None
        self.bytes = 0
        self.tables: dict[DataConfig, Table] = {}

    def table(self, config: DataConfig) -> Table:
        with self.reading:
            if self.rows is None:
                rows = list(open_rows(config.path, config.split, "train", config.subset))
                self.bytes, self.rows = estimate_bytes(rows), rows
            if config not in self.tables:
                if len(self.tables) >= MAX_TABLES:
                    del self.tables[next(iter(self.tables))]
                self.tables[config] = Table(self.rows, config.validation, config.part, config.seed, config.path)
            return self.tables[config]


class RowCache:
    """LRU cache of rows, limited to `max_bytes`. A read blocks only readers of the same path. The rows used last stay,
    even if they alone exceed the limit."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, CachedRows] = OrderedDict()

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self._entries.values())

    def table(self, config: DataConfig, stamp: Stamp) -> Table:
        """Return the table of a config, read if it is not cached. Raise RowError."""
        key = (config.path, config.split, config.subset)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.stamp != stamp:  # never read, or the files have changed
                entry = self._entries[key] = CachedRows(stamp)
            self._entries.move_to_end(key)
        try:
            table = entry.table(config)
        except BaseException:
            self._forget(key, entry)
            raise
        with self._lock:
            while len(self._entries) > 1 and self.bytes > self.max_bytes:
                self._entries.popitem(last=False)
        return table

    def _forget(self, key: Key, entry: CachedRows) -> None:
        with self._lock:
            if entry.rows is None and self._entries.get(key) is entry:
                del self._entries[key]


def estimate_bytes(rows: Sequence[Row]) -> int:
    """Estimate the size in memory from a sample of the rows."""
    sample = rows[:: max(1, len(rows) // SAMPLE_ROWS)]
    return sum(map(_size, sample)) * len(rows) // max(1, len(sample))


def _size(value: Any) -> int:
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple):
        inner = value
    return sys.getsizeof(value) + sum(map(_size, inner))


_cache = RowCache(CACHE_BYTES)
"""The cache of this process."""


def _stamp(name: str) -> Stamp:
    """Return size and modification time of every file, so that changed files are read again; empty for a hub id."""
    path = rows_path(name)
    if path is None or not path.exists():
        return ()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return tuple((file.name, (about := file.stat()).st_size, about.st_mtime_ns) for file in files)


def read(config: DataConfig) -> Table:
    """Return the table of a config; files are read once per process while they do not change. Blocking. Raise
    RowError."""
    if config.part == "validation" and not config.validation:
        raise RowError('part = "validation" needs a share in `validation`, or another path or split')
    alone = DataConfig.model_validate({name: getattr(config, name) for name in DataConfig.model_fields})
    return _cache.table(alone, _stamp(config.path))


def in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def table(config: DataConfig) -> Table:
    """Call `read` in a thread."""
    return await asyncio.to_thread(read, config)


def text_of(row: Row, column: str) -> str:
    """Return a column as text; numbers, which answers may be, are converted. Raise RowError with the row's location
    for anything else."""
    where, values = row
    value = values.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        found = "is missing" if value is None else f"must be a text, it is {type(value).__name__} {value!r:.40}"
        raise RowError(f"{where}: {column} {found}; the columns are: {', '.join(values)}")
    return str(value)


def category_of(row: Row, column: str | None) -> dict[str, float]:
    """Return the metric `task/NAME` of a row's category, for `Step.metrics`; nothing if it has none. A number follows
    the column's name, as in `level 5`. Raise RowError with the row's location for anything but a text or a number."""
    where, values = row
    value = None if column is None else values.get(column)
    if value is None or value == "":
        return {}
    if not isinstance(value, str | int | float):
        raise RowError(f"{where}: {column} must be a text or a number, it is {type(value).__name__} {value!r:.40}")
    name = value if isinstance(value, str) else f"{column} {value}"
    return {f"{TASK}{name.encode('ascii', 'replace').decode()}"[:NAME_CHARACTERS]: 1.0}


def check_categories(rows: Sequence[Row], column: str | None) -> None:
    """Raise RowError if the column has a value that is no category, no value at all, or more than MAX_CATEGORIES."""
    found = {name for row in rows for name in category_of(row, column)}
    if column is not None and not found:
        raise RowError(f"{rows[0][0]}: {column} is in no row; the columns are: {', '.join(rows[0][1])}")
    if len(found) > MAX_CATEGORIES:
        raise RowError(
            f"{column} has {len(found)} different values; a column of categories has at most {MAX_CATEGORIES}"
        )


def content_of(text: str, row: Row, column: str | None) -> str | list[Text | Image]:
    """Return the text, preceded by the row's images if a column is named: bytes of PNG or JPEG, or the form in which
    Hugging Face datasets stores them."""
    return text if column is None else [*images_of(row, column), Text(text)]


def images_of(row: Row, column: str, folder: Path | None = None) -> list[Image]:
    """Return the images of a column. `folder` holds images that are given by a path only; None: such images are
    refused. Raise RowError."""
    where, values = row
    found = values.get(column)
    images = found if isinstance(found, list) else [] if found is None else [found]
    return [_image(image, f"{where}: {column}", folder) for image in images]


def _image(image: Any, where: str, folder: Path | None) -> Image:
    data = image.get("bytes") if isinstance(image, dict) else image
    if data is None and folder is not None and isinstance(path := image.get("path"), str):
        try:
            data = (folder / path).read_bytes()
        except OSError as error:
            raise RowError(f"{where}: {error}") from None
    if isinstance(data, str) and data.startswith("data:image/"):
        try:
            data = base64.b64decode(data.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise RowError(f"{where}: is not valid base64: {error}") from None
    if isinstance(data, bytes):
        for signature, media_type in SIGNATURES.items():
            if data.startswith(signature):
                return Image(data, media_type)
    raise RowError(f"{where} must hold PNG or JPEG images, as bytes or data: URLs")
