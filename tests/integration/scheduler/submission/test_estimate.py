"""Estimates of the needs of a spec, from a similar job."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from opentinker.cli.planning.validate import in_words
from opentinker.services.scheduler.http import validate
from opentinker.services.scheduler.jobs.rough_estimate import rough_estimate
from opentinker.shared.api_types import JobEstimate, Validation
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from tests.support.api import fits
from tests.support.factories import make_spec

STEPS = 20


def spec_of(**changes: Any) -> dict[str, Any]:
    return make_spec(**{"model__base": "some/model", "train__steps": 100, **changes}).model_dump(mode="json")


async def ran(store: Store, spec: dict[str, Any], number: int, *, worker_s: float, running_s: float) -> str:
    """Make a job that has done STEPS steps within `running_s` seconds."""
    id = await store.create_job(id=f"j-{number:010}", spec=spec, tenant="default")
    for state in (JobState.STARTING, JobState.RUNNING):
        await store.transition(id, state)
    await store.update(id, step=STEPS)
    await store.transition(id, JobState.SUCCEEDED)
    states = f"job:{id}:states"
    entries = await store.redis.xrange(states)
    await store.redis.delete(states)
    for _, fields in entries:
        event = orjson.loads(fields["event"])
        event["time"] = 1000.0 + (running_s if event.get("state") == JobState.SUCCEEDED else 0.0)
        await store.redis.xadd(states, {**fields, "event": orjson.dumps(event)})
    await store.redis.hset(f"spent:job:{id}", mapping={"worker_s": worker_s, "gpu_s": worker_s / 2})
    return id


async def estimated(ctx: Context, spec: dict[str, Any], **prices: Any) -> JobEstimate | None:
    settings = ctx.settings.model_copy(update=prices)
    found = await validate.report_on(Context(**{**vars(ctx), "settings": settings}), spec, "default")
    fits(found, Validation)
    assert found["mistakes"] == []
    return found["estimate"]


async def test_a_job_takes_what_the_one_like_it_took(ctx: Context, store: Store) -> None:
    assert await estimated(ctx, spec_of()) is None, "nothing has run"
    like = await ran(store, spec_of(), 2, worker_s=60.0, running_s=20.0)
    await ran(
        store, spec_of() | {"model": {**spec_of()["model"], "base": "other/model"}}, 3, worker_s=9.0, running_s=9.0
    )
    found = await estimated(ctx, spec_of())
    assert found is not None and (found["like"], found["jobs"], found["steps"]) == ([like], 1, 100)
    assert (found["seconds"], found["worker_s"], found["gpu_s"]) == pytest.approx((100.0, 300.0, 150.0))
    assert (found["cost"], found["currency"]) == (None, "")
    assert found["basis"].endswith("took 1 s a step over 20 steps")
    assert in_words(found).startswith("estimate: 1:40 min of running, 0.0833 worker hours, 0.0417 GPU hours: ")

    doubled = spec_of(rollout__max_tokens=2 * spec_of()["rollout"]["max_tokens"])
    found = await estimated(ctx, doubled, price_worker_hour=3.6, price_gpu_hour=36.0, price_currency="EUR")
    assert found is not None and found["seconds"] == pytest.approx(200.0)
    assert found["basis"].endswith("times 2 for the size of a step")
    assert found["cost"] == pytest.approx(0.6 + 3.0) and "hours, 3.60 EUR: " in in_words(found)


async def test_several_jobs_like_it_give_their_median_and_their_range(ctx: Context, store: Store) -> None:
    took = (40.0, 48.0, 36.0, 44.0)
    ids = [await ran(store, spec_of(), n, worker_s=2 * spent, running_s=spent) for n, spent in enumerate(took)]
    found = await estimated(ctx, spec_of())
    assert found is not None and found["like"] == ids[::-1]
    assert (found["seconds"], found["seconds_low"], found["seconds_high"]) == pytest.approx((210.0, 180.0, 240.0))
    assert found["basis"] == "median of 4 jobs like it, 3 to 4 min"
    assert in_words(found).startswith("estimate: 3:30 min of running, ")
    assert found["worker_s"] == pytest.approx(420.0)


def workers(count: int) -> dict[str, Any]:
    return spec_of(resources__rollout_workers=count)


LORA = {"rank": 8, "alpha": 16}


async def test_jobs_with_other_workers_are_scaled_by_what_was_measured(ctx: Context, store: Store) -> None:
    await ran(store, workers(2), 1, worker_s=60.0, running_s=20.0)
    found = await estimated(ctx, workers(4))
    assert found is not None and found["seconds"] == pytest.approx(100.0)
    assert found["basis"].endswith("not scaled for 4 rollout workers instead of 2: no job has measured that")
    assert found["worker_s"] == pytest.approx(300.0 * 5 / 3), "four workers and a trainer, not two and a trainer"
    one = await estimated(ctx, workers(1))
    assert one is not None and "for 1 rollout worker instead of 2: " in one["basis"]

    other = {"base": "other/model"}
    for number, (count, spent) in enumerate(((1, 40.0), (2, 20.0)), 2):  # twice as many take half as long
        spec = workers(count)
        await ran(store, spec | {"model": spec["model"] | other}, number, worker_s=2 * spent, running_s=spent)
    found = await estimated(ctx, workers(4))
    assert found is not None and found["seconds"] == pytest.approx(50.0)
    assert found["basis"].endswith("times 0.5 for 4 rollout workers instead of 2")
    same = await ran(store, workers(4), 9, worker_s=60.0, running_s=18.0)
    found = await estimated(ctx, workers(4))
    assert found is not None and found["like"] == [same], "as many workers: nothing is scaled"


async def test_an_adapter_takes_as_much_less_as_it_did_elsewhere(ctx: Context, store: Store) -> None:
    def with_model(**model: Any) -> dict[str, Any]:
        return spec_of(train__learner="torch", **{f"model__{name}": value for name, value in model.items()})

    await ran(store, with_model(), 1, worker_s=40.0, running_s=20.0)
    await ran(store, with_model(base="other/model"), 2, worker_s=40.0, running_s=40.0)
    await ran(store, with_model(base="other/model", lora=LORA), 3, worker_s=40.0, running_s=30.0)
    found = await estimated(ctx, with_model(lora=LORA))
    assert found is not None and found["seconds"] == pytest.approx(75.0)
    assert found["basis"].endswith("times 0.75 for LoRA instead of all weights")


async def test_what_nothing_like_it_has_run_is_simulated_by_its_own_durations(ctx: Context) -> None:
    own = {"rollout__engine": "toy", "rollout__toy": {"seconds_per_token": 0.01}, "rollout__max_tokens": 100}
    own |= {"train__learner": "simulated", "train__simulated_step_s": 0.5, "rollout__max_turns": 1}
    own |= {"algorithm__max_staleness": 0, "algorithm__group_size": 2, "algorithm__groups_per_batch": 2}
    found = await estimated(ctx, spec_of(**own))
    assert found is not None and found["like"] == [] and found["basis"].startswith("simulated, for no job like it")
    assert found["seconds"] == pytest.approx(150.0), "each of 100 steps samples for a second and trains for half of one"
    assert found["seconds_low"] == found["seconds_high"] == found["seconds"]
    wide = {"rollout__max_concurrent_groups": 64, "resources__rollout_workers": 64}
    for large in ({"algorithm__groups_per_batch": 1000}, {"algorithm__max_staleness": 10_000}, wide):
        assert await estimated(ctx, spec_of(**own | large)) is None, "its simulation would take long"


async def test_a_sweep_takes_what_all_its_jobs_take(ctx: Context, store: Store) -> None:
    await ran(store, spec_of(), 1, worker_s=60.0, running_s=20.0)
    found = await estimated(
        ctx, {**spec_of(), "sweep": {"parameters": {"rollout.episode_timeout_s": [60, 90]}, "seeds": [1, 2, 3]}}
    )
    assert found is not None and found["jobs"] == 6 and found["seconds"] == pytest.approx(100.0)
    assert found["worker_s"] == pytest.approx(1800.0) and "of running each" in in_words(found)


async def test_a_job_that_never_ends_is_not_estimated(ctx: Context, store: Store) -> None:
    served = {"name": "chat", "kind": "inference", "model": {"base": "some/model"}}
    assert await estimated(ctx, served) is None


def test_without_a_job_like_it_round_figures_are_assumed_and_said_to_be(ctx: Context) -> None:
    trained = {
        "model__base": "Qwen/Qwen3-0.6B",
        "train__learner": "torch",
        "train__steps": 10,
        "rollout__engine": "vllm",
    }
    settings = ctx.settings.model_copy(update={"price_worker_hour": 3.6, "price_currency": "EUR"})
    spec = make_spec(**trained)
    found = rough_estimate(settings, spec, 1)
    assert found is not None and (found["like"], found["steps"]) == ([], 10)
    assert "assumed" in found["basis"] and "600 M parameters (its name) on a CPU" in found["basis"]
    assert found["worker_s"] == pytest.approx(2 * found["seconds"]), "a trainer and a rollout worker"
    assert found["cost"] == pytest.approx(found["worker_s"] / 1000) and found["currency"] == "EUR"
    tokens = spec.algorithm.group_size * spec.algorithm.groups_per_batch * spec.rollout.max_tokens
    assert found["seconds"] == pytest.approx(10 * 6 * 6e8 * 2 * tokens / 1e11), "training takes longest on a CPU"
    larger = rough_estimate(settings, make_spec(**trained | {"train__steps": 30}), 4)
    assert larger is not None and larger["seconds"] == pytest.approx(3 * found["seconds"])
    assert larger["worker_s"] == pytest.approx(12 * found["worker_s"])
    for unknown in ({"model__base": "some/model"}, {"rollout__engine": "toy"}, {"train__learner": "simulated"}):
        assert rough_estimate(settings, make_spec(**trained | unknown), 1) is None


async def test_a_validated_spec_has_a_rough_estimate_at_first(ctx: Context, store: Store) -> None:
    spec = spec_of(model__base="org/tiny-5m", rollout__engine="toy")
    assert await estimated(ctx, spec) is None, "simulated"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opentinker.services.scheduler.jobs.rough_estimate._is_simulated", lambda spec: False)
        rough = await estimated(ctx, spec)
        assert rough is not None and rough["like"] == [] and in_words(rough).count("assumed") == 1
        like = await ran(store, spec, 1, worker_s=60.0, running_s=20.0)
        known = await estimated(ctx, spec)
    assert known is not None and known["like"] == [like], "measured times come first"
