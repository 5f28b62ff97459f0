"""Jobs and sweeps as text, as HTML for notebooks, and as rows of tables."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from opentinker.sdk.displays import Progress
from opentinker.sdk.job_text import reason_of, state_of
from opentinker.shared.api_types import Job, MetricPoint, Sweep, SweepTrial

WIDTH, HEIGHT = 240, 48
"""Size of a curve, in pixels."""
SHOWN = 10
"""Trials of a card."""


def point_row(point: MetricPoint) -> dict[str, Any]:
    return {"step": point["step"], "time": point["time"], "source": point["source"], **point["values"]}


def job_card(id: str, job: Job | None) -> str:
    """Return a job as HTML. Every text is escaped; there are no scripts, styles or addresses of others in it."""
    if job is None:
        return f"<p><b>{html.escape(id)}</b>: the server does not answer</p>"
    of = f" of {job['steps']}" if job["steps"] else ""
    why = reason_of(job)
    rows = [("state", job["state"] + (f": {why}" if why else "")), ("step", f"{job['step']}{of}")]
    lines = "".join(f"<tr><td>{name}</td><td>{html.escape(text)}</td></tr>" for name, text in rows)
    drawn = ""
    if len(values := job["curve"]) > 1:
        name = "reward" if job["kind"] == "rl" else "loss"
        drawn = f"<tr><td>{name}</td><td>{_sparkline(values)} {values[-1]:.4g}</td></tr>"
    return f"<table><tr><th>{html.escape(job['name'])}</th><th>{html.escape(id)}</th></tr>{lines}{drawn}</table>"


def _sparkline(values: Sequence[float]) -> str:
    every = max(1, len(values) // WIDTH)
    chosen = list(values[::every])
    low, high = min(chosen), max(chosen)
    span = (high - low) or 1.0
    places = [
        f"{WIDTH * at / max(1, len(chosen) - 1):.1f},{HEIGHT - HEIGHT * (value - low) / span:.1f}"
        for at, value in enumerate(chosen)
    ]
    line = f'<polyline points="{" ".join(places)}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{line}</svg>'


def job_progress(job: Job) -> Progress:
    """Return how far a job is."""
    state = state_of(job)
    text, line = f"{job['name']} {state}", f"job {job['id']} is {state}"
    return Progress(job["id"], text, line, job["step"], job["steps"] or 0, job["waiting_for"])


def trial_row(trial: SweepTrial) -> dict[str, Any]:
    """Return a trial as a row of a table."""
    jobs = ", ".join(job["id"] for job in trial["jobs"] if job["id"])
    known = {"trial": trial["number"], "state": trial["state"], "value": trial["value"]}
    return {**known, **trial["settings"], "jobs": jobs, "reason": trial["reason"]}


def ended_trials(sweep: Sweep) -> int:
    """Return how many trials have ended."""
    return sum(count for state, count in sweep["trials"].items() if state != "running")


def sweep_told(sweep: Sweep) -> str:
    """`running, 3 of 8 trials, best reward/mean 0.91 (train.lr 0.0001)`"""
    best = sweep["best"]
    parts = [sweep["state"], f"{ended_trials(sweep)} of {sweep['planned']} trials"]
    if best is not None:
        settings = ", ".join(f"{path} {value}" for path, value in best["settings"].items())
        parts.append(f"best {sweep['metric']} {best['value']:.4g} ({settings})")
    return ", ".join(parts)


def sweep_progress(sweep: Sweep) -> Progress:
    """Return how far a sweep is."""
    said = sweep_told(sweep)
    return Progress(
        sweep["id"], f"{sweep['name']} {said}", f"sweep {sweep['id']}: {said}", ended_trials(sweep), sweep["planned"]
    )


def sweep_card(id: str, sweep: Sweep | None) -> str:
    """Return a sweep as HTML, with its best finished trials. Every text is escaped; it has no scripts or styles."""
    if sweep is None:
        return f"<p><b>{html.escape(id)}</b>: the server does not answer</p>"
    sign = 1 if sweep["goal"] == "minimize" else -1
    valued = [trial for trial in sweep["all_trials"] if trial["state"] == "finished" and trial["value"] is not None]
    ranked = sorted(valued, key=lambda trial: sign * (trial["value"] or 0.0))
    paths = list(sweep["all_trials"][0]["settings"]) if sweep["all_trials"] else []
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("trial", "state", sweep["metric"], *paths))
    rows = ""
    for trial in ranked[:SHOWN]:
        cells = [trial["number"], trial["state"], f"{trial['value']:.4g}", *(trial["settings"][path] for path in paths)]
        rows += "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>"
    reason = f": {sweep['reason']}" if sweep["reason"] else ""
    more = f"<p>and {len(ranked) - SHOWN} more</p>" if len(ranked) > SHOWN else ""
    return (
        f"<p><b>{html.escape(sweep['name'])}</b> {html.escape(id)}<br>{html.escape(sweep_told(sweep) + reason)}</p>"
        f"<table><tr>{head}</tr>{rows}</table>{more}"
    )
