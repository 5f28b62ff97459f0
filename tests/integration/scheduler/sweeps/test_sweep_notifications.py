"""A sweep tells of its end and its target once; its jobs tell nothing unless that is asked for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from opentinker.services.scheduler.artifacts.catalog import ArtifactCatalog
from opentinker.services.scheduler.jobs.metric_history import MetricHistory
from opentinker.services.scheduler.notifications import notifier as notifier_module
from opentinker.services.scheduler.notifications.notifier import Notifier
from opentinker.services.scheduler.sweeps.messages import tell_target
from opentinker.services.scheduler.sweeps.running_sweep import RunningSweep
from opentinker.services.scheduler.sweeps.submission import submit_sweep
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.notifications import Message, Notifications
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.errors import NotFound
from opentinker.shared.types.sweeps import Undelivered
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


async def test_a_message_that_is_given_up_is_shown_at_the_sweep(
    http: Http, ctx: Context, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier_module, "TRIES", 1)
    receiver.status = 503
    sweep = await begun(http, telling(receiver))
    assert (await http("GET", f"/v1/sweeps/{sweep}"))[1]["undelivered"] == []
    await http("POST", f"/v1/sweeps/{sweep}/cancel")

    async def undelivered() -> list[dict[str, Any]]:
        return list((await http("GET", f"/v1/sweeps/{sweep}"))[1]["undelivered"])

    (given_up,) = await until(undelivered)
    assert given_up["time"] == pytest.approx(time.time(), abs=60)
    assert {**given_up, "time": 0} == {
        "time": 0, "occasion": "cancelled", "entry": 0, "tries": 1, "error": "answered 503: so it is"
    }  # fmt: skip
    second = Undelivered(time=1.5, occasion="target", entry=1, tries=9, error="away")
    await SweepStore(ctx.store.redis).add_undelivered(sweep, second)
    assert (await SweepStore(ctx.store.redis).sweep(sweep)).undelivered[1] == second
    with pytest.raises(NotFound):
        await SweepStore(ctx.store.redis).add_undelivered("s-0123456789", second)


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


async def test_a_bound_for_jobs_alone_is_not_of_the_best_trial(http: Http, ctx: Context, receiver: Receiver) -> None:
    spec = telling(receiver, notify_jobs=True, max_running=1)
    spec["notify"][0] |= {"on": ["target"], "target": {"metric": "reward/mean", "below": 0.2}}
    sweep = await begun(http, spec)
    await play_all(ctx, http, sweep, lambda spec: [skill(spec)])
    (said,) = await until(lambda: receiver.bodies)
    assert said["job"]["name"].endswith("skill=0.1"), "what the best trial falls below is no target of the sweep"
    await until(lambda: SweepStore(ctx.store.redis).is_active(sweep), lambda active: not active)
    assert len(receiver.bodies) == 1


async def test_the_end_is_told_with_a_trial_that_finished_as_the_budget_was_spent(
    ctx: Context, receiver: Receiver
) -> None:
    id, _ = await submit_sweep(ctx, telling(receiver, max_running=1, max_worker_s=10), "default")
    store, history = SweepStore(ctx.store.redis), MetricHistory(ctx.bus, ArtifactCatalog(ctx))
    with ThreadPoolExecutor(1) as search:
        running = RunningSweep(ctx, store, history, search, UNFENCED, await store.sweep(id))
        assert not await running.step()
        (jobs,) = (await store.job_ids(id)).values()
        await play(ctx, jobs[0], [0.4])
        await ctx.store.redis.hset(f"spent:job:{jobs[0]}", "worker_s", 20)
        assert await running.step()
    (message,) = await Notifications(ctx.store.redis).due(time.time() + 1, 5)
    about = message.body["sweep"]
    assert (about["reason"], about["trials"]) == ("its budget is spent: max_worker_s = 10", {"finished": 1})
    assert about["best"]["value"] == pytest.approx(0.4)


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
