"""`opentinker logs`: of a job, from all services, asked of the server; of a service, from its file on this machine."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from opentinker.cli.common import DATA_DIR, PATIENCE_S, AsJson, DataDir, Url, client, line_of, say
from opentinker.cli.shell import complete
from opentinker.local.processes import tail
from opentinker.shared.types.errors import OpenTinkerError
from opentinker.shared.types.telemetry import LEVELS

POLL_S = 0.2
LINES = 50
TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""`docker compose logs` writes them into pipes too."""


def logs(
    of: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB|SERVICE",
            help="A job: its lines from all services. A service on this machine, e.g. trainer-0 or nats. "
            "Default: every service here. `-` makes JSON lines from standard input readable.",
            autocompletion=complete.jobs,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", "--watch", "-w", help="Keep printing new lines.")] = False,
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", help=f"Only the last N lines; default: all of a job, {LINES} of a file.", min=0),
    ] = None,
    level: Annotated[str, typer.Option(help=f"This level and above: {', '.join(LEVELS)}.")] = LEVELS[0],
    data_dir: DataDir = DATA_DIR,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print the log of a job, or of the services on this machine."""
    level = {"warn": "warning", "fatal": "critical"}.get(level.lower(), level.lower())
    if level not in LEVELS:
        raise typer.BadParameter(f"--level {level!r} is unknown; choose from {', '.join(LEVELS)}")
    if of == "-":
        _of_input(level)
    elif of is not None and of.startswith("j-"):
        _of_job(of, follow, lines, level, url, as_json)
    elif url is not None:
        raise typer.BadParameter(
            "--url is for the log of a job, whose id begins with j-: opentinker logs JOB --url URL"
        )
    else:
        _of_files(of, follow, LINES if lines is None else lines, level, data_dir, as_json)


def _of_input(level: str) -> None:
    """Lines of services that log elsewhere, as in containers."""
    for line in (TERMINAL_CODES.sub("", line).rstrip() for line in sys.stdin):
        if grave(line, level):
            say(format_line("", line))


def _of_job(job: str, follow: bool, lines: int | None, level: str, url: str | None, as_json: bool) -> None:
    api = client(url, patience_s=PATIENCE_S if follow else 2.0)
    if lines == 0 and not follow:
        return
    last = min(lines or 0, 10_000)
    ask = api.logs if follow else api.log_lines
    found = ask(job, level=level, last=last)
    count = 0
    for line in found:
        say(line_of(line) if as_json else format_job_line(line))
        count += 1
    if not count and not as_json:
        say(f"no log lines of {job}" + (f" at level {level} or above" if level != LEVELS[0] else ""))


def _of_files(service: str | None, follow: bool, lines: int, level: str, data_dir: Path, as_json: bool) -> None:
    folder = data_dir / "logs"
    files = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if service is not None:
        if service not in files:
            known = ", ".join(files) or f"none yet in {folder}"
            raise OpenTinkerError(f"there is no log of {service!r}; there is: {known}. Job ids look like j-0123456789")
        files = {service: files[service]}
    elif not files:
        raise OpenTinkerError(f"no logs in {folder}; --data-dir says where to look. Of a job: opentinker logs JOB")

    def show(name: str, line: str) -> None:
        if grave(line, level):
            say(line if as_json else format_line(name, line))

    if not follow:
        last = [(name, line) for name, path in files.items() for line in tail(path, lines).splitlines() if line]
        for name, line in last:
            show(name, line)
        return
    for name, line in follow_logs(files, lines):
        show(name, line)


def grave(line: str, level: str) -> bool:
    """Lines without a level, of servers that are not ours, are shown at the lowest alone."""
    if level == LEVELS[0]:
        return True
    try:
        said = orjson.loads(line).get("level")
    except (orjson.JSONDecodeError, AttributeError):
        return False
    return said in LEVELS and LEVELS.index(said) >= LEVELS.index(level)


def format_job_line(line: Mapping[str, Any]) -> str:
    """As `format_line`."""
    stamp = time.strftime("%H:%M:%S", time.localtime(float(line["time"])))
    return _joined(stamp, line["worker"], line["level"], line["event"], line["fields"], line["trace"])


def format_line(name: str, line: str) -> str:
    """`12:03:44 trainer-0 info event key=value`; a line that is not JSON is shown as it is."""
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        entry = None
    if not isinstance(entry, dict) or "event" not in entry:
        return f"{name}  {line}" if name else line
    fields: dict[str, Any] = {k: v for k, v in entry.items() if k not in ("service", "worker")}
    name = name or str(entry.get("worker") or entry.get("service") or "")
    stamp = str(fields.pop("timestamp", ""))[11:19]
    level, event = fields.pop("level", ""), fields.pop("event")
    return _joined(stamp, name, level, event, fields, fields.pop("exception", None))


def _joined(stamp: str, name: str, level: str, event: str, fields: Mapping[str, Any], trace: str | None) -> str:
    parts = [str(event), *(f"{key}={value}" for key, value in fields.items())]
    return f"{stamp}  {name:<12}  {level:<7}  {' '.join(parts)}" + (f"\n{trace}" if trace else "")


def follow_logs(files: Mapping[str, Path], lines: int) -> Iterator[tuple[str, str]]:
    """The last lines of each file, then new ones as they come; a rotated file is read on from its start."""
    places: dict[str, int] = {}
    for name, path in files.items():
        places[name] = path.stat().st_size
        for line in tail(path, lines).splitlines():
            yield name, line
    while True:
        for name, path in files.items():
            for line in _new_lines(path, name, places):
                yield name, line
        time.sleep(POLL_S)


def _new_lines(path: Path, name: str, places: dict[str, int]) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(places[name] if places[name] <= size else 0)
            data = file.read()
    except FileNotFoundError:  # between a rotation and the next start
        places[name] = 0
        return []
    whole = data[: data.rfind(b"\n") + 1]
    places[name] = (places[name] if places[name] <= size else 0) + len(whole)
    return whole.decode(errors="replace").splitlines()
