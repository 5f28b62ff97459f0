"""`opentinker jobs --watch`: refreshes the table of jobs in place on a terminal, appends a line per change elsewhere.

watch_jobs     consumes the API's list of jobs; produces updates of a view; woken by a poll each POLL_S
LiveTable      redraws the table (rich);  ChangeLines, JsonLines  write one line per change
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from opentinker.cli.common import UsageError, ago, table_lines
from opentinker.cli.views.watch import PLAIN_LINES, LineView
from opentinker.sdk.job_text import on_one_line, reason_of
from opentinker.shared.types.core import ENDLESS
from opentinker.shared.types.errors import plural

if TYPE_CHECKING:
    from rich.console import Console

    from opentinker.shared.api_types import JobSummary

POLL_S = 1.0


class TableView(Protocol):
    def show(self, jobs: Sequence[JobSummary]) -> None: ...
    def close(self) -> None: ...


def watch_jobs(find: Callable[[], Sequence[JobSummary]], view: TableView, rounds: int | None = None) -> None:
    """Show what `find` returns, again and again, until Ctrl-C. `rounds` limits how often."""
    try:
        for number in count() if rounds is None else range(rounds):
            if number:
                time.sleep(POLL_S)
            view.show(find())
    finally:
        view.close()


def view_of(as_json: bool, empty: str, chosen: Sequence[str] = ()) -> TableView:
    """The view that suits stdout: lines unless it is a capable terminal. `chosen`: columns of the table."""
    from rich.console import Console

    if as_json:
        return JsonLines(sys.stdout)
    console = Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveTable(console, empty, chosen)
    if chosen:
        raise UsageError("--columns is for the table: in a pipe, --watch prints a line per change")
    return ChangeLines(sys.stdout)


def columns_of(jobs: Sequence[JobSummary], chosen: Sequence[str]) -> Sequence[str]:
    """Return the chosen columns, or USUAL without those in which no job has anything."""
    return chosen or [name for name in USUAL if name not in MAY_BE_EMPTY or any(CELLS[name](job) for job in jobs)]


def rows_of(jobs: Sequence[JobSummary], columns: Sequence[str]) -> list[list[Any]]:
    """A row of these columns for each job."""
    return [[CELLS[name](job) for name in columns] for job in jobs]


def step_of(job: JobSummary) -> str:
    """Return `3/100`; of jobs without an end the steps alone, if they have any."""
    if job["kind"] in ENDLESS:
        return str(job["step"] or "serves")
    return f"{job['step']}/{job['steps'] or '?'}"


def last_of(job: JobSummary) -> str:
    """Return `reward/mean 0.3125`: the first metric of the newest step, of several policies the first of each."""
    reports = job["progress"].get("policies") or {"": job["progress"]}
    numbers = {
        policy: next(
            (pair for pair in own.items() if isinstance(pair[1], float | int) and pair[0] != "step_seconds"), None
        )
        for policy, own in reports.items()
    }
    return ", ".join(f"{policy} {pair[0]} {pair[1]:.4g}".strip() for policy, pair in numbers.items() if pair)


CELLS: dict[str, Callable[[JobSummary], object]] = {
    "id": lambda job: job["id"],
    "name": lambda job: job["name"],
    "project": lambda job: job["project"],
    "tags": lambda job: ", ".join(job["tags"]),
    "state": lambda job: job["state"],
    "step": step_of,
    "last": last_of,
    "created": lambda job: ago(job["created"]),
    "reason": reason_of,
    "kind": lambda job: job["kind"],
    "environment": lambda job: job["environment"] or "",
    "model": lambda job: job["model"],
    "owner": lambda job: job["key"],
    "notes": lambda job: on_one_line(job["notes"]),
    "updated": lambda job: ago(job["updated"]),
    "finished": lambda job: ago(job["finished"]) if job["finished"] else "",
}
USUAL = ("id", "name", "project", "tags", "state", "step", "last", "created", "reason")
MAY_BE_EMPTY = ("project", "tags", "last")


class LiveTable:
    """The table with the time of the last update above it; rows beyond the terminal's height are counted."""

    def __init__(self, console: Console, empty: str, chosen: Sequence[str]) -> None:
        from rich.live import Live

        self._console, self._empty, self._chosen = console, empty, chosen
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def show(self, jobs: Sequence[JobSummary]) -> None:
        from rich.text import Text

        width, height = self._console.size
        lines = [f"{plural(len(jobs), 'job')} at {time.strftime('%H:%M:%S')}; Ctrl-C ends"]
        columns = columns_of(jobs, self._chosen)
        table = (
            list(table_lines(columns, rows_of(jobs, columns), width, last_below=columns[-1] == "reason"))
            if jobs
            else [self._empty]
        )
        room = max(2, height - 2)
        lines += table if len(table) <= room else [*islice(table, room - 1), f"... {len(table) - room + 1} more lines"]
        self._live.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)

    def close(self) -> None:
        self._live.stop()


class Changes:
    """Jobs whose state, reason or progress changed since the last list; progress counts in PLAIN_LINES parts."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[object, ...]] = {}

    def of(self, jobs: Sequence[JobSummary]) -> tuple[list[JobSummary], list[str]]:
        """Changed jobs, the oldest first, and the ids of those that are no longer listed."""
        now = {job["id"]: _shown(job) for job in jobs}
        changed = [job for job in reversed(jobs) if self._seen.get(job["id"]) != now[job["id"]]]
        gone = [id for id in self._seen if id not in now]
        self._seen = now
        return changed, gone


def _shown(job: JobSummary) -> tuple[object, ...]:
    part = job["step"] // max(1, (job["steps"] or 0) // PLAIN_LINES)
    return job["name"], job["state"], reason_of(job), part


class ChangeLines(LineView):
    """`14:03:22  j-1  my job  running  12/400`, a line per change."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._changes = Changes()

    def show(self, jobs: Sequence[JobSummary]) -> None:
        changed, gone = self._changes.of(jobs)
        stamp = time.strftime("%H:%M:%S")
        for job in changed:
            parts = (stamp, job["id"], job["name"], job["state"], step_of(job), reason_of(job))
            self.write("  ".join(map(str, parts)).rstrip())
        for id in gone:
            self.write(f"{stamp}  {id}  no longer listed")


class JsonLines(ChangeLines):
    """A line of JSON per change: the job, or {id, listed: false} for one that is no longer listed."""

    def show(self, jobs: Sequence[JobSummary]) -> None:
        changed, gone = self._changes.of(jobs)
        for job in changed:
            self.write_json(job)
        for id in gone:
            self.write_json({"id": id, "listed": False})
