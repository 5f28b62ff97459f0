"""Metrics that name an opponent of evaluations as the spec does get the name by which jobs report them."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from opentinker import ApiError, AsyncClient
from opentinker.services.scheduler.sweeps.messages import tell_target
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.notifications import Notifications
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.sweeps import SweepProgress, SweepRecord
from tests.support.api import write_checkpoint
from tests.support.factories import make_spec

WEIGHTS = {"model.safetensors": b"weights", "config.json": b"{}", "trainer/state.json": b"{}"}
FIELDS: dict[str, Any] = {"environment": {"name": "signalling"}, "model": {"base": "some/model"}}
HOOK = "https://93.184.215.14/hook"


@pytest.fixture
async def opponent(client: AsyncClient, ctx: Context) -> str:
    """A job with one checkpoint, of step 20."""
    job = str((await client.submit(make_spec(**FIELDS).model_dump(mode="json")))["id"])
    write_checkpoint(ctx, job, 20, WEIGHTS)
    return job


def evaluated_against(*opponents: dict[str, Any], **tables: Any) -> dict[str, Any]:
    spec = make_spec(**FIELDS, seats={"listener": {"bot": "echo"}}).model_dump(mode="json")
    return spec | {"validation": {"every": 2, "episodes": 4, "against": list(opponents)}} | tables


@pytest.mark.parametrize("published", [True, False])
async def test_metrics_of_a_job_are_settled_with_its_opponents(
    client: AsyncClient, ctx: Context, opponent: str, published: bool
) -> None:
    written, step = "judge" if published else f"{opponent}@latest", f"{opponent}@20"
    if published:
        await client.publish(step, "judge")
    targets = {f"val/winrate/{written}": 0.6, f"val/winrate/{step}": 0.5, "val/winrate/echo": 0.7, "reward/mean": 0.2}
    told = [{"url": HOOK, "target": {"metric": name, "above": 0.6}} for name in (f"p/val/winrate/{written}", "p/exact")]
    spec = evaluated_against(
        {"bot": "echo"},
        {"frozen": written},
        policies={"p": {}, "q": {"train": {"target": {f"val/reward/against/{written}/low": 0.4}}}},
        seats={"speaker": "p", "listener": "q"},
        artifacts={"keep_best": 1, "best_metric": f"val/wins/{written}"},
        notify=told,
    )
    spec["train"] |= {"target": targets}
    stored = (await ctx.store.job((await client.submit(spec))["id"])).spec
    settled = {f"val/winrate/{step}": 0.6, "val/winrate/echo": 0.7, "reward/mean": 0.2}
    assert stored["train"]["target"] == stored["policies"]["p"]["train"]["target"] == settled
    assert stored["policies"]["q"]["train"]["target"] == {f"val/reward/against/{step}/low": 0.4}
    assert stored["artifacts"]["best_metric"] == f"val/wins/{step}"
    assert [entry["target"]["metric"] for entry in stored["notify"]] == [f"p/val/winrate/{step}", "p/exact"]


async def test_those_of_a_sweep_too_for_its_jobs_and_its_messages(
    client: AsyncClient, ctx: Context, opponent: str
) -> None:
    latest, step = f"{opponent}@latest", f"{opponent}@20"
    spec = evaluated_against({"frozen": latest}, artifacts={"keep_best": 1, "best_metric": f"val/winrate/{latest}"})
    spec["train"] |= {"target": {f"val/winrate/{latest}": 0.9}}
    spec["notify"] = [{"url": HOOK, "on": ["target"], "target": {"metric": f"val/winrate/{latest}", "above": 0.6}}]
    table: dict[str, Any] = {"metric": f"val/winrate/{latest}", "notify_jobs": True}

    async def made(parameters: dict[str, Any]) -> SweepRecord:
        sweep = await client.sweep(spec | {"sweep": {**table, "parameters": parameters}})
        return await SweepStore(ctx.store.redis).sweep(sweep["id"])

    record = await made({"train.lr": [1e-5], f"train.target.val/losses/{latest}": [1, 2]})
    assert record.metric == record.base["artifacts"]["best_metric"] == f"val/winrate/{step}"
    assert record.base["train"]["target"] == {f"val/winrate/{step}": 0.9}
    assert list(record.table["parameters"]) == ["train.lr", f"train.target.val/losses/{step}"]
    await tell_target(ctx, msgspec.structs.replace(record, progress=SweepProgress(value=0.65)))
    (message,) = await Notifications(ctx.store.redis).due(time.time() + 1, 5)
    assert (message.job, message.occasion) == (record.id, "target")

    record = await made({"train.target": [{f"val/winrate/{latest}": 0.7}, {"exact": 0.8}]})
    assert record.table["parameters"]["train.target"]["values"] == [{f"val/winrate/{step}": 0.7}, {"exact": 0.8}]
    record = await made({"validation.against.0.frozen": [latest]})
    assert record.base["train"]["target"] == {f"val/winrate/{latest}": 0.9}, "it may be another opponent in each job"


@pytest.mark.parametrize("whole", [True, False])
async def test_parameters_that_mean_the_same_are_refused(client: AsyncClient, opponent: str, whole: bool) -> None:
    names = [f"val/winrate/{opponent}@{at}" for at in ("latest", "20")]
    parameters: dict[str, Any] = {f"train.target.{name}": [0.5, 0.6] for name in names}
    if whole:
        parameters = {"train.target": [{name: 0.5} for name in names]}
    spec = evaluated_against({"frozen": f"{opponent}@latest"}, sweep={"parameters": parameters})
    with pytest.raises(ApiError) as wrong:
        await client.sweep(spec)
    said = "is the same as another value" if whole else f"is of the same metric as train.target.{names[1]}"
    assert said in wrong.value.mistakes[0]["problem"]
