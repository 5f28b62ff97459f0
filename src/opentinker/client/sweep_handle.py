"""A sweep as an object, for scripts and notebooks.

    sweep = client.start_sweep("job.toml", {"parameters": {"train.lr": [1e-5, 1e-4]}, "seeds": [1, 2]})
    sweep.wait(progress=True)
    sweep.trials()                           # a table, if pandas or polars is installed
    sweep.best_job().metrics()

In a notebook it shows itself as a card with its best trials.
"""

from __future__ import annotations

from typing import Any, Self

from opentinker.client.handle import Handle
from opentinker.client.job_handle import JobHandle
from opentinker.sdk.cards import trial_row
from opentinker.sdk.displays import Frame, framed
from opentinker.sdk.http import ApiError
from opentinker.sdk.record_view import SweepView
from opentinker.sdk.sweeps import best_job
from opentinker.shared.api_types import Sweep, SweepBest


class SweepHandle(SweepView, Handle[Sweep]):
    """Make it with `Client.start_sweep` or `Client.sweep_handle`. Methods raise ApiError as the client's calls do."""

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
        return framed([trial_row(trial) for trial in self.refresh()["all_trials"]], frame)

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
