"""Share links: a key that shows some jobs, and nothing else."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from opentinker import ApiError, AsyncClient
from opentinker.shared import api_types
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Role
from opentinker.shared.state.store import Store
from tests.support.api import OPERATOR, SPEC, bearing, fits, new_key_of
from tests.support.scheduling import scheduler

FOREIGN = (
    *("/v1/jobs", "/v1/sweeps", "/v1/keys", "/v1/workers", "/v1/usage", "/v1/published", "/v1/environments"),
    "/v1/checks",
)


async def status_of(url: str, key: str, path: str, method: str = "GET") -> int:
    async with (
        aiohttp.ClientSession(headers=bearing(key)) as session,
        session.request(method, url + path) as response,
    ):
        return response.status


async def made(url: str, key: str, **body: Any) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession(headers=bearing(key)) as session,
        session.post(f"{url}/v1/shares", json=body) as response,
    ):
        assert response.status == 201, await response.text()
        return dict(await response.json())


async def test_a_link_shows_its_jobs_and_nothing_else(ctx: Context, store: Store) -> None:
    async with scheduler(ctx) as url, AsyncClient(url, api_key=OPERATOR) as client:
        shown, other = [(await client.submit(SPEC))["id"] for _ in range(2)]
        link = await client.share(shown, expires_in_s=3600, name="for Ada")
        assert link.startswith(f"{url}/#/share/ot_") and link.endswith(f"/jobs/{shown}")
        key = link.split("/share/")[1].split("/")[0]
        parts = ("", "/events?format=json", "/metrics", "/logs?format=json", "/timeline", "/why", "/rollouts")
        for part in (*parts, "/evaluations"):
            assert await status_of(url, key, f"/v1/jobs/{shown}{part}") == 200, part
            assert await status_of(url, key, f"/v1/jobs/{other}{part}") == 403, part
        for path in FOREIGN:
            assert await status_of(url, key, path) == 403, path
        for verb in ("cancel", "pause", "resume"):
            assert await status_of(url, key, f"/v1/jobs/{shown}/{verb}", "POST") == 403
        async with AsyncClient(url, api_key=key) as guest:
            who = await guest.whoami()
            assert (who["jobs"], who["scopes"], who["name"]) == ([shown], ["jobs:read"], "for Ada")
            with pytest.raises(ApiError, match="does not allow jobs:write"):
                await guest.share(shown)
        (listed,) = [one for one in await client.keys() if one["jobs"]]
        assert listed["expires"] and listed["jobs"] == [shown]
        await client.revoke_key(listed["id"])
        assert await status_of(url, key, f"/v1/jobs/{shown}") in (200, 401)  # within a second
        both = await made(url, OPERATOR, jobs=[shown, other])
        fits(both, api_types.Share)
        assert both["address"].endswith(f"/compare/{shown},{other}")


async def test_only_own_jobs_are_shared_and_by_those_who_may_change_them(ctx: Context, store: Store) -> None:
    async with scheduler(ctx) as url, AsyncClient(url, api_key=OPERATOR) as client:
        job = (await client.submit(SPEC))["id"]
        stranger = await new_key_of(store, "red", Role.MEMBER)
        async with AsyncClient(url, api_key=stranger) as red:
            with pytest.raises(ApiError, match="you have no such job"):
                await red.share(job)
        viewer = await new_key_of(store, "default", Role.VIEWER)
        async with AsyncClient(url, api_key=viewer) as reader:
            with pytest.raises(ApiError, match="does not allow jobs:write"):
                await reader.share(job)
        refused: list[dict[str, Any]] = [
            {"expires_in_s": 1}, {"expires_in_s": 1e9}, {"jobs": []}, {"jobs": ["../x"]}, {"jobs": [job] * 51},
        ]  # fmt: skip
        for wrong in refused:
            with pytest.raises(AssertionError, match="errors"):
                await made(url, OPERATOR, **{"jobs": [job], **wrong})
