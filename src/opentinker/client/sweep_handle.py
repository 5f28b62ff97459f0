"""A sweep as an object, for scripts and notebooks.

    sweep = client.start_sweep("job.toml", {"parameters": {"train.lr": [1e-5, 1e-4]}, "seeds": [1, 2]})
    sweep.wait(progress=True)
    sweep.trials()                           # a table, if pandas or polars is installed
    sweep.best_job().metrics()

In a notebook it shows itself as a card with its best trials.
"""

from __future__ import annotations

import contextlib
import html
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from opentinker.client.displays import Frame, Progress, Silent, display_of, framed
from opentinker.client.job_handle import JobHandle
from opentinker.sdk.http import ApiError
from opentinker.sdk.sweeps import best_job
from opentinker.shared.api_types import Sweep, SweepBest, SweepTrial

if TYPE_CHECKING:
    from opentinker.client.sync import Client

SHOWN = 10
"""Trials of a card."""


class SweepHandle:
    """Make it with `Client.start_sweep` or `Client.sweep_handle`. Methods raise ApiError as the client's calls do."""

    def __init__(self, client: Client, id: str) -> None:
        self.client, self.id = client, id
        self._last: Sweep | None = None

    # --- state --------------------------------------------------------------------------------------------------------

    def refresh(self) -> Sweep:
        """Ask the server for the sweep: the dictionary that `Client.sweep_state` returns."""
        self._last = self.client.sweep_state(self.id)
        return self._last

    @property
    def info(self) -> Sweep:
        """The server's latest record of the sweep; requested if there has been none yet."""
        return self._last or self.refresh()

    @property
    def name(self) -> str:
        """The display name."""
        return self.info["name"]

    @property
    def state(self) -> str:
        """`running`, `succeeded`, `failed` or `cancelled`, asked for now."""
        return self.refresh()["state"]

    @property
    def is_over(self) -> bool:
        """Whether it has ended; asked for now."""
        return self.state != "running"

    def wait(
        self,
        *,
        progress: bool = True,
        timeout_s: float | None = None,
        cancel_on_interrupt: bool = False,
        poll_s: float = 1.0,
    ) -> SweepHandle:
        """Wait until the sweep has ended. `progress`: show how many trials have ended and the best so far, as a card in
        a notebook and as a bar on a terminal. Raises TimeoutError; the sweep continues then, as after Ctrl-C unless
        `cancel_on_interrupt`."""
        shown = display_of(self) if progress else Silent()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with shown:
                while True:
                    shown.update(progress_of(self.refresh()))
                    if self.info["state"] != "running":
                        return self
                    if deadline is not None and time.monotonic() >= deadline:
                        raise TimeoutError(f"sweep {self.id} is still running after {timeout_s:g} s")
                    time.sleep(poll_s)
        except KeyboardInterrupt:
            if cancel_on_interrupt:
                self.cancel()
            raise

    def cancel(self) -> SweepHandle:
        """Cancel it and its jobs."""
        self.client.cancel_sweep(self.id)
        self.refresh()
        return self

    # --- results ------------------------------------------------------------------------------------------------------

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

    # --- how it shows itself ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        known = f" {self._last['name']!r} {told(self._last)}" if self._last is not None else ""
        return f"<sweep {self.id}{known}>"

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield "id", self.id
        if self._last is not None:
            for field in ("name", "state", "trials", "planned", "best"):
                yield field, self._last[field]

    def _repr_html_(self) -> str:
        """Return the sweep as HTML for a notebook."""
        with contextlib.suppress(ApiError):  # as it was known last
            self.refresh()
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
