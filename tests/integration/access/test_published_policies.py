"""A published checkpoint as what other jobs of its tenant begin with, play and serve: who may, and what they get."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.services.scheduler.artifacts.archiver import Archiver
from opentinker.services.scheduler.jobs.kept_checkpoints import read_start
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Role
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from opentinker.shared.types.manifest import read_manifest, start_of
from tests.support.api import Http, bearing, new_key_of, write_checkpoint
from tests.support.factories import make_spec

TRAINED = {"trainer/state.json": b"{}"}
NAME = "gomoku.v1"


def spec_of(kind: str, start: str) -> dict[str, Any]:
    """A job of this kind that begins with what has this name. A simulated learner leaves no weights, and the toy engine
    has none."""
    base: dict[str, Any] = {"name": kind, "kind": kind, "model": {"base": "some/model"}, "start": {"from": start}}
    match kind:
        case "eval":
            environment = {"name": "copy_digits"}
            return base | {"environment": environment, "evaluation": {"episodes": 4}, "rollout": {"engine": "toy"}}
        case "inference":
            return base | {"rollout": {"engine": "toy"}}
    return make_spec(model__base="some/model").model_dump(mode="json") | {"start": {"from": start}}


async def submit(http: Http, key: str, kind: str, start: str) -> tuple[int, Any]:
    return await http("POST", "/v1/jobs", json=spec_of(kind, start), headers=bearing(key))


@pytest.fixture
async def trained(http: Http, ctx: Context, store: Store) -> tuple[str, str]:
    """A member's key, and a job of theirs that has a checkpoint."""
    key = await new_key_of(store, "red", Role.MEMBER)
    status, job = await http(
        "POST", "/v1/jobs", json=make_spec(model__base="some/model").model_dump(mode="json"), headers=bearing(key)
    )
    assert status == 201, job
    await store.transition(job["id"], JobState.STARTING, epoch=1)
    write_checkpoint(ctx, job["id"], 10, TRAINED)
    return key, str(job["id"])


async def publish(http: Http, key: str, checkpoint: str) -> tuple[int, Any]:
    return await http("POST", "/v1/published", json={"name": NAME, "checkpoint": checkpoint}, headers=bearing(key))


@pytest.mark.parametrize("kind", ["rl", "eval", "inference"])
async def test_members_of_a_tenant_begin_with_what_another_one_has_published(
    http: Http, ctx: Context, store: Store, trained: tuple[str, str], kind: str
) -> None:
    owner, job = trained
    other = await new_key_of(store, "red", Role.MEMBER)
    assert (await submit(http, other, kind, NAME))[0] == 422
    assert (await publish(http, owner, f"{job}@10"))[0] == 201
    status, user = await submit(http, other, kind, NAME)
    assert status == 201, user
    begun = await store.job(user["id"])
    assert begun.spec["start"]["from"] == f"{job}@10", "what it began with is said for ever"
    assert read_start(ctx.settings.data_dir, user["id"]).job == job
    place = start_of(ctx.settings.data_dir, user["id"])
    assert read_manifest(place).step == 10 and (place / "trainer" / "state.json").read_bytes() == b"{}"
    # The name may go, and the checkpoint stays as long as somebody uses it.
    assert (await http("DELETE", f"/v1/published/{NAME}", headers=bearing(other)))[0] == 200
    await store.transition(job, JobState.SUCCEEDED, epoch=1)
    await store.ended(job)
    await store.redis.srem("artifact:open", job)
    status, refused = await http("DELETE", f"/v1/jobs/{job}/checkpoints/10", headers=bearing(owner))
    assert status == 409 and user["id"] in refused["detail"]


async def test_viewers_and_other_tenants_do_not(http: Http, store: Store, trained: tuple[str, str]) -> None:
    """To another tenant a name, and a job, that is not theirs looks like one that nobody has."""
    owner, job = trained
    viewer, stranger = await new_key_of(store, "red", Role.VIEWER), await new_key_of(store, "blue", Role.ADMIN)
    assert (await publish(http, viewer, f"{job}@10"))[0] == 403
    assert (await publish(http, stranger, f"{job}@10"))[0] == 422
    assert (await publish(http, owner, f"{job}@10"))[0] == 201
    for kind in ("rl", "eval", "inference"):
        assert (await submit(http, viewer, kind, NAME))[0] == 403
        for mine, nobodys in ((NAME, "nobodys.v1"), (f"{job}@10", "j-0000000000@10")):
            answers = [await submit(http, stranger, kind, start) for start in (mine, nobodys)]
            assert [status for status, _ in answers] == [422, 422]
            said = [str(body).replace(start, "?") for (_, body), start in zip(answers, (mine, nobodys), strict=True)]
            assert said[0].replace(job, "j-0000000000") == said[1]
    assert (await http("GET", f"/v1/published/{NAME}", headers=bearing(viewer)))[0] == 200
    assert (await http("GET", f"/v1/published/{NAME}", headers=bearing(stranger)))[0] == 404


async def test_published_checkpoints_are_kept(http: Http, ctx: Context, store: Store, trained: tuple[str, str]) -> None:
    """The workshop of the job is gone: what is published is in the store, and whoever begins with it gets it there."""
    owner, job = trained
    assert (await publish(http, owner, f"{job}@10"))[0] == 201
    await store.transition(job, JobState.SUCCEEDED, epoch=1)
    archiver = Archiver(ctx)
    await store.redis.sadd("artifact:sweeping", job)
    await archiver.clean()
    assert not (ctx.settings.data_dir / "jobs" / job).exists()
    for kind in ("rl", "eval", "inference"):
        status, user = await submit(http, await new_key_of(store, "red", Role.MEMBER), kind, NAME)
        assert status == 201, user
        assert (start_of(ctx.settings.data_dir, user["id"]) / "trainer" / "state.json").read_bytes() == b"{}"
