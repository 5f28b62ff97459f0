"""A sweep as an object, for scripts and notebooks.

    sweep = client.start_sweep("job.toml", {"parameters": {"train.lr": [1e-5, 1e-4]}, "seeds": [1, 2]})
    sweep.wait(progress=True)
    sweep.trials()                           # a table, if pandas or polars is installed
    sweep.best_job().metrics()

In a notebook it shows itself as a card with its best trials.
"""

from __future__ import annotations

import html
from typing import Any, Self

from opentinker.client.displays import Frame, Progress, framed
from opentinker.client.handle import Handle
from opentinker.client.job_handle import JobHandle
from opentinker.sdk.http import ApiError
from opentinker.sdk.sweeps import best_job
from opentinker.shared.api_types import Sweep, SweepBest, SweepTrial

SHOWN = 10
"""Trials of a card."""


class SweepHandle(Handle[Sweep]):
    """Make it with `Client.start_sweep` or `Client.sweep_handle`. Methods raise ApiError as the client's calls do."""

    NOUN = "sweep"
    FIELDS = ("name", "state", "trials", "planned", "best")

    def refresh(self) -> Sweep:
        """Ask the server for the sweep: the dictionary that `Client.sweep_state` returns."""
        self._last = self.client.sweep_state(self.id)
        return self._last

    def cancel(self) -> Self:
        """Cancel it and its jobs."""
        self.client.cancel_sweep(self.id)
        self.refresh()
        return self

    @property
    def best(self) -> SweepBest | None:
        """The best finished trial so far, with `number`, `value` and `settings`, asked for now; None without any."""
        return self.refresh()["best"]

    def trials(self, *, frame: Frame = "auto") -> Any:
        """Return the trials, by number: `trial`, `state`, `value`, a column per setting, `jobs` (ids), `reason`.

        `frame`: `pandas` or `polars` for a DataFrame, `rows` for a list of dictionaries; `auto`: the first of these
        that is installed."""
        return framed([row_of(trial) for trial in self.refresh()["all_trials"]], frame)

    def jobs(self) -> list[JobHandle]:
        """Return the jobs that were submitted so far, in the order of their trials."""
        trials = self.refresh()["all_trials"]
        return [JobHandle(self.client, job["id"]) for trial in trials for job in trial["jobs"] if job["id"]]

    def best_job(self) -> JobHandle:
        """Return the best job of the best trial. Raises ApiError while no trial has finished."""
        found = self.refresh()
        if found["best"] is None:
            raise ApiError(f"no trial of sweep {self.id} has finished yet: call wait() first")
        return JobHandle(self.client, best_job(found))

    def _progress_of(self, record: Sweep) -> Progress:
        return progress_of(record)

    def _told(self, record: Sweep) -> str:
        return told(record)

    def _card(self) -> str:
        return card(self.id, self._last)


def row_of(trial: SweepTrial) -> dict[str, Any]:
    """Return a trial as a row of a table."""
    jobs = ", ".join(job["id"] for job in trial["jobs"] if job["id"])
    known = {"trial": trial["number"], "state": trial["state"], "value": trial["value"]}
    return {**known, **trial["settings"], "jobs": jobs, "reason": trial["reason"]}


def ended(sweep: Sweep) -> int:
    """Return how many trials have ended."""
    return sum(count for state, count in sweep["trials"].items() if state != "running")


def told(sweep: Sweep) -> str:
    """`running, 3 of 8 trials, best reward/mean 0.91 (train.lr 0.0001)`"""
    best = sweep["best"]
    parts = [sweep["state"], f"{ended(sweep)} of {sweep['planned']} trials"]
    if best is not None:
        settings = ", ".join(f"{path} {value}" for path, value in best["settings"].items())
        parts.append(f"best {sweep['metric']} {best['value']:.4g} ({settings})")
    return ", ".join(parts)


def progress_of(sweep: Sweep) -> Progress:
    """Return how far a sweep is."""
    said = told(sweep)
    return Progress(
        sweep["id"], f"{sweep['name']} {said}", f"sweep {sweep['id']}: {said}", ended(sweep), sweep["planned"]
    )


def card(id: str, sweep: Sweep | None) -> str:
    """Return a sweep as HTML, with its best trials. Every text is escaped; there are no scripts or styles in it."""
    if sweep is None:
        return f"<p><b>{html.escape(id)}</b>: the server does not answer</p>"
    sign = 1 if sweep["goal"] == "minimize" else -1
    valued = [trial for trial in sweep["all_trials"] if trial["value"] is not None]
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
        f"<p><b>{html.escape(sweep['name'])}</b> {html.escape(id)}<br>{html.escape(told(sweep) + reason)}</p>"
        f"<table><tr>{head}</tr>{rows}</table>{more}"
    )
