"""`opentinker sweep` and `opentinker sweeps`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker.cli.common import (
    PATIENCE_S,
    AsJson,
    Url,
    UsageError,
    ago,
    as_typed,
    client,
    complain,
    print_found,
    print_json,
    print_line,
    print_table,
    rough,
    same_server,
    say,
)
from opentinker.cli.shell import complete
from opentinker.cli.views.lists import RUNNING_FIRST, print_groups, say_if_cut
from opentinker.cli.views.refresh import refresh
from opentinker.sdk.job_text import on_one_line
from opentinker.sdk.labels import list_query
from opentinker.shared.types.errors import plural

if TYPE_CHECKING:
    from opentinker.shared.api_types import Sweep, SweepSummary

SWEEP_EXIT = {"running": 0, "succeeded": 0, "failed": 1, "cancelled": 4}
"""Exit status of `sweep SWEEP --watch` by the state in which it ended."""
POLL_S = 2.0
SHOWN = 20
BAR = 20
SweepId = Annotated[
    str, typer.Argument(metavar="SWEEP", help="Sweep id, see `opentinker sweeps`.", autocompletion=complete.sweeps)
]
Environment = Annotated[
    str | None,
    typer.Option("--environment", help="Only sweeps in this environment.", autocompletion=complete.environments),
]
Sort = Annotated[
    str | None,
    typer.Option(
        "--sort",
        help="state (running first), created, updated, finished, name, kind, environment, model, project, owner, "
        "tag or notes; -name reverses.  [default: state]",
    ),
]
Group = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="PROPERTY",
        help="Count sweeps by project, tag, name, state, kind, environment, model, owner or notes.",
    ),
]


def sweep(
    sweep_id: SweepId,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Print its progress until it ends.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel it and its jobs.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete it and the artifacts of its jobs.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Show this many trials, the best.")] = SHOWN,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show a sweep: progress, the best trials so far, which settings matter; or cancel or delete it."""
    if follow + cancel + delete > 1:
        raise typer.BadParameter("--watch, --cancel and --delete do not go together")
    api = client(url, patience_s=PATIENCE_S if follow else 2.0)
    if cancel:
        found: Mapping[str, Any] = api.cancel_sweep(sweep_id)
        print_json(found) if as_json else say(f"{found['id']}  {found['state']}")
        return
    if delete:
        gone = api.delete_sweep(sweep_id)
        print_json(gone) if as_json else say(
            f"deleted {gone['sweep']} and the artifacts of {plural(len(gone['jobs']), 'job')}"
        )
        return
    shown = _watched(api, sweep_id, as_json) if follow else api.sweep_state(sweep_id)
    if as_json:
        print_json(shown)
    else:
        _show(shown, limit, url)
    if follow:
        raise typer.Exit(SWEEP_EXIT[shown["state"]])


def sweeps(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Show this many.")] = SHOWN,
    states: Annotated[
        list[str] | None,
        typer.Option("--state", help=f"Only sweeps in this state: {', '.join(SWEEP_EXIT)}. Repeatable."),
    ] = None,
    kinds: Annotated[list[str] | None, typer.Option("--kind", help="Only sweeps of jobs of this kind.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only sweeps with this text in their name.")] = None,
    notes: Annotated[str | None, typer.Option("--notes", help="Only sweeps with this text in their notes.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Only sweeps of this project.")] = None,
    tags: Annotated[list[str] | None, typer.Option("--tag", help="Only sweeps with this tag. Repeatable.")] = None,
    environment: Environment = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Only sweeps of this model, as the spec names it.")
    ] = None,
    owner: Annotated[str | None, typer.Option("--owner", help="Only sweeps of this API key (its id) or user.")] = None,
    search: Annotated[
        str | None, typer.Option("--search", help="Only sweeps with these words in their name, model or notes.")
    ] = None,
    sort: Sort = None,
    group: Group = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh the list until Ctrl-C.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List your sweeps: the running first, then those that are over, each the newest first."""
    api = client(url, patience_s=PATIENCE_S if watch else 2.0)
    texts = {"name": name, "notes": notes, "project": project, "environment": environment, "model": model}
    texts |= {"owner": owner, "search": search}
    query = list_query({"state": states, "kind": kinds, "tag": tags}, texts)
    if group is not None:
        if watch or sort:
            raise UsageError("--group counts sweeps: it does not go with --watch or --sort")
        print_groups(api.sweep_groups(group, query), "sweep", group, as_json)
        return
    chosen = states or kinds or tags or any(texts.values())
    empty = "no such sweep" if chosen else "no sweeps yet: submit a file with a [sweep] table: `opentinker submit FILE`"

    def find(most: int = limit) -> list[SweepSummary]:
        return api.sweeps(most, states=states, kinds=kinds, tags=tags, sort=sort or RUNNING_FIRST, **texts)

    found = find(limit + 1)
    say_if_cut(found, limit, "sweep", lambda: api.sweep_groups("state", query))
    if watch:
        refresh(lambda: _print_list(find(), as_json, empty, as_line=True))
    _print_list(found[:limit], as_json, empty)


def _print_list(found: Sequence[Mapping[str, Any]], as_json: bool, empty: str, *, as_line: bool = False) -> None:
    if as_json and as_line:
        print_line({"sweeps": found})
        return
    cells: dict[str, list[Any]] = {
        "sweep": [one["id"] for one in found],
        "name": [on_one_line(one["name"]) for one in found],
        "project": [one["project"] for one in found],
        "tags": [", ".join(one["tags"]) for one in found],
        "state": [one["state"] for one in found],
        "trials": [_progress(one) for one in found],
        "metric": [one["metric"] for one in found],
        "best": [_best(one) for one in found],
        "created": [ago(one["created"]) for one in found],
    }
    columns = [name for name in cells if name not in ("project", "tags") or any(cells[name])]
    rows = [list(row) for row in zip(*(cells[name] for name in columns), strict=True)]
    print_found({"sweeps": found}, as_json, columns, rows, empty=empty)


def submit_file(path: Path, spec: dict[str, Any], url: str | None, follow: bool, as_json: bool) -> None:
    """Submit the sweep of a file whose data is `spec`."""
    from opentinker.sdk.spec_location import located

    api = client(url, patience_s=PATIENCE_S if follow else 2.0)
    with located(path):
        made = api.sweep(spec, beside=path.parent)
    show_begun(api, made, url, follow, as_json)


def show_begun(api: Any, made: Any, url: str | None, follow: bool, as_json: bool) -> None:
    """Show a sweep that was just submitted."""
    if follow:
        shown = _watched(api, made["id"], as_json)
        print_json(shown) if as_json else _show(shown, SHOWN, url)
        raise typer.Exit(SWEEP_EXIT[shown["state"]])
    if as_json:
        print_json(made)
        return
    say(f"{made['id']}  {made['state']}, {made['planned']} trials by {made['method']}")
    say(f"watch it with: {as_typed('sweep', made['id'], '--watch', *same_server(url))}")
    say(f"its jobs: {as_typed('jobs', '--tag', made['id'], *same_server(url))}")


def _watched(api: Any, id: str, as_json: bool) -> Sweep:
    """Wait for the end; say what is new, on stderr where stdout has JSON."""
    told = ""
    while True:
        found: Sweep = api.sweep_state(id)
        state = "" if found["state"] == "running" else f"{found['state']}: "
        news = f"{state}{_progress(found)}; best: {_best(found) or 'none yet'}"
        if news != told:
            told = news
            (complain if as_json else say)(news)
        if found["state"] != "running":
            return found
        time.sleep(POLL_S)


def _show(found: Sweep, limit: int, url: str | None) -> None:
    ended = found["finished"]
    lasted = rough((ended or time.time()) - found["created"])
    reason = f": {found['reason']}" if found["reason"] else ""
    labels = [f"project {found['project']}" if found["project"] else "", ", ".join(found["tags"])]
    say("  ".join(filter(None, [found["id"], on_one_line(found["name"]), *labels])))
    if found["notes"]:
        say(found["notes"])
    cost = f"{found['jobs']} jobs, {found['worker_s']:.0f} worker-seconds"
    say(f"{found['state']}{reason}; {_progress(found)} after {lasted}; {cost}")
    say(f"{found['method']}, {found['goal']} {found['metric']}")
    for one in found.get("undelivered", ()):  # an older server has none
        say(on_one_line(f"message {one['occasion']} to notify.{one['entry']} not delivered: {one['error']}"))
    _show_trials(found, limit)
    if tie := _tie(found):
        say(f"\n{tie}")
    if found["importance"]:
        say("\nwhich settings matter (share of the difference between good and ordinary trials)")
        rows = [[path, f"{share:.0%}", "#" * round(BAR * share)] for path, share in found["importance"].items()]
        print_table(["setting", "share", ""], rows, empty="")
    if found["state"] == "running":
        say(f"\n  {as_typed('sweep', found['id'], '--watch', *same_server(url))}")
    elif found["best"] is not None:
        from opentinker.sdk.sweeps import best_job

        say(f"\n  {as_typed('job', best_job(found), *same_server(url))}")


def _tie(found: Sweep) -> str:
    """Return that all finished trials have the same value; empty if they have not, or if there is only one."""
    values = [trial["value"] for trial in found["all_trials"] if trial["state"] == "finished"]
    if len(values) < 2 or len({*values}) > 1:
        return ""
    return f"all {len(values)} finished trials have the same {found['metric']}"


def _show_trials(found: Sweep, limit: int) -> None:
    sign = 1 if found["goal"] == "minimize" else -1
    order = ("finished", "running", "stopped", "failed", "cancelled")

    def rank(trial: Mapping[str, Any]) -> tuple[int, float, int]:
        value = trial["value"]
        return order.index(trial["state"]), sign * value if value is not None else 0.0, trial["number"]

    trials = sorted(found["all_trials"], key=rank)
    told = {trial["number"]: _own_reason(trial, found) for trial in trials[:limit]}
    reasons = any(told.values())
    names = _short_names(list(found["spec"]["sweep"]["parameters"]))
    rows = [
        [
            trial["number"],
            trial["state"],
            _value(trial),
            *(_setting(trial["settings"][path]) for path in names),
            ", ".join(_job(job) for job in trial["jobs"] if job["id"]),
            *([told[trial["number"]]] if reasons else []),
        ]
        for trial in trials[:limit]
    ]
    say("")
    columns = ["trial", "state", found["metric"], *names.values(), "jobs", *(["reason"] if reasons else [])]
    print_table(columns, rows, empty="no trials yet", last_below=reasons)
    if len(trials) > limit:
        say(f"and {len(trials) - limit} more: --limit {len(trials)}")


def _own_reason(trial: Mapping[str, Any], found: Sweep) -> str:
    """Return why a trial ended, unless the sweep's own reason says so already."""
    reason = on_one_line(trial["reason"])
    return "" if reason and on_one_line(found["reason"]).endswith(reason) else reason


def _job(job: Mapping[str, Any]) -> str:
    """`j-0123456789`, and with seeds `j-0123456789 (seed 2: 0.48)`."""
    if job["seed"] is None:
        return str(job["id"])
    value = "" if job["value"] is None else f": {job['value']:.4g}"
    return f"{job['id']} (seed {job['seed']}{value})"


def _value(trial: Mapping[str, Any]) -> str:
    """The trial's value; of one that runs, the mean of its jobs so far."""
    if trial["value"] is not None:
        return f"{trial['value']:.4g}"
    values = [job["value"] for job in trial["jobs"] if job["value"] is not None]
    return f"({sum(values) / len(values):.4g})" if values else ""


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return for each path its last part, or the whole path where two share that."""
    last = [path.rpartition(".")[2] for path in paths]
    return {path: name if last.count(name) == 1 else path for path, name in zip(paths, last, strict=True)}


def _setting(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else on_one_line(str(value))


def _progress(one: Mapping[str, Any]) -> str:
    """`12 of 32 trials (3 running, 2 stopped)`."""
    states = dict(one["trials"])
    done = sum(states.values()) - states.get("running", 0)
    shown = ", ".join(f"{count} {state}" for state, count in states.items() if state != "finished")
    return f"{done} of {one['planned']} trials" + (f" ({shown})" if shown else "")


def _best(one: Mapping[str, Any]) -> str:
    best = one["best"]
    if best is None:
        return ""
    told = ", ".join(
        f"{name} {_setting(best['settings'][path])}" for path, name in _short_names(list(best["settings"])).items()
    )
    return f"{best['value']:.4g} ({told})"
