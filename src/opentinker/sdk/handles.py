"""A job and a sweep as objects of `AsyncClient`: those of `Client` (client/job_handle.py, sweep_handle.py), awaited.

sweep = await client.start_sweep("job.toml", {"parameters": {"train.lr": [1e-5, 1e-4]}})
await sweep.wait()
rows = await sweep.trials()
metrics = await (await sweep.best_job()).metrics()
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from opentinker.sdk.cards import point_row, trial_row
from opentinker.sdk.displays import Frame, Silent, display_of, framed
from opentinker.sdk.http import ApiError
from opentinker.sdk.record_view import FINAL, JobView, Record, RecordView, SweepView
from opentinker.sdk.sweeps import best_job
from opentinker.shared.api_types import Event, Job, Rollout, Sweep, SweepBest
from opentinker.shared.types.core import part_id

if TYPE_CHECKING:
    from opentinker.sdk.client import AsyncClient

AT_ONCE = 16
"""Jobs of a sweep that are asked for at the same time."""


class AsyncHandle(RecordView[Record]):
    """`info`, `name`, `state` and `is_over` are as the server reported last, in `refresh`, `wait` and all other calls.
    Methods raise ApiError as the client's calls do."""

    def __init__(self, client: AsyncClient, found: Record) -> None:
        self.client, self.id = client, found["id"]
        self._last: Record = found

    @abstractmethod
    async def refresh(self) -> Record:
        """Ask the server for the record."""

    @abstractmethod
    async def cancel(self) -> Self:
        """Cancel it."""

    @property
    def info(self) -> Record:
        """The server's latest record."""
        return self._last

    @property
    def name(self) -> str:
        """The display name."""
        return self._last["name"]

    @property
    def state(self) -> str:
        """`running`, `succeeded`, `failed`, `cancelled`, and of a job more, such as `queued`."""
        return self._last["state"]

    @property
    def is_over(self) -> bool:
        """Whether it has succeeded, failed or been cancelled."""
        return self.state in FINAL

    async def wait(
        self,
        *,
        progress: bool = True,
        timeout_s: float | None = None,
        cancel_on_interrupt: bool = False,
        poll_s: float = 1.0,
    ) -> Self:
        """Wait for the end. `progress`: show how far it is, as a card in a notebook and as a bar on a terminal. Raises
        TimeoutError; the job or sweep continues then, as when this task is cancelled unless `cancel_on_interrupt`."""
        shown = display_of(self) if progress else Silent()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with shown:
                while True:
                    found = await self.refresh()
                    shown.update(self._progress_of(found))
                    if found["state"] in FINAL:
                        return self
                    if deadline is not None and time.monotonic() >= deadline:
                        raise TimeoutError(f"{self.NOUN} {self.id} is still {found['state']} after {timeout_s:g} s")
                    await asyncio.sleep(poll_s)
        except asyncio.CancelledError:
            if cancel_on_interrupt:
                await self.cancel()
            raise

    def _repr_html_(self) -> str:
        """Return it as HTML for a notebook, as it was known last."""
        return self._card()


class AsyncJobHandle(JobView, AsyncHandle[Job]):
    """Make it with `AsyncClient.start` or `AsyncClient.handle`."""

    async def refresh(self) -> Job:
        """Ask the server for the job: the dictionary that `AsyncClient.job` returns."""
        self._last = await self.client.job(self.id)
        return self._last

    async def cancel(self) -> Self:
        """Cancel it; its checkpoints stay."""
        await self.client.cancel(self.id)
        await self.refresh()
        return self

    async def metrics(self, names: Sequence[str] | None = None, *, frame: Frame = "auto") -> Any:
        """Return the metric history: a row per point with `step`, `time`, `source` and a column per metric.

        `names`: only these. `frame`: `pandas` or `polars` for a DataFrame, `rows` for a list of dictionaries; `auto`:
        the first of these that is installed."""
        points = await self.client.metrics(self.id, names=None if names is None else list(names))
        return framed([point_row(point) for point in points], frame)

    async def events(self) -> list[Event]:
        """Return what has happened so far, oldest first."""
        return await self.client.event_log(self.id)

    async def rollouts(self, step: int | None = None, *, policy: str = "") -> AsyncGenerator[Rollout, None]:
        """Yield the kept training episodes of a step, or of all steps that have any, oldest first. `policy`: which of
        the policies, of a job with several."""
        part = part_id(self.id, policy)
        found = await self.client.rollouts(part, step)
        for one in [step] if step is not None else found["steps"]:
            page = found if one == found["step"] else await self.client.rollouts(part, one)
            for rollout in page["rollouts"]:
                yield rollout

    async def download(self, to: str | Path, step: int | None = None, *, policy: str = "") -> Path:
        """Download a checkpoint (default: the newest) into a directory that transformers or peft loads. `policy`: which
        of the policies, of a job with several."""
        return await self.client.download(part_id(self.id, policy), to, step)


class AsyncSweepHandle(SweepView, AsyncHandle[Sweep]):
    """Make it with `AsyncClient.start_sweep` or `AsyncClient.sweep_handle`."""

    async def refresh(self) -> Sweep:
        """Ask the server for the sweep: the dictionary that `AsyncClient.sweep_state` returns."""
        self._last = await self.client.sweep_state(self.id)
        return self._last

    async def cancel(self) -> Self:
        """Cancel it and its jobs."""
        await self.client.cancel_sweep(self.id)
        await self.refresh()
        return self

    async def best(self) -> SweepBest | None:
        """Return the best finished trial so far, with `number`, `value` and `settings`; None without any."""
        return (await self.refresh())["best"]

    async def trials(self, *, frame: Frame = "auto") -> Any:
        """Return the trials, by number: `trial`, `state`, `value`, a column per setting, `jobs` (ids), `reason`.

        `frame`: `pandas` or `polars` for a DataFrame, `rows` for a list of dictionaries; `auto`: the first of these
        that is installed."""
        return framed([trial_row(trial) for trial in (await self.refresh())["all_trials"]], frame)

    async def jobs(self) -> list[AsyncJobHandle]:
        """Return the jobs that were submitted so far, in the order of their trials."""
        trials = (await self.refresh())["all_trials"]
        ids = [job["id"] for trial in trials for job in trial["jobs"] if job["id"]]
        limit = asyncio.Semaphore(AT_ONCE)

        async def handle(id: str) -> AsyncJobHandle:
            async with limit:
                return await self.client.handle(id)

        return list(await asyncio.gather(*(handle(id) for id in ids)))

    async def best_job(self) -> AsyncJobHandle:
        """Return the best job of the best trial. Raises ApiError while no trial has finished."""
        found = await self.refresh()
        if found["best"] is None:
            raise ApiError(f"no trial of sweep {self.id} has finished yet: await wait() first")
        return await self.client.handle(best_job(found))
