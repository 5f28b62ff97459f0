"""A sweep tells of its end and its target once; its jobs tell nothing unless that is asked for."""

from __future__ import annotations

import time
from typing import Any

import pytest

from opentinker.services.scheduler.notifications.notifier import Notifier
from opentinker.services.scheduler.sweeps.messages import tell_target
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.notifications import Message, Notifications
from opentinker.shared.state.sweeps import SweepStore
from tests.conftest import NewContext, until
from tests.integration.scheduler.test_notifications import Receiver, receiver
from tests.support.api import Http, mistakes
from tests.support.sweeps import SKILL, ends, jobs_of, play, play_all, skill, swept

__all__ = ["receiver"]


@pytest.fixture
async def ctx(new_context: NewContext) -> Any:
    """Surroundings of a scheduler whose operator lets jobs reach this machine."""
    async with new_context(env_egress_allow=["127.0.0.0/8"], public_url="https://tinker.example") as ctx:
        yield ctx


def telling(receiver: Receiver, **table: Any) -> dict[str, Any]:
    entry = {"url": receiver.url, "on": ["succeeded", "failed", "cancelled"]}
    return {**swept(**table), "project": "maths", "notify": [entry]}


async def begun(http: Http, spec: dict[str, Any]) -> str:
    status, sweep = await http("POST", "/v1/sweeps", json=spec)
    assert status == 201, sweep
    return str(sweep["id"])


async def test_a_sweep_tells_of_its_end_once_with_the_best(http: Http, ctx: Context, receiver: Receiver) -> None:
    sweep = await begun(http, telling(receiver))
    await play_all(ctx, http, sweep, lambda spec: [skill(spec)])
    await until(lambda: receiver.bodies)
    await until(lambda: SweepStore(ctx.store.redis).is_active(sweep), lambda active: not active)
    assert await Notifications(ctx.store.redis).followed() == {}, "its jobs are not looked at"
    (said,) = receiver.bodies
    assert (said["id"], said["occasion"], said["page"]) == (
        f"{sweep}/end/0", "succeeded", f"https://tinker.example/#/sweeps/{sweep}"
    )  # fmt: skip
    about = said["sweep"]
    assert (about["project"], about["trials"], about["jobs"]) == ("maths", {"finished": 3}, 3)
    assert about["best"] == {"number": 2, "value": pytest.approx(0.7), "settings": {SKILL: 0.7}}
    specs = [(await ctx.store.job(job["id"])).spec for job in await jobs_of(http, sweep)]
    assert [spec.get("notify", []) for spec in specs] == [[], [], []]


async def test_a_cancelled_sweep_is_told_and_its_jobs_if_asked(http: Http, ctx: Context, receiver: Receiver) -> None:
    sweep = await begun(http, telling(receiver, notify_jobs=True))
    jobs = await until(lambda: jobs_of(http, sweep), lambda jobs: len(jobs) == 3)
    await http("POST", f"/v1/sweeps/{sweep}/cancel")
    told = await until(lambda: receiver.bodies, lambda bodies: len(bodies) == 4)
    assert {body["occasion"] for body in told} == {"cancelled"}
    assert {body["job"]["id"] for body in told if "job" in body} == {job["id"] for job in jobs}
    assert [body["sweep"]["reason"] for body in told if "sweep" in body] == ["cancelled by request"]


async def test_a_message_about_a_deleted_sweep_is_dropped(ctx: Context) -> None:
    kept = Notifications(ctx.store.redis)
    message = Message(id="s-1/end/0", job="s-0123456789", tenant="default", entry=0, occasion="failed", body={})
    await kept.add(message.job, [message], {}, 1.0)
    notifier = Notifier(ctx)
    await notifier.send()
    await notifier.sent()
    assert await kept.due(2.0, 5) == []


async def test_the_best_trial_reaches_a_target_once(http: Http, ctx: Context, receiver: Receiver) -> None:
    spec = telling(receiver, max_running=1)
    spec["notify"][0] |= {"on": ["target"], "target": {"metric": "reward/mean", "above": 0.3}}
    sweep = await begun(http, spec)
    played: list[float] = []

    def score(spec: dict[str, Any]) -> list[float]:
        assert (receiver.bodies == []) is (len(played) < 2), "told after the second of three trials"
        played.append(skill(spec))
        return [skill(spec)]

    async def after(count: int) -> None:
        for job in await until(lambda: jobs_of(http, sweep), lambda jobs: len(jobs) == count):
            if job["state"] == "queued":
                await play(ctx, job["id"], score((await ctx.store.job(job["id"])).spec))

    await after(1)
    await after(2)
    (said,) = await until(lambda: receiver.bodies)
    assert (said["id"], said["occasion"]) == (f"{sweep}/target/0", "target")
    assert (said["sweep"]["best"]["value"], said["sweep"]["state"]) == (pytest.approx(0.4), "running")
    await after(3)
    await ends(http, sweep)
    await until(lambda: SweepStore(ctx.store.redis).is_active(sweep), lambda active: not active)
    assert played == [0.1, 0.4, 0.7] and len(receiver.bodies) == 1
    assert await Notifications(ctx.store.redis).seen([sweep]) == [{}], "nothing is left of it"


async def test_another_leader_does_not_tell_of_a_target_again(http: Http, ctx: Context, receiver: Receiver) -> None:
    spec = telling(receiver)
    spec["notify"][0]["target"] = {"metric": "reward/mean", "above": 0.3}
    sweep = await begun(http, spec)
    jobs = await until(lambda: jobs_of(http, sweep), lambda jobs: len(jobs) == 3)
    await play(ctx, jobs[1]["id"], [0.4])
    await until(lambda: receiver.bodies)
    record = await SweepStore(ctx.store.redis).sweep(sweep)
    await tell_target(ctx, record)
    assert await Notifications(ctx.store.redis).due(time.time() + 1, 5) == []


@pytest.mark.parametrize(
    ("target", "field", "says"),
    [
        ({"metric": "exact", "above": 0.5}, "notify.0.target.metric", "its own metric, reward/mean"),
        ({"metric": "reward/mean", "below": 0.5}, "notify.0.target.below", "use above"),
    ],
)
async def test_a_target_that_a_sweep_cannot_tell_of_is_refused(
    http: Http, receiver: Receiver, target: dict[str, Any], field: str, says: str
) -> None:
    spec = telling(receiver)
    spec["notify"][0]["target"] = target
    status, answer = await http("POST", "/v1/sweeps", json=spec)
    assert status == 422 and says in mistakes(answer)[field]
    spec["sweep"]["notify_jobs"] = True
    assert (await http("POST", "/v1/sweeps", json=spec))[0] == 201


async def test_an_entry_that_would_never_speak_is_refused(http: Http, receiver: Receiver) -> None:
    spec = telling(receiver)
    spec["notify"][0]["on"] = ["alarm"]
    status, answer = await http("POST", "/v1/sweeps", json=spec)
    assert status == 422 and "notify_jobs = true" in mistakes(answer)["notify.0.on"]
    spec["sweep"]["notify_jobs"] = True
    assert (await http("POST", "/v1/sweeps", json=spec))[0] == 201
