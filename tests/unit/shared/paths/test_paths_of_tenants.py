"""Paths of one tenant's jobs are closed to another, in submissions and in workers that open a changed link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from opentinker.services.rollout_worker.run_lease import run_lease
from opentinker.services.scheduler.jobs.submit import submit
from opentinker.services.trainer.job_reporter import JobReporter
from opentinker.services.trainer.resume import resume
from opentinker.services.trainer.supervised_loop import SupervisedJob
from opentinker.shared.data.readable_paths import check_opened, opening, resolved
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Lease, Pool
from opentinker.shared.types.errors import JobFailed, SpecError
from tests.integration.trainer.test_supervised import Student
from tests.support.api import SPEC, Http, bearing, new_key_of
from tests.support.factories import make_spec
from tests.support.scheduling import scheduler
from tests.unit.shared.paths.named_paths import OTHER, OWN, ROW, named, sft


async def test_no_spelling_gets_one_tenant_what_is_another_s(ctx: Context, store: Store, jobs: list[str]) -> None:
    """Over HTTP, as a member: plain, 4,257 and more characters, and by a link; nothing of it makes a job."""
    key = await new_key_of(store, "red")
    victim = f"{ctx.settings.data_dir}/jobs/{OTHER}"
    long = victim.replace("/jobs/", "/" + "./" * 2100 + "jobs/")
    (ctx.settings.data_dir.parent / "mine").symlink_to(victim)
    places = [victim, long, victim.replace("/jobs/", "/" * 5000 + "jobs/"), str(ctx.settings.data_dir.parent / "mine")]
    async with scheduler(ctx) as url, aiohttp.ClientSession(headers=bearing(key)) as session:
        http = Http(session, url)
        for place in places:
            for spec in (sft(f"{place}/metrics.jsonl"), named("model.base", f"{place}/checkpoints")):
                for path in ("/v1/jobs", "/v1/validate"):
                    status, said = await http("POST", path, json=spec)
                    assert status == 422 or said["valid"] is False, (place[:100], said)
                    assert "canary" not in str(said)
        assert (await http("GET", "/v1/jobs"))[1]["jobs"][0]["id"] == OWN
        status, made = await http("POST", "/v1/jobs", json=sft(long.replace(OTHER, OWN) + "/metrics.jsonl"))
        assert status == 201, "of its own it may, however it writes it"
    kept = (await store.job(made["id"])).spec["data"]["path"]
    assert kept == f"{resolved(ctx.settings.data_dir)}/jobs/{OWN}/metrics.jsonl"


async def test_a_changed_link_fails_the_job(ctx: Context, store: Store, jobs: list[str], tmp_path: Path) -> None:
    mine, rows = tmp_path / "mine", tmp_path / "mine" / "rows.jsonl"
    mine.mkdir()
    rows.write_bytes(orjson.dumps(ROW) + b"\n")
    id, _ = await submit(ctx, sft(str(rows)), "red")
    await check_opened(store, ctx.settings, id)
    with pytest.raises(JobFailed, match=r"data\.path: .* is kept by the server"):
        async with opening(store, ctx.settings, id):
            rows.unlink()
            rows.symlink_to(ctx.settings.data_dir / "jobs" / OTHER / "metrics.jsonl")
    with pytest.raises(JobFailed, match=r"data\.path"):
        await check_opened(store, ctx.settings, id)


async def test_workers_open_no_changed_link(ctx: Context, store: Store, jobs: list[str], tmp_path: Path) -> None:
    async def unused(*_: object) -> None:
        raise AssertionError

    def never(*_: object) -> Any:
        raise AssertionError("it was opened")

    link = tmp_path / "mine"
    link.symlink_to(ctx.settings.data_dir / "jobs" / OTHER)
    spec = parse_spec(sft(str(link / "metrics.jsonl")))
    rl = make_spec(model__base=str(link / "checkpoints"))
    for id, kind, pool in (("j-cccccccccc", spec, Pool.TRAINER), ("j-dddddddddd", rl, Pool.ROLLOUT)):
        await store.create_job(id=id, spec=kind.model_dump(mode="json"), tenant="red")
        worker = LeasedWorker(ctx, pool, unused)
        lease = Lease(job=id, worker=worker.info.id, incarnation=worker.info.incarnation, epoch=1, pool=pool)
        with pytest.raises(JobFailed, match="is kept by the server"):
            if pool is Pool.ROLLOUT:
                await run_lease(worker, lease, kind, never, EnvClient(ctx.bus))
            else:
                await SupervisedJob(worker, lease, kind, Student(), load=never).run()
    with pytest.raises(JobFailed, match=r"model\.base"):
        await resume(JobReporter(ctx, lease, rl, Student()))


async def test_a_job_that_names_one_is_refused_before_anybody_looks(ctx: Context, jobs: list[str]) -> None:
    place = ctx.settings.data_dir / "run"
    place.mkdir()
    (place / "rows.jsonl").write_text('{"secret": "canary"}\n')
    spec = {**SPEC, "kind": "sft", "data": {"path": str(place / "rows.jsonl")}, "train": {"steps": 0}}
    del spec["environment"]
    with pytest.raises(SpecError) as refused:
        await submit(ctx, spec, "red")
    assert {"data.path", "train.steps"} <= {mistake["field"] for mistake in refused.value.mistakes}
    assert "canary" not in str(refused.value)
