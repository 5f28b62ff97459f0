"""Estimates of the needs of a spec, from a similar job."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker.cli.planning.validate import in_words
from opentinker.services.scheduler.http import validate
from opentinker.services.scheduler.jobs import data_size
from opentinker.services.scheduler.jobs.rough_estimate import rough_estimate
from opentinker.shared.api_types import JobEstimate, Validation
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import parse_spec
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
    assert found is not None and found["like"] == [] and found["basis"].startswith("simulated, because no job like it")
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
    found = rough_estimate(settings, spec, 10)
    assert found is not None and (found["like"], found["steps"]) == ([], 10)
    assert "assumed" in found["basis"] and "600 M parameters (its name) on a CPU" in found["basis"]
    assert found["worker_s"] == pytest.approx(2 * found["seconds"]), "a trainer and a rollout worker"
    assert found["cost"] == pytest.approx(found["worker_s"] / 1000) and found["currency"] == "EUR"
    tokens = spec.algorithm.group_size * spec.algorithm.groups_per_batch * spec.rollout.max_tokens
    assert found["seconds"] == pytest.approx(10 * 6 * 6e8 * 2 * tokens / 1e11), "training takes longest on a CPU"
    asleep = rough_estimate(settings, make_spec(**trained, rollout__sleep="always"), 10)
    assert asleep is not None and asleep["seconds"] > found["seconds"], "engines that sleep sample before or after it"
    larger = rough_estimate(settings, spec, 30)
    assert larger is not None and larger["seconds"] == pytest.approx(3 * found["seconds"])
    assert larger["worker_s"] == pytest.approx(3 * found["worker_s"])
    for unknown in ({"model__base": "some/model"}, {"rollout__engine": "toy"}, {"train__learner": "simulated"}):
        assert rough_estimate(settings, make_spec(**trained | unknown), 10) is None


def test_policies_share_the_tokens_of_an_episode_and_one_trainer(ctx: Context) -> None:
    changes = {"model__base": "org/model-1b", "train__learner": "torch", "rollout__engine": "vllm"}
    alone = rough_estimate(ctx.settings, make_spec(**changes), 10)
    policies = {"a": {}, "b": {"model": {"base": "org/model-3b"}}}
    seats = {"a": {"policy": "a"}, "b": {"policy": "b"}}
    both = rough_estimate(ctx.settings, make_spec(**changes, policies=policies, seats=seats), 10)
    assert alone is not None and both is not None
    assert both["seconds"] == pytest.approx(2 * alone["seconds"]), (
        "half of the tokens by 1 B and half by 3 B parameters"
    )
    assert both["worker_s"] == pytest.approx(2 * both["seconds"]), "a trainer for both and a rollout worker"
    assert "1 B parameters (its name) and 3 B parameters (its name) on a CPU" in both["basis"]


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


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Fifty rows of 400 bytes."""
    row = orjson.dumps({"prompt": "1 + 1 = ", "completion": ""})
    text = "x" * (400 - len(row) - 1)
    path = tmp_path / "rows.jsonl"
    path.write_bytes((orjson.dumps({"prompt": "1 + 1 = ", "completion": text}) + b"\n") * 50)
    return path


def supervised(rows: Path, kind: str = "sft", model: str = "org/model-1b", **data: Any) -> dict[str, Any]:
    given = {"path": str(rows), "batch_size": 8, "epochs": 2, **data}
    if kind == "dpo":
        given["columns"] = {"chosen": "prompt", "rejected": "completion"}
    return {"name": "rows", "kind": kind, "model": {"base": model}, "data": given, "train": {"lr": 1e-5}}


async def test_epochs_are_counted_by_the_rows_and_rows_by_their_bytes(ctx: Context, rows: Path) -> None:
    found = await estimated(ctx, supervised(rows))
    assert found is not None and found["steps"] == 13, "100 rows, 8 at a time"
    assert found["seconds"] == pytest.approx(13 * 8 * 100 * 6 * 1e9 / 1e11), "rows of 400 bytes have about 100 tokens"
    assert "rows of 100 tokens" in found["basis"] and found["basis"].startswith("assumed")
    held_back = await estimated(ctx, supervised(rows, validation=0.2, max_length=50))
    assert held_back is not None and (held_back["steps"], "rows of 50 tokens" in held_back["basis"]) == (10, True)
    pairs = await estimated(ctx, supervised(rows, kind="dpo"))
    assert pairs is not None and pairs["seconds"] == pytest.approx(found["seconds"] * 2 * 8 / 6), "and a reference"
    assert await estimated(ctx, supervised(Path("owner/rows"))) is None, "only the trainer reads data sets of a hub"


def test_a_large_file_is_taken_to_go_on_as_it_begins(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_size, "READ_BYTES", 4000)
    spec = parse_spec(supervised(rows))
    assert data_size.planned_steps(spec) == 13
    packed = rows.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(rows.read_bytes()))
    assert data_size.planned_steps(parse_spec(supervised(packed))) == 0, "how much follows is not known"
    monkeypatch.undo()
    assert data_size.planned_steps(parse_spec(supervised(packed))) == 13
    rows.write_text("")
    assert data_size.planned_steps(spec) == 0


async def test_round_figures_are_corrected_by_what_jobs_with_other_models_took(
    ctx: Context, store: Store, rows: Path
) -> None:
    def spec_with(model: str) -> dict[str, Any]:
        return parse_spec(supervised(rows, model=model)).model_dump(mode="json")

    by_figures = 8 * 100 * 6 * 1e9 / 1e11
    for number, longer in enumerate((2.0, 3.0, 5.0), 1):
        spent = STEPS * by_figures * longer
        await ran(store, spec_with("org/other-1b"), number, worker_s=spent, running_s=spent)
    found = await estimated(ctx, spec_with("org/model-2b"))
    assert found is not None and found["like"] == []
    assert found["seconds"] == pytest.approx(13 * 2 * by_figures * 3), "twice the parameters"
    assert (found["seconds_low"], found["seconds_high"]) == pytest.approx((52 * by_figures, 130 * by_figures))
    assert found["basis"].endswith(
        "; times 3, because 3 other jobs of its kind took 2 to 5 times as long as such figures say"
    )
    assert found["worker_s"] == pytest.approx(found["seconds"])


async def test_an_evaluation_plays_as_many_episodes_at_once_as_it_has_places(ctx: Context) -> None:
    evaluated: dict[str, Any] = {
        "name": "exam", "kind": "eval", "model": {"base": "org/model-1b", "chat_template": "plain"},
        "environment": {"name": "copy_digits"}, "evaluation": {"episodes": 30},
        "rollout": {"max_tokens": 100, "max_concurrent_groups": 4}, "resources": {"rollout_workers": 2},
    }  # fmt: skip
    found = await estimated(ctx, evaluated)
    assert found is not None and found["steps"] == 30
    token_s = 0.01 + 4 * 1e9 / 1e10
    assert found["seconds"] == pytest.approx(4 * 100 * token_s), "30 episodes, 8 at once"
    toy = {**evaluated["rollout"], "engine": "toy", "toy": {"seconds_per_token": 0.01}}
    simulated = await estimated(ctx, {**evaluated, "rollout": toy})
    assert simulated is not None and simulated["basis"].startswith("simulated, because no job like it")
    assert simulated["seconds"] == pytest.approx(4.0) and simulated["worker_s"] == pytest.approx(8.0)
    assert await estimated(ctx, {**evaluated, "rollout": {**toy, "toy": {}}}) is None, "its tokens take no time"
