"""Groups that meet members of a pool take turns on its engine: whose weights it has while they play."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from opentinker.services.rollout_worker.engines.base import EngineLost, SwapError
from opentinker.services.rollout_worker.engines.toy import ToyEngine
from opentinker.services.rollout_worker.episode_protocol import EpisodeFailed
from opentinker.services.rollout_worker.opponents import Opponents
from opentinker.services.rollout_worker.seat_map import LoadedPolicy, SeatMap
from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.spec import ToySpec, parse_spec
from opentinker.shared.types.core import Ending, WeightVersion
from opentinker.shared.types.pools import members_of
from tests.conftest import soon, until
from tests.unit.shared.spec.test_pools import BASE

OLD, NEW, LAST = "1.0", "1.10", "1.20"


class Recording(ToyEngine):
    def __init__(self, name: str) -> None:
        super().__init__(ToySpec(), eos_id=1, vocab_size=8, context_length=64)
        self.name = name
        self.loads: list[str] = []
        self.problem: Exception | None = None
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load(self, version: WeightVersion, directory: Path) -> None:
        self.loads.append(str(version))
        await self.may_load.wait()
        if self.problem is not None:
            raise self.problem
        await super().load(version, directory)


class Bench:
    def __init__(self, data: Path, *pools: str) -> None:
        seats = {f"seat_{pool}": {"pool": pool} for pool in pools}
        self.spec = parse_spec({**BASE, "seats": seats, "pools": {pool: {"every": 10} for pool in pools}})
        self.engines = {pool: Recording(pool) for pool in pools}
        players = [LoadedPolicy("", self.spec, ToyEngine(ToySpec(), eos_id=1, vocab_size=8, context_length=64), None)]  # type: ignore[arg-type]
        players += [LoadedPolicy(f"{pool}@", self.spec, engine, None, True) for pool, engine in self.engines.items()]  # type: ignore[arg-type]
        self.seats = SeatMap(self.spec, players)
        for version in (OLD, NEW, LAST):
            (members_of(data, "j", "") / version).mkdir(parents=True)
        self.seconds: list[float] = []
        self.opponents = Opponents(self.spec, players, data, "j", self.seconds.append)
        self.playing: list[str] = []

    def group(self, end: asyncio.Event | None = None, **members: str) -> asyncio.Task[None]:
        """Play until `end`."""

        async def play() -> None:
            async with self.opponents.playing(members) as players:
                for pool, member in members.items():
                    engine: Any = players[pool].engine
                    assert (players[pool].name, str(engine.version)) == (f"{pool}@{member}", member)
                self.playing.append("+".join(members.values()))
                if end is not None:
                    await end.wait()
                for pool, member in members.items():
                    assert str(self.engines[pool].version) == member, "the weights changed under the group"

        return asyncio.create_task(play())


async def test_groups_of_one_member_play_together_and_others_wait_for_their_turn(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "past")
    end = asyncio.Event()
    first, second = bench.group(end, past=OLD), bench.group(end, past=OLD)
    await until(lambda: bench.playing == [OLD, OLD])
    waiting = [bench.group(past=NEW), bench.group(past=LAST), bench.group(past=OLD), bench.group(past=NEW)]
    await asyncio.sleep(0)
    assert bench.playing == [OLD, OLD], "a group that came for the loaded member waits behind those for others"
    end.set()
    await soon(asyncio.gather(first, second, *waiting))
    assert bench.playing == [OLD, OLD, NEW, NEW, LAST, OLD], "those that wait for the same member enter together"
    assert bench.engines["past"].loads == [OLD, NEW, LAST, OLD] and len(bench.seconds) == 4


async def test_a_member_that_stays_is_loaded_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "past")
    for _ in range(3):
        await soon(bench.group(past=OLD))
    assert bench.engines["past"].loads == [OLD]


async def test_a_group_that_is_cancelled_while_it_waits_or_loads_holds_up_nobody(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "past")
    end, engine = asyncio.Event(), bench.engines["past"]
    first = bench.group(end, past=OLD)
    await until(lambda: bench.playing == [OLD])
    waiting = bench.group(past=NEW)
    await asyncio.sleep(0)
    await cancel_and_wait(waiting)
    engine.may_load.clear()
    end.set()
    await soon(first)
    loading = bench.group(past=LAST)
    await until(lambda: engine.loads == [OLD, LAST])
    loading.cancel()
    behind = bench.group(past=LAST)
    engine.may_load.set()
    await soon(behind)
    assert loading.cancelled() and bench.playing == [OLD, LAST]


async def test_a_member_that_cannot_be_loaded_fails_its_group_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "past")
    with pytest.raises(EpisodeFailed, match=r"member 1\.5 of pool 'past' cannot play: there is no checkpoint") as error:
        await soon(bench.group(past="1.5"))
    assert error.value.ending is Ending.ENGINE_ERROR
    bench.engines["past"].problem = SwapError("damaged")
    with pytest.raises(EpisodeFailed, match="damaged"):
        await soon(bench.group(past=OLD))
    bench.engines["past"].problem = None
    await soon(bench.group(past=OLD))
    bench.engines["past"].problem = EngineLost("dead")
    with pytest.raises(EngineLost):
        await soon(bench.group(past=NEW))


async def test_groups_that_meet_members_of_two_pools_do_not_wait_for_each_other_forever(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "a", "b")
    groups = [
        bench.group(a=OLD, b=NEW),
        bench.group(b=OLD, a=NEW),
        bench.group(b=NEW, a=OLD),
        bench.group(a=NEW, b=LAST),
    ]
    await soon(asyncio.gather(*groups))
    assert len(bench.playing) == 4


async def test_a_seat_is_played_by_the_member_of_its_group(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "past")
    async with bench.opponents.playing({"past": NEW}) as members:
        seats = bench.seats.against(members)
        player, own = seats.at("seat_past"), seats.at("another")
        assert isinstance(player, LoadedPolicy) and own is not None and seats.named(f"past@{NEW}") is player
        assert (player.name, player.is_frozen, own.name) == (f"past@{NEW}", True, "")
        assert seats.split_seats("", ["another", "seat_past"]) == (["another"], {"seat_past"})
    unnamed = bench.seats.at("seat_past")
    assert unnamed is not None and unnamed.name == "past@", "other groups are not concerned"
    assert bench.seats.against({}) is bench.seats
