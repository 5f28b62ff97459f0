"""`opentinker metrics`: the curves of a job as a table, as CSV or as JSON."""

from __future__ import annotations

import csv
import fnmatch
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker.cli.common import (
    PATIENCE_S,
    AsJson,
    JobId,
    Url,
    as_typed,
    client,
    complain,
    print_json,
    print_line,
    print_table,
    same_server,
    say,
)
from opentinker.shared.types.metric_names import meant_metric, split_policy

if TYPE_CHECKING:
    from opentinker.shared.api_types import MetricPoint

SHOWN = 20
KEYS = ("step", "time", "source")


def metrics(
    job_id: JobId,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Metrics, such as reward/mean or 'val/*'; default: all."),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only from this source: trainer, validation, ...")
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", "-n", min=1, help=f"The newest N rows; a table has {SHOWN} without it.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Print rows as they come until the job ends.")] = False,
    url: Url = None,
    as_json: AsJson = False,
    as_csv: bool = False,
) -> None:
    """Print a job's metrics: without names a summary of each, with names a row per step; `-o csv` and `-o json` print
    all steps."""
    api = client(url, patience_s=PATIENCE_S if watch else 2.0)
    if watch:
        return _follow(api, job_id, names or [], source, as_json, as_csv)
    points = api.metrics(job_id, source=source)
    chosen = list(_chosen(points, names or []))
    known = {name for point in points for name in point["values"]}
    if absent := [one for one in names or [] if points and not any(_is_chosen(name, [one]) for name in known)]:
        said = f"the job has reported no {', '.join(absent)}{_meant(absent, known)}"
        if not chosen:
            raise typer.BadParameter(f"{said} (it has: {_listed(known)})")
        complain(said)
    rows = chosen if last is None else chosen[-last:]
    if as_json:
        print_json(rows)
    elif as_csv:
        columns = _columns(rows)
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([*KEYS, *columns])
        writer.writerows([[*(one[key] for key in KEYS), *_cells(one, columns, "")] for one in rows])
    elif names:
        _print_rows(rows if last is not None else rows[-SHOWN:])
        if last is None and len(rows) > SHOWN:
            say(f"the newest {SHOWN} of {len(rows)} rows; all: --last {len(rows)}, or -o csv")
    else:
        _print_summary(rows)
        if rows:
            say(f"\nits curve by step: {as_typed('metrics', job_id, 'NAME', *same_server(url))}")


def _chosen(points: Sequence[MetricPoint], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the points that have one of the metrics, with those alone. `names`: exact or with `*`; none: all."""
    for point in points:
        values = {name: value for name, value in point["values"].items() if not names or _is_chosen(name, names)}
        if values:
            yield {"step": point["step"], "time": point["time"], "source": point["source"], "values": values}


def _is_chosen(name: str, names: Sequence[str]) -> bool:
    return any(name == one or fnmatch.fnmatchcase(name, one) for one in names)


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({name for row in rows for name in row["values"]})


def _cells(row: dict[str, Any], columns: Sequence[str], number: str) -> list[str]:
    values = row["values"]
    return [format(values[name], number) if name in values else "" for name in columns]


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    columns = _columns(rows)
    shown = [[row["step"], row["source"], *_cells(row, columns, ".5g")] for row in rows]
    print_table(["step", "source", *columns], shown, empty="no metrics yet")


def _print_summary(rows: Sequence[dict[str, Any]]) -> None:
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row["values"].items():
            series.setdefault(name, []).append((row["step"], value))
    shown = [
        [name, len(points), points[-1][0], *(f"{value:.5g}" for value in _spread([value for _, value in points]))]
        for name, points in sorted(series.items())
    ]
    columns = ["metric", "points", "step", "newest", "lowest", "highest"]
    print_table(columns, shown, empty="no metrics yet: they come with a job's first step")


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return values[-1], min(values), max(values)


def _meant(absent: Sequence[str], known: Iterable[str]) -> str:
    names = list(known)
    meant = [name for one in absent if (name := meant_metric(one, names)) is not None]
    return f"; did you mean {', '.join(meant)}?" if meant else ""


def _listed(known: Iterable[str]) -> str:
    names = sorted(known)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _follow(api: Any, job_id: str, names: Sequence[str], source: str | None, as_json: bool, as_csv: bool) -> None:
    """Print points as they come: as lines of JSON, else a metric per line, since later ones may be others. A name that
    no policy of the job will report is refused, because it would be waited for in vain."""
    policies = list(api.job(job_id).get("policies") or ())
    for name in names:
        if (split := split_policy(name, policies)) is not None and (right := "/".join(split)) != name:
            raise typer.BadParameter(f"the job reports no {name}; did you mean {right}?")
    try:
        for point in api.watch_metrics(job_id):
            if source is not None and point["source"] != source:
                continue
            for row in _chosen([point], names):
                _print_point(row, as_json, as_csv)
    except KeyboardInterrupt:
        complain("the job continues")
        raise typer.Exit(130) from None


def _print_point(row: dict[str, Any], as_json: bool, as_csv: bool) -> None:
    if as_json:
        print_line(row)
        return
    for name, value in row["values"].items():
        if as_csv:
            csv.writer(sys.stdout, lineterminator="\n").writerow([*(row[key] for key in KEYS), name, value])
        else:
            say(f"step {row['step']}  {name} {value:.5g}")
    sys.stdout.flush()
