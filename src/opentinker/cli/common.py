"""Options that several commands share, where the server is, and output as a table or as JSON."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker.cli.shell import complete

if TYPE_CHECKING:
    from opentinker.client import Client

PATIENCE_S = 60.0
"""For commands that keep running: a server that restarts is waited for."""
NARROW = 8
"""Characters that a column of a table keeps."""
DEFAULT_URL = "http://127.0.0.1:8080"

DataDir = Annotated[
    Path,
    typer.Option("--data-dir", envvar="OPENTINKER_DATA_DIR", help="Where servers, logs and checkpoints are kept."),
]
Url = Annotated[
    str | None,
    typer.Option("--url", envvar="OPENTINKER_URL", help="Server; default: the one running on ./data, else port 8080."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
JobId = Annotated[
    str, typer.Argument(metavar="JOB", help="Job id, see `opentinker jobs`.", autocompletion=complete.jobs)
]
JobIds = Annotated[
    list[str], typer.Argument(metavar="JOB", help="Job ids, see `opentinker jobs`.", autocompletion=complete.jobs)
]
Policy = Annotated[str, typer.Option(metavar="NAME", help="One of the job's policies; needed if it has several.")]

OUTPUT: ContextVar[str] = ContextVar("output", default="table")
"""Value of `-o` of the command that runs."""

UsageError: Any = typer.BadParameter.__mro__[1]
"""From typer's version of click: a wrong option, where BadParameter is a wrong value."""
DATA_DIR = Path("data")


def server_url(url: str | None) -> str:
    """The given URL, else that of the `up` on the usual data directory, else the default."""
    if url:
        return url
    from opentinker.local.discovery import is_running, read_state, usual_data_dir

    data_dir = usual_data_dir()
    state = read_state(data_dir) if is_running(data_dir) else {}
    return str(state.get("url", DEFAULT_URL))


def running_server() -> str | None:
    """Return the `up` on the usual data directory; None if none runs there."""
    from opentinker.local.discovery import is_running, usual_data_dir

    return server_url(None) if is_running(usual_data_dir()) else None


def client(url: str | None, *, patience_s: float = 2.0, key: str | None = None) -> Client:
    """`patience_s`: how long a server that does not answer is waited for. `key`: not the one that would be found."""
    from opentinker.client import Client

    return Client(server_url(url), wait_s=patience_s, on_wait=complain, api_key=key)


def as_typed(*arguments: object) -> str:
    """A command line of ours to be copied: it works as it stands, in this directory, whether or not a venv is active.

    A path below this directory is shown relative to it.
    """
    return shlex.join([*_program(), *(shown(a) if isinstance(a, Path) else str(a) for a in arguments)])


def _program() -> list[str]:
    """`OPENTINKER_COMMAND` says how people reach this command line where that cannot be seen, as in a container."""
    if command := os.environ.get("OPENTINKER_COMMAND"):
        return shlex.split(command)
    script = Path(sys.argv[0])
    if script.suffix == ".py":  # python -m opentinker.cli
        return [shown(Path(sys.executable)), "-m", "opentinker.cli"]
    found = shutil.which(script.name)
    return [script.name if found and Path(found).resolve() == script.resolve() else shown(script)]


def shown(path: Path) -> str:
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def assigned(setting: str) -> tuple[str, Any]:
    """Parse `NAME=VALUE` of an option: the name, and the value as JSON, a list or table or quoted text of TOML, or else
    as text."""
    import tomllib

    import orjson

    name, equals, value = setting.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{setting!r} is not of the form NAME=VALUE")
    try:
        return name, orjson.loads(value)
    except orjson.JSONDecodeError:
        pass
    try:
        return name, tomllib.loads(f"value = {value}")["value"] if value.startswith(("[", "{", "'", '"')) else value
    except tomllib.TOMLDecodeError:
        return name, value


def print_json(value: Any) -> None:
    """Print a value as indented JSON, with `-o yaml` as YAML."""
    import orjson

    sys.stdout.write(_yaml(value) or orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode() + "\n")


def print_line(value: Any) -> None:
    """One of several, as they come."""
    sys.stdout.write(line_of(value) + "\n")
    sys.stdout.flush()


def line_of(value: Any) -> str:
    """Return a value of a stream as a line of JSON, with `-o yaml` as a document of YAML."""
    import orjson

    return f"---\n{_yaml(value)}".rstrip("\n") if OUTPUT.get() == "yaml" else orjson.dumps(value, default=str).decode()


def _yaml(value: Any) -> str:
    """Return a value as YAML; empty without `-o yaml`."""
    if OUTPUT.get() != "yaml":
        return ""
    from msgspec import yaml

    return yaml.encode(value, enc_hook=str).decode()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str, last_below: bool = False) -> None:
    """Fitted to the terminal by wrapping its widest columns; in a pipe every row is one line. `last_below`: where the
    table does not fit, the last column stands below each row."""
    if not rows:
        say(empty)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table_lines(columns, rows, width, last_below=last_below):
        say(line)


def print_found(
    found: Any, as_json: bool, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str
) -> None:
    """Print what the server has answered, or the `rows` that are made of it."""
    print_json(found) if as_json else print_table(columns, rows, empty=empty)


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int | None, *, last_below: bool = False
) -> Iterator[str]:
    """The lines of a table that is at most `width` characters wide; None: as wide as it gets."""
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    below = [""] * len(cells)
    if last_below and width is not None and _total(widths) > width:
        below = ["", *(row[-1] for row in cells[1:])]
        cells, widths = [row[:-1] for row in cells], widths[:-1]
    while width is not None and _total(widths) > width and max(widths) > NARROW:
        widths[widths.index(max(widths))] -= 1
    for row, note in zip(cells, below, strict=True):
        wrapped = [
            [cell] if len(cell) <= size else textwrap.wrap(cell, size) for cell, size in zip(row, widths, strict=True)
        ]
        for line in zip_longest(*wrapped, fillvalue=""):
            yield "  ".join(cell.ljust(size) for cell, size in zip(line, widths, strict=True)).rstrip()
        if note:
            yield from textwrap.wrap(note, width or 80, initial_indent="  ", subsequent_indent="  ")


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def quiet() -> None:
    """Warnings, such as what an environment raised, go to stderr; the rest is for services."""
    import logging

    import structlog

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def complain(text: str) -> None:
    sys.stderr.write(text + "\n")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def when(unix_s: float) -> str:
    """`2026-11-23 04:16:33 (3 min ago)`, in local time."""
    import time

    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(unix_s))} ({ago(unix_s)})"


def same_server(url: str | None) -> list[str]:
    """The option that a command to be copied needs to reach the same server."""
    return ["--url", url] if url else []


def ago(unix_s: float) -> str:
    """`3 min ago` and the like."""
    import time

    return f"{rough(time.time() - unix_s)} ago"


def rough(seconds: float) -> str:
    """`90 s`, `3 min`, `2 h`, `4 d`; nothing is below 0."""
    for limit, size, unit in ((90.0, 1.0, "s"), (5400.0, 60.0, "min"), (129600.0, 3600.0, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
