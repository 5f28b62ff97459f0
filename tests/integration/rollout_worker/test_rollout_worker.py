"""A rollout worker's lease over real servers with a simulated engine: lost engines, and tickets without an end."""

from __future__ import annotations

import asyncio
import importlib.abc
import os
import sys
import threading
from typing import Any

import pytest

from opentinker.services.rollout_worker.engines import vllm_startup
from opentinker.services.rollout_worker.engines.base import Completion, EngineError, EngineLost
from opentinker.services.rollout_worker.opening_check import opening_mismatch_of
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.rl_job import MAX_DELIVERIES
from opentinker.services.rollout_worker.seat_map import LoadedPolicy
from opentinker.services.rollout_worker.service import ENGINE, import_engine
from opentinker.services.scheduler.jobs.tickets import JUDGED_FROM, too_many_failures
from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.messaging.bus import Bus, StreamFull
from opentinker.shared.messaging.reply_validation import failure
from opentinker.shared.messaging.subjects import GROUP, GROUPS, SWAP, TICKETS, TIMELINE, Subject
from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.state.circuits import DOWN, Circuits, circuit_key
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Ending, Message, WeightVersion
from opentinker.shared.types.env_protocol import SeatPrompt, SessionReply, StepSession
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.swap import SwapCommand
from opentinker.shared.types.telemetry import TimelinePart
from tests.conftest import WAIT_S, Server, soon, until
from tests.integration.rollout_worker.rollout_bench import EOS, Asking, Bench, Mortal
from tests.support.factories import make_spec, make_ticket
from tests.unit.rollout_worker.scripted_episode import Chars, renderer


@pytest.fixture
def bench(bus: Bus, store: Store) -> Bench:
    return Bench(bus, store)


async def test_an_engine_that_dies_while_idle_ends_the_worker(bench: Bench) -> None:
    await bench.issue(0)
    engine = Mortal()
    life = bench.live(engine)
    engine.died.set()
    with pytest.raises(EngineLost, match="while idle"):
        await soon(life)


async def test_tickets_that_kill_every_engine_fail_in_the_end_and_with_them_the_job(bench: Bench) -> None:
    await bench.issue(JUDGED_FROM)
    deaths = 0
    while await bench.tickets():
        engine = Mortal()
        engine.poisoned = True
        life = bench.live(engine)

        async def over(life: asyncio.Task[None] = life) -> bool:
            return life.done() or not await bench.tickets()

        await until(over)
        if life.done():
            with pytest.raises(EngineLost):
                life.result()
            deaths += 1
            assert deaths < 4 * MAX_DELIVERIES, "there is no end"
        await cancel_and_wait(life)
    assert deaths > 1
    ledger = await bench.admission.ledger()
    assert ledger.failed == {"engine_error": JUDGED_FROM}
    assert "engine_error 20" in (too_many_failures(ledger, bench.spec.rollout.max_failed_share) or "")
    assert "came to no end" in (await bench.store.latest_event(bench.job, "group_failed") or {})["error"]


async def test_tickets_of_a_lost_engine_are_played_by_the_next(bench: Bench) -> None:
    await bench.issue(3)
    engine = Mortal()
    engine.poisoned = True
    with pytest.raises(EngineLost):
        await soon(bench.live(engine))
    life = bench.live(Mortal())
    await until(lambda: bench.bus.count("GROUPS", GROUP.at(job=bench.job)), lambda found: found == 3)
    await cancel_and_wait(life)
    assert (await bench.admission.ledger()).failed == {}


class Broken(Asking):
    """Fails in its first step, or already when it is opened."""

    def __init__(self, *, in_open: bool) -> None:
        self.in_open = in_open

    async def open(self, *_: Any) -> SessionReply:
        return failure("env-0", Ending.ENV_ERROR, "on fire") if self.in_open else await super().open()

    async def step(self, worker: str, request: StepSession) -> SessionReply:
        return failure("env-0", Ending.ENV_ERROR, "on fire")


@pytest.mark.parametrize("in_open", [False, True])
async def test_a_policy_that_breaks_its_environment_opens_no_circuit(bench: Bench, in_open: bool) -> None:
    await bench.issue(JUDGED_FROM)
    circuits = Circuits(bench.store.redis)
    key = circuit_key("t", bench.spec.environment.model_dump(mode="json"))
    await circuits.succeeded(key)
    bench.sessions = Broken(in_open=in_open)
    await bench.play(Mortal())
    assert (await circuits.find(key)).is_open == in_open
    failed = (await bench.admission.ledger()).failed
    assert sum(failed.values()) == JUDGED_FROM and (DOWN in failed) == in_open


class Gated(Mortal):
    """Answers nothing before `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def generate(self, *args: Any, **options: Any) -> Completion:
        await self.gate.wait()
        return await super().generate(*args, **options)


async def test_a_worker_without_weights_or_tickets_says_so_on_the_timeline(bench: Bench) -> None:
    await bench.issue(1)
    engine = Gated()
    said: list[str] = []

    async def hear(part: TimelinePart) -> None:
        said.extend(one.kind for one in part.segments)

    listening = await bench.bus.listen(TIMELINE, hear, job=bench.job, worker="rollout-0")
    job = bench.job_of([LoadedPolicy("", bench.spec, engine, renderer())])
    job.weights.clear()
    life = asyncio.create_task(job.run())
    await until(lambda: "weights" in said)
    job.weights.set()
    await until(lambda: said[-1:] == ["rollout"])  # it plays, and waits for nothing
    engine.gate.set()
    await until(lambda: said[-1:] == ["tickets"])
    await cancel_and_wait(life)
    await listening.unsubscribe()


async def test_a_worker_that_is_taken_back_ends_its_groups_and_begins_no_other(bench: Bench) -> None:
    bench.spec = make_spec(rollout__engine="toy", rollout__max_concurrent_groups=2)
    await bench.issue(5)
    engine = Gated()
    job = bench.job_of([LoadedPolicy("", bench.spec, engine, renderer())])
    life = asyncio.create_task(job.run())
    await until(lambda: len(job.groups) == 2)
    job.worker._leaving.set()  # as when its lease says by when it must leave
    engine.gate.set()
    await soon(life)
    assert await bench.bus.count("GROUPS", GROUP.at(job=bench.job)) == 2
    assert await bench.tickets() == 3, "others play them"
    ledger = await bench.admission.ledger()
    assert (ledger.accepted, ledger.failed) == (2, {})


class Uneven(Mortal):
    """Requests of some samples never end, those of others fail."""

    def __init__(self, *, hanging: set[int], failing: set[int]) -> None:
        super().__init__()
        self.hanging, self.failing = hanging, failing
        self.freed: list[int] = []

    async def generate(self, request: str, *args: Any, **options: Any) -> Completion:
        index = int(request.split("-")[-3])
        if index in self.failing:
            raise EngineError("this one never works")
        if index in self.hanging:
            try:
                await asyncio.Event().wait()
            finally:
                self.freed.append(index)
        return await super().generate(request, *args, **options)


async def test_an_oversampled_group_is_closed_when_enough_episodes_have_ended(bench: Bench) -> None:
    """Two of five are wanted: one hangs, one fails for good, and the group is whole and numbered from 0."""
    bench.spec = make_spec(rollout__engine="toy", rollout__oversample=3, rollout__retries=0)
    await bench.issue(1)
    engine = Uneven(hanging={0}, failing={2})
    await bench.play(engine)
    (group,) = await bench.bus.stored(GROUP, job=bench.job)
    assert [t.index for t in group.trajectories] == [0, 1]
    group.check()
    assert engine.freed == [0], "what is cut off is cancelled"
    ledger = await bench.admission.ledger()
    assert (ledger.accepted, ledger.failed) == (1, {})


async def test_an_oversampled_group_fails_when_too_few_are_left(bench: Bench) -> None:
    bench.spec = make_spec(rollout__engine="toy", rollout__oversample=1, rollout__retries=0)
    await bench.issue(1)
    await bench.play(Uneven(hanging={1}, failing={0, 2}))
    assert (await bench.admission.ledger()).failed == {"engine_error": 1}


class Unseeded(Asking):
    """Counts its episodes, and begins each with their number: state that siblings share."""

    def __init__(self) -> None:
        self.opened = 0

    async def open(self, *_: Any) -> SessionReply:
        self.opened += 1
        return SessionReply(worker="env-0", messages=[Message(role="user", content=f"{self.opened}=")])


@pytest.mark.parametrize("choice", ["warn", "fail"])
async def test_siblings_with_other_starts_are_trained_by_choice(bench: Bench, choice: str) -> None:
    bench.spec = make_spec(rollout__engine="toy", rollout__opening_mismatch=choice, rollout__retries=0)
    bench.sessions = Unseeded()
    await bench.issue(2)
    await bench.play(Mortal())
    ledger = await bench.admission.ledger()
    assert (ledger.accepted, ledger.failed) == ((2, {}) if choice == "warn" else (0, {"env_bad_reply": 2}))
    (event,) = (e for e in await bench.store.events(bench.job) if e["event"] == "opening_mismatch")
    assert "samples 0 and 1 began differently: from token 3 on it is '1=" in event["differs"]


class Rotating(Asking):
    """Opens a round of three seats, with the same prompt for each; or, `unseeded`, a turn of the first or last."""

    def __init__(self, *, unseeded: bool) -> None:
        self.unseeded, self.opened = unseeded, 0

    async def open(self, *_: Any) -> SessionReply:
        self.opened += 1
        seats = [f"s{self.opened % 2 * 2}"] if self.unseeded else ["s0", "s1", "s2"]
        prompts = [SeatPrompt(seat=seat, messages=[Message(role="user", content="7=")]) for seat in seats]
        return SessionReply(worker="env-0").with_prompts(prompts, together=not self.unseeded)

    async def step(self, worker: str, request: StepSession) -> SessionReply:
        return SessionReply(worker="env-0", rewards={action.seat: {"r": 1.0} for action in request.actions}, done=True)


class Loud(Chars):
    """Another policy's tokenizer, which writes the same prompt with other tokens."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return super().encode(text.upper())


GAME = {
    "policies": {"a": {}, "b": {}},
    "seats": {"s0": "a", "s1": "a", "s2": "b"},
    "algorithm": {"group_size": 6, "groups_per_batch": 2},
}


@pytest.mark.parametrize(("unseeded", "rotate"), [(False, True), (True, False)])
async def test_openings_are_compared_where_everybody_plays_the_same_seats(
    bench: Bench, unseeded: bool, rotate: bool
) -> None:
    plain = bench.spec.model_dump(mode="json")
    bench.spec = parse_spec({**plain, **GAME, "match": {"rotate": rotate}})
    bench.sessions = Rotating(unseeded=unseeded)
    loaded = [
        LoadedPolicy(name, spec_of(bench.spec, name), Mortal(), Renderer(chars, "model", frozenset({EOS})))
        for name, chars in (("a", Chars()), ("b", Loud()))
    ]
    job = bench.job_of(loaded)
    ticket = make_ticket(job=bench.job, seq=1)
    samples = await asyncio.gather(*(job._play_sample(ticket, i, job.seats) for i in range(6)))
    differs = opening_mismatch_of(ticket, samples, job.seats)
    assert ("acts first in one" in differs) if unseeded else not differs


async def test_a_full_store_loses_no_group(small_server: Server, store: Store) -> None:
    async with Bus.connect(small_server.url, "test") as bus:
        for stream in (TICKETS, GROUPS):
            await bus.js.add_stream(stream)
        bench = Bench(bus, store)
        await bench.issue(3)
        with pytest.raises(StreamFull):
            for number in range(10_000):
                await bus.publish(Subject(GROUP.pattern, bytes), bytes(4096), f"other/{number}", job="other")
        life = bench.live(Mortal())

        async def said() -> list[str]:
            return [e["error"] for e in await store.events(bench.job) if e["event"] == "stream_full"]

        await until(said)
        assert await bus.count("GROUPS", GROUP.at(job=bench.job)) == 0
        assert (await bench.admission.ledger()).running == 3
        await bus.purge("GROUPS", GROUP.at(job="other"))
        await until(bench.tickets, lambda found: found == 0)
        assert await bus.count("GROUPS", GROUP.at(job=bench.job)) == 3
        ledger = await bench.admission.ledger()
        assert (ledger.accepted, ledger.running, ledger.failed) == (3, 0, {})
        assert len(await said()) == 1, "said with every try"
        await cancel_and_wait(life)


# --- swaps ----------------------------------------------------------------------------------------------------------


class Slow(Mortal):
    """Its swaps take until they are let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go_on, self.closed = asyncio.Event(), asyncio.Event(), False

    async def receive(self, command: SwapCommand) -> dict[str, float]:
        self.began.set()
        await self.go_on.wait()
        assert not self.closed, "an engine that is closed in the middle of a swap ends it with a traceback"
        return {}

    async def close(self) -> None:
        self.closed = True


async def test_a_swap_under_way_ends_before_the_engine_is_closed(bench: Bench) -> None:
    await bench.issue(0)
    engine = Slow()

    async def live() -> None:
        try:
            await bench.live(engine)
        finally:
            await engine.close()

    addresses: list[str] = []

    async def listens() -> list[str]:
        addresses[:] = [w.address for w in await bench.store.workers() if w.ready_for(bench.job)]
        return addresses

    command = SwapCommand(job=bench.job, epoch=1, action="receive", generation=0, version=WeightVersion(1, 1))
    life = asyncio.create_task(live())
    await until(listens)
    swap = asyncio.create_task(bench.bus.request(SWAP, command, WAIT_S, worker=addresses[0]))
    await soon(engine.began.wait())
    engine.died.set()  # the job's end comes between
    engine.go_on.set()
    assert (await soon(swap)).ok
    with pytest.raises(EngineLost, match="while idle"):
        await soon(life)
    assert engine.closed


# --- imports --------------------------------------------------------------------------------------------------------


class Held(importlib.abc.MetaPathFinder):
    """Stands in the way of an import until the event loop has turned."""

    def __init__(self) -> None:
        self.asked, self.turned = threading.Event(), threading.Event()

    def find_spec(self, name: str, *_: object) -> None:
        if name == ENGINE:
            self.asked.set()
            raise ImportError("the loop turned" if self.turned.wait(WAIT_S) else "the loop stood still")


async def test_a_late_first_load_delays_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    monkeypatch.setattr(sys, "meta_path", [held, *sys.meta_path])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delitem(sys.modules, ENGINE, raising=False)
    importing = asyncio.create_task(import_engine(make_spec(rollout__engine="vllm")))
    await until(held.asked.is_set)
    held.turned.set()
    with pytest.raises(ImportError, match="the loop turned"):
        await soon(importing)


async def test_a_worker_without_vllm_fails_the_job_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_startup, "is_installed", lambda: False)
    monkeypatch.delitem(sys.modules, ENGINE, raising=False)
    with pytest.raises(JobFailed, match=r"no vLLM: install opentinker\[rollout\]"):
        await import_engine(make_spec(rollout__engine="vllm"))
