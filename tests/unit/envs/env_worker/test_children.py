"""Environments that block, crash or hang in child processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import (
    CloseSession,
)
from tests.conftest import until
from tests.samples.slow_imports import alive
from tests.support.playing import step
from tests.unit.envs.env_worker.requests import BLOCKING, opening


async def start_children(sessions: Sessions, number: int) -> None:
    """Have the child processes up, so that a short deadline does not run while they start."""
    names = [f"start-{i}" for i in range(number)]
    await asyncio.gather(*(sessions.open(opening(session=name, environment=BLOCKING)) for name in names))
    for name in names:
        await sessions.close(CloseSession(session=name))
    await until(lambda: not sessions._closing)


async def test_blocking_environment_runs_in_a_child_and_blocks_nobody(sessions: Sessions, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    opened = await sessions.open(opening(environment=BLOCKING, gate=str(gate)))
    child = int(opened.messages[0].text)
    await sessions.open(opening(session="other"))
    blocked = asyncio.create_task(sessions.step(step(0)))
    await asyncio.sleep(0)
    assert (await sessions.step(step(0, session="other"))).reward == 1.0
    assert not blocked.done()
    gate.touch()
    assert (await blocked).reward == 1.0
    assert child != os.getpid()


async def test_hung_child_is_killed_and_others_are_unharmed(sessions: Sessions) -> None:
    await start_children(sessions, 2)
    hung = await sessions.open(opening(environment=BLOCKING, deadline_s=2.0, gate="never"))
    neighbour = await sessions.open(opening(session="n", environment=BLOCKING))
    assert hung.messages != neighbour.messages, "idle children are used first"
    reply = await sessions.step(step(0))
    assert reply.failure == Ending.ENV_TIMEOUT
    assert (await sessions.step(step(0, session="n"))).reward == 1.0
    await until(lambda: not alive(int(hung.messages[0].text)))
    again = await sessions.open(opening(session="again", environment=BLOCKING))
    assert again.failure is None


async def test_crashed_child_costs_only_its_own_sessions(sessions: Sessions) -> None:
    await sessions.open(opening(environment=BLOCKING, how="crash"))
    await sessions.open(opening(session="n", environment=BLOCKING))
    reply = await sessions.step(step(0))
    assert reply.failure == Ending.ENV_ERROR
    assert "exit status 7" in reply.error
    assert (await sessions.step(step(0, session="n"))).reward == 1.0


@pytest.mark.parametrize("crash", [True, False])
async def test_what_a_child_has_started_ends_with_it(sessions: Sessions, host: ChildPool, crash: bool) -> None:
    await sessions.open(opening(environment=BLOCKING, how="spawn"))
    started = int((await sessions.step(step(0))).messages[0].text)
    assert alive(started)
    if crash:
        assert "exit status 7" in (await sessions.step(step(1))).error
    else:
        await host.close()
    await until(lambda: not alive(started))


async def test_sessions_beside_a_hung_one_in_the_same_child_end_with_a_reason(host: ChildPool) -> None:
    sessions = Sessions(
        "w", limit=8, resolver=Resolver(modules=True), host=ChildPool(children=1, per_child=2, modules=True)
    )
    await start_children(sessions, 1)
    await sessions.open(opening(environment=BLOCKING, deadline_s=2.0, gate="never"))
    await sessions.open(opening(session="n", environment=BLOCKING))
    assert (await sessions.open(opening(session="third", environment=BLOCKING))).busy, "all places are taken"
    hung = asyncio.create_task(sessions.step(step(0)))
    await asyncio.sleep(0)
    beside = await sessions.step(step(0, session="n"))
    assert (await hung).failure == Ending.ENV_TIMEOUT
    assert beside.failure == Ending.ENV_ERROR
    assert "step of one of its sessions had not returned after " in beside.error
    fresh = await sessions.open(opening(session="third", environment=BLOCKING))
    assert fresh.failure is None
    await sessions.drain(0.01)
    assert sessions._host is not None
    await sessions._host.close()


async def test_what_user_code_prints_stays_out_of_the_protocol(sessions: Sessions) -> None:
    await sessions.open(opening(environment=BLOCKING, how="print"))
    assert (await sessions.step(step(0))).reward == 1.0


async def test_children_do_not_see_the_service_variables(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_REDIS_URL", "redis://user:secret@host")
    await sessions.open(opening(environment=BLOCKING, how="variables"))
    assert "OPENTINKER" not in (await sessions.step(step(0))).messages[0].text


async def test_children_end_with_the_worker(sessions: Sessions, host: ChildPool) -> None:
    opened = await sessions.open(opening(environment=BLOCKING))
    await host.close()
    assert not alive(int(opened.messages[0].text))
