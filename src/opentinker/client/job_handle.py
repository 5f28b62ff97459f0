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

import contextlib
import html
import importlib
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from opentinker.sdk.http import ApiError
from opentinker.sdk.job_text import reason_of, state_of
from opentinker.shared.api_types import Event, Job, MetricPoint, Rollout

if TYPE_CHECKING:
    from opentinker.client.sync import Client

Frame = Literal["auto", "pandas", "polars", "rows"]
FINAL = ("succeeded", "failed", "cancelled")
WIDTH, HEIGHT = 240, 48


class JobHandle:
    """Make it with `Client.start` or `Client.handle`. Methods raise ApiError as the client's calls do."""

    def __init__(self, client: Client, id: str) -> None:
        self.client, self.id = client, id
        self._last: Job | None = None

    # --- state --------------------------------------------------------------------------------------------------------

    def refresh(self) -> Job:
        """Ask the server for the job: the dictionary that `Client.job` returns."""
        self._last = self.client.job(self.id)
        return self._last

    @property
    def info(self) -> Job:
        """The server's latest record of the job; requested if there has been none yet."""
        return self._last or self.refresh()

    @property
    def name(self) -> str:
        return self.info["name"]

    @property
    def state(self) -> str:
        """`queued`, `running`, `succeeded`..., asked for now."""
        return self.refresh()["state"]

    @property
    def is_over(self) -> bool:
        return self.state in FINAL

    def wait(
        self,
        *,
        progress: bool = True,
        timeout_s: float | None = None,
        cancel_on_interrupt: bool = False,
        poll_s: float = 1.0,
    ) -> JobHandle:
        """Wait until the job has ended. `progress`: show how far it is, as a card in a notebook and as a bar on a
        terminal. Raises TimeoutError; the job continues then, as after Ctrl-C unless `cancel_on_interrupt`."""
        shown = _display_of(self) if progress else _Silent()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with shown:
                while True:
                    shown.update(self.refresh())
                    if self.info["state"] in FINAL:
                        return self
                    if deadline is not None and time.monotonic() >= deadline:
                        raise TimeoutError(f"job {self.id} is still {self.info['state']} after {timeout_s:g} s")
                    time.sleep(poll_s)
        except KeyboardInterrupt:
            if cancel_on_interrupt:
                self.cancel()
            raise

    def cancel(self) -> JobHandle:
        self.client.cancel(self.id)
        self.refresh()
        return self

    # --- results ------------------------------------------------------------------------------------------------------

    def metrics(self, names: Sequence[str] | None = None, *, frame: Frame = "auto") -> Any:
        """Return the metric history: a row per point with `step`, `time`, `source` and a column per metric.

        `names`: only these. `frame`: `pandas` or `polars` for a DataFrame, `rows` for a list of dictionaries; `auto`:
        the first of these that is installed."""
        points = self.client.metrics(self.id, names=None if names is None else list(names))
        rows = [row_of(point) for point in points]
        kind = frame
        if kind == "auto":
            kind = next((one for one in ("pandas", "polars") if importlib.util.find_spec(one)), "rows")
        if kind == "pandas":
            return importlib.import_module("pandas").DataFrame(rows)
        if kind == "polars":
            return importlib.import_module("polars").DataFrame(rows, infer_schema_length=None)
        return rows

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

    # --- how it shows itself ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        known = f" {self._last['name']!r} {state_of(self._last)}" if self._last is not None else ""
        return f"<job {self.id}{known}>"

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield "id", self.id
        if self._last is not None:
            for field in ("name", "state", "step", "steps"):
                yield field, self._last[field]

    def _repr_html_(self) -> str:
        """Return the job as HTML for a notebook."""
        with contextlib.suppress(ApiError):  # as it was known last
            self.refresh()
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


# --- progress ---------------------------------------------------------------------------------------------------------


class _Silent:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def update(self, job: Job) -> None: ...


class _Lines(_Silent):
    """A line on stderr whenever the state changes."""

    def __init__(self) -> None:
        self._said = ""

    def update(self, job: Job) -> None:
        if (line := f"job {job['id']} is {state_of(job)}") != self._said:
            self._said = line
            print(line, file=sys.stderr, flush=True)


class _Card(_Silent):
    """The job's card, redrawn in its place in a notebook."""

    def __init__(self, job: JobHandle) -> None:
        display = importlib.import_module("IPython.display").display
        self._job, self._shown = job, display(job, display_id=True)
        self._drawn: object = None

    def update(self, job: Job) -> None:
        drawn = (job["state"], job["step"], job["waiting_for"])
        if drawn != self._drawn:
            self._drawn = drawn
            self._shown.update(self._job)


class _Bar(_Silent):
    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), transient=False
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, job: Job) -> None:
        from rich.markup import escape

        text = escape(f"{job['name']} {state_of(job)}")
        self._bar.update(self._task, description=text, completed=job["step"], total=job["steps"] or None)


def _display_of(job: JobHandle) -> _Silent:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None and hasattr(shell, "kernel"):
        return _Card(job)
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        return _Bar()
    return _Lines()
