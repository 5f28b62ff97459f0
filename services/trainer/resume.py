"""Resumes a job in a new trainer: the newest good checkpoint, or the model that the job starts from -> the learner.

Both training loops call `resume` first, on a job's first lease as well as after its trainer was killed or replaced.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import structlog

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.job_reporter import JobReporter
from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.data.readable_paths import opening
from opentinker.shared.spec import StartSpec
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import Manifest, start_of

log = structlog.get_logger()


async def resume(reporter: JobReporter) -> Manifest | None:
    """Load the newest good checkpoint into the learner; without one, the model that the job starts from.

    Older epochs cannot write afterwards. Raises JobFailed, Fenced.
    """
    path, manifest = await _find_checkpoint(reporter) or (None, None)
    gone = await asyncio.to_thread(reporter.stored.forget_newer, manifest, reporter.lease.epoch)
    reporter.stored.resumed(manifest)
    step = 0 if manifest is None else manifest.step
    if reporter.stored.went_back:
        log.info("went_back", policy=reporter.policy, step=step, removed=gone)
        await reporter.event("went_back", {"step": step, "from": max(gone, default=step)})
    if reporter.stored.pinned:
        await reporter.event("out_of_step", {"step": step})
    if manifest is not None:
        await reporter.continue_from(manifest)
    # Without a checkpoint only evaluations of the weights that the job starts from remain valid.
    resumed, step = (manifest.resumed, manifest.step) if manifest else ({1: 0}, 0)
    await asyncio.to_thread(reporter.evaluations.restore, resumed, step)
    start = None if manifest else reporter.spec.start
    async with opening(reporter.ctx.store, reporter.ctx.settings, reporter.lease.job):
        load = (
            functools.partial(reporter.learner.load, path)
            if start is None
            else functools.partial(_load_start, reporter, start)
        )
        await finish_uncancelled(asyncio.to_thread(load))
    await reporter.loaded(manifest, start)
    return manifest


async def _find_checkpoint(reporter: JobReporter) -> tuple[Path, Manifest] | None:
    """Fence older epochs and return the newest good checkpoint, if there is one; damaged ones are reported."""
    epoch = reporter.lease.epoch
    await asyncio.to_thread(reporter.stored.fence, epoch)
    damaged: dict[str, str] = {}
    found = await asyncio.to_thread(reporter.stored.find, damaged)
    for name, problem in damaged.items():
        await reporter.event("checkpoint_damaged", {"checkpoint": name, "problem": problem})
    if found is None and damaged and not reporter.stored.went_back:
        raise JobFailed(
            f"none of its {len(damaged)} checkpoints is intact ({next(iter(damaged.values()))}), and it does not "
            f"restart from step 0 by itself. They are in {reporter.root}; submit the job again to start with step 0"
        )
    if found is not None and (manifest := found[1]).epoch >= epoch:
        raise JobFailed(
            f"checkpoint {manifest.name} was written in epoch {manifest.epoch}, this trainer has epoch "
            f"{epoch}: the job's record is older than its checkpoints"
        )
    return found


def _load_start(reporter: JobReporter, start: StartSpec) -> None:
    """Load the other job's checkpoint, which the scheduler has linked into the job's directory. Blocking."""
    directory = start_of(reporter.ctx.settings.data_dir, reporter.lease.job, reporter.policy)
    try:
        checkpoint.read_intact(directory)
    except JobFailed as error:
        raise JobFailed(
            f"it cannot start from {start.checkpoint}: {error}; submit it again from another checkpoint "
            f"(`opentinker checkpoints {start.job}` lists them)"
        ) from error
    reporter.learner.start(directory, optimizer=start.optimizer)
