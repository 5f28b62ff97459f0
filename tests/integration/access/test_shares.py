"""Share links: a key that shows some jobs, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker import ApiError, AsyncClient
from opentinker.shared import api_types
from opentinker.shared.security.authorization import Role
from opentinker.shared.state.store import Store
from tests.support.api import SPEC, Http, bearing, fits, new_key_of

FOREIGN = (
    *("/v1/jobs", "/v1/sweeps", "/v1/keys", "/v1/workers", "/v1/usage", "/v1/published", "/v1/environments"),
    *("/v1/checks", "/v1/checkpoints"),
)


async def test_a_link_shows_its_jobs_and_nothing_else(client: AsyncClient, api: Http, http: Http) -> None:
    shown, other = [(await client.submit(SPEC))["id"] for _ in range(2)]
    link = await client.share(shown, expires_in_s=3600, name="for Ada")
    assert link.startswith(f"{client.url}/#/share/ot_") and link.endswith(f"/jobs/{shown}")
    key = link.split("/share/")[1].split("/")[0]

    async def status_of(path: str, method: str = "GET") -> int:
        return (await api(method, path, headers=bearing(key)))[0]

    parts = ("", "/events?format=json", "/metrics", "/logs?format=json", "/timeline", "/why", "/rollouts")
    for part in (*parts, "/evaluations"):
        assert await status_of(f"/v1/jobs/{shown}{part}") == 200, part
        assert await status_of(f"/v1/jobs/{other}{part}") == 403, part
    for path in FOREIGN:
        assert await status_of(path) == 403, path
    for verb in ("cancel", "pause", "resume"):
        assert await status_of(f"/v1/jobs/{shown}/{verb}", "POST") == 403
    async with AsyncClient(client.url, api_key=key) as guest:
        who = await guest.whoami()
        assert (who["jobs"], who["scopes"], who["name"]) == ([shown], ["jobs:read"], "for Ada")
        with pytest.raises(ApiError, match="it needs jobs:write"):
            await guest.share(shown)
    (listed,) = [one for one in await client.keys() if one["jobs"]]
    assert listed["expires"] and listed["jobs"] == [shown]
    await client.revoke_key(listed["id"])
    assert await status_of(f"/v1/jobs/{shown}") in (200, 401)  # within a second
    status, both = await http("POST", "/v1/shares", json={"jobs": [shown, other]})
    fits(both, api_types.Share)
    assert status == 201 and both["address"].endswith(f"/compare/{shown},{other}")


async def test_only_own_jobs_are_shared_and_by_those_who_may_change_them(http: Http, store: Store) -> None:
    job = await http.job()
    for tenant, role, why in (
        ("red", Role.MEMBER, "you have no such job"),
        ("default", Role.VIEWER, "it needs jobs:write"),
    ):
        async with AsyncClient(http.url, api_key=await new_key_of(store, tenant, role)) as other:
            with pytest.raises(ApiError, match=why):
                await other.share(job)
    refused: list[dict[str, Any]] = [
        {"expires_in_s": 1}, {"expires_in_s": 1e9}, {"jobs": []}, {"jobs": ["../x"]}, {"jobs": [job] * 51},
    ]  # fmt: skip
    for wrong in refused:
        status, body = await http("POST", "/v1/shares", json={"jobs": [job], **wrong})
        assert status == 422 and body["errors"]
