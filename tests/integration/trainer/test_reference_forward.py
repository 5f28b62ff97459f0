"""Reference logprobs: right values, models within their memory, and the way from SCORE to GROUP over real servers."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from opentinker.services.reference_forward.required_models import (
    REFERENCE,
    ModelKey,
    find_models,
    find_required_models,
)
from opentinker.services.reference_forward.results import add_results
from opentinker.services.reference_forward.scorer import Scorer
from opentinker.services.reference_forward.service import ReferenceForward
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.config import Settings
from opentinker.shared.messaging.bus import Bus, StreamFull
from opentinker.shared.messaging.subjects import GROUP, SCORE, TIMELINE
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, WeightVersion
from opentinker.shared.types.manifest import start_of
from opentinker.shared.types.trajectories import Group
from tests.conftest import WAIT_S, Server, soon, until
from tests.support.factories import make_spec, make_trajectory
from tests.support.learning import loaded, plain_logprobs, random_groups, torch_spec
from tests.support.scheduling import messages


def scored(scorer: Scorer, base: Path, groups: list[Group], temperatures: list[float]) -> list[Group]:
    model = scorer.load(ModelKey(str(base), "float32"))
    found = scorer.score(model, groups, temperatures)
    return [add_results(group, {REFERENCE: results}, {}) for group, results in zip(groups, found, strict=True)]


def assert_plain(base: Path, group: Group, temperature: float) -> None:
    """The group's reference logprobs are those of a plain forward in float64, one trajectory at a time."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    for trajectory in group.trajectories:
        mask = trajectory.mask.astype(bool)
        with torch.no_grad():
            expected = np.r_[0.0, plain_logprobs(plain, trajectory.ids.tolist(), temperature).numpy()] * mask
        assert trajectory.ref_logprobs is not None
        np.testing.assert_allclose(trajectory.ref_logprobs, expected, atol=1e-5)


def test_reference_logprobs_are_those_of_a_plain_forward_at_the_job_temperature(tiny: Path) -> None:
    group = random_groups(0, size=6)[0]
    (passed,) = scored(Scorer(tokens_per_batch=20), tiny, [group], [0.7])
    assert_plain(tiny, passed, 0.7)
    for before, after in zip(group.trajectories, passed.trajectories, strict=True):
        assert (after.ids_T, after.logprobs_T) == (before.ids_T, before.logprobs_T)


def test_groups_of_differing_temperatures_share_one_pass_and_keep_their_own(tiny: Path) -> None:
    """The same group twice, at two temperatures: nothing is computed twice, and no logprob is shared."""
    group, other = random_groups(0, groups=2, size=6)
    scorer = Scorer()
    scored(scorer, tiny, [group], [1.0])
    one = scorer.computed
    together = scored(scorer, tiny, [group, group, other], [1.0, 0.5, 2.0])
    for passed, temperature in zip(together, (1.0, 0.5, 2.0), strict=True):
        assert_plain(tiny, passed, temperature)
    assert together[0].trajectories[0].ref_logprobs_T != together[1].trajectories[0].ref_logprobs_T
    both = scorer.computed - one
    scored(scorer, tiny, [group, other], [1.0, 2.0])
    assert scorer.computed - one - both == both, "the second temperature of a group costs no forward pass"


def test_the_size_of_a_model_is_known_before_it_is_loaded(tiny: Path) -> None:
    scorer = Scorer()
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        key = ModelKey(str(tiny), dtype)
        parameters = list(scorer.load(key).parameters())
        assert {p.element_size() for p in parameters} == {width}
        assert scorer.size(key) == sum(p.numel() * width for p in parameters)


def test_scoring_beside_a_load_in_another_dtype_gives_the_same(tiny: Path) -> None:
    """Loading sets process-wide defaults for a moment; a pass that runs meanwhile must not see them."""
    scorer, group = Scorer(), random_groups(0, size=6)[0]
    model = scorer.load(ModelKey(str(tiny), "float32"))
    alone = scorer.score(model, [group], [1.0])
    with ThreadPoolExecutor(1) as loads:
        loading = [loads.submit(scorer.load, ModelKey(str(tiny), "bfloat16")) for _ in range(3)]
        rounds = 0
        while not loading[-1].done():
            beside = scorer.score(model, [group], [1.0])
            rounds += 1
            assert all(np.array_equal(a, b) for a, b in zip(alone[0], beside[0], strict=True))
    assert rounds > 0 and all(future.result() is not None for future in loading)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}], ids=["full", "lora"])
def test_reference_of_a_continued_job_is_its_start(tiny: Path, tmp_path: Path, lora: dict[str, Any] | None) -> None:
    spec = torch_spec(tiny, model={"lora": lora})
    learner = loaded(RlLearner(spec))
    for step in range(3):
        learner.step(random_groups(step), WeightVersion(1, step))
    learner.save(tmp_path)
    learner.causal.set_attn_implementation("sdpa")
    group, scorer = random_groups(7, size=6)[0], Scorer()
    continued: dict[str, Any] = {
        "model": {"lora": lora},
        "algorithm": {"kl_coef": 0.1},
        "start": {"from": "j-0123456789@3"},
    }
    (key,) = find_required_models(torch_spec(tiny, **continued), tmp_path)
    frozen = scorer.load(key)
    assert scorer.size(key) == sum(p.numel() * p.element_size() for p in frozen.parameters())
    (found,) = scorer.score(frozen, [group], [1.0])
    (plain,) = scorer.score(scorer.load(ModelKey(str(tiny), "float32")), [group], [1.0])
    for trajectory, logprobs_T, other_T in zip(group.trajectories, found, plain, strict=True):
        expected = np.r_[0.0, plain_logprobs(learner.causal, trajectory.ids.tolist()).numpy()] * trajectory.mask
        np.testing.assert_allclose(logprobs_T, expected, atol=1e-5)
        assert np.abs(logprobs_T - other_T).max() > 1e-3


@asynccontextmanager
async def running(
    bus: Bus, store: Store, worker: str = "reference-0", make_scorer: Callable[[], Scorer] = Scorer, **changes: Any
) -> AsyncIterator[ReferenceForward]:
    settings = Settings(heartbeat_s=0.1, **changes)
    ctx = Context("reference-forward", worker, settings, bus, store, structlog.get_logger())
    service = ReferenceForward(ctx, make_scorer, ack_wait_s=1.0, full_pause_s=0.3)
    task = asyncio.create_task(service.serve())
    try:
        yield service
    finally:
        ctx.stopping.set()
        await soon(task)


async def add_job(store: Store, base: str, parts: dict[str, Any] | None = None, **model: Any) -> str:
    """`parts` of the spec; without them, one that needs the reference."""
    changes = {"algorithm": {"kl_coef": 0.1}} if parts is None else parts
    spec = torch_spec(base, model={"base": base, **model}, **changes).model_dump(mode="json")
    return await store.create_job(id=f"j-{uuid.uuid4().hex[:8]}", spec=spec, tenant="t")


def of_job(job: str, count: int) -> list[Group]:
    return [msgspec.structs.replace(group, job=job) for group in random_groups(0, groups=count)]


async def send(bus: Bus, *groups: Group) -> None:
    for group in groups:
        await bus.publish(SCORE, group, group.key, job=group.job)


async def test_what_a_frozen_checkpoint_said_passes_through_unscored(bus: Bus, store: Store, tiny: Path) -> None:
    """Its tokens may be those of another model, which this one does not know."""
    job = await add_job(store, str(tiny))
    (group,) = of_job(job, 1)
    theirs = make_trajectory(index=0, seat="b", policy="j-0123456789@5", prompt=(10**6,), output=(10**6, 1))
    whole = msgspec.structs.replace(group, trajectories=[group.trajectories[0], theirs, *group.trajectories[1:]])
    await send(bus, whole)
    async with running(bus, store):
        await passed(bus, job, 1)
    found = (await bus.stored(GROUP, job=job))[0].trajectories
    assert found[1] == theirs and all((t.ref_logprobs is None) == (t is found[1]) for t in found)


async def test_groups_that_wait_for_a_pass_are_on_the_timeline(bus: Bus, store: Store, tiny: Path) -> None:
    is_said = threading.Event()

    class Slow(Scorer):
        def load(self, key: ModelKey) -> Any:
            assert is_said.wait(30), "nothing is said of the wait before it is over"
            return super().load(key)

    job = await add_job(store, str(tiny))
    parts = await messages(bus, TIMELINE, job=job, worker="reference-0")
    await send(bus, *of_job(job, 2))
    async with running(bus, store, make_scorer=Slow):
        await until(lambda: any(one.kind == "loading" and one.since for part in parts for one in part.segments))
        is_said.set()
        await passed(bus, job, 2)
        await until(lambda: any(one.kind == "score" for part in parts for one in part.segments))
    segments = [one for part in parts for one in part.segments]
    assert {(one.lane, one.kind) for one in segments} >= {("reference", "loading"), ("reference", "score")}
    waits = sorted((one for one in segments if one.kind in ("loading", "queue")), key=lambda one: one.start)
    assert all(later.start >= one.end for one, later in pairwise(waits)), "no second counts twice"
    assert {one.since for one in waits[1:] if one.kind == "loading"} == {waits[0].start}
    await bus.purge("GROUPS", GROUP.at(job=job))


async def test_each_policy_is_scored_by_the_model_that_it_started_from(
    bus: Bus, store: Store, tiny: Path, tmp_path: Path
) -> None:
    learner = loaded(RlLearner(torch_spec(tiny)))
    for step in range(3):
        learner.step(random_groups(step), WeightVersion(1, step))
    kl, none = {"algorithm": {"kl_coef": 0.1}}, {"algorithm": {"kl_coef": 0.0}}
    policies = {"fresh": kl, "free": none, "continued": {**kl, "start": {"from": "j-0123456789@3"}}}
    seats = {name: name for name in policies}
    job = await add_job(store, str(tiny), {"policies": policies, "seats": seats})
    start = start_of(tmp_path, job, "continued")
    start.mkdir(parents=True)
    learner.save(start)
    (group,) = of_job(job, 1)
    named = [*policies, "j-9876543210@5"]
    rows = [msgspec.structs.replace(t, policy=name) for t, name in zip(group.trajectories, named, strict=True)]
    await send(bus, msgspec.structs.replace(group, trajectories=rows))
    async with running(bus, store, data_dir=tmp_path):
        await passed(bus, job, 1)
    fresh, free, continued, frozen = (await bus.stored(GROUP, job=job))[0].trajectories
    assert (free, frozen) == (rows[1], rows[3]), "what has no reference passes through unscored"
    scorer = Scorer()
    for row, base in ((fresh, tiny), (continued, start)):
        alone = msgspec.structs.replace(group, trajectories=[row])
        (((expected_T,),),) = [scorer.score(scorer.load(ModelKey(str(base), "float32")), [alone], [1.0])]
        assert row.ref_logprobs is not None
        np.testing.assert_allclose(row.ref_logprobs, expected_T, atol=1e-5)
    (((other_T,),),) = [scorer.score(scorer.load(ModelKey(str(tiny), "float32")), [alone], [1.0])]
    assert np.abs(continued.ref_logprobs - other_T).max() > 1e-3, "the references differ"


def test_policies_that_start_from_one_checkpoint_share_its_reference(tmp_path: Path) -> None:
    kl = {"algorithm": {"kl_coef": 0.1}}
    one, other = ({**kl, "start": {"from": f"j-0123456789@{step}"}} for step in (3, 4))
    policies = {"a": one, "b": one, "c": other, "d": kl, "e": kl}
    spec = make_spec(environment={"name": "game"}, policies=policies, seats={name: name for name in policies})
    found = find_models(spec, tmp_path, "j")
    assert [roles[REFERENCE] for roles in found.values()] == [["a", "b"], ["c"], ["d", "e"]]
    assert [Path(key.base) for key in found][:2] == [start_of(tmp_path, "j", name) for name in "ac"]


async def test_a_match_without_a_policy_that_has_a_reference_passes_through(bus: Bus, store: Store, tiny: Path) -> None:
    policies: dict[str, Any] = {"a": {"algorithm": {"kl_coef": 0.1}}, "b": {"algorithm": {"kl_coef": 0.0}}}
    job = await add_job(store, str(tiny), {"policies": policies, "seats": {"a": "a", "b": "b"}})
    (group,) = of_job(job, 1)
    whole = msgspec.structs.replace(
        group, trajectories=[msgspec.structs.replace(t, policy="b") for t in group.trajectories]
    )
    await send(bus, whole)
    async with running(bus, store):
        await passed(bus, job, 1)
    assert (await bus.stored(GROUP, job=job))[0].trajectories == whole.trajectories


async def test_an_unusable_reference_fails_the_job_with_the_reason(bus: Bus, store: Store, tmp_path: Path) -> None:
    job = await add_job(store, str(tmp_path / "nothing"))
    await send(bus, *of_job(job, 2))
    async with running(bus, store):
        await until(lambda: bus.count("SCORES", SCORE.at(job=job)), lambda found: found == 0)
    record = await store.job(job)
    assert record.state is JobState.FAILED and "not found" in record.reason
    assert await bus.count("GROUPS", GROUP.at(job=job)) == 0


async def test_a_changed_link_to_a_reference_is_refused(bus: Bus, store: Store, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(tiny)
    job = await add_job(store, str(tmp_path / "mine"))
    victim = await add_job(store, str(tiny))
    (tmp_path / "data" / "jobs").mkdir(parents=True)
    shutil.copytree(tiny, tmp_path / "data" / "jobs" / victim)
    (tmp_path / "mine").unlink()
    (tmp_path / "mine").symlink_to(tmp_path / "data" / "jobs" / victim)
    await store.redis.hset(f"job:{victim}", "tenant", "another")
    await send(bus, *of_job(job, 1))
    async with running(bus, store, data_dir=tmp_path / "data") as service:
        assert "model.base: " in (reason := await failed(store, job)) and "kept by the server" in reason
        assert not service.cache.loads


async def failed(store: Store, job: str) -> str:
    """Waits until the job has failed. Returns the reason."""
    await until(lambda: store.job(job), lambda found: found.state is JobState.FAILED)
    return (await store.job(job)).reason


async def passed(bus: Bus, job: str, count: int) -> None:
    await until(lambda: bus.count("GROUPS", GROUP.at(job=job)), lambda found: found == count)


async def test_a_job_of_another_release_fails_and_others_go_on(bus: Bus, store: Store, tiny: Path) -> None:
    good = await add_job(store, str(tiny))
    spec = {**torch_spec(str(tiny), algorithm={"kl_coef": 0.1}).model_dump(mode="json"), "gone": 1}
    foreign = await store.create_job(id=f"j-{uuid.uuid4().hex[:8]}", spec=spec, tenant="t")
    await send(bus, *of_job(foreign, 1), *of_job(good, 1))
    async with running(bus, store):
        await passed(bus, good, 1)
        assert "gone" in await failed(store, foreign)
    assert await bus.count("SCORES", SCORE.at(job="*")) == 0


@pytest.mark.parametrize("empty", [False, True])
async def test_an_invalid_group_is_left_to_the_trainers_check(bus: Bus, store: Store, tiny: Path, empty: bool) -> None:
    job = await add_job(store, str(tiny))
    group = of_job(job, 1)[0]
    broken = [] if empty else [msgspec.structs.replace(t, spans=[]) for t in group.trajectories]
    await send(bus, msgspec.structs.replace(group, trajectories=broken))
    async with running(bus, store):
        await passed(bus, job, 1)
    assert (await store.job(job)).state is JobState.QUEUED


async def test_what_cannot_be_decoded_reaches_the_trainer_under_its_number(bus: Bus, store: Store, tiny: Path) -> None:
    """It was accepted: terminated here it would be pending for ever, and the last batch never full."""
    job, over = await add_job(store, str(tiny)), await add_job(store, str(tiny))
    await store.transition(over, JobState.CANCELLED)
    garbage = b"\xc1 no msgpack"
    for key in (f"{job}/7:a", f"{over}/0:a", "j-unknown/0:a", "nothing"):
        headers = {"Nats-Msg-Id": key}
        await bus.js.publish(SCORE.at(job=key.partition("/")[0]), garbage, headers=headers)
    async with running(bus, store):
        await passed(bus, job, 1)
        await until(lambda: bus.count("SCORES", SCORE.at(job="*")), lambda found: found == 0)
    consumer = await bus.consume(GROUP, f"train-{job}", batch=1, job=job)
    delivery = await consumer.next(WAIT_S)
    assert delivery is not None and (delivery.noun, delivery.key, delivery.data) == (None, f"{job}/7:a", garbage)
    await consumer.close(delete=True)
    for none in (over, "j-unknown", "nothing"):
        assert await bus.count("GROUPS", GROUP.at(job=none)) == 0
    await bus.purge("GROUPS", GROUP.at(job=job))


async def test_a_full_stream_loses_nothing(bus: Bus, store: Store, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, other = await add_job(store, str(tiny)), await add_job(store, str(tiny))
    await send(bus, *of_job(full, 5), *of_job(other, 5))
    refused = 0
    publish = bus.publish

    async def refuse(subject: Any, noun: Any, msg_id: str, **keys: str) -> int:
        nonlocal refused
        if subject is GROUP and keys["job"] == full and not released.is_set():
            refused += 1
            raise StreamFull("full")
        return await publish(subject, noun, msg_id, **keys)

    released = asyncio.Event()
    monkeypatch.setattr(bus, "publish", refuse)
    with capture_logs() as logs:
        async with running(bus, store):
            await passed(bus, other, 5)
            await until(lambda: refused > 1)
            assert await bus.count("GROUPS", GROUP.at(job=full)) == 0
            released.set()
            await passed(bus, full, 5)
    assert [line["job"] for line in logs if line["event"] == "stream_full"] == [full], "said with every try"


def launch(nats: Server, valkey: Server, *module: str) -> subprocess.Popen[bytes]:
    """`module`: another one than the service's own, with its arguments."""
    environ = {**os.environ, "OPENTINKER_NATS_URL": nats.url, "OPENTINKER_REDIS_URL": valkey.url}
    argv = [sys.executable, "-m", *(module or ["opentinker.services.reference_forward"])]
    return subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL)


def libraries(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/maps").read_text()


async def test_torch_is_loaded_on_demand(nats_server: Server, valkey_server: Server, store: Store) -> None:
    process = launch(nats_server, valkey_server)
    try:
        await until(store.workers, lambda found: [worker.pid for worker in found] == [process.pid])
        assert "libtorch" not in libraries(process)
    finally:
        process.kill()
        process.wait()
