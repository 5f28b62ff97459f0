"""The trainers of a job's policies in one process: which error ends the job."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from opentinker.services.trainer.job_training import train_all
from opentinker.shared.types.errors import Fenced, JobFailed


async def test_the_job_ends_by_the_first_error_whatever_saving_the_other_policies_meets() -> None:
    waiting = asyncio.Event()

    async def interrupted() -> None:
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            raise Fenced("the checkpoint of this policy was refused")

    async def fails() -> None:
        await waiting.wait()
        raise JobFailed("step 3 was refused: the loss is nan")

    jobs: list[Any] = [SimpleNamespace(run=interrupted), SimpleNamespace(run=fails)]
    with pytest.raises(JobFailed, match="the loss is nan"):
        await train_all(jobs)
