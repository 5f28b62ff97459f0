"""Rows of files and data sets for environments that have tasks by number: `row` of `open` -> a row of the data.

`row` counts without end, in the order of submission, and is what a resumed job goes on with: it says by itself how many
passes over the data there have been and which row of which pass comes now. So an epoch is counted in one place, and
nothing has to be remembered.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from opentinker.envs.base import EnvironmentConfig
from opentinker.shared.data.dataset import open_rows
from opentinker.shared.data.jsonl import RowError, rows_path
from opentinker.shared.types.core import Image, Text

Row = tuple[str, dict[str, Any]]
"""Where it stands, for messages to people, and the row."""
Stamp = tuple[tuple[str, int, int], ...]
KEPT_BYTES = 1 << 30
"""Of rows in memory, about."""
MOST_TABLES = 16
"""Over the same rows."""
SAMPLED = 200
"""Rows that are measured."""
SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


class DataConfig(EnvironmentConfig):
    """Settings of an environment that has data. `part` and `validation` divide them."""

    path: Annotated[str, Field(min_length=1)]
    """A .jsonl (also .jsonl.gz, .jsonl.xz), .json (a list) or .parquet file, a directory of .parquet files or one saved
    by Hugging Face datasets, or a data set's hub id; on the env workers' machines."""
    split: Annotated[str, Field(min_length=1)] | None = None
    """Of a hub id, or of a saved directory that has several; default `train`."""
    subset: Annotated[str, Field(min_length=1)] | None = None
    """Of a hub id that has several."""
    validation: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """This share of the rows, drawn by `seed`, is never trained on."""
    part: Literal["train", "validation"] = "train"
    """Which rows are played: [validation] of the job says {part = "validation"}."""
    shuffle: bool = True
    """A new order in every pass; false: the order of the file."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the order, and of what is held back."""


class Table:
    """All rows of one path, and the order in which they are played."""

    def __init__(self, rows: list[Row], validation: float, part: str, seed: int, path: str) -> None:
        """Raises RowError."""
        self.rows, self.seed = rows, seed
        if validation:
            order = np.random.default_rng([seed, 1]).permutation(len(self.rows))
            held = max(1, round(validation * len(self.rows)))
            kept = sorted(order[:held] if part == "validation" else order[held:])
            self.rows = [self.rows[at] for at in kept]
        if not self.rows:
            raise RowError(f"{path}: validation = {validation} leaves no row to train on")
        self._order = lru_cache(maxsize=4)(self._shuffled)

    def __len__(self) -> int:
        return len(self.rows)

    def _shuffled(self, epoch: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng([self.seed, 0, epoch]).permutation(len(self.rows))

    def at(self, row: int, *, shuffle: bool) -> Row:
        """Row number `row` of all passes, from 0."""
        epoch, place = divmod(row, len(self.rows))
        return self.rows[int(self._order(epoch)[place]) if shuffle else place]


Key = tuple[str, str | None, str | None]


class Kept:
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
                self.bytes, self.rows = estimate(rows), rows
            if config not in self.tables:
                if len(self.tables) >= MOST_TABLES:
                    del self.tables[next(iter(self.tables))]
                self.tables[config] = Table(self.rows, config.validation, config.part, config.seed, config.path)
            return self.tables[config]


class Library:
    """What was read stays for the next episode, the latest first, within `most_bytes`. Who reads holds up nobody but
    those who want the same rows. The rows asked for last stay, however many they are."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, Kept] = OrderedDict()

    @property
    def bytes(self) -> int:
        return sum(kept.bytes for kept in self._kept.values())

    def table(self, config: DataConfig, stamp: Stamp) -> Table:
        """Raises RowError."""
        key = (config.path, config.split, config.subset)
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept.stamp != stamp:  # never read, or written anew since
                kept = self._kept[key] = Kept(stamp)
            self._kept.move_to_end(key)
        try:
            table = kept.table(config)
        except BaseException:
            self._forget(key, kept)
            raise
        with self._lock:
            while len(self._kept) > 1 and self.bytes > self.most_bytes:
                self._kept.popitem(last=False)
        return table

    def _forget(self, key: Key, kept: Kept) -> None:
        with self._lock:
            if kept.rows is None and self._kept.get(key) is kept:
                del self._kept[key]


def estimate(rows: Sequence[Row]) -> int:
    """Bytes, by some of them."""
    some = rows[:: max(1, len(rows) // SAMPLED)]
    return sum(map(_size, some)) * len(rows) // max(1, len(some))


def _size(value: Any) -> int:
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple):
        inner = value
    return sys.getsizeof(value) + sum(map(_size, inner))


_library = Library(KEPT_BYTES)
"""Of this process."""


def _stamp(name: str) -> Stamp:
    """Size and time of every file, so that what was written anew is read anew; nothing for a data set of a hub."""
    path = rows_path(name)
    if path is None or not path.exists():
        return ()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return tuple((file.name, (about := file.stat()).st_size, about.st_mtime_ns) for file in files)


def read(config: DataConfig) -> Table:
    """Once per process, while the files stay as they are. Blocking. Raises RowError."""
    if config.part == "validation" and not config.validation:
        raise RowError('part = "validation" needs a share in `validation`, or another path or split')
    alone = DataConfig.model_validate({name: getattr(config, name) for name in DataConfig.model_fields})
    return _library.table(alone, _stamp(config.path))


def in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def table(config: DataConfig) -> Table:
    """As `read`, beside the event loop."""
    return await asyncio.to_thread(read, config)


def text_of(row: Row, column: str) -> str:
    """Raises RowError, with where the row stands, unless it is a text (or a number, as answers are)."""
    where, values = row
    value = values.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        found = "is missing" if value is None else f"must be a text, it is {type(value).__name__} {value!r:.40}"
        raise RowError(f"{where}: {column} {found}; the columns are: {', '.join(values)}")
    return str(value)


def content_of(text: str, row: Row, column: str | None) -> str | list[Text | Image]:
    """The text alone, or after the row's images: bytes of PNG or JPEG, or what Hugging Face datasets makes of them."""
    return text if column is None else [*images_of(row, column), Text(text)]


def images_of(row: Row, column: str, folder: Path | None = None) -> list[Image]:
    """`folder`: where images are that are named by a path alone; None: they are not looked for. Raises RowError."""
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
