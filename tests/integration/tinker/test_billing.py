"""What `tinker billing` reads: tokens by hour, session and base of the key's tenant, and what its checkpoints hold."""

from __future__ import annotations

import time
from typing import Any

import pytest

from opentinker.services.scheduler.tinker import billing_api
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.tinker import billing
from opentinker.shared.state.tinker.billing import HOUR_S, TinkerSpent
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.tinker import TinkerSession
from tests.integration.tinker.site import BASE, Client, FakeWorkers, checkpoint_of

HOUR = "2026-11-29T09:00:00Z"


def at(hour: int) -> str:
    return time.strftime("%Y-%m-%dT%H:00:00Z", time.gmtime(hour * HOUR_S))


async def usage(user: Client, first: int, end: int) -> Any:
    params = {"starting_on": at(first), "ending_before": at(end)}
    status, found = await user.get("billing/usage/events", params=params)
    assert status == 200, found
    return found


async def test_usage_is_listed_by_hour_session_and_base_and_is_of_the_tenant(
    user: Client, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent, now = TinkerSpent(ctx.store.redis), int(time.time()) // HOUR_S
    session = (await user.ok("create_session", tags=[], user_metadata={"run": "a"}, sdk_version="0.38.0"))["session_id"]
    for _ in range(2):
        await spent.add("default", session, BASE, {"training": 100, "checkpoint": 1})
    await spent.add("default", "s-gone", BASE, {"sampling_prefill": 7, "sampling_sample": 30})
    await spent.add("other", "s-theirs", BASE, {"training": 5})
    monkeypatch.setattr("opentinker.shared.state.tinker.billing.time.time", lambda: (now - 1) * HOUR_S)
    await spent.add("default", session, BASE, {"training": 3})
    monkeypatch.undo()
    found = await usage(user, now - 1, now + 1)
    assert [(one["session_id"], one["event_info"]) for one in found["data"]] == [
        (session, {"type": "training", "token_count": 3}),
        (session, {"type": "training", "token_count": 200}),
        ("s-gone", {"type": "sampling_sample", "token_count": 30}),
        ("s-gone", {"type": "sampling_prefill", "token_count": 7, "cached": False}),
        (session, {"type": "checkpoint", "count": 2}),
    ]
    assert {one["base_model"] for one in found["data"]} == {BASE}
    assert (await usage(user, now, now + 1))["data"] == found["data"][1:]
    assert found["sessions"] == {session: {"user_metadata": {"run": "a"}}, "s-gone": {"user_metadata": None}}


async def test_entries_of_an_hour_and_of_an_answer_are_bounded_and_no_token_is_lost(
    user: Client, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(billing, "MAX_OF_HOUR", 3)
    spent, now = TinkerSpent(ctx.store.redis), int(time.time()) // HOUR_S
    for number in range(5):
        await spent.add("default", f"s-{number}", BASE, {"training": 10})
    await spent.add("default", "s-0", BASE, {"training": 1, "checkpoint": 1})
    found = await usage(user, now, now + 1)
    said = {(one["session_id"], one["event_info"]["type"]): one["event_info"] for one in found["data"]}
    assert said["", "training"]["token_count"] == 20 and said["s-0", "training"]["token_count"] == 11
    assert said["", "checkpoint"]["count"] == 1 and len(said) == 5
    assert found["sessions"].keys() == {"s-0", "s-1", "s-2"}
    monkeypatch.setattr(billing_api, "MAX_ENTRIES", 4)
    params = {"starting_on": at(now - 1), "ending_before": at(now + 1)}
    status, refused = await user.get("billing/usage/events", params=params)
    assert status == 422 and "leaves 5 entries" in refused["detail"] and "fewer hours" in refused["detail"]


async def test_metadata_of_another_tenant_s_session_is_not_told(user: Client, ctx: Context) -> None:
    theirs = TinkerSession(id="s-theirs", tenant="other", created=1.0, metadata={"secret": "x"})
    await TinkerStore(ctx.store.redis).open_session(theirs)
    now = int(time.time()) // HOUR_S
    await TinkerSpent(ctx.store.redis).add("default", theirs.id, BASE, {"training": 1})
    assert (await usage(user, now, now + 1))["sessions"] == {theirs.id: {"user_metadata": None}}


async def test_checkpoints_are_counted_as_they_are_now(user: Client, ctx: Context, workers: FakeWorkers) -> None:
    path = "billing/usage/checkpoints/current"
    assert await user.get(path) == (200, {"data": []})
    model = await user.model()
    for name, size in (("a", 10**9), ("b", 5 * 10**8)):
        await workers.store.add_checkpoint(checkpoint_of(ctx, model, name=name, size=size))
    status, found = await user.get(path)
    assert status == 200
    assert found["data"] == [{"checkpoint_count": 2, "size_bytes": 1_500_000_000, "size_gigabytes": 1.5}]
    status, refused = await user.get(path, params={"project_id": "p"})
    assert status == 422 and "leave it out" in refused["detail"]


@pytest.mark.parametrize(
    ("first", "end", "said"),
    [
        ("yesterday", HOUR, "starting_on"),
        ("2026-11-29T08:30:00Z", HOUR, "beginning of an hour"),
        ("", HOUR, "starting_on"),
        (HOUR, HOUR, "must be after starting_on"),
        ("2026-11-01T09:00:00Z", HOUR, "at most 14 days"),
        ("2026-11-29T08:00:00Z", "9" * 400, "ending_before"),
    ],
)
async def test_a_window_is_of_whole_hours_and_two_weeks_at_most(user: Client, first: str, end: str, said: str) -> None:
    status, refused = await user.get("billing/usage/events", params={"starting_on": first, "ending_before": end})
    assert status == 422 and said in refused["detail"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "copy_weights"), ("GET", "sessions/s-0/trace_export"), ("POST", "create_custom_loss"), ("GET", "audit")],
)
async def test_what_is_not_served_says_so(user: Client, method: str, path: str) -> None:
    status, refused = await user.send(method, path)
    assert status == 404 and "not served" in refused["detail"] and "docs/tinker.md" in refused["hint"]
