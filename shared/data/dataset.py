"""Rows of a file, a directory or a data set, wherever they are: by number, each with the words for where it stands.

jsonl and json are read here, parquet and directories saved by Hugging Face datasets through pyarrow, a hub id through
`datasets`, which (from its version 4 on) runs no code of a data set. Both come with the extra `data`, and are imported
where they are needed alone. Blocking: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

import orjson

from opentinker.shared.data.jsonl import RowError, lines, row_of, rows_path
from opentinker.shared.spec.data import JSON, JSONL, PARQUET, DataSpec
from opentinker.shared.types.error_text import first_line

SAVED = ("state.json", "dataset_dict.json")
"""In a directory that was saved by Hugging Face datasets."""


class Source(NamedTuple):
    """Arguments of `open_rows`."""

    path: str
    split: str | None
    default_split: str
    subset: str | None


def sources(data: DataSpec) -> list[Source]:
    """Return the sources of the training rows and, if named, of the validation rows."""
    found = [Source(data.path, data.split, "train", data.subset)]
    if isinstance(data.validation, str):
        subset = data.subset if data.validation == data.path else None
        found.append(Source(data.validation, data.validation_split, "validation", subset))
    return found


class Rows(Protocol):
    columns: list[str]
    """Columns of the first row, where rows may differ."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the place of each row and the row. Raises RowError if one cannot be read."""
        ...


class LineRows:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = list(lines(path))
        self.columns = list(self._row(0)) if self._lines else []

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for at in range(len(self)):
            yield f"{self._path}, line {self._lines[at][0]}", self._row(at)

    def _row(self, at: int) -> dict[str, Any]:
        return row_of(self._path, *self._lines[at])


class ListRows:
    """Rows of a .json file: a list of objects."""

    def __init__(self, path: Path) -> None:
        try:
            found = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise RowError(f"{path} cannot be read: {error}") from None
        if not isinstance(found, list):
            raise RowError(f"{path} must hold a list of objects")
        self._path, self._rows = path, found
        self.columns = list(self._row(0)) if found else []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for at in range(len(self)):
            yield f"{self._path}, row {at + 1}", self._row(at)

    def _row(self, at: int) -> dict[str, Any]:
        row = self._rows[at]
        if not isinstance(row, dict):
            raise RowError(f"{self._path}, row {at + 1}: is not an object with named fields")
        return row


class TableRows:
    """`table`: a pyarrow Table."""

    def __init__(self, name: str, table: Any) -> None:
        self._name, self._table = name, table
        self.columns: list[str] = table.column_names

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        number = 0
        for batch in self._table.to_batches(max_chunksize=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{self._name}, row {number}", row


def open_rows(path: str, split: str | None, default_split: str, subset: str | None = None) -> Rows:
    """`subset`: of a hub id. Raises RowError if there are no rows."""
    if (place := rows_path(path)) is not None:
        if subset is not None:
            raise RowError(f"subset = {subset!r}: {path} is a path on this machine, only hub ids have subsets")
        rows = _local(place, split, default_split)
    else:
        rows = _hub(path, subset, split or default_split)
    if not len(rows):
        raise RowError(f"{path} has no rows")
    return rows


@contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise RowError(f"{error.name} is not installed here: pip install 'opentinker[data]'") from None


def _local(path: Path, split: str | None, default_split: str) -> Rows:
    if not path.exists():
        raise RowError(f"{path} does not exist on this machine; give a path that the trainer can read")
    if any((path / name).is_file() for name in SAVED):
        return _saved(path, split, default_split)
    if split is not None:
        raise RowError(f"split = {split!r}: {path} has no splits")
    if path.is_file() and path.name.endswith(JSONL):
        return LineRows(path)
    if path.is_file() and path.suffix == JSON:
        return ListRows(path)
    files = sorted(path.glob(f"*{PARQUET}")) if path.is_dir() else [path] if path.suffix == PARQUET else []
    if not files:
        raise RowError(
            f"{path} is neither a {', '.join(JSONL)}, {JSON} or {PARQUET} file, nor a directory of {PARQUET} files, "
            "nor one saved by Hugging Face datasets (save_to_disk)"
        )
    with _installed():
        import pyarrow
        import pyarrow.parquet

    try:
        tables = [pyarrow.parquet.read_table(file) for file in files]
        return TableRows(str(path), pyarrow.concat_tables(tables, promote_options="default"))
    except (OSError, pyarrow.ArrowException) as error:
        raise RowError(f"{path} cannot be read: {error}") from error


def _saved(path: Path, split: str | None, default_split: str) -> Rows:
    _refuse_names_elsewhere(path)
    with _installed():
        import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise RowError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, datasets.DatasetDict):
        if split is not None:
            raise RowError(f"split = {split!r}: {path} has no splits")
        return TableRows(str(path), found.with_format("arrow")[:])
    chosen = split or (next(iter(found)) if len(found) == 1 else default_split)
    if chosen not in found:
        raise RowError(f"{path} has no split {chosen!r}; there are: {', '.join(map(str, found))}")
    return TableRows(f"{path}, split {chosen}", found[chosen].with_format("arrow")[:])


def _refuse_names_elsewhere(path: Path) -> None:
    """Raises RowError if a saved directory names splits or files that are not in it."""
    try:
        for file in (path / "dataset_dict.json", *path.glob("state.json"), *path.glob("*/state.json")):
            told = orjson.loads(file.read_bytes()) if file.is_file() else {}
            names = [*told.get("splits", ()), *(entry["filename"] for entry in told.get("_data_files") or ())]
            if odd := [name for name in names if PurePosixPath(name).name != name]:
                raise RowError(f"{file} names {odd[0][:100]!r}, which is no name in this directory")
    except (OSError, orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise RowError(f"{path} cannot be read: {error!r}") from None


def _hub(id: str, subset: str | None, split: str) -> Rows:
    with _installed():
        import datasets

    try:
        builder = datasets.load_dataset_builder(id, subset)
        _refuse_files_off_hub(id, builder.config.data_files or {})
        builder.download_and_prepare()
        found = builder.as_dataset(split)
    except RowError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise RowError(
            f"{id!r} is not a path on this machine, and as a data set of the hub it could not be loaded "
            f"(split {split!r}): {first_line(error)}"
        ) from error
    return TableRows(f"{id}, split {split}", found.with_format("arrow")[:])


def _refuse_files_off_hub(id: str, files: Mapping[Any, Sequence[str]]) -> None:
    """Raise RowError if any file is on this machine: an id such as `text` is a format, for which `datasets` reads all
    files below the working directory, and a hub data set may name any path."""
    for name in (name for names in files.values() for name in names):
        if not name.rpartition("::")[2].startswith(("hf://", "https://")):
            raise RowError(
                f"{id!r} is not a data set of the hub alone: its rows would be read from files of this machine"
            )
