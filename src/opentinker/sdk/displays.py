"""How far a job or sweep is, while a script or a notebook waits for it: lines, a bar on a terminal, or a card."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any, Literal, NamedTuple

Frame = Literal["auto", "pandas", "polars", "rows"]


class Progress(NamedTuple):
    id: str
    text: str
    """`my job running`"""
    line: str
    """The same as a sentence with the id."""
    done: int
    total: int
    """0: unknown."""
    waiting_for: str = ""


class Silent:
    """Shows nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def update(self, progress: Progress) -> None: ...


class Lines(Silent):
    """A line on stderr whenever it changes."""

    def __init__(self) -> None:
        self._said = ""

    def update(self, progress: Progress) -> None:
        if progress.line != self._said:
            self._said = progress.line
            print(progress.line, file=sys.stderr, flush=True)


class Card(Silent):
    """The card of an object, redrawn in its place in a notebook."""

    def __init__(self, of: object) -> None:
        display = importlib.import_module("IPython.display").display
        self._of, self._shown = of, display(of, display_id=True)
        self._drawn: Progress | None = None

    def update(self, progress: Progress) -> None:
        if progress != self._drawn:
            self._drawn = progress
            self._shown.update(self._of)


class Bar(Silent):
    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), transient=False
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: Progress) -> None:
        from rich.markup import escape

        self._bar.update(
            self._task, description=escape(progress.text), completed=progress.done, total=progress.total or None
        )


def display_of(shown: object) -> Silent:
    """Return what shows the progress of an object where this process runs."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None and hasattr(shell, "kernel"):
        return Card(shown)
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        return Bar()
    return Lines()


def framed(rows: list[dict[str, Any]], frame: Frame) -> Any:
    """Return rows as a DataFrame or as they are; `auto`: of pandas or polars if one is installed."""
    kind = frame
    if kind == "auto":
        kind = next((one for one in ("pandas", "polars") if importlib.util.find_spec(one)), "rows")
    if kind == "pandas":
        return importlib.import_module("pandas").DataFrame(rows)
    if kind == "polars":
        return importlib.import_module("polars").DataFrame(rows, infer_schema_length=None)
    return rows
