"""`opentinker jobs`, `cancel` and `label`: jobs chosen by their properties, and what they are called."""

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
from opentinker.cli.shell import complete
from opentinker.cli.views.lists import RUNNING_FIRST, print_groups, say_if_cut
from opentinker.sdk.labels import list_query
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import Conflict, NotFound, plural
from opentinker.shared.types.sweeps import ID_PREFIX

if TYPE_CHECKING:
    from opentinker.client import Client
    from opentinker.shared.api_types import JobSummary, SweepSummary

KINDS = ("rl", "sft", "dpo", "inference", "eval", "tinker")
STATES = tuple(state.value for state in JobState)
MOST_CANCELLED = 10_000
NAMES_SHOWN = 10

States = Annotated[
    list[str] | None, typer.Option("--state", help=f"Only jobs in this state: {', '.join(STATES)}. Repeatable.")
]
Kinds = Annotated[list[str] | None, typer.Option("--kind", help=f"Only jobs of this kind: {', '.join(KINDS)}.")]
Environment = Annotated[
    str | None,
    typer.Option("--environment", help="Only jobs with this environment.", autocompletion=complete.environments),
]
Model = Annotated[str | None, typer.Option("--model", help="Only jobs of this model, as their spec names it.")]
Search = Annotated[
    str | None,
    typer.Option("--search", help="Only jobs with these words in their name, model or notes."),
]
Sort = Annotated[
    str | None,
    typer.Option(
        "--sort",
        help="state (running first), created, updated, finished, step, name, kind, environment, model, project, "
        "owner, tag or notes; -step reverses.  [default: state]",
    ),
]
Group = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="PROPERTY",
        help="Count jobs by project, tag, name, state, kind, environment, model, owner or notes.",
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="NAME,...",
        help="Show these: id, name, project, tags, state, step, last (metric), created, reason, kind, environment, "
        "model, owner, notes, updated, finished.",
    ),
]


def jobs(
    url: Url = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="List this many.")] = 100,
    states: States = None,
    kinds: Kinds = None,
    name: Annotated[str | None, typer.Option("--name", help="Only jobs with this text in their name.")] = None,
    notes: Annotated[str | None, typer.Option("--notes", help="Only jobs with this text in their notes.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Only jobs of this project.")] = None,
    tags: Annotated[list[str] | None, typer.Option("--tag", help="Only jobs with this tag. Repeatable.")] = None,
    environment: Environment = None,
    model: Model = None,
    owner: Annotated[str | None, typer.Option("--owner", help="Only jobs of this API key (its id) or user.")] = None,
    search: Search = None,
    sort: Sort = None,
    group: Group = None,
    columns: Columns = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh the list until Ctrl-C; in a pipe, print a line per change.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs: the running first, then those that wait, then those that are over, each the newest first."""
    _check(states, kinds)
    from opentinker.cli.views.job_table import view_of, watch_jobs

    shown = _columns(columns)
    if shown and as_json:
        raise UsageError("--columns is for the table: JSON and YAML have all fields")
    api = client(url, patience_s=PATIENCE_S if watch else 2.0)
    filters = {"name": name, "notes": notes, "project": project, "environment": environment, "model": model}
    filters |= {"owner": owner, "search": search}
    query = list_query({"state": states, "kind": kinds, "tag": tags}, filters)
    if group is not None:
        if watch or sort or shown:
            raise UsageError("--group counts jobs: it does not go with --watch, --sort or --columns")
        print_groups(api.job_groups(group, query), "job", group, as_json)
        return

    def find(most: int = limit) -> list[JobSummary]:
        return api.jobs(most, states=states, kinds=kinds, tags=tags, sort=sort or RUNNING_FIRST, **filters)

    chosen = states or kinds or tags or any(filters.values())
    empty = "no such job" if chosen else f"no jobs yet; try: {as_typed('submit', 'JOB.toml', *same_server(url))}"
    found = find(limit + 1)
    say_if_cut(found, limit, "job", lambda: api.job_groups("state", query))
    if watch:
        try:
            watch_jobs(find, view_of(as_json, empty, shown))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    elif as_json:
        print_json(found[:limit])
    else:
        _print_jobs(found[:limit], shown, empty)


def _columns(given: str | None) -> list[str]:
    from opentinker.cli.views.job_table import CELLS

    names = [name.strip() for name in (given or "").split(",") if name.strip()]
    if unknown := [name for name in names if name not in CELLS]:
        raise typer.BadParameter(f"--columns: {unknown[0]!r} is unknown; choose from {', '.join(CELLS)}")
    return names


def _print_jobs(found: list[JobSummary], shown: list[str], empty: str) -> None:
    from opentinker.cli.views.job_table import columns_of, rows_of

    columns = columns_of(found, shown)
    print_table(columns, rows_of(found, columns), empty=empty, last_below=columns[-1] == "reason")


def label(
    ids: Annotated[
        list[str],
        typer.Argument(metavar="JOB", help="Ids of jobs, or of sweeps.", autocompletion=complete.jobs_and_sweeps),
    ],
    url: Url = None,
    name: Annotated[str | None, typer.Option("--name", help="New display name, of one job or sweep.")] = None,
    project: Annotated[str | None, typer.Option("--project", help='Project; "" takes jobs out of theirs.')] = None,
    add: Annotated[list[str] | None, typer.Option("--tag", help="Add this tag. Repeatable.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--untag", help="Remove this tag. Repeatable.")] = None,
    notes: Annotated[str | None, typer.Option("--notes", help="Notes; they replace earlier ones.")] = None,
    as_json: AsJson = False,
) -> None:
    """Change the name, project, tags or notes of jobs and sweeps, running or over."""
    if name is None and project is None and notes is None and not add and not remove:
        raise UsageError("say what changes: --name, --project, --tag, --untag or --notes")
    if name is not None and len(ids) > 1:
        raise UsageError("--name is for one job or sweep")
    api = client(url)
    changed: list[JobSummary | SweepSummary] = []
    for id in ids:
        change = api.label_sweep if id.startswith(ID_PREFIX) else api.label
        changed.append(change(id, name=name, project=project, add_tags=add, remove_tags=remove, notes=notes))
    if as_json:
        print_json(changed[0] if len(changed) == 1 else changed)
        return
    for one in changed:
        told = [one["name"], *([f"project {one['project']}"] if one["project"] else []), ", ".join(one["tags"])]
        say(f"{one['id']}  {'  '.join(filter(None, told))}")


def cancel(
    job_ids: Annotated[
        list[str] | None, typer.Argument(metavar="JOB", help="Job ids.", autocompletion=complete.jobs)
    ] = None,
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
            say("none of these jobs is active")
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
        raise UsageError("--all asks first: add --yes to skip the question")
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
