"""People without a key, who signed in at an identity provider, play episodes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from redis.exceptions import RedisError

from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.state.plays import MAX_PLAYS, Play, Plays
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.env_protocol import StepSession
from tests.integration.rollout_worker.env_workers import Workers, client, workers
from tests.support.browsing import Browser, browser
from tests.support.oidc.login import Open, signs_in
from tests.support.oidc.provider import ADA, Provider

__all__ = ["client", "workers"]
BODY = orjson.dumps({"environment": {"name": "tests.samples.env_samples:Counting"}})


async def begun(page: Browser) -> dict[str, Any]:
    status, episode = await page.asks("POST", "/v1/plays", data=BODY)
    assert status == 201, episode
    return dict(episode)


async def test_a_users_plays_do_not_end_those_of_colleagues(served: Open, provider: Provider, workers: Workers) -> None:
    await workers.start("env-0")
    async with served() as (_, url), browser(url) as ada, browser(url) as bob:
        assert await signs_in(ada) == ""
        provider.user = {**ADA, "sub": "u-bob", "email": "bob@lab.example"}
        assert await signs_in(bob) == ""
        own = await begun(ada)
        for _ in range(MAX_PLAYS):
            await begun(bob)
        said = orjson.dumps({"turn": own["turn"], "actions": [{"text": "a"}]})
        status, after = await ada.asks("POST", f"/v1/plays/{own['id']}/turns", data=said)
        assert status == 200, after


async def test_an_episode_that_cannot_be_kept_leaves_no_session_behind(
    served: Open, provider: Provider, workers: Workers, client: EnvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Play] = []

    async def away(self: Plays, tenant: str, owner: str, play: Play, now: float) -> list[Play]:
        opened.append(play)
        raise RedisError("away")

    monkeypatch.setattr(Plays, "begin", away)
    await workers.start("env-0")
    async with served() as (_, url), browser(url) as ada:
        await signs_in(ada)
        status, _ = await ada.asks("POST", "/v1/plays", data=BODY)
        assert status == 503
    (play,) = opened
    step = StepSession(session=play.session, turn=0, text="a", stop=StopReason.EOS)
    assert "no such session" in (await client.step(play.worker, step)).error
