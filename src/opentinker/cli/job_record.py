"""`opentinker job JOB`: what it does now, what to type next, and its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker.cli.common import (
    AsJson,
    JobId,
    Url,
    as_typed,
    client,
    print_json,
    print_table,
    same_server,
    say,
    when,
)
from opentinker.cli.results.values import result_rows
from opentinker.shared.types.core import part_id
from opentinker.shared.types.metric_names import opponent_of

if TYPE_CHECKING:
    from opentinker.shared.api_types import Category, Estimate, OpponentPool

SHORT = ("name", "kind", "model", "environment", "data", "endpoint", "asleep", "priority")
TIMES = ("created", "since", "updated", "finished", "deleted", "quiet_since")


def job(
    job_id: JobId,
    url: Url = None,
    full: Annotated[
        bool, typer.Option("--full", help="Everything that is known: workers, ledger, artifacts, spec.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a job is doing now and what it waits for; --full shows its whole record."""
    from opentinker.cli.views.job_summary import doing, next_commands

    record: Mapping[str, Any] = client(url).job(job_id)
    said = doing(record)
    if as_json:
        print_json({**record, "doing": said})
        return
    for sentence in said:
        say(sentence)
    for command in next_commands(record):
        say(f"  {as_typed(*command, *same_server(url))}")
    say("")
    print_table(["field", "value"], _fields(record, full), empty="")
    print_games(record.get("metrics") or {}, list(record.get("policies") or ()))
    print_pools(record.get("pools") or {})
    if record.get("result"):
        say(f"\nresult of weights {record['result']['version']}")
        print_result(record["result"])
    for part in ("ledger", "workers", "artifacts", "spec") if full else ():
        if record.get(part):
            say(f"\n{part}")
            print_json(record[part])


def print_games(metrics: Mapping[str, Any], policies: Sequence[str]) -> None:
    """Print the win rates and the rating of each policy in its newest evaluation; nothing without games. `metrics`: the
    newest of each source."""
    games: dict[str, dict[str, str]] = {}
    for policy in policies or ("",):
        point = metrics.get(part_id("validation", policy), {"values": {}, "step": 0})
        prefix = f"{policy}/" if policy else ""
        values = {name.removeprefix(prefix): value for name, value in point["values"].items()}
        found = {f"against {who}" if who else "won": f"{values[name]:.0%}" for name in values
                 if (who := opponent_of(name)) is not None}  # fmt: skip
        if "val/rating" in values:
            found["rating"] = f"{values['val/rating']:.0f} ± {values['val/rating/error']:.0f}"
        if found:
            games[policy] = {"policy": policy or "this job", "step": str(point["step"]), **found}
    if games:
        columns = list(dict.fromkeys(name for own in games.values() for name in own))
        if "rating" in columns:
            columns.append(columns.pop(columns.index("rating")))
        say("\ngames won in the newest evaluation; a draw counts as half")
        print_table(columns, [[own.get(name, "-") for name in columns] for own in games.values()], empty="")


def print_pools(pools: Mapping[str, OpponentPool]) -> None:
    """Print the members of each opponent pool, newest first, with the policy's results against them."""
    for name, pool in pools.items():
        whose = pool["policy"] or "this job"
        say(f"\npool {name}: past versions of {whose}; its win rate in recent games; their ratings on the job's scale")
        rows = [
            [
                *(one["version"], f"{one['won'] + one['drawn'] + one['lost']:,}"),
                *(f"{one['won']:,}", f"{one['drawn']:,}", f"{one['lost']:,}"),
                "-" if one["win_rate"] is None else f"{one['win_rate']:.0%}",
                "-" if one["rating"] is None else f"{one['rating']:.0f} ± {one['rating_error']:.0f}",
            ]
            for one in reversed(pool["members"])
        ]
        print_table(["version", "games", "won", "drawn", "lost", "win rate", "rating"], rows, empty="no member yet")


def print_result(result: Mapping[str, Any]) -> None:
    """Print what an evaluation has measured, with intervals: by category, and whole."""
    print_categories(result["categories"])
    print_table(["metric", "value"], result_rows(result["values"]), empty="")


def print_categories(categories: Sequence[Category]) -> None:
    """Print a row for each category of an evaluation; nothing without any."""
    if categories:
        rows = [
            [one["name"], one["episodes"], _estimate(one["reward"]), _estimate(one["solved"])] for one in categories
        ]
        print_table(["category", "episodes", "reward", "solved"], rows, empty="")


def _estimate(one: Estimate) -> str:
    """`0.75 (0.41 to 0.93)`"""
    bounds = "" if one["low"] is None or one["high"] is None else f" ({one['low']:.3g} to {one['high']:.3g})"
    return f"{one['value']:.3g}{bounds}"


def _fields(record: Mapping[str, Any], full: bool) -> list[list[Any]]:
    """Return the fields that are not empty; times as dates."""
    wanted = [
        name
        for name, value in record.items()
        if not isinstance(value, dict | list) and value not in ("", None) and name != "id"
    ]
    short = [name for name in (*SHORT, "created", "finished") if name in wanted and record[name] is not False]
    names = ["id", *wanted] if full else short
    return [[name, _said(name, record[name])] for name in names if name not in TIMES or record[name]]


def _said(name: str, value: Any) -> Any:
    if name in TIMES:
        return when(value)
    return ("no", "yes")[value] if isinstance(value, bool) else value
