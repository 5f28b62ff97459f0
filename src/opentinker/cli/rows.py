"""`opentinker rows`: the rows of a job's data set, and how often each was solved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from opentinker.cli.common import AsJson, JobId, Policy, Url, client, print_json, print_table, say
from opentinker.shared.api_types import DataRow, DataRows, RowPoint
from opentinker.shared.types.core import part_id
from opentinker.shared.types.errors import plural

LEVELS = "▁▂▃▄▅▆▇█"
PROMPT = 60
"""Characters of a prompt in the table."""
POINTS = 16
"""Newest points of a row's series in the table."""


def rows(
    job_id: JobId,
    text: Annotated[str, typer.Option("--text", "-t", help="Only rows with this text, in any letter case.")] = "",
    least_solved: Annotated[
        int | None, typer.Option(help="Only rows solved in at least this percentage of their episodes.", min=0, max=100)
    ] = None,
    most_solved: Annotated[
        int | None, typer.Option(help="Only rows solved in at most this percentage.", min=0, max=100)
    ] = None,
    solved_above: Annotated[
        int | None, typer.Option(help="Only rows solved in more than this percentage.", min=0, max=100)
    ] = None,
    solved_below: Annotated[
        int | None, typer.Option(help="Only rows solved in less than this percentage.", min=0, max=100)
    ] = None,
    sort: Annotated[
        str, typer.Option(help="Order: row, solved, played or reward; a leading - reverses it.", metavar="ORDER")
    ] = "row",
    offset: Annotated[int, typer.Option(help="Skip this many rows.", min=0)] = 0,
    limit: Annotated[int, typer.Option("--limit", "-n", help="Show this many rows.", min=1, max=100)] = 20,
    full: Annotated[bool, typer.Option("--full", help="Show whole prompts in place of a table.")] = False,
    policy: Policy = "",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the rows of a job's data set: prompt, tokens, and how often each was solved, over steps."""
    found = client(url).rows(
        part_id(job_id, policy),
        text=text,
        least_solved=least_solved,
        most_solved=most_solved,
        solved_above=solved_above,
        solved_below=solved_below,
        sort=sort,
        offset=offset,
        limit=limit,
    )
    if as_json:
        print_json(found)
        return
    say(_heading(found, offset))
    if full:
        for line in _in_full(found["rows"], played=found["solved_at"] is not None):
            say(line)
        return
    if found["solved_at"] is None:
        learned = [[row["row"], _or_dash(row["tokens"]), _short(row)] for row in found["rows"]]
        print_table(["row", "tokens", "prompt"], learned, empty="no row matches the filters")
        return
    played = [
        [
            *(row["row"], _or_dash(row["tokens"]), row["played"]),
            *("-" if row["reward"] is None else f"{row['reward']:.2f}", percent(row["solved"])),
            *(sparkline(row["series"]), _short(row)),
        ]
        for row in found["rows"]
    ]
    columns = ["row", "tokens", "played", "reward", "solved", "over steps", "prompt"]
    print_table(columns, played, empty="no row matches the filters")


def sparkline(series: Sequence[RowPoint]) -> str:
    """Return a character per point, the newest last: the higher, the more was solved."""
    return "".join(LEVELS[round(point["solved"] * (len(LEVELS) - 1))] for point in series[-POINTS:])


def _heading(found: DataRows, offset: int) -> str:
    """`rows 1 to 20 of 7,473 of gsm8k; 1,204 were played; solved: reward at least 1`"""
    last = offset + len(found["rows"])
    parts = [f"rows {offset + 1:,} to {last:,} of {found['total']:,}" if found["rows"] else "no rows"]
    if found["total"] != found["count"]:
        parts[0] += f" that pass, of {found['count']:,}"
    parts[0] += f" of {found['source']}"
    if found["solved_at"] is not None:
        parts += [
            f"{found['played']:,} {'was' if found['played'] == 1 else 'were'} played",
            f"solved: reward at least {found['solved_at']:g}",
        ]
    if found["searched"] < found["count"]:
        parts.append(f"only the first {found['searched']:,} were searched")
    if found["first_step"]:
        parts.append(f"counts begin with step {found['first_step']}")
    if found["note"]:
        parts.append(f"prompts are plain messages: {found['note']}")
    return "; ".join(parts)


def _in_full(rows: Iterable[DataRow], *, played: bool) -> Iterable[str]:
    for row in rows:
        where = f" ({row['place']})" if row["place"] else ""
        yield f"\n--- row {row['row']}{where}: {_facts(row, played=played)}"
        if row["prompt"]:
            more = f" ... ({row['left_out']} more characters are left out)" if row["left_out"] else ""
            yield f"{row['prompt']}{more}"
        yield from (f"[{name}] {words}" for name, words in row["answers"].items())


def _facts(row: DataRow, *, played: bool) -> str:
    """`80 tokens, played 8 times, reward 0.25, solved 25 % ▁▂; episodes of steps 3, 7`"""
    parts = [row["problem"]] if row["problem"] else []
    if row["tokens"] is not None:
        parts.append(plural(row["tokens"], "token"))
    if row["images"]:
        parts.append(f"{plural(row['images'], 'image')} not counted")
    if played:
        parts.append(f"played {plural(row['played'], 'time')}" if row["played"] else "not played yet")
    if row["reward"] is not None:
        parts.append(f"reward {row['reward']:g}, solved {percent(row['solved'])} {sparkline(row['series'])}")
    steps = f"; episodes of steps {', '.join(map(str, row['kept']))}" if row["kept"] else ""
    return ", ".join(parts) + steps


def percent(share: float | None) -> str:
    """`12 %`; a share that is not quite 0 or 1 has a digit more, `99.5 %`."""
    if share is None:
        return "-"
    if 0.0 < share < 0.01 or 0.99 < share < 1.0:
        return f"{min(max(100 * share, 0.1), 99.9):.1f} %"
    return f"{100 * share:.0f} %"


def _or_dash(number: int | None) -> object:
    return "-" if number is None else number


def _short(row: DataRow) -> str:
    words = " ".join((row["prompt"] or row["problem"]).split())
    return words if len(words) <= PROMPT else f"{words[: PROMPT - 3]}..."
