"""Lists of jobs: filters, orders, groups and pages; and what jobs are called."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from opentinker.shared.state.store import Store
from tests.support.api import SPEC, Http, mistakes


@pytest.fixture
async def jobs(http: Http) -> dict[str, str]:
    """Ids of four jobs by their names, the oldest first; `c` is cancelled."""
    labels: dict[str, dict[str, Any]] = {
        "a": {"project": "maths", "tags": ["baseline", "Seed 1"], "notes": "first try\nof two"},
        "b": {"project": "maths", "tags": ["baseline"]},
        "c": {"tags": ["baseline", "odd"]},
        "D": {"project": "letters"},
    }
    made = {name: await http.job({**SPEC, "name": name, **given}) for name, given in labels.items()}
    await http("POST", f"/v1/jobs/{made['c']}/cancel")
    return made


async def listed(http: Http, query: str) -> str:
    """Names of the listed jobs, in order; pages of two."""
    names, before = "", ""
    while True:
        status, page = await http("GET", f"/v1/jobs?limit=2&{query}{before}")
        assert status == 200, page
        names += "".join(job["name"] for job in page["jobs"])
        if not page["more"]:
            return names
        before = f"&before={page['cursor']}"


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", "Dcba"),
        ("project=maths", "ba"),
        ("tag=baseline", "cba"),
        ("tag=baseline,odd", "c"),
        ("state=cancelled", "c"),
        ("state=cancelled,queued&tag=baseline", "cba"),
        ("kind=rl&name=d", "D"),
        ("name_is=D", "D"),
        ("name_is=d", ""),
        ("search=MATHS seed", "a"),
        ("search=two try", "a"),
        ("search=nothing", ""),
        ("model=some/model&environment=none", ""),
        ("sort=name", "abcD"),
        ("sort=-name&state=queued", "Dba"),
        ("sort=-created", "abcD"),
        ("sort=state", "Dbac"),
        ("sort=project", "Dbac"),
        ("sort=tag", "bcaD"),
        ("sort=notes", "aDcb"),
        ("notes=FIRST", "a"),
        ("notes=nothing", ""),
        ("notes_is=first try", "a"),
        ("notes_is=first", ""),
    ],
)
async def test_jobs_are_filtered_and_sorted_page_by_page(
    http: Http, jobs: dict[str, str], query: str, names: str
) -> None:
    assert await listed(http, query) == names


@pytest.mark.parametrize("sort", ["state", "-state", "updated", "-created"])
async def test_the_next_page_goes_on_where_the_last_ended_although_its_last_job_left_the_filter(
    http: Http, jobs: dict[str, str], sort: str
) -> None:
    rest = await listed(http, f"state=queued&sort={sort}")
    _, page = await http("GET", f"/v1/jobs?limit=1&state=queued&sort={sort}")
    (last,) = page["jobs"]
    await http("POST", f"/v1/jobs/{last['id']}/cancel")
    _, page = await http("GET", f"/v1/jobs?state=queued&sort={sort}&before={page['cursor']}")
    assert "".join(job["name"] for job in page["jobs"]) == rest[1:] and len(rest) == 3


async def test_an_id_alone_is_a_cursor_also_of_a_job_outside_the_filter(http: Http, jobs: dict[str, str]) -> None:
    for query, names in (("sort=name", "cD"), ("state=cancelled&sort=name", "c"), ("project=letters&sort=-name", "")):
        _, page = await http("GET", f"/v1/jobs?{query}&before={jobs['b']}")
        assert "".join(job["name"] for job in page["jobs"]) == names, query
    _, page = await http("GET", "/v1/jobs?limit=1&sort=name")
    assert await listed(http, f"sort=-name&before={page['cursor']}") == "", "of another order: the job's place in this"
    forged = base64.urlsafe_b64encode(b'["name", 1, 1, "j"]').decode().rstrip("=")  # a number among names
    status, body = await http("GET", f"/v1/jobs?sort=name&before={jobs['b']}.{forged}")
    assert status == 422 and set(mistakes(body)) == {"before"}
    assert (await http("GET", f"/v1/jobs?before={page['cursor']}"))[1]["jobs"] == [], "a is the oldest"


async def test_a_search_finds_ids_and_a_filter_the_oldest_job(http: Http, jobs: dict[str, str]) -> None:
    assert await listed(http, f"search={jobs['a'][2:]} rl") == "a"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("state=dead", "state"),
        ("kind=rl,dead", "kind"),
        ("sort=colour", "sort"),
        (f"search={'x' * 201}", "search"),
        (f"notes={'x' * 201}", "notes"),
        (f"project={'x' * 201}", "project"),
        ("sort=name&before=j-0000000000", "before"),
        ("sort=name&before=j-0000000000.x", "before"),
        ("sort=name&before=j-0000000000.%C3%A9", "before"),
    ],
)
async def test_wrong_filters_are_refused_by_name(http: Http, query: str, field: str) -> None:
    status, body = await http("GET", f"/v1/jobs?{query}")
    assert status == 422 and set(mistakes(body)) == {field}


async def test_jobs_are_counted_by_a_property(http: Http, jobs: dict[str, str]) -> None:
    _, body = await http("GET", "/v1/jobs/groups")
    assert body["groups"] == [
        {"name": "maths", "jobs": 2, "states": {"queued": 2}},
        {"name": "", "jobs": 1, "states": {"cancelled": 1}},
        {"name": "letters", "jobs": 1, "states": {"queued": 1}},
    ]
    _, body = await http("GET", "/v1/jobs/groups?by=tag&state=queued")
    assert [(group["name"], group["jobs"]) for group in body["groups"]] == [("baseline", 2), ("", 1), ("Seed 1", 1)]
    _, body = await http("GET", "/v1/jobs/groups?by=name&tag=baseline")
    assert [(group["name"], group["jobs"]) for group in body["groups"]] == [("a", 1), ("b", 1), ("c", 1)]
    await http("PATCH", f"/v1/jobs/{jobs['b']}", json={"notes": "first try\nwith another seed"})
    _, body = await http("GET", "/v1/jobs/groups?by=notes&tag=baseline")
    assert [(group["name"], group["jobs"]) for group in body["groups"]] == [("first try", 2), ("", 1)]
    assert (await http("GET", "/v1/jobs/groups?by=colour"))[0] == 422


async def test_labels_change_while_a_job_runs_and_after_it(http: Http, jobs: dict[str, str]) -> None:
    id = jobs["c"]
    status, job = await http(
        "PATCH", f"/v1/jobs/{id}", json={"name": "see", "project": "maths", "add_tags": ["new"], "remove_tags": ["odd"]}
    )
    assert status == 200 and (job["name"], job["project"], job["tags"]) == ("see", "maths", ["baseline", "new"])
    _, job = await http("PATCH", f"/v1/jobs/{id}", json={"notes": "again", "tags": []})
    assert (job["name"], job["tags"], job["notes"], job["state"]) == ("see", [], "again", "cancelled")
    spec = (await http("GET", f"/v1/jobs/{id}"))[1]["spec"]
    assert (spec["name"], spec["project"], spec["tags"], spec["notes"]) == ("see", "maths", [], "again")
    assert await listed(http, "project=maths&name=se") == "see"


async def test_tags_that_many_add_at_once_are_all_there(http: Http, jobs: dict[str, str], store: Store) -> None:
    path = f"/v1/jobs/{jobs['D']}"
    await asyncio.gather(*(http("PATCH", path, json={"add_tags": [f"t{n}"]}) for n in range(20)))
    assert set((await store.job(jobs["D"])).tags) == {f"t{n}" for n in range(20)}
    status, body = await http("PATCH", path, json={"add_tags": ["one too many"]})
    assert status == 409 and "21 tags; 20 are allowed" in body["detail"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\u202eb"}, "name"),
        ({"tags": ["a,b"]}, "tags.0"),
        ({"tags": ["x" * 51]}, "tags.0"),
        ({"tags": [f"{n}" for n in range(21)]}, "tags"),
        ({"tags": ["a"], "add_tags": ["b"]}, "add_tags"),
        ({"notes": "x" * 10_001}, "notes"),
        ({"project": "x" * 101}, "project"),
        ({"state": "succeeded"}, "state"),
    ],
)
async def test_wrong_labels_are_refused_and_change_nothing(http: Http, change: dict[str, Any], field: str) -> None:
    id = await http.job()
    status, body = await http("PATCH", f"/v1/jobs/{id}", json=change)
    assert status == 422 and set(mistakes(body)) == {field}
    assert (await http("GET", f"/v1/jobs/{id}"))[1]["name"] == SPEC["name"]
