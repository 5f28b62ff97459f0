"""Trees from end to end: an env worker process behind NATS, a rollout worker with the simulated engine, the stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.messaging.subjects import GROUP
from opentinker.shared.state.store import Store
from opentinker.shared.types.trajectories import Group
from tests.conftest import Server
from tests.integration.rollout_worker.env_workers import Workers
from tests.integration.rollout_worker.rollout_bench import Bench, Mortal
from tests.support.factories import make_spec

SAMPLES = "tests.samples.tree_samples"
SIZE, TURNS = 4, 3


@pytest.fixture
async def workers(nats_server: Server, valkey_server: Server, store: Store) -> AsyncIterator[Workers]:
    workers = Workers(nats_server, valkey_server, store)
    await workers.start("env-0")
    yield workers
    workers.close()


async def groups_of(bus: Bus, store: Store, count: int, environment: dict[str, Any], **rollout: Any) -> list[Group]:
    """The groups of so many tickets, as they are in the stream."""
    bench = Bench(bus, store)
    bench.spec = make_spec(
        environment=environment,
        algorithm={"name": "at_grpo", "group_size": SIZE, "groups_per_batch": count},
        rollout={"engine": "toy", "max_tokens": 64, "max_tokens_per_turn": 4, "max_turns": TURNS, "seed": 3, **rollout},
    )
    bench.sessions = EnvClient(bus)
    await bench.issue(count)
    engine = Mortal()
    engine.context_length = 512
    await bench.play(engine)
    assert (await bench.admission.ledger()).accepted == count
    return await bus.stored(GROUP, job=bench.job)


@pytest.mark.parametrize("name", ["Climb", "BlockingClimb"])
async def test_a_group_is_one_message_with_every_candidate(workers: Workers, bus: Bus, store: Store, name: str) -> None:
    environment = {"name": f"{SAMPLES}:{name}", "config": {"turns": 2 * TURNS}}
    for group in await groups_of(bus, store, 2, environment):
        group.check()
        assert group.is_tree and group.samples == SIZE
        played = {t.seat: t for t in group.trajectories if t.index == 0}
        assert {seat: [turn.number for turn in t.turns] for seat, t in played.items()} == {
            "left": [0, 2, 4], "right": [1, 3, 5],
        }  # fmt: skip
        others = [t for t in group.trajectories if t.index]
        assert len(others) == 2 * TURNS * (SIZE - 1)
        for other in others:
            (turn,) = other.turns
            own = played[other.seat]
            assert other.ids[: turn.start].tolist() == own.ids[: turn.start].tolist(), "it follows the chosen ones"
            assert other.mask.tolist() == [0] * turn.start + [1] * (turn.end - turn.start)
            (chosen,) = (one for one in own.turns if one.number == turn.number)
            assert chosen.paid[other.seat] >= turn.paid[other.seat], "the best goes on"
        height = sum(round(10 * turn.paid[t.seat]) for t in played.values() for turn in t.turns)
        assert {t.metrics["height"] for t in played.values()} == {float(height)}


async def test_rounds_are_sampled_as_trees(workers: Workers, bus: Bus, store: Store) -> None:
    (group,) = await groups_of(bus, store, 1, {"name": f"{SAMPLES}:Together"})
    group.check()
    numbers = [(t.index, t.seat, [turn.number for turn in t.turns]) for t in group.trajectories]
    assert numbers[:2] == [(0, "left", [0, 1]), (0, "right", [0, 1])]
    assert len(numbers) == 2 + 2 * 2 * (SIZE - 1)


async def test_the_same_seeds_come_to_the_same_tree(workers: Workers, bus: Bus, store: Store) -> None:
    environment = {"name": "gomoku", "config": {"size": 5, "win": 4, "opponent": "self"}}
    stories = []
    for _ in range(2):
        (group,) = await groups_of(bus, store, 1, environment)
        stories.append([(t.index, t.seat, t.ids.tolist(), t.turns[0].paid) for t in group.trajectories])
    assert stories[0] == stories[1]
