"""Adapters that requests name: which are loaded, which make room, and which are refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from opentinker.services.rollout_worker.engines.base import EngineError
from opentinker.services.rollout_worker.engines.toy import ToyEngine
from opentinker.services.rollout_worker.tinker.adapter_cache import AdapterCache
from opentinker.services.rollout_worker.tinker.adapter_files import AdapterGone, AdapterRefused, check_adapter
from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.spec import ToySpec
from opentinker.shared.types.core import WeightVersion
from tests.conftest import soon, until
from tests.support.adapters import write_adapter


class Shelf(ToyEngine):
    """Notes what it loads and drops."""

    def __init__(self) -> None:
        super().__init__(ToySpec(), eos_id=1, vocab_size=8, context_length=64)
        self.calls: list[str] = []
        self.problem: Exception | None = None

    @property
    def held(self) -> int:
        return len(self._adapters)

    async def add(self, name: str, version: WeightVersion, adapter: Path) -> None:
        await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        self.calls.append(f"+{adapter.name}")
        await super().add(name, version, adapter)

    async def drop(self, name: str) -> None:
        self.calls.append("-")
        await super().drop(name)


class Bench:
    def __init__(self, place: Path, room: int = 2) -> None:
        self.place, self.engine = place, Shelf()
        self.cache = AdapterCache(self.engine, room, max_rank=8)
        self.using: list[str] = []
        for name in "abcdefg":
            write_adapter(place / name)

    async def use(self, name: str, end: asyncio.Event | None = None, version: str = "1", tenant: str = "red") -> str:
        """Hold it until `end`. The engine must know it all the while."""
        async with self.cache.holding(tenant, str(self.place / name), version) as known:
            self.using.append(name)
            assert known in self.engine._adapters
            if end is not None:
                await end.wait()
            assert known in self.engine._adapters, "it was lost while it was used"
            self.using.remove(name)
        return known


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_the_least_recently_used_one_makes_room_and_comes_back(bench: Bench) -> None:
    names = [await bench.use(name) for name in "abacab"]
    assert bench.engine.calls == ["+a", "+b", "-", "+c", "-", "+b"], "a is used most"
    assert names[1] == names[5], "the same contents have the same name when they come back"
    assert len({*names}) == 3 and bench.cache.loads == 4
    async with bench.cache.holding("red", "", "") as base:
        assert base == "" and len(bench.engine.calls) == 6


async def test_many_requests_at_once_load_an_adapter_once_and_new_contents_again(bench: Bench) -> None:
    await asyncio.gather(*(bench.use("a") for _ in range(20)))
    assert bench.engine.calls == ["+a"]
    assert await bench.use("a", version="2") != await bench.use("a", version="1")
    assert bench.engine.calls == ["+a", "+a"]


async def test_one_in_use_stays_and_a_new_one_waits_without_being_overtaken_for_ever(bench: Bench) -> None:
    ends = {name: asyncio.Event() for name in "ab"}
    users = [asyncio.create_task(bench.use(name, end)) for name, end in ends.items()]
    await until(lambda: len(bench.using) == 2)
    third = asyncio.create_task(bench.use("c"))
    await until(lambda: any(adapter.leaving for adapter in bench.cache._loaded.values()))
    late = asyncio.create_task(bench.use("a"))
    await soon(bench.use("b"))  # which is not the one to leave
    assert bench.using == ["a", "b"] and not third.done() and not late.done()
    ends["a"].set()
    await soon(third)
    ends["b"].set()
    await soon(asyncio.gather(late, *users))
    assert bench.engine.calls[:4] == ["+a", "+b", "-", "+c"] and bench.engine.held == 2


async def test_who_gives_up_waiting_leaves_the_others_their_adapters(bench: Bench) -> None:
    end = asyncio.Event()
    users = [asyncio.create_task(bench.use(name, end)) for name in "ab"]
    await until(lambda: len(bench.using) == 2)
    third = asyncio.create_task(bench.use("c"))
    await until(lambda: any(adapter.leaving for adapter in bench.cache._loaded.values()))
    await cancel_and_wait(third)
    await soon(bench.use("a"))
    end.set()
    await soon(asyncio.gather(*users))
    assert bench.engine.calls == ["+a", "+b"]


async def test_a_tenant_with_many_adapters_in_use_and_more_waiting_delays_others_by_one_of_its_requests(
    bench: Bench,
) -> None:
    ends = {name: asyncio.Event() for name in "abcdefg"}
    users = [asyncio.create_task(bench.use(name, ends[name])) for name in "abcdef"]
    await until(lambda: len(bench.using) == 2 and len(bench.cache._waiting) == 4)
    other = asyncio.create_task(bench.use("g", ends["g"], tenant="blue"))
    await until(lambda: len(bench.cache._waiting) == 5)
    assert bench.using == ["a", "b"]
    ends["a"].set()
    await until(lambda: len(bench.cache._waiting) == 4)
    assert bench.using == ["b", "g"], "the tenant without an adapter is next"
    ends["b"].set()
    await until(lambda: len(bench.cache._waiting) == 3)
    assert bench.using == ["g", "c"], "then the others in the order of their arrival"
    for end in ends.values():
        end.set()
    await soon(asyncio.gather(other, *users))


async def test_tenants_with_as_many_adapters_in_use_take_turns(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=1)
    ends = {name: asyncio.Event() for name in "abcdef"}
    owners = {"a": "red", "b": "red", "c": "red", "d": "blue", "e": "blue", "f": "green"}
    users = [asyncio.create_task(bench.use(name, ends[name], tenant=owners[name])) for name in owners]
    order = ""
    for waiting in reversed(range(6)):
        await until(lambda: len(bench.cache._waiting), waiting.__eq__)
        order += bench.using[0]
        ends[order[-1]].set()
    await soon(asyncio.gather(*users))
    assert order == "adfbec"


@pytest.mark.parametrize("is_using", [False, True], ids=["without an adapter", "with one in use"])
async def test_a_tenant_whose_adapters_cannot_be_loaded_delays_others_by_one_of_them(
    tmp_path: Path, is_using: bool
) -> None:
    bench, failures, end = Bench(tmp_path, room=1 + is_using), 0, asyncio.Event()
    write_adapter(tmp_path / "large", rank=9)
    await bench.use("b")
    await bench.use("a", tenant="blue")
    user = asyncio.create_task(bench.use("a", end, tenant="blue")) if is_using else None
    await until(lambda: bench.using, lambda using: using == ["a"] * is_using)

    async def fail_for_ever() -> None:
        nonlocal failures
        while True:
            with pytest.raises(AdapterRefused, match="rank 9"):
                await bench.use("large")
            failures += 1

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        failing = [group.create_task(fail_for_ever()) for _ in range(20)]
        await until(lambda: failures > 0)
        before = failures
        await bench.use("c", tenant="blue")
        assert failures - before <= 1
        for task in failing:
            task.cancel()
    end.set()
    if user is not None:
        await soon(user)


async def test_room_is_made_by_the_tenant_that_uses_the_most_and_by_the_first_that_is_idle(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=3)
    ends = {name: asyncio.Event() for name in "abcd"}
    held = [("a", "blue"), ("b", "red"), ("c", "red")]
    users = [asyncio.create_task(bench.use(name, ends[name], tenant=tenant)) for name, tenant in held]
    await until(lambda: bench.using, lambda using: using == ["a", "b", "c"])
    fourth = asyncio.create_task(bench.use("d", ends["d"], tenant="green"))
    await until(lambda: any(adapter.leaving for adapter in bench.cache._loaded.values()))
    for name, tenant in (("a", "blue"), ("c", "red")):
        await soon(bench.use(name, tenant=tenant))  # not the one to leave, though `a` was used the longest ago
    late = asyncio.create_task(bench.use("b"))
    await until(lambda: len(bench.cache._waiting) == 2)
    ends["c"].set()
    await until(lambda: "d" in bench.using)
    await soon(late)  # `b` stays: `c` was idle first
    assert bench.engine.calls == ["+a", "+b", "+c", "-", "+d"]
    for end in ends.values():
        end.set()
    await soon(asyncio.gather(fourth, *users))


async def test_random_users_that_are_cut_off_never_lose_an_adapter_nor_a_place(bench: Bench) -> None:
    draw = np.random.default_rng(0)

    async def user(name: str, tenant: str, rounds: int, cut: bool) -> None:
        end = asyncio.Event()
        task = asyncio.create_task(bench.use(name, end, tenant=tenant))
        for _ in range(rounds):
            await asyncio.sleep(0)
            assert bench.engine.held <= 2
        if cut:
            task.cancel()
        end.set()
        with contextlib.suppress(asyncio.CancelledError):
            await soon(task)

    names, tenants = draw.choice(list("abcd"), 200), draw.choice(["red", "blue", "green"], 200)
    plan = zip(names, tenants, draw.integers(0, 20, 200), draw.random(200) < 0.3, strict=True)
    await asyncio.gather(*(user(str(name), str(tenant), int(rounds), bool(cut)) for name, tenant, rounds, cut in plan))
    assert not any(adapter.users or adapter.leaving for adapter in bench.cache._loaded.values())
    assert not bench.cache._waiting and not bench.cache._in_use
    assert len(bench.cache) == bench.engine.held <= 2


async def test_a_bad_directory_is_refused_and_evicts_nothing(bench: Bench) -> None:
    await bench.use("a")
    await bench.use("b")
    shutil.rmtree(bench.place / "c")
    with pytest.raises(AdapterGone, match="were removed"):
        await bench.use("c")
    (bench.place / "d" / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterRefused, match="cannot be read"):
        await bench.use("d")
    assert bench.engine.calls == ["+a", "+b"]
    bench.engine.problem = EngineError("no module q_proj")
    with pytest.raises(AdapterRefused, match="no module q_proj"):
        await bench.use("a", version="2")
    bench.engine.problem = None
    await bench.use("a", version="2")
    assert bench.engine.held == 2


def test_adapters_that_an_engine_must_not_see_are_refused(tmp_path: Path) -> None:
    check_adapter(write_adapter(tmp_path / "good"), 8)
    check_adapter(write_adapter(tmp_path / "half", dtype=np.float16), 8)
    cases = {
        "large": (write_adapter(tmp_path / "large", rank=16), "rank 16, and this server takes 8"),
        "large and torn": (write_adapter(tmp_path / "unread", rank=16), "rank 16, and this server takes 8"),
        "nan": (write_adapter(tmp_path / "nan", value=float("nan")), "not finite"),
        "infinite": (write_adapter(tmp_path / "infinite", value=float("-inf"), dtype=np.float16), "not finite"),
        "torn": (write_adapter(tmp_path / "torn"), "ends before"),
        "code": (write_adapter(tmp_path / "code"), "brings its own code"),
        "pickle": (write_adapter(tmp_path / "pickle"), "only adapter_model.bin"),
    }
    for torn in ("torn", "unread"):
        weights = tmp_path / torn / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-8])
    config = tmp_path / "code" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "auto_map": {"AutoModel": "evil.Model"}}))
    (tmp_path / "pickle" / "adapter_model.safetensors").rename(tmp_path / "pickle" / "adapter_model.bin")
    for directory, problem in cases.values():
        with pytest.raises(AdapterRefused, match=problem):
            check_adapter(directory, 8)


def test_a_bfloat16_adapter_with_nan_is_noticed(tmp_path: Path) -> None:
    """numpy has no bfloat16: its bits are looked at."""
    for name, bits in (("good", 0x3F80), ("nan", 0x7FC0), ("infinite", 0xFF80)):
        place = write_adapter(tmp_path / name, dtype=np.float16)
        weights = place / "adapter_model.safetensors"
        data = weights.read_bytes().replace(b'"F16"', b'"BF16"')
        length = int.from_bytes(data[:8], "little") + 2
        header, rest = data[8 : 8 + length], bytearray(data[8 + length :])
        rest[6:8] = bits.to_bytes(2, "little")
        weights.write_bytes(length.to_bytes(8, "little") + header + rest)
        if name == "good":
            check_adapter(place, 8)
        else:
            with pytest.raises(AdapterRefused, match="not finite"):
                check_adapter(place, 8)
