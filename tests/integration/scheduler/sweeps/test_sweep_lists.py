"""Lists of sweeps: filtered, sorted and labelled as jobs are."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared import api_types
from opentinker.shared.runtime.service import Context
from opentinker.shared.single_flight import SingleFlight
from opentinker.shared.state.list_rows import ListRow, ListRows
from opentinker.shared.types.sweeps import MAX_SWEEP_TAGS
from tests.conftest import until
from tests.support.api import SPEC, Http, fits, mistakes
from tests.support.sweeps import SKILL, jobs_of, play_all, skill, swept


async def made(http: Http, table: dict[str, Any] | None = None, **labels: Any) -> str:
    status, sweep = await http("POST", "/v1/sweeps", json={**swept(**(table or {})), **labels})
    assert status == 201, sweep
    return str(sweep["id"])


async def listed(http: Http, query: str) -> list[str]:
    status, page = await http("GET", f"/v1/sweeps?{query}")
    assert status == 200, page
    fits(page, api_types.Sweeps)
    return [sweep["name"] for sweep in page["sweeps"]]


async def test_sweeps_are_listed_by_their_labels_as_jobs_are(http: Http, ctx: Context) -> None:
    await made(http, name="one", project="maths", tags=["base", "odd"], notes="lr 1e-4")
    second = await made(http, name="two", project="maths", tags=["base"])
    await made(http, {"parameters": {SKILL: [0.1], "model.base": [SPEC["model"]["base"]]}}, name="varied")
    await http("POST", f"/v1/sweeps/{second}/cancel")
    assert await listed(http, "project=maths") == ["two", "one"]
    assert await listed(http, "project=maths&sort=name") == ["one", "two"]
    assert await listed(http, "tag=base,odd") == ["one"]
    assert await listed(http, "search=1E-4+maths") == ["one"]
    assert await listed(http, "state=cancelled") == await listed(http, "name=TW") == ["two"]
    assert await listed(http, "state=running&sort=-created") == ["one", "varied"]
    assert await listed(http, "kind=sft") == []
    _, page = await http("GET", "/v1/sweeps?sort=state&limit=1")
    assert (page["more"], page["sweeps"][0]["name"]) == (True, "varied"), "running ones first, the newest of them first"
    assert await listed(http, f"sort=state&before={page['cursor']}") == ["one", "two"]
    _, page = await http("GET", "/v1/sweeps?state=running&limit=1")
    await http("POST", f"/v1/sweeps/{page['sweeps'][0]['id']}/cancel")
    assert await listed(http, f"state=running&before={page['cursor']}") == ["one"], "although that has left the filter"
    models = {sweep["name"]: sweep["model"] for sweep in (await http("GET", "/v1/sweeps"))[1]["sweeps"]}
    assert models["varied"] == "" and await listed(http, f"model={models['one']}") == ["two", "one"]


async def test_sweeps_are_counted_by_a_property_as_jobs_are(http: Http, ctx: Context) -> None:
    first = await made(http, name="one", project="maths", tags=["base", "odd"])
    await made(http, name="two", project="maths", tags=["base"])
    await made(http, name="two")
    await http("POST", f"/v1/sweeps/{first}/cancel")
    status, body = await http("GET", "/v1/sweeps/groups")
    fits(body, api_types.SweepGroups)
    assert (status, body["groups"]) == (200, [
        {"name": "maths", "sweeps": 2, "states": {"running": 1, "cancelled": 1}},
        {"name": "", "sweeps": 1, "states": {"running": 1}},
    ])  # fmt: skip

    async def counted(query: str) -> list[tuple[str, int]]:
        _, body = await http("GET", f"/v1/sweeps/groups?{query}")
        return [(group["name"], group["sweeps"]) for group in body["groups"]]

    assert await counted("by=tag") == [("base", 2), ("", 1), ("odd", 1)]
    assert await counted("by=name&state=running") == [("two", 2)]
    await made(http, name="two more")
    assert (await listed(http, "name=two"), await listed(http, "name_is=two")) == (
        ["two more", "two", "two"],
        ["two", "two"],
    )
    assert await counted("by=state&project=maths") == [("cancelled", 1), ("running", 1)]
    for query, field in (("by=colour", "by"), ("state=queued", "state")):
        status, body = await http("GET", f"/v1/sweeps/groups?{query}")
        assert status == 422 and set(mistakes(body)) == {field}


async def test_a_sweep_that_is_deleted_meanwhile_does_not_end_the_list(
    http: Http, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {name: await made(http, name=name) for name in ("a", "b", "c")}
    rows = await ListRows(ctx.store.redis, "sweep").of("default")

    async def as_they_were(*_: object) -> list[ListRow]:
        return rows

    monkeypatch.setattr(ListRows, "of", as_they_were)
    await ctx.store.redis.delete(f"sweep:{ids['b']}")
    _, page = await http("GET", "/v1/sweeps?sort=name&limit=2")
    assert ([one["name"] for one in page["sweeps"]], page["more"]) == (["a"], True)
    assert await listed(http, "sort=name&limit=3") == ["a", "c"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("sort=step", "sort"),
        ("state=queued", "state"),
        ("kind=tinker", "kind"),
        ("before=s-0000000000&tag=x", "before"),
    ],
)
async def test_what_no_sweep_has_is_refused(http: Http, query: str, field: str) -> None:
    status, body = await http("GET", f"/v1/sweeps?{query}")
    assert status == 422 and set(mistakes(body)) == {field}


async def test_labels_change_while_a_sweep_runs_and_later_jobs_have_them(http: Http, ctx: Context) -> None:
    sweep = await made(http, {"max_running": 1}, name="old", project="maths", tags=["base"])
    (first,) = await until(lambda: jobs_of(http, sweep), len)
    changes = {"name": "new", "project": "physics", "add_tags": ["late"], "remove_tags": ["base"], "notes": "seed 2"}
    status, changed = await http("PATCH", f"/v1/sweeps/{sweep}", json=changes)
    fits(changed, api_types.SweepSummary)
    assert (status, changed["name"], changed["project"], changed["tags"]) == (200, "new", "physics", ["late"])
    over = await play_all(ctx, http, sweep, lambda spec: [skill(spec)])
    assert (over["notes"], over["spec"]["project"]) == ("seed 2", "maths"), "the spec stays as it was submitted"
    jobs = await jobs_of(http, sweep)
    assert [(job["project"], job["tags"]) for job in jobs] == [
        ("maths", ["base", sweep]), ("physics", ["late", sweep]), ("physics", ["late", sweep])
    ]  # fmt: skip
    assert jobs[0]["id"] == first["id"] and jobs[1]["name"].startswith("new #1 ")
    status, changed = await http("PATCH", f"/v1/sweeps/{sweep}", json={"tags": []})
    assert (status, changed["tags"], changed["state"]) == (200, [], "succeeded")


@pytest.mark.parametrize("noun", ["jobs", "sweeps"])
async def test_lists_have_at_once_what_was_submitted_labelled_and_cancelled(
    http: Http, ctx: Context, monkeypatch: pytest.MonkeyPatch, noun: str
) -> None:
    monkeypatch.setattr(SingleFlight, "_is_fresh", lambda self, key: key in self._calls)  # kept until it is forgotten
    spec = swept() if noun == "sweeps" else SPEC

    async def found(query: str) -> int:
        return len((await http("GET", f"/v1/{noun}?{query}"))[1][noun])

    assert await found("name=fresh") == 0
    _, one = await http("POST", f"/v1/{noun}", json={**spec, "name": "fresh"})
    assert await found("name=fresh") == 1 and await found("project=maths") == 0
    await http("PATCH", f"/v1/{noun}/{one['id']}", json={"project": "maths"})
    assert await found("project=maths") == 1 and await found("state=cancelled") == 0
    await http("POST", f"/v1/{noun}/{one['id']}/cancel")
    assert await found("state=cancelled") == 1


async def test_a_sweep_has_room_for_the_tag_of_its_jobs(http: Http) -> None:
    many = [f"t{n}" for n in range(MAX_SWEEP_TAGS)]
    sweep = await made(http, {"max_running": 1}, tags=many)
    status, body = await http("PATCH", f"/v1/sweeps/{sweep}", json={"add_tags": ["more"]})
    assert status == 409 and f"{MAX_SWEEP_TAGS} are allowed" in body["detail"]
    status, body = await http("PATCH", f"/v1/sweeps/{sweep}", json={"tags": [*many, "more"]})
    assert status == 422 and set(mistakes(body)) == {"tags"}
