"""`opentinker jobs` and `opentinker cancel`: jobs chosen by state, kind and name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from opentinker.cli.common import (
    PATIENCE_S,
    AsJson,
    Url,
    UsageError,
    as_typed,
    client,
    complain,
    print_json,
    print_table,
    same_server,
    say,
)
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import Conflict, NotFound, plural

if TYPE_CHECKING:
    from opentinker.client import Client
    from opentinker.shared.api_types import JobSummary

KINDS = ("rl", "sft", "dpo", "inference", "eval")
STATES = tuple(state.value for state in JobState)
MOST_CANCELLED = 10_000
NAMES_SHOWN = 10

States = Annotated[
    list[str] | None, typer.Option("--state", help=f"Only jobs in this state: {', '.join(STATES)}. Repeatable.")
]
Kinds = Annotated[list[str] | None, typer.Option("--kind", help=f"Only jobs of this kind: {', '.join(KINDS)}.")]


def jobs(
    url: Url = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="List this many, the newest.")] = 100,
    states: States = None,
    kinds: Kinds = None,
    name: Annotated[str | None, typer.Option("--name", help="Only jobs with this text in their name.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh the list until Ctrl-C; in a pipe, print a line per change.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    _check(states, kinds)
    from opentinker.cli.views.job_table import COLUMNS, rows_of, view_of, watch_jobs

    api = client(url, patience_s=PATIENCE_S if watch else 2.0)

    def find() -> list[JobSummary]:
        return api.jobs(limit, states=states, kinds=kinds, name=name)

    chosen = states or kinds or name
    empty = "no such job" if chosen else f"no jobs yet; try: {as_typed('submit', 'JOB.toml', *same_server(url))}"
    if watch:
        try:
            watch_jobs(find, view_of(as_json, empty))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    elif as_json:
        print_json(find())
    else:
        print_table(COLUMNS, rows_of(find()), empty=empty, last_below=True)


def cancel(
    job_ids: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Job ids.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All your jobs that have not ended.")] = False,
    states: States = None,
    kinds: Kinds = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --all: do not ask.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Cancel jobs; their checkpoints stay. Exit status 1 if one of them could not be cancelled."""
    _check(states, kinds)
    if bool(job_ids) is everything:
        raise UsageError("give the ids of jobs, or --all")
    if (states or kinds) and not everything:
        raise UsageError("--state and --kind go with --all")
    api = client(url)
    chosen = list(job_ids or [])
    if everything:
        going_on = [state.value for state in JobState if not state.final]
        found = api.jobs(MOST_CANCELLED, states=states or going_on, kinds=kinds)
        found = [job for job in found if job["state"] in going_on]
        _confirm(found, yes)
        chosen = [job["id"] for job in found]
    records, failed = _cancelled(api, chosen)
    if as_json:
        print_json(records[0] if len(chosen) == 1 and records and not everything else records)
    else:
        for record in records:
            say(f"{record['id']}  {record['state']}")
        if everything and not chosen:
            say("no such job is going on")
    if failed:
        raise typer.Exit(1)


def _cancelled(api: Client, ids: Sequence[str]) -> tuple[list[JobSummary], bool]:
    """One job's refusal raises; of several jobs each is reported and the others are cancelled."""
    records: list[JobSummary] = []
    for id in ids:
        try:
            records.append(api.cancel(id))
        except (Conflict, NotFound) as error:
            if len(ids) == 1:
                raise
            complain(f"error: {error}")
    return records, len(records) < len(ids)


def _confirm(found: list[JobSummary], yes: bool) -> None:
    if yes or not found:
        return
    if not sys.stdin.isatty():
        raise UsageError("--all asks first: add --yes where nobody can answer")
    for job in found[:NAMES_SHOWN]:
        complain(f"{job['id']}  {job['state']}  {job['name']}")
    if len(found) > NAMES_SHOWN:
        complain(f"and {len(found) - NAMES_SHOWN} more")
    typer.confirm(f"Cancel {plural(len(found), 'job')}?", abort=True, err=True)


def _check(states: list[str] | None, kinds: list[str] | None) -> None:
    for option, values, known in (("--state", states, STATES), ("--kind", kinds, KINDS)):
        for value in values or []:
            if value not in known:
                raise typer.BadParameter(f"{option} {value!r} is unknown; choose from {', '.join(known)}")
