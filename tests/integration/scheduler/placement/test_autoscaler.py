"""Workers on demand: how many are started for which queue, and what an operator may set."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from opentinker.services.scheduler.autoscaler.autoscaler import Autoscaler, launcher_of, workers_to_start
from opentinker.services.scheduler.autoscaler.base import Launched
from opentinker.services.scheduler.placement.types import (
    NO_GPUS,
    UNKNOWN,
    ClusterView,
    Gpus,
    Held,
    Need,
    PlannedJob,
    Slot,
)
from opentinker.shared.config import Settings
from opentinker.shared.runtime.service import Context
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.tenant_limits import TenantLimits
from opentinker.shared.types.core import JobState, Pool
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.workers import Gpu, WorkerInfo
from tests.conftest import NewContext
from tests.support.scheduling import Workers, new_job

RL = {Pool.TRAINER: 1, Pool.ROLLOUT: 1}
THERE = {Pool.TRAINER: ["t"], Pool.ROLLOUT: ["r"]}


def room(gpus: Mapping[str, Gpus] | None = None) -> dict[str, Slot]:
    slots = [(pool, n) for pool, most in ((Pool.TRAINER, 2), (Pool.ROLLOUT, 4)) for n in range(most)]
    return {f"{pool}-{n}": Slot(pool, (gpus or {}).get(f"{pool}-{n}", NO_GPUS)) for pool, n in slots}


def lacked(view: ClusterView, room: dict[str, Slot]) -> Counter[Pool]:
    return Counter(room[name].pool for name in workers_to_start(view, room))


def queued(id: str, needs: dict[Pool, int] = RL, **changes: Any) -> PlannedJob:
    return PlannedJob(id=id, tenant="default", priority=0, created=1.0, needs=needs, **({"most": 1} | changes))


def view(*jobs: PlannedJob, **changes: Any) -> ClusterView:
    return ClusterView(now=100.0, jobs=jobs, **({"free": {}, "alive": {}} | changes))


# --- workers to start -----------------------------------------------------------------------------------------------


def test_what_a_job_lacks_is_what_is_started() -> None:
    assert lacked(view(queued("a")), room()) == {Pool.TRAINER: 1, Pool.ROLLOUT: 1}
    there = {Pool.ROLLOUT: ["r"]}
    assert lacked(view(queued("a"), free=there, alive=there), room()) == {Pool.TRAINER: 1}


def test_a_job_gets_as_many_rollout_workers_as_it_may_have() -> None:
    assert lacked(view(queued("a", most=3)), room()) == {Pool.TRAINER: 1, Pool.ROLLOUT: 3}
    assert lacked(view(queued("a", most=9)), room()) == {Pool.TRAINER: 1, Pool.ROLLOUT: 4}


def test_nothing_is_started_for_a_job_that_could_not_start_then() -> None:
    assert not lacked(view(queued("a", absent="env worker")), room())
    assert not lacked(view(queued("a", retry_at=200.0)), room())
    assert not lacked(view(queued("a", {Pool.TRAINER: 1, Pool.ROLLOUT: 5})), room())
    assert not lacked(view(queued("a"), limits={"*": TenantLimits(workers=1)}), room())
    assert not lacked(view(queued("a")), {})


def test_what_comes_anyway_is_not_started_again() -> None:
    assert not lacked(view(queued("a"), coming=THERE, alive=THERE), room())
    assert lacked(view(queued("a"), queued("b"), coming=THERE, alive=THERE), room()) == RL


def test_a_job_that_lost_its_trainer_gets_another() -> None:
    running = queued("a", held=True, lost_at=99.0)
    kept, there = [Held("r", "a", Pool.ROLLOUT)], {Pool.ROLLOUT: ["r"]}
    assert lacked(view(running, leases=kept, alive=there), room()) == {Pool.TRAINER: 1}


def test_what_has_the_gpus_that_a_job_needs_is_started_for_it() -> None:
    two, one = Gpus((80, 80)), Gpus((80,))
    gpus = {"trainer-1": two, "rollout-2": one}
    wants = queued("a", gpus={Pool.TRAINER: Need(2), Pool.ROLLOUT: Need(1)})
    assert workers_to_start(view(wants), room(gpus)) == ["trainer-1", "rollout-2"]
    assert workers_to_start(view(queued("a")), room(gpus)) == ["trainer-0", "rollout-0"]
    assert not workers_to_start(view(queued("a", gpus={Pool.TRAINER: Need(3)})), room(gpus))


# --- the loop ---------------------------------------------------------------------------------------------------------


class FakeLauncher:
    """What it starts is there at once, and beats when the test lets it."""

    prefix = "fake"

    def __init__(self) -> None:
        self.all: dict[str, Launched] = {}
        self.ended: list[str] = []

    async def running(self) -> list[Launched]:
        return list(self.all.values())

    def gpus(self, pool: Pool, name: str) -> Gpus:
        return NO_GPUS

    async def start(self, pool: Pool, name: str) -> None:
        assert name not in self.all
        self.all[name] = Launched(name, pool)

    async def end(self, name: str) -> None:
        self.ended.append(name)
        del self.all[name]

    def counts(self) -> Counter[Pool]:
        return Counter(one.pool for one in self.all.values())


@pytest.fixture
async def ctx(new_context: NewContext) -> AsyncIterator[Context]:
    settings = {"launcher_trainers": 2, "launcher_rollout_workers": 3, "launcher_start_s": 1000.0}
    async with new_context("scheduler", **settings) as ctx:
        yield ctx


async def needed(ctx: Context) -> tuple[FakeLauncher, Autoscaler]:
    """A job waits for workers."""
    await new_job(ctx.store, "job-1")
    launcher = FakeLauncher()
    return launcher, Autoscaler(ctx, launcher)


async def test_jobs_get_workers_once_up_to_the_limit(ctx: Context, store: Store, workers: Workers) -> None:
    launcher = FakeLauncher()
    loop = Autoscaler(ctx, launcher)
    await loop.reconcile()
    assert not launcher.all
    await new_job(store, "job-1")
    await loop.reconcile()
    assert launcher.counts() == RL and Counter(slot.pool for slot in loop.starting.values()) == RL
    await loop.reconcile()
    assert launcher.counts() == RL, "they are on their way"
    for n in range(2, 9):
        await new_job(store, f"job-{n}")
    await loop.reconcile()
    assert launcher.counts() == {Pool.TRAINER: 2, Pool.ROLLOUT: 2}
    await Autoscaler(ctx, launcher).reconcile()
    assert launcher.counts() == {Pool.TRAINER: 2, Pool.ROLLOUT: 2}, "the next scheduler knows them"


async def test_a_job_of_a_live_policy_gets_workers_after_it(ctx: Context, store: Store, workers: Workers) -> None:
    spec = {"name": "live", "kind": "inference", "model": {"base": "model"}, "rollout": {"engine": "toy"}}
    served = parse_spec({**spec, "start": {"from": "j-0000000000@live"}}).model_dump(mode="json")
    await store.create_job(id="j-1111111111", spec=served, tenant="default")
    launcher = FakeLauncher()
    loop = Autoscaler(ctx, launcher)
    await loop.reconcile()
    assert not launcher.all, "what it would serve has no workers"
    await new_job(store, "j-0000000000", JobState.STARTING)
    await loop.reconcile()
    assert launcher.counts()[Pool.ROLLOUT] > 0


async def test_a_worker_that_never_starts_is_retried_later(ctx: Context, store: Store, workers: Workers) -> None:
    launcher, loop = await needed(ctx)
    await loop.reconcile()
    (trainer,) = (one for one in launcher.all.values() if one.pool == Pool.TRAINER)
    launcher.all[trainer.name] = Launched(trainer.name, Pool.TRAINER, "its process has ended")
    await loop.reconcile()
    assert launcher.ended == [trainer.name]
    await loop.reconcile()
    assert launcher.counts() == {Pool.ROLLOUT: 1}, "not at once"
    loop._failures[Pool.TRAINER].again_at = 0.0
    await loop.reconcile()
    assert launcher.counts() == RL
    assert loop._failures[Pool.TRAINER].count == 1


async def test_memory_is_learned_from_the_first_worker(ctx: Context, store: Store, workers: Workers) -> None:
    """Else every worker that may be is started for a job that none of them does for, again and again."""

    class Unknowing(FakeLauncher):
        def gpus(self, pool: Pool, name: str) -> Gpus:
            return Gpus((UNKNOWN,)) if pool == Pool.TRAINER else NO_GPUS

    job = await new_job(store, "job-1", resources__trainer_gpus=1, resources__gpu_memory_gb=80, train__learner="torch")
    launcher = Unknowing()
    loop = Autoscaler(ctx, launcher)
    await loop.reconcile()
    assert launcher.counts() == RL, "it may be enough"
    (name,) = (one.name for one in launcher.all.values() if one.pool == Pool.TRAINER)
    info = WorkerInfo(
        id=name, incarnation="a", pool=Pool.TRAINER, host="here", pid=1, status="idle",
        gpus=[Gpu(index=0, uuid="0", model="X", memory=40 * 10**9)],
    )  # fmt: skip
    await store.beat(info, 600.0)
    await loop.reconcile()
    assert launcher.counts() == RL, "another would have no more"
    await store.redis.delete(f"worker:{name}")
    await launcher.end(name)
    await loop.reconcile()
    assert launcher.counts() == {Pool.ROLLOUT: 1}
    await store.transition(job, JobState.CANCELLED, epoch=0)
    await new_job(store, "job-2", resources__trainer_gpus=1, resources__gpu_memory_gb=40, train__learner="torch")
    await loop.reconcile()
    assert launcher.counts()[Pool.TRAINER] == 1, "this is what they have"


async def test_silence_is_ended(ctx: Context, workers: Workers) -> None:
    launcher, loop = await needed(ctx)
    await loop.reconcile()
    names = sorted(launcher.all)
    loop._known = {name: since - 2000.0 for name, since in loop._known.items()}
    await loop.reconcile()
    assert sorted(launcher.ended) == names and not loop.starting


async def test_workers_that_beat_are_not_on_their_way(ctx: Context, store: Store, workers: Workers) -> None:
    launcher, loop = await needed(ctx)
    launcher.all["trainer-0"] = Launched("trainer-0", Pool.TRAINER)
    await workers.start("trainer-0")
    await loop.reconcile()
    assert [slot.pool for slot in loop.starting.values()] == [Pool.ROLLOUT]


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({"LAUNCHER": "docker"}, "launcher"),
        ({"LAUNCHER": "kubernetes"}, "needs launcher_pods"),
        ({"LAUNCHER_PODS": "/pods"}, "launcher_pods is for launcher = kubernetes"),
        ({"LAUNCHER": "process", "LAUNCHER_OWNER": "x"}, "launcher_owner is for launcher = kubernetes"),
        ({"LAUNCHER_ACCESS": "/access"}, "launcher_access is for launcher = process"),
        ({"LAUNCHER_TRAINERS": "-1"}, "launcher_trainers"),
        ({"IDLE_EXIT_S": "0"}, "idle_exit_s"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(environ: dict[str, str], what: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_settings(None, {f"OPENTINKER_{name}": value for name, value in environ.items()})
    assert what in str(caught.value.mistakes)


def test_what_is_to_be_started_must_be_there(tmp_path: Path) -> None:
    for settings, field in (
        (Settings(launcher="process", launcher_access=tmp_path), "launcher_access"),
        (Settings(launcher="kubernetes", launcher_pods=tmp_path), "launcher_pods"),
    ):
        with pytest.raises(SpecError) as caught:
            launcher_of(settings)
        assert [mistake["field"] for mistake in caught.value.mistakes] == [field]
    assert launcher_of(Settings()) is None
