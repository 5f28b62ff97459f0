"""Jobs of kind sft and dpo: what their spec may say, who is placed, and whole runs over real processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from opentinker.services.scheduler.jobs.submit import submit
from opentinker.services.scheduler.placement.reconciler import Reconciler
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import SpecError
from tests.conftest import until
from tests.samples.row_samples import chat_model, copies, preferences, row_spec, turns, write_rows
from tests.support.cluster import Cluster, shared_fixture
from tests.support.factories import refusals
from tests.support.lineage import undocumented
from tests.support.scheduling import Workers, kinds, running

BASE: dict[str, Any] = {
    "name": "j",
    "kind": "sft",
    "model": {"base": "m"},
    "data": {"path": "a"},
    "train": {"steps": 1},
}


def mistakes(**changes: Any) -> dict[str, str]:
    """By field; a change to None takes the part away."""
    data = {name: value for name, value in {**BASE, **changes}.items() if value is not None}
    return refusals(parse_spec, data)


# --- the spec ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data": None}, {"data"}),
        ({"environment": {"name": "copy_digits"}, "rollout": {}, "algorithm": {"group_size": 0}},
         {"environment", "rollout", "algorithm", "algorithm.group_size"}),
        ({"dpo": {"beta": 0.5}}, {"dpo"}),
        ({"kind": "rl"}, {"data", "environment"}),
        ({"kind": "rl", "train": {}, "environment": {"name": "x"}}, {"data", "train.steps"}),
        ({"train": {"lr": -1}}, {"train.lr", "train.steps"}),
        ({"data": {"path": "a", "epochs": 2}}, {"data.epochs"}),
        ({"data": {"path": "a", "epochs": 0}, "train": {}}, {"data.epochs"}),
        ({"train": {"steps": 1, "learner": "simulated"}, "resources": {"rollout_workers": 2}},
         {"train.learner", "resources.rollout_workers"}),
        ({"train": {"steps": 1, "parallel": "zero2"}}, {"train.parallel"}),
        ({"validation": {"every": 5}, "teacher": {"base": "t"}}, {"validation", "teacher"}),
        ({"train": {"steps": 1, "target": {"val/accuracy": 0.9}}}, {"train.target"}),
        ({"train": {"steps": 1, "target": {"loss": 0.5, "accuracy": 0.9}}}, {"train.target"}),
        ({"data": {"path": "a", "format": "preference", "validate_every": 5}}, {"data.validate_every"}),
        ({"data": {"path": "a", "format": "preference"}}, {"data.format"}),
        ({"data": {"path": "a.jsonl", "split": "train", "validation": "b.parquet", "validation_split": "test"}},
         {"data.split", "data.validation_split"}),
        ({"data": {"path": "a.jsonl", "subset": "main"}}, {"data.subset"}),
        ({"data": {"path": "a", "validation": 0.5, "validation_split": "test"}}, {"data.validation_split"}),
        ({"data": {"path": "a", "validation": 1.0}}, {"data.validation"}),
        ({"data": {"path": "a", "validation": ""}}, {"data.validation"}),
        ({"data": {"path": "a", "columns": {"question": "prompt"}}}, {"data.columns"}),
        ({"kind": "dpo", "data": {"path": "a", "mask": "assistant"}, "dpo": {"beta": 0.0}}, {"dpo.beta", "data.mask"}),
        ({"kind": "dpo", "dpo": {"loss": "ipo", "label_smoothing": 0.1}}, {"dpo.label_smoothing"}),
    ],
)  # fmt: skip
def test_what_does_not_apply_is_refused_and_what_is_needed_is_asked_for(changes: Any, named: set[str]) -> None:
    assert set(mistakes(**changes)) == named


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_stored_spec_has_only_its_own_parts_and_means_the_same(kind: str) -> None:
    spec = parse_spec({**BASE, "kind": kind, "data": {"path": "a", "validation": 0.1}})
    stored = spec.model_dump(mode="json")
    labels = {"name", "project", "tags", "notes", "notify"}
    own = {"kind", "model", "data", "train", "start", "resources", "artifacts"} | ({"dpo"} if kind == "dpo" else set())
    assert set(stored) == labels | own
    assert parse_spec(stored) == spec
    assert (spec.dpo is not None) == (kind == "dpo")


# --- submission and placement -----------------------------------------------------------------------------------------


async def test_data_is_checked_at_submission(ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "good.jsonl", [{"question": "1", "answer": "2"}])
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    (tmp_path / "bad.jsonl").write_bytes(b"\n{no\n")
    columns = {"prompt": "question", "completion": "answer"}
    for data, field, why in (
        ({"path": f"{tmp_path}/none.jsonl"}, "data.path", "does not exist on the server"),
        ({"path": f"{tmp_path}/empty.jsonl"}, "data.path", "has no rows"),
        ({"path": f"{tmp_path}/bad.jsonl"}, "data.path", "line 2: is not JSON"),
        ({"path": "a\0b/c/d"}, "data.path", "does not exist"),
        ({"path": f"{tmp_path}/good.jsonl"}, "data.columns", "the columns are: question, answer"),
        ({"path": f"{tmp_path}/good.jsonl", "format": "messages"}, "data.format", "needs messages"),
        ({"path": f"{tmp_path}/good.jsonl", "columns": columns, "validation": f"{tmp_path}/none/"}, "data.validation",
         "does not exist"),
    ):  # fmt: skip
        with pytest.raises(SpecError) as caught:
            await submit(ctx, {**BASE, "data": data}, "default")
        (mistake,) = caught.value.mistakes
        assert mistake["field"] == field and why in mistake["problem"], mistake
    monkeypatch.chdir(tmp_path)
    spec = {**BASE, "data": {"path": "good.jsonl", "columns": columns, "epochs": 2}, "train": {}}
    id, _ = await submit(ctx, spec, "default")
    record = await ctx.store.job(id)
    assert record.spec["data"]["path"] == f"{tmp_path}/good.jsonl", "trainers may run elsewhere"
    assert (record.steps, await kinds(ctx.store, id)) == (0, ["queued"])


async def test_a_trainer_is_all_that_is_placed(ctx: Context, store: Store) -> None:
    workers = Workers(store)
    await store.create_job(id="j-rows", spec=row_spec("m", "a").model_dump(mode="json"), tenant="default")

    async def waits_for(what: str) -> bool:
        return (await store.job("j-rows")).waiting_for == what

    async with running(Reconciler(ctx).run()):
        await until(lambda: waits_for("trainer (none is running)"))
        await workers.start("rollout-0", "trainer-0")
        await until(lambda: store.job("j-rows"), lambda found: found.state == JobState.STARTING)
        await until(lambda: waits_for(""))
        await until(lambda: workers.holds("trainer-0"))
        assert await workers.holds("rollout-0") is None
        await workers["trainer-0"].die()
        await workers.start("trainer-1")
        await until(lambda: workers.holds("trainer-1"))
        assert await workers.holds("rollout-0") is None
    await workers.stop()
    assert [event for event in await kinds(store, "j-rows") if "rollout" in event] == []


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "m")


def long_spec(model: Path, rows: Path, **parts: Any) -> JobSpec:
    data = {"epochs": 4, "batch_size": 8, "validation": 0.1, "validate_every": 20}
    train = {"lr": 1e-2, "checkpoint_every": 10}
    return row_spec(model, rows, **{"model": {"chat_template": "plain"}, "data": data, "train": train, **parts})


cluster = shared_fixture(Cluster, rollout_workers=0, env_workers=0)
"""Nothing that generates."""


def weights(cluster: Cluster, job: str, step: int) -> dict[str, Tensor]:
    directory = cluster.data / "jobs" / job / "checkpoints" / f"step-{step:06d}"
    return dict(load_file(directory / "model.safetensors"))


async def values(cluster: Cluster, job: str, name: str) -> list[float]:
    points = await cluster.client.metrics(job)
    assert {point["source"] for point in points} == {"trainer", "validation"}
    assert undocumented({name for point in points for name in point["values"]}) == []
    return [point["values"][name] for point in points if name in point["values"]]


@pytest.mark.nightly
@pytest.mark.asyncio(loop_scope="module")
async def test_sft_survives_a_kill_with_the_same_weights(cluster: Cluster, tmp_path: Path, model: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": turns(r["prompt"], r["completion"])} for r in copies(100)])
    spec = long_spec(model, rows)
    unbroken = await cluster.submit(spec)
    record = await cluster.wait(unbroken)
    assert (record["state"], record["step"], record["steps"]) == ("succeeded", 45, 45), record["reason"]
    losses, held = await values(cluster, unbroken, "loss"), await values(cluster, unbroken, "val/loss")
    assert len(losses) == 45 and losses[-1] < losses[0] / 5
    assert len(held) == 4 and held[-1] < held[0] / 5
    events = [event["event"] for event in await cluster.client.event_log(unbroken)]
    assert events[:6] == ["queued", "starting", "data_loaded", "model_loaded", "running", "validation"]

    killed = await cluster.submit(spec)
    await cluster.reaches(killed, 15)
    cluster.kill("trainer-0")
    await cluster.succeeds(killed)
    assert (await cluster.client.job(killed))["restarts"] == 1
    lines: dict[int, list[int]] = {line["step"]: line["data"] for line in cluster.lines(killed) if "data" in line}
    for epoch in range(4):
        used = [row for step in sorted(lines) for row in lines[step]][epoch * 90 : (epoch + 1) * 90]
        assert sorted(used) == list(range(90))
    first, second = weights(cluster, unbroken, 45), weights(cluster, killed, 45)
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)
    AutoModelForCausalLM.from_pretrained(await cluster.client.download(killed, tmp_path / "model"))


@pytest.mark.nightly
@pytest.mark.asyncio(loop_scope="module")
async def test_dpo_over_real_processes_and_two_ranks_learns(cluster: Cluster, tmp_path: Path, model: Path) -> None:
    spec = row_spec(
        model,
        write_rows(tmp_path / "pairs.jsonl", preferences(60)),
        "dpo",
        model={"chat_template": "plain"},
        data={"epochs": 4, "batch_size": 8, "validation": 0.2},
        train={"lr": 3e-3, "checkpoint_every": 5},
        resources={"trainer_ranks": 2},
    )
    job = await cluster.submit(spec)
    record = await cluster.wait(job)
    assert (record["state"], record["step"]) == ("succeeded", 24), record["reason"]
    losses, held = await values(cluster, job, "loss"), await values(cluster, job, "val/rewards/accuracy")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < 0.3
    assert held[-1] > 0.9


@pytest.mark.asyncio(loop_scope="module")
async def test_job_of_another_kind_goes_on_from_the_weights(cluster: Cluster, tmp_path: Path, model: Path) -> None:
    """DPO after SFT; with a learning rate of 0 it ends with what it began with."""
    usual = {"model": {"chat_template": "plain"}}
    train = {"steps": 6, "lr": 3e-3, "checkpoint_every": 2, "keep_checkpoints": 3}
    first = await cluster.run(row_spec(model, write_rows(tmp_path / "rows.jsonl", copies(20)), train=train, **usual))
    pairs = write_rows(tmp_path / "pairs.jsonl", preferences(20))
    spec = row_spec(model, pairs, "dpo", train={"steps": 2, "lr": 0.0}, **usual)
    second = str((await cluster.client.submit(spec, from_checkpoint=f"{first}@4"))["id"])
    await cluster.succeeds(second)
    begun, ended = weights(cluster, first, 4), weights(cluster, second, 2)
    assert begun.keys() == ended.keys() and all(begun[name].equal(ended[name]) for name in begun)
    assert not all(begun[name].equal(other) for name, other in weights(cluster, first, 6).items())
    losses = [point["values"]["loss"] for point in await cluster.client.metrics(second, names=["loss"])]
    assert losses == pytest.approx([math.log(2)] * 2, abs=1e-6), "the reference is what it began with"
