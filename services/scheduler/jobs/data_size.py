"""How many rows a job's data set has and how long they are, as far as the beginning of a .jsonl file tells, and the
steps that `data.epochs` makes of them. Blocking."""

from __future__ import annotations

from typing import NamedTuple

from opentinker.shared.data.jsonl import RowError, lines, rows_path
from opentinker.shared.spec import DataSpec, JobSpec
from opentinker.shared.spec.data import JSONL
from opentinker.shared.state.store import steps_of

READ_BYTES = 8 << 20
"""Of a file, uncompressed, to count its rows; a larger plain one is taken to go on as it begins."""
SAMPLE_BYTES = 256 << 10
"""Of a file, to tell how long its rows are."""
BYTES_PER_TOKEN = 4
"""Of prose, in round figures."""


class Rows(NamedTuple):
    number: int
    """0: not known, of a large compressed file."""
    mean_bytes: float


def rows_in(data: DataSpec, most_bytes: int) -> Rows | None:
    """Return the rows of a .jsonl file; None for other data sets, and for a file without a readable row."""
    count = size = 0
    try:
        path = rows_path(data.path)
        if path is None or not path.name.endswith(JSONL) or not path.is_file():
            return None
        for _, line in lines(path):
            count, size = count + 1, size + len(line)
            if size >= most_bytes:
                whole = path.stat().st_size if path.suffix == ".jsonl" else 0
                return Rows(max(count, round(whole * count / size)) if whole else 0, size / count)
    except (RowError, OSError):  # the checks of the rows say what is wrong with them
        return None
    return Rows(count, size / count) if count else None


def row_tokens(data: DataSpec) -> float | None:
    """Return the tokens of a row, in round figures; None where nothing tells."""
    rows = rows_in(data, SAMPLE_BYTES)
    return None if rows is None else max(1.0, rows.mean_bytes / BYTES_PER_TOKEN)


def planned_steps(spec: JobSpec) -> int:
    """Return the job's steps, or episodes; 0 where only the trainer can count its rows."""
    steps, data = steps_of(spec.model_dump(mode="json")), spec.data
    if steps or data is None or data.epochs is None:
        return steps
    rows = rows_in(data, READ_BYTES)
    if rows is None or not rows.number:
        return 0
    held_back = round(rows.number * data.validation) if isinstance(data.validation, float) else 0
    return -(-data.epochs * max(1, rows.number - held_back) // data.batch_size)
