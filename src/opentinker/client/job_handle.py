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

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from opentinker.client.handle import Handle
from opentinker.sdk.cards import point_row
from opentinker.sdk.displays import Frame, framed
from opentinker.sdk.record_view import JobView
from opentinker.shared.api_types import Event, Job, Rollout
from opentinker.shared.types.core import part_id


class JobHandle(JobView, Handle[Job]):
    """Make it with `Client.start` or `Client.handle`. Methods raise ApiError as the client's calls do."""

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
        rows = [point_row(point) for point in points]
        return framed(rows, frame)

    def events(self) -> list[Event]:
        """Return what has happened so far, oldest first."""
        return self.client.event_log(self.id)

    def rollouts(self, step: int | None = None, *, policy: str = "") -> Iterator[Rollout]:
        """Yield the kept training episodes of a step, or of all steps that have any, oldest first. `policy`: which of
        the policies, of a job with several."""
        part = part_id(self.id, policy)
        found = self.client.rollouts(part, step)
        for one in [step] if step is not None else found["steps"]:
            page = found if one == found["step"] else self.client.rollouts(part, one)
            yield from page["rollouts"]

    def download(self, to: str | Path, step: int | None = None, *, policy: str = "") -> Path:
        """Download a checkpoint (default: the newest) into a directory that transformers or peft loads. `policy`: which
        of the policies, of a job with several."""
        return self.client.download(part_id(self.id, policy), to, step)
