"""Policies of a job that start from checkpoints: each trainer loads the weights and moments of its own policy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opentinker.services.trainer.checkpoint import commit
from opentinker.services.trainer.job_reporter import JobReporter
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.services.trainer.resume import resume
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.core import JobState, Lease, Pool
from opentinker.shared.types.manifest import Manifest, start_of
from tests.conftest import NewContext
from tests.support.factories import version
from tests.support.learning import digest, loaded, random_groups, torch_spec

JOB = "j-0123456789"
EARLIER = {"a": 10, "b": 20}
"""Steps of their checkpoints."""


@pytest.fixture
async def ctx(new_context: NewContext) -> AsyncIterator[Context]:
    async with new_context("trainer-0") as ctx:
        yield ctx


async def test_each_policy_loads_the_weights_and_moments_that_it_starts_from(ctx: Context, small: Path) -> None:
    starts = {
        name: {"start": {"from": f"j-9876543210~{name}@{step}", "optimizer": True}} for name, step in EARLIER.items()
    }
    seats = {"speaker": "a", "listener": "b"}
    spec = torch_spec(small, environment={"name": "signalling"}, policies=starts, seats=seats)
    expected = {}
    for name, step in EARLIER.items():
        learner = loaded(RlLearner(spec_of(spec, name)))
        for number in range(2):
            learner.step(random_groups(step + number), version(number))
        place = start_of(ctx.settings.data_dir, JOB, name)
        manifest = Manifest(job="j-9876543210", policy=name, epoch=1, step=step, version=version(step))
        commit(place.parent, manifest, learner.save, name=place.name)
        expected[name] = digest(learner)
    assert expected["a"] != expected["b"]

    await ctx.store.create_job(id=JOB, spec=spec.model_dump(mode="json"), tenant="default")
    await ctx.store.transition(JOB, JobState.STARTING, epoch=1)
    lease = Lease(job=JOB, worker="trainer-0", incarnation="i", epoch=1, pool=Pool.TRAINER)
    found = {}
    for name in EARLIER:
        own = spec_of(spec, name)
        learner = RlLearner(own)
        assert await resume(JobReporter(ctx, lease, own, learner, policy=name)) is None
        found[name] = digest(learner)
    assert found == expected
