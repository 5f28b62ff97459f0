"""The SDK of Tinker, unmodified, in several versions, against the API. Trainer and rollout worker are played."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from opentinker.shared.runtime.service import Context
from opentinker.shared.state.tinker.billing import HOUR_S, TinkerSpent
from opentinker.shared.types.tinker import Command, Sampler, Save, tinker_place
from tests.integration.tinker.site import BASE, FakeWorkers, checkpoint_of, start_server
from tests.support.tinker import environments
from tests.support.tinker.sdk_clients import called, run

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


class Saves(FakeWorkers):
    """Workers that also keep records of what is saved."""

    async def _carry_out(self, command: Command) -> None:
        body = command.body
        if isinstance(body, Save) and body.name:
            saved = checkpoint_of(self.ctx, command.model, kind=body.kind, name=body.name)
            await self.store.add_checkpoint(saved)
        if isinstance(body, Save) and body.sampler:
            place = str(tinker_place(self.ctx.settings.data_dir, command.model) / "samplers" / body.sampler)
            session = command.model.partition(":")[0]
            sampler = Sampler(
                id=body.sampler, tenant=command.tenant, session=session, job=self.job, base=BASE, model=command.model,
                directory=place, version=f"{command.model}@{command.seq}", rank=4, follows=body.follows,
            )  # fmt: skip
            await self.store.add_sampler(sampler)
        await super()._carry_out(command)


@pytest.mark.parametrize("version", environments.VERSIONS)
async def test_a_client_trains_saves_and_samples(ctx: Context, url: str, version: str) -> None:
    job = await start_server(ctx)
    async with Saves(ctx, job).work() as workers:
        found = await run(url, version, BASE)
    assert found["version"] == version and found["bases"] == [BASE] and found["info"] == BASE
    assert found["losses"] == [1.5] * 6 and found["lengths"] == [5, 3]
    assert "has 1 rows" in found["refused"] or "weights" in found["refused"]
    assert found["samples"] == found["elsewhere"] == [3, 3]
    assert found["prompt_logprobs"] == [None, -2.0, -2.0]
    assert {"weights/first", "sampler_weights/named"} <= set(found["checkpoints"])
    assert [command.seq for command in workers.commands if ":train:0" in command.model][:3] == [0, 1, 2]


async def test_the_command_line_shows_usage_and_what_is_stored(ctx: Context, url: str) -> None:
    python = await asyncio.to_thread(environments.python_with, environments.VERSIONS[-1])
    await TinkerSpent(ctx.store.redis).add("default", "s-1", BASE, {"training": 1234, "sampling_prefill": 5})
    await FakeWorkers(ctx, "j").store.add_checkpoint(checkpoint_of(ctx, "s-1:train:0", size=2 * 10**9))
    command = str(python.with_name("tinker"))

    async def told(*argv: str) -> Any:
        return json.loads(await called(url, command, "-f", "json", "billing", *argv))

    hours = [time.strftime("%Y-%m-%dT%H:00:00Z", time.gmtime(time.time() + more * HOUR_S)) for more in (0, 1)]
    found = await told("usage", *hours)
    assert "1234" in str(found) and "sampling_prefill" in str(found) and BASE in str(found)
    stored = str(await told("checkpoint-storage"))
    assert "2000000000" in stored
