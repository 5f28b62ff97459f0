"""reference-forward as a pool: models in memory, forward passes across jobs, and several instances."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from opentinker.services.reference_forward.required_models import ModelKey
from opentinker.services.reference_forward.scorer import Scorer
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import GROUP, SCORE
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import F32, JobState, Pool
from opentinker.shared.types.trajectories import Group
from tests.conftest import WAIT_S, Server, start_nats, until
from tests.integration.trainer.test_reference_forward import add_job, failed, launch, of_job, passed, running, send


async def test_a_model_too_large_fails_its_job_and_others_go_on(bus: Bus, store: Store, tiny: Path) -> None:
    """The tiny model has 9.5 MB in float32, half of it in bfloat16."""
    large = await add_job(store, str(tiny))
    small = await add_job(store, str(tiny), dtype="bfloat16")
    await send(bus, *of_job(large, 1), *of_job(small, 1))
    async with running(bus, store, reference_memory_gb=0.005) as service:
        assert f"model {str(tiny)!r} takes 0.00951 GB in float32" in await failed(store, large)
        await passed(bus, small, 1)
        assert 0 < service.cache.used_bytes <= 5_000_000


class SlowLoad(Scorer):
    """Takes models of one dtype as long as the test likes."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype, self.release = dtype, threading.Event()
        self.loads: list[str] = []

    def load(self, key: ModelKey) -> Any:
        self.loads.append(key.dtype)
        assert key.dtype != self.dtype or self.release.wait(WAIT_S)
        return super().load(key)


async def test_no_model_is_loaded_for_a_job_that_ended_while_it_waited(bus: Bus, store: Store, tiny: Path) -> None:
    scorer = SlowLoad("float32")
    first = await add_job(store, str(tiny))
    ended = await add_job(store, str(tiny), dtype="bfloat16")
    async with running(bus, store, make_scorer=lambda: scorer) as service:
        try:
            await send(bus, *of_job(first, 1))
            await until(lambda: scorer.loads)
            await send(bus, *of_job(ended, 1))
            await until(lambda: len(service.queue.queues) == 2)
            await store.transition(ended, JobState.CANCELLED)
        finally:
            scorer.release.set()
        await passed(bus, first, 1)
        await until(lambda: not service.queue.in_flight)
        assert scorer.loads == ["float32"] and service.cache.loads == 1
        await until(lambda: bus.count("SCORES", SCORE.at(job=ended)), lambda waiting: not waiting)
        again = await add_job(store, str(tiny), dtype="bfloat16")
        await send(bus, *of_job(again, 1))
        await passed(bus, again, 1)


class Watching(Scorer):
    """Counts, whenever it loads a model, those of before that are still in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.models: list[weakref.ref[Any]] = []
        self.alive: list[int] = []

    def load(self, key: ModelKey) -> Any:
        self.alive.append(sum(model() is not None for model in self.models))
        model = super().load(key)
        self.models.append(weakref.ref(model))
        return model


async def test_a_model_has_left_the_memory_before_the_next_one_is_loaded(bus: Bus, store: Store, tiny: Path) -> None:
    """Room for one: one after another in turn, each of which has scored a group."""
    scorer = Watching()
    one, other = await add_job(store, str(tiny)), await add_job(store, str(tiny), dtype="bfloat16")
    groups = {job: of_job(job, 2) for job in (one, other)}
    async with running(bus, store, make_scorer=lambda: scorer, reference_memory_gb=0.01):
        for turn, job in enumerate((one, other, one, other)):
            await send(bus, groups[job][turn // 2])
            await passed(bus, job, 1 + turn // 2)
    assert scorer.alive == [0, 0, 0, 0]


# --- forward passes -------------------------------------------------------------------------------------------------


class Recording(Scorer):
    """Remembers the groups of each pass. `before` runs in the thread of a pass, ahead of it."""

    entered = False

    def __init__(self, before: Callable[[], object] = lambda: None, **options: Any) -> None:
        super().__init__(**options)
        self.before = before
        self.passes: list[list[str]] = []

    def score(self, model: Any, groups: Sequence[Group], temperatures: Sequence[float]) -> list[list[F32]]:
        self.entered = True
        self.before()
        self.passes.append([group.key for group in groups])
        return super().score(model, groups, temperatures)


async def test_what_waits_for_one_model_goes_through_it_in_one_pass(bus: Bus, store: Store, tiny: Path) -> None:
    """While the first pass is held up the other jobs' groups gather; then they go together, each to its own job."""
    released = threading.Event()
    scorer = Recording(lambda: released.wait(WAIT_S))
    jobs = [await add_job(store, str(tiny)) for _ in range(3)]
    async with running(bus, store, make_scorer=lambda: scorer) as service:
        await send(bus, *of_job(jobs[0], 1))
        await until(lambda: scorer.entered)
        await send(bus, *of_job(jobs[1], 2), *of_job(jobs[2], 2))
        await until(lambda: len(service.queue.in_flight) == 5)
        released.set()
        for job, count in zip(jobs, (1, 2, 2), strict=True):
            await passed(bus, job, count)
        assert scorer.passes[0] == [f"{jobs[0]}/0"]
        assert sorted(scorer.passes[1]) == [f"{job}/{seq}" for job in sorted(jobs[1:]) for seq in (0, 1)]
        assert len(scorer.passes) == 2 and service.cache.loads == 1


async def test_one_bad_group_in_a_shared_pass_fails_its_job_alone(bus: Bus, store: Store, tiny: Path) -> None:
    released = threading.Event()
    scorer = Recording(lambda: released.wait(WAIT_S))
    first, good, bad = [await add_job(store, str(tiny)) for _ in range(3)]
    unknown = of_job(bad, 1)[0]
    ids_T = [(t.ids + 10**6).astype("<i4").tobytes() for t in unknown.trajectories]
    changed = [msgspec.structs.replace(t, ids_T=ids) for t, ids in zip(unknown.trajectories, ids_T, strict=True)]
    async with running(bus, store, make_scorer=lambda: scorer) as service:
        await send(bus, *of_job(first, 1))
        await until(lambda: scorer.entered)
        await send(bus, *of_job(good, 1), msgspec.structs.replace(unknown, trajectories=changed))
        await until(lambda: len(service.queue.in_flight) == 3)
        released.set()
        await passed(bus, good, 1)
        reason = await failed(store, bad)
        assert reason.startswith("reference-forward: model") and "could not score it: group 0 holds token id" in reason
    assert any(len(keys) == 2 for keys in scorer.passes), "they were in one pass"
    assert (await store.job(good)).state is not JobState.FAILED


async def test_a_load_holds_up_nobody_whose_model_is_there(bus: Bus, store: Store, tiny: Path) -> None:
    scorer = SlowLoad("bfloat16")
    quick, slow = await add_job(store, str(tiny)), await add_job(store, str(tiny), dtype="bfloat16")
    groups = of_job(quick, 3)
    async with running(bus, store, make_scorer=lambda: scorer) as service:
        await send(bus, groups[0])
        await passed(bus, quick, 1)
        await send(bus, *of_job(slow, 3))
        await until(lambda: "bfloat16" in scorer.loads)
        await send(bus, *groups[1:])
        await passed(bus, quick, 3)
        await until(
            lambda: len(service.queue.in_flight) == 1
        )  # the others are there for an instance that has the model
        assert await bus.count("GROUPS", GROUP.at(job=slow)) == 0
        scorer.release.set()
        await passed(bus, slow, 3)


# --- several instances ----------------------------------------------------------------------------------------------


async def keys_of(bus: Bus, job: str) -> Counter[str]:
    return Counter(group.key for group in await bus.stored(GROUP, job=job))


async def test_two_instances_share_the_work(bus: Bus, store: Store, tiny: Path) -> None:
    """Neither comes out of its first pass before the other is in one too."""
    both = threading.Barrier(2, timeout=WAIT_S)
    meet = [threading.Event(), threading.Event()]

    def in_step(me: int) -> Callable[[], None]:
        def before() -> None:
            if not meet[me].is_set():
                meet[me].set()
                both.wait()

        return before

    scorers = [Recording(in_step(0)), Recording(in_step(1))]
    job = await add_job(store, str(tiny))
    groups = of_job(job, 20)
    narrow: dict[str, Any] = {"reference_tokens_per_batch": 40}
    async with (
        running(bus, store, make_scorer=lambda: scorers[0], **narrow) as one,
        running(bus, store, "reference-1", make_scorer=lambda: scorers[1], **narrow) as two,
    ):
        await send(bus, *groups)
        await passed(bus, job, 20)
        await until(lambda: one.groups + two.groups == 20)
        assert one.groups > 0 and two.groups > 0
        pools = {worker.id: worker.pool for worker in await store.workers()}
        assert pools == {"reference-0": Pool.REFERENCE, "reference-1": Pool.REFERENCE}
    assert await keys_of(bus, job) == Counter(group.key for group in groups)
    for trajectory in (trajectory for group in await bus.stored(GROUP, job=job) for trajectory in group.trajectories):
        trajectory.check()
        assert trajectory.ref_logprobs is not None and (trajectory.ref_logprobs[trajectory.mask == 1] < 0).all()
    assert await bus.count("SCORES", SCORE.at(job=job)) == 0


async def test_work_of_an_instance_killed_in_a_forward_pass_is_done_by_another(
    bus: Bus, store: Store, nats_server: Server, valkey_server: Server, tiny: Path, tmp_path: Path
) -> None:
    jobs = [await add_job(store, str(tiny)) for _ in range(2)]
    groups = [group for job in jobs for group in of_job(job, 3)]
    await send(bus, *groups)
    process = launch(nats_server, valkey_server, "tests.samples.reference_process", str(tmp_path / "marker"))
    try:
        await until((tmp_path / "marker").exists)
    finally:
        process.kill()
        process.wait()
    for job in jobs:
        assert await bus.count("GROUPS", GROUP.at(job=job)) == 0
        assert await bus.count("SCORES", SCORE.at(job=job)) == 3
    async with running(bus, store, "reference-1") as other:
        for job in jobs:
            await passed(bus, job, 3)
            assert set((await keys_of(bus, job)).values()) == {1}
        await until(lambda: other.groups == 6 and not other.queue.in_flight)
    for job in jobs:
        assert await bus.count("SCORES", SCORE.at(job=job)) == 0


async def test_a_restarted_nats_server_costs_no_group(store: Store, tiny: Path, tmp_path: Path) -> None:
    """It goes away while a pass is under way, and comes back before that has ended."""
    server, scorer = start_nats(tmp_path), Recording(lambda: released.wait(WAIT_S))
    released = threading.Event()
    try:
        async with Bus.connect(server.url, "test") as bus:
            await bus.ensure_streams()
            job = await add_job(store, str(tiny))
            groups = of_job(job, 6)
            await send(bus, *groups[:4])
            async with running(bus, store, make_scorer=lambda: scorer) as service:
                await until(lambda: scorer.entered)
                server.kill()
                await until(lambda: not bus.nc.is_connected)
                server.start()
                await until(lambda: bus.nc.is_connected)
                released.set()
                await send(bus, *groups[4:])
                await passed(bus, job, 6)
                await until(lambda: not service.queue.in_flight)
            assert await keys_of(bus, job) == Counter(group.key for group in groups)
            assert await bus.count("SCORES", SCORE.at(job=job)) == 0
    finally:
        released.set()
        server.kill()


async def test_what_was_scored_twice_is_kept_once(bus: Bus, store: Store, tiny: Path) -> None:
    """The message of a group that is stored already comes again: its acknowledgement was lost."""
    job = await add_job(store, str(tiny))
    group = of_job(job, 1)[0]
    async with running(bus, store) as service:
        for attempt in ("one", "two"):
            await bus.publish(SCORE, group, attempt, job=job)
        await until(lambda: service.groups == 2 and not service.queue.in_flight)
    assert await keys_of(bus, job) == {group.key: 1}


async def test_told_to_stop_it_finishes_the_pass_and_gives_the_rest_back(bus: Bus, store: Store, tiny: Path) -> None:
    released = threading.Event()
    scorer = Recording(lambda: released.wait(WAIT_S))
    job = await add_job(store, str(tiny))
    await send(bus, *of_job(job, 4))
    async with running(bus, store, make_scorer=lambda: scorer, reference_tokens_per_batch=1000) as service:
        await until(lambda: scorer.entered)
        service.ctx.stopping.set()
        await until(lambda: not service._readers)
        released.set()
    done = service.groups
    assert done >= 1 and not service.queue.in_flight
    assert await bus.count("GROUPS", GROUP.at(job=job)) == done
    assert await bus.count("SCORES", SCORE.at(job=job)) == 4 - done
    async with running(bus, store, "reference-1") as other:
        await passed(bus, job, 4)
        await until(lambda: other.groups == 4 - done)
    assert np.array_equal(sorted((await keys_of(bus, job)).values()), [1] * 4)
