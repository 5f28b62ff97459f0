"""A job as an object, for scripts and notebooks.

    job = client.start("job.toml")           # or client.handle("j-...")
    job.wait(progress=True)
    job.metrics()                            # a table, if pandas or polars is installed
    for episode in job.rollouts():
        print(episode["reward"], episode["ending"])

In a notebook it shows itself as a card with a curve. Needs the client alone; rich, IPython, pandas and polars are used
where they are installed.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from opentinker.client.displays import Frame, Progress, framed
from opentinker.client.handle import Handle
from opentinker.sdk.job_text import reason_of, state_of
from opentinker.shared.api_types import Event, Job, MetricPoint, Rollout

WIDTH, HEIGHT = 240, 48


class JobHandle(Handle[Job]):
    """Make it with `Client.start` or `Client.handle`. Methods raise ApiError as the client's calls do."""

    NOUN = "job"
    FIELDS = ("name", "state", "step", "steps")

    def refresh(self) -> Job:
        """Ask the server for the job: the dictionary that `Client.job` returns."""
        self._last = self.client.job(self.id)
        return self._last

    def cancel(self) -> Self:
        """Cancel it; its checkpoints stay."""
        self.client.cancel(self.id)
        self.refresh()
        return self

    def metrics(self, names: Sequence[str] | None = None, *, frame: Frame = "auto") -> Any:
        """Return the metric history: a row per point with `step`, `time`, `source` and a column per metric.

        `names`: only these. `frame`: `pandas` or `polars` for a DataFrame, `rows` for a list of dictionaries; `auto`:
        the first of these that is installed."""
        points = self.client.metrics(self.id, names=None if names is None else list(names))
        rows = [row_of(point) for point in points]
        return framed(rows, frame)

    def events(self) -> list[Event]:
        """Return what has happened so far, oldest first."""
        return self.client.event_log(self.id)

    def rollouts(self, step: int | None = None) -> Iterator[Rollout]:
        """Yield the kept training episodes of a step, or of all steps that have any, oldest first."""
        found = self.client.rollouts(self.id, step)
        for one in [step] if step is not None else found["steps"]:
            page = found if one == found["step"] else self.client.rollouts(self.id, one)
            yield from page["rollouts"]

    def download(self, to: str | Path, step: int | None = None) -> Path:
        """Download a checkpoint (default: the newest) into a directory that transformers or peft loads."""
        return self.client.download(self.id, to, step)

    def _progress_of(self, record: Job) -> Progress:
        return progress_of(record)

    def _told(self, record: Job) -> str:
        return state_of(record)

    def _card(self) -> str:
        return card(self.id, self._last)


def row_of(point: MetricPoint) -> dict[str, Any]:
    return {"step": point["step"], "time": point["time"], "source": point["source"], **point["values"]}


def card(id: str, job: Job | None) -> str:
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


def progress_of(job: Job) -> Progress:
    """Return how far a job is."""
    state = state_of(job)
    text, line = f"{job['name']} {state}", f"job {job['id']} is {state}"
    return Progress(job["id"], text, line, job["step"], job["steps"] or 0, job["waiting_for"])
