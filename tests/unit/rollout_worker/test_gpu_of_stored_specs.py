"""Whose memory a GPU needs is read from specs that were accepted once, maybe by an earlier release."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

from opentinker.services.rollout_worker.engines import gpu_split
from opentinker.shared.types.core import Lease, Pool
from tests.unit.shared.spec.signalling_job import BASE, refused


async def test_the_spec_of_another_job_is_read_though_a_submission_of_it_is_refused_now() -> None:
    kept = {"keep_best": 1, "best_metric": "val/winrate/speaker/random"}
    against = {"every": 5, "episodes": 4, "against": [{"bot": "random"}]}
    assert refused(artifacts=kept, validation=against).keys() == {"artifacts.best_metric"}
    record = SimpleNamespace(id="b", spec={**BASE, "artifacts": kept, "validation": against})
    store: Any = SimpleNamespace(jobs=AsyncMock(return_value=[record]))
    trains = Lease(job="b", worker="trainer-0", incarnation="i", epoch=1, pool=Pool.TRAINER)
    found = await gpu_split._other_jobs(store, "a", [trains])
    assert list(found) == ["b"] and list(found["b"].policies) == ["speaker", "listener"]
