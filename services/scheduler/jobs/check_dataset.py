"""Checks a job's [data] without reading it all: that it exists, and that its first row has a known format.

Blocking: call these in a thread. The trainer reads every row, and data sets of a hub.
"""

from __future__ import annotations

from pathlib import Path

from opentinker.shared.data.jsonl import RowError, first_row, rows_path
from opentinker.shared.data.readable_paths import resolved
from opentinker.shared.durable_files import not_on_hub
from opentinker.shared.spec import DataSpec
from opentinker.shared.spec.data import JSONL, NoFormat, format_of
from opentinker.shared.types.mistakes import Mistake, mistake

FILE_FORMATS = frozenset([
    "arrow", "audiofolder", "conll", "csv", "eval", "fasta", "fastq", "genbank", "harbor", "hdf5", "iceberg",
    "imagefolder", "json", "lance", "meshfolder", "mmcif", "niftifolder", "pandas", "parquet", "pdb", "pdffolder",
    "sql", "text", "tsfile", "videofolder", "vortex", "webdataset", "xml",
])  # fmt: skip
"""Names under which Hugging Face datasets loads local files instead of a data set of the hub."""


def check_data(data: DataSpec, kind: str) -> list[Mistake]:
    """The mistakes in it."""
    found = []
    for field, value in (("path", data.path), ("validation", data.validation)):
        if isinstance(value, str):
            try:
                _check(value, kind, data)
            except NoFormat as error:
                found.append(mistake(f"data.{error.field}", getattr(data, error.field), str(error)))
            except (RowError, OSError) as error:
                found.append(mistake(f"data.{field}", value, str(error)))
    return [one for n, one in enumerate(found) if one not in found[:n]]


def _check(name: str, kind: str, data: DataSpec) -> None:
    """Raises RowError, NoFormat; OSError for a place that may not be looked at."""
    path = rows_path(name)
    if path is None:
        if name in FILE_FORMATS:
            raise RowError(
                f"{name!r} is a file format, not a data set; give a file, a directory or a hub id (OWNER/NAME)"
            )
        if why := not_on_hub(name):
            raise RowError(why)
        return
    if not path.exists():
        start = "" if path.is_absolute() else f"; relative paths begin at {Path.cwd()}"
        raise RowError(f"does not exist on the server ({path.absolute()}); give a file, a directory or a hub id{start}")
    if path.name.endswith(JSONL):
        format_of(first_row(path), kind, data)


def absolute(data: DataSpec) -> dict[str, str]:
    """The fields that name files, as the trainer will find them wherever it was started."""
    return {
        field: str(resolved(path))
        for field, value in (("path", data.path), ("validation", data.validation))
        if isinstance(value, str) and (path := rows_path(value)) is not None
    }
