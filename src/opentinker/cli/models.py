"""`opentinker models`: the models that clients train on a Tinker server, and their checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from opentinker.cli.artifacts import size_of
from opentinker.cli.common import AsJson, JobId, Url, ago, client, print_json, print_table, say, when
from opentinker.cli.rows import LEVELS
from opentinker.shared.types.errors import plural

if TYPE_CHECKING:
    from opentinker.shared.api_types import ServedModel, ServedModels

POINTS = 16
"""Values of a curve in the table."""


def models(
    job_id: JobId,
    offset: Annotated[int, typer.Option(help="Skip this many models, the last used ones.", min=0)] = 0,
    limit: Annotated[int, typer.Option("--limit", "-n", help="Show this many models.", min=1, max=1000)] = 20,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the models of a Tinker server's clients: progress, what they wait for, and their checkpoints."""
    found = client(url).job_models(job_id, offset=offset, limit=limit)
    if as_json:
        print_json(found)
        return
    say(_heading(found, offset))
    columns = ["model", "rank", "steps", "loss", "over passes", "tokens", "last used", "client", "waits for"]
    rows = [
        [
            *(
                one["id"],
                one["rank"] or "all weights",
                one["steps"],
                "-" if one["loss"] is None else f"{one['loss']:.4g}",
            ),
            *(sparkline(one["curve"]), f"{one['tokens']:,}", ago(one["used"])),
            *("alive" if one["alive"] else "gone", _waits(one)),
        ]
        for one in found["models"]
    ]
    print_table(columns, rows, empty="connect a client of the Tinker SDK to make one: docs/tinker.md", last_below=True)
    saved = [
        [one["path"], one["step"], size_of(one["bytes"]), ago(one["created"]), _kept(one["expires"], one["public"])]
        for model in found["models"]
        for one in model["checkpoints"]
    ]
    if saved:
        say("")
        print_table(["checkpoint", "step", "size", "saved", "expires"], saved, empty="")


def sparkline(curve: Sequence[float]) -> str:
    """Return a character for each of the newest values, from the lowest of them to the highest."""
    newest = curve[-POINTS:]
    low, high = min(newest, default=0.0), max(newest, default=0.0)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(LEVELS[round((value - low) * scale)] for value in newest)


def _heading(found: ServedModels, offset: int) -> str:
    """`models 1 to 2 of 2 on runs/models/tiny; slots 3/8, 2 waiting for tokens; other tenants: 1 model`"""
    last = offset + len(found["models"])
    models = f"models {offset + 1} to {last} of {found['total']}" if found["models"] else "no models"
    parts = [f"{models} on {found['base']}"]
    if found["queue"]:
        parts.append(found["queue"])
    others = found["others"]
    if others is not None and others["models"]:
        waiting = f", {plural(others['waiting'], 'command')} waiting" if others["waiting"] else ""
        parts.append(f"other tenants: {plural(others['models'], 'model')}, {others['alive']} with a client{waiting}")
    return "; ".join(parts)


def _waits(model: ServedModel) -> str:
    return f"{model['waiting_for']} ({plural(model['waiting'], 'command')})" if model["waiting"] else "-"


def _kept(expires: float | None, public: bool) -> str:
    return ("never" if expires is None else when(expires).partition(" (")[0]) + (", public" if public else "")
