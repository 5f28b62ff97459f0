"""Trainers and rollout workers of an earlier release beside a scheduler of this one."""

from __future__ import annotations

import time

import pytest

from opentinker.services.scheduler.tinker.access import Access
from opentinker.services.scheduler.tinker.commands import Commands
from opentinker.services.scheduler.tinker.endings import Endings
from opentinker.shared.runtime.service import Context
from opentinker.shared.types import codec
from opentinker.shared.types.tinker import Answer, Failed
from tests.integration.tinker.site import Client, FakeWorkers, passes
from tests.integration.tinker.test_sampling import asked, sampler_of


async def test_bytes_that_they_do_not_release_count_no_longer_after_a_round(
    user: Client, workers: FakeWorkers, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis, model, sampler = ctx.store.redis, await user.model(), await sampler_of(user)
    workers.answers = False

    async def counted() -> set[str]:
        await Endings(access := Access(ctx), Commands(access))._round(time.time())
        return set(await redis.hkeys("tinker:sizes"))

    async def answer(request: str, waiting: str, name: str) -> None:
        """As they do."""
        await redis.set(f"tinker:answer:{request}", codec.to_json(Answer(request=request, result=Failed(error="no"))))
        await redis.zrem(waiting, name)

    monkeypatch.setattr("opentinker.shared.state.tinker.requests.LARGE_ANSWER", 11)
    for seq in (1, 2):
        assert (await user.raw("forward_backward", passes(model, seq)))[0] == 200
        await user.ok("asample", **asked(sampler, seq))
    read = f"tinker:answer:{model}#3"
    await redis.hset("tinker:sizes", read, "8 default")
    await redis.hset("tinker:held", "default", 100)
    waiting = {
        name.format(seq)
        for seq in (1, 2)
        for name in (f"{model}#{{}}", f"{sampler}#{{}}", f"tinker:draw:{sampler}#{{}}")
    }
    assert await counted() == {*waiting, read}
    await answer(f"{model}#1", f"tinker:open:{model}", "1")
    await answer(f"{sampler}#1", f"tinker:waiting:{workers.job}:default", f"{sampler}#1")
    await user.ok("cancel_future", request_id=f"{sampler}#2")
    waiting.remove(f"tinker:draw:{sampler}#2")
    assert await counted() == {name for name in waiting if name.endswith("2")} | {read}
    await redis.hset(f"tinker:sizes:{model}", "2", "8 default")
    await workers.store.remove_model(await workers.store.model("default", model))
    assert not [key async for key in redis.scan_iter("tinker:*") if key.startswith(("tinker:held", "tinker:sizes:"))]
