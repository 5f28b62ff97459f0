"""A tenant has a bounded number of sessions, samplers and models, and of bytes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from opentinker.shared.runtime.service import Context
from opentinker.shared.types.core import JobState
from tests.conftest import until
from tests.integration.tinker.site import BASE, Client, FakeWorkers, checkpoint_of, sampler_in, start_server
from tests.support.api import Http, new_key_of


async def test_models_sessions_samplers_and_bytes_of_a_tenant_are_bounded(
    user: Client, workers: FakeWorkers, ctx: Context, api: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = "opentinker.shared.state"
    monkeypatch.setattr(f"{state}.tinker.store.MAX_MODELS", 2)
    monkeypatch.setattr(f"{state}.tinker.sessions.MAX_SESSIONS", 3)
    monkeypatch.setattr(f"{state}.tinker.sessions.MAX_SAMPLERS", 2)
    monkeypatch.setattr("opentinker.shared.state.tinker.store.MAX_CHECKPOINT_BYTES", 10)
    session = await user.session()
    first, _ = await user.model(session, 0), await user.model(session, 1)
    body: dict[str, Any] = {"session_id": session, "base_model": BASE, "lora_config": {"rank": 8}}
    status, answer = await user.post("create_model", **body, model_seq_id=2)
    assert status == 422 and "2 models" in answer["detail"] and "unload" in answer["detail"]
    await user.ok("unload_model", model_id=first)
    second = await user.model(session, 2)
    await user.ok("create_model", **body, model_seq_id=2)  # sent again
    for number in range(2):
        await sampler_in(user, session, number)
    made = {"session_id": session, "sampling_session_seq_id": 2, "base_model": BASE}
    status, answer = await user.post("create_sampling_session", **made)
    assert status == 422 and "2 samplers" in answer["detail"]
    save = {"model_id": second, "sampling_session_seq_id": 3}
    failed = await user.result(await user.ok("save_weights_for_sampler", **save, seq_id=1))
    assert failed["category"] == "user" and "2 samplers" in failed["error"]
    await ctx.store.redis.zadd("tinker:samplers:default", {f"{session}:sampler:0": time.time() - 7200})
    await user.ok("create_sampling_session", **made)
    assert (await user.get(f"samplers/{session}:sampler:0"))[0] == 404, "it was idle, and made room"
    for name in ("a", "b"):
        await workers.store.add_checkpoint(checkpoint_of(ctx, second, name=name))
    assert await workers.store.stored_bytes("default") == 14
    failed = await user.result(await user.ok("save_weights", model_id=second, seq_id=2, path="c"))
    assert failed["category"] == "user" and "14 bytes" in failed["error"] and "delete" in failed["error"]
    last = await user.ok("save_weights", model_id=second, seq_id=2, path="c")
    assert await user.result(last) == failed
    assert (await user.send("DELETE", f"training_runs/{second}/checkpoints/weights/a"))[0] == 200
    assert await user.result(await user.ok("save_weights", model_id=second, seq_id=2, path="c")) == failed, "still"
    saved = await user.result(await user.ok("save_weights", model_id=second, seq_id=3, path="c"))
    await workers.store.add_checkpoint(checkpoint_of(ctx, second, name="c"))
    assert "path" in saved
    assert await user.result(await user.ok("save_weights", model_id=second, seq_id=3, path="c")) == saved, "full again"
    await user.session(), await user.session()
    status, answer = await user.post("create_session", tags=[])
    assert status == 422 and "3 sessions" in answer["detail"]
    await Client(api, await new_key_of(ctx.store, "blue")).session()


async def test_parallel_clients_do_not_exceed_the_bound(
    user: Client, workers: FakeWorkers, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker.shared.state.tinker.store.MAX_MODELS", 3)
    session = await user.session()
    body: dict[str, Any] = {"session_id": session, "base_model": BASE, "lora_config": {"rank": 8}}
    calls = [user.post("create_model", **body, model_seq_id=number) for number in range(9)]
    statuses = sorted([status for status, _ in await asyncio.gather(*calls)])
    assert statuses == [200] * 3 + [422] * 6
    await ctx.store.transition(workers.job, JobState.CANCELLED, reason="over")
    async with FakeWorkers(ctx, await start_server(ctx)).work():
        await until(lambda: user.post("create_model", **body, model_seq_id=20), lambda answer: answer[0] == 200)
