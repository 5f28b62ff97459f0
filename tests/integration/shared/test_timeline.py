"""The timeline of a job: what its workers were busy with, live and as history."""

from __future__ import annotations

import asyncio
import random
import uuid
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from opentinker.client import AsyncClient
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import EVENT, TIMELINE
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.timeline import GLUE_S, MAX_SEGMENTS, Lanes, LanesByJob, glued
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from opentinker.shared.types.env_protocol import CloseSession
from opentinker.shared.types.telemetry import Segment, TimelinePart
from tests.conftest import until
from tests.support.api import SPEC
from tests.support.playing import opening, step
from tests.support.scheduling import messages, running
from tests.unit.shared.test_liveness import Clock


class Heard:
    """A bus that only listens."""

    def __init__(self) -> None:
        self.parts: list[TimelinePart] = []

    async def emit(self, subject: Any, part: TimelinePart, **keys: str) -> None:
        assert subject is TIMELINE and keys == {"job": part.job, "worker": part.worker}
        self.parts.append(part)

    @property
    def segments(self) -> list[tuple[str, str, float, float, str, float]]:
        return [
            (s.lane, s.kind, round(s.start, 6), round(s.end, 6), s.version, round(s.level, 6))
            for part in self.parts
            for s in part.segments
        ]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.now = 100.0
    return clock


@pytest.fixture
def lanes(heard: Heard, clock: Clock) -> Lanes:
    return Lanes(heard, "j", "w", clock)  # type: ignore[arg-type]


async def test_many_at_a_time_are_one_segment_with_a_level(heard: Heard, clock: Clock, lanes: Lanes) -> None:
    with lanes.busy("generation", "rollout"):
        clock.now += 1.0
        with lanes.busy("generation", "rollout"), lanes.busy("env", "rollout"):
            clock.now += 1.0
    clock.now += 5.0
    await lanes.report()
    assert heard.segments == [
        ("generation", "rollout", 100.0, 102.0, "", 1.5),
        ("env", "rollout", 101.0, 102.0, "", 1.0),
    ]
    await lanes.report()
    assert len(heard.parts) == 1  # a silent second has no part


async def test_what_goes_on_is_told_part_by_part_without_a_gap(heard: Heard, clock: Clock, lanes: Lanes) -> None:
    with lanes.busy("training", "step", "1.5"):
        for _ in range(3):
            clock.now += 1.0
            await lanes.report()
        clock.now += 0.5
    await lanes.report()
    assert [(s[2], s[3], s[4]) for s in heard.segments] == [
        *((100.0, 101.0, "1.5"), (101.0, 102.0, "1.5"), (102.0, 103.0, "1.5"), (103.0, 103.5, "1.5"))
    ]
    assert [part.seq for part in heard.parts] == [0, 1, 2, 3]
    assert [s.since for part in heard.parts for s in part.segments] == [0.0, 100.0, 100.0, 100.0]


async def test_new_weights_part_what_goes_on(heard: Heard, clock: Clock, lanes: Lanes) -> None:
    lanes.use("1.0")
    with lanes.busy("generation", "rollout"):
        clock.now += 1.0
        lanes.use("1.1")
        clock.now += 1.0
        with lanes.busy("generation", "rollout"):
            clock.now += 1.0
    await lanes.report()
    assert heard.segments == [
        ("generation", "rollout", 100.0, 101.0, "1.0", 1.0),
        ("generation", "rollout", 101.0, 103.0, "1.1", 1.5),
    ]


async def test_short_gaps_are_glued_and_of_many_segments_the_shortest_are_left_out(
    heard: Heard, clock: Clock, lanes: Lanes
) -> None:
    for _ in range(50):
        with lanes.busy("env", "rollout"):
            clock.now += 0.01
        clock.now += GLUE_S / 2
    for number in range(MAX_SEGMENTS + 20):
        lanes.note("swap", "load", 200.0 + number, 200.0 + number + (0.1 if number < 30 else 0.5))
    await lanes.report()
    (part,) = heard.parts
    assert len(part.segments) == MAX_SEGMENTS and part.left_out == 21
    assert [s.lane for s in part.segments].count("env") == 1
    assert part.segments == sorted(part.segments, key=lambda s: s.start)
    assert len(msgspec.json.encode(part)) < 20_000


async def test_turns_with_short_gaps_are_one_segment_before_anybody_asks(heard: Heard, clock: Clock) -> None:
    lanes = Lanes(heard, "j", "w", clock, glue_s=0.25)  # type: ignore[arg-type]
    for gap in (0.25, 0.125, 0.5, 0.125, 0.0):
        with lanes.busy("env", "turn"), lanes.busy("env", "turn"):
            clock.now += 0.125
        clock.now += gap
    assert not lanes.goes_on
    await lanes.report()
    assert heard.segments == [
        ("env", "turn", 100.0, 100.75, "", 1.0),
        ("env", "turn", 101.25, 101.625, "", round(4 / 3, 6)),
    ]
    clock.now += 0.125  # nothing of what was told is told again, and no gap is glued over
    with lanes.busy("env", "turn"):
        clock.now += 0.125
    await lanes.report()
    assert heard.segments[2:] == [("env", "turn", 101.75, 101.875, "", 1.0)]


async def test_new_weights_do_not_carry_on_what_is_over(heard: Heard, clock: Clock, lanes: Lanes) -> None:
    with lanes.busy("generation", "rollout"):
        clock.now += 1.0
    lanes.use("1.1")
    clock.now += GLUE_S / 2
    with lanes.busy("generation", "rollout"):
        clock.now += 1.0
    await lanes.report()
    assert [(s[4], s[5]) for s in heard.segments] == [("", 1.0), ("1.1", 1.0)]


def test_gluing_keeps_the_area_under_the_level() -> None:
    noise = random.Random(7)
    for _ in range(200):
        at, made = 0.0, []
        for _ in range(20):
            at += noise.choice([0.0, GLUE_S / 3, 1.0])
            length = noise.uniform(0.1, 1.0)
            made.append(Segment(lane="l", kind="k", start=at, end=at + length, level=noise.uniform(1, 4)))
            at += length
        noise.shuffle(made)
        found = glued(made)
        areas = [sum(s.level * (s.end - s.start) for s in segments) for segments in (made, found)]
        assert areas[0] == pytest.approx(areas[1]) and len(found) < len(made)
        assert all(b.start - a.end > GLUE_S for a, b in pairwise(found))


async def test_a_worker_of_many_jobs_tells_each_its_own(bus: Bus) -> None:
    job, other = (f"j-{uuid.uuid4().hex[:10]}" for _ in range(2))
    heard = await messages(bus, TIMELINE, job=job, worker="*")
    lanes = LanesByJob(bus, "reference-0")
    async with running(lanes.run()):
        lanes.of(job).note("reference", "score", 1.0, 2.0, level=3)
        lanes.of(other).note("reference", "score", 1.0, 2.0)
        await until(lambda: heard)
    assert [part.job for part in heard] == [job] and heard[0].segments[0].level == 3
    kept = await bus.history(TIMELINE, 0, 10, job=job, worker="*")
    assert [part for _, part in kept] == heard


async def test_an_active_job_is_not_forgotten(heard: Heard) -> None:
    lanes = LanesByJob(heard, "env-0", forget_s=-1.0)  # type: ignore[arg-type]
    key = lanes.of("j").begin("env", "turn")
    first = lanes.of("j")
    await lanes.report()
    assert lanes.of("j") is first
    first.end(key)
    await lanes.report()
    assert lanes.of("j") is not first


COUNTING, MISBEHAVING = "tests.samples.env_samples:Counting", "tests.samples.env_samples:Misbehaving"


async def test_sessions_of_an_env_worker_are_a_segment_per_job_and_kind(heard: Heard) -> None:
    lanes = LanesByJob(heard, "env-0", glue_s=60.0)  # type: ignore[arg-type]
    sessions = Sessions("w", limit=64, resolver=Resolver(modules=True), lanes=lanes)
    names = [f"s{number}" for number in range(32)]
    await asyncio.gather(*(sessions.open(opening(COUNTING, name, job="one", turns=5)) for name in names))
    await asyncio.gather(*(sessions.open(opening(COUNTING, name + "-", job="two", turns=5)) for name in names[:2]))
    for turn in range(5):
        await asyncio.gather(*(sessions.step(step(turn, session=name)) for name in names))
    await lanes.report()
    assert sessions.active == 2
    assert {part.job: [(s.lane, s.kind) for s in part.segments] for part in heard.parts} == {
        "one": [("env", "open"), ("env", "turn")],
        "two": [("env", "open")],
    }
    (_, turns), _ = (part.segments for part in heard.parts)
    assert 0 < turns.level <= 32
    await sessions.drain(0.01)


async def test_a_turn_that_hangs_is_seen_to_go_on_until_its_session_is_closed(heard: Heard) -> None:
    lanes = LanesByJob(heard, "env-0")  # type: ignore[arg-type]
    sessions = Sessions("w", limit=64, resolver=Resolver(modules=True), lanes=lanes)
    for name in ("a", "b"):
        await sessions.open(opening(MISBEHAVING, name, how="hang"))
    await lanes.report()
    heard.parts.clear()
    hanging = [asyncio.create_task(sessions.step(step(session=name))) for name in ("a", "b")]
    await until(lambda: lanes.of("j").goes_on)
    for _ in range(2):
        await asyncio.sleep(0.01)
        await lanes.report()
    (first,), (second,) = (part.segments for part in heard.parts)
    assert second.start == first.end and second.kind == "turn" and round(second.level, 6) == 2
    await sessions.close(CloseSession(session="a"))
    assert lanes.of("j").goes_on
    await sessions.close(CloseSession(session="b"))
    await until(lambda: not lanes.of("j").goes_on)
    await asyncio.gather(*hanging)
    await sessions.drain(0.01)


async def test_the_timeline_is_served_page_by_page_and_by_its_last_seconds(client: AsyncClient, ctx: Context) -> None:
    job = (await client.submit(SPEC))["id"]
    assert await client.timeline(job) == []
    lanes = [Lanes(ctx.bus, job, f"w-{n}") for n in range(2)]
    for number in range(3):
        for one in lanes:
            one.note("generation", "rollout", float(number), number + 0.5, version="1.0")
            await one.report()
    await ctx.bus.flush()
    found = await client.timeline(job)
    assert [(part["worker"], part["seq"]) for part in found] == [(f"w-{n}", seq) for seq in range(3) for n in range(2)]
    assert found[0]["segments"] == [
        {
            "lane": "generation",
            "kind": "rollout",
            "start": 0.0,
            "end": 0.5,
            "version": "1.0",
            "level": 1.0,
            "since": 0.0,
        }
    ]
    assert await client.timeline(job, found[3]["cursor"]) == found[4:]
    assert await client.timeline(job, last_s=3600) == found


# --- events -----------------------------------------------------------------------------------------------------------


async def test_events_of_jobs_go_out_live_as_the_log_has_them(client: AsyncClient, ctx: Context, store: Store) -> None:
    heard = await messages(ctx.bus, EVENT, job="*")
    await until(lambda: ctx.detail.get("leads"))
    await client.submit({**SPEC, "name": "before"})
    await until(lambda: heard)  # a scheduler that has just begun to lead may miss the first events
    job = (await client.submit(SPEC))["id"]

    def mine() -> list[dict[str, Any]]:
        return [one.event for one in heard if one.job == job]

    await until(mine)
    await store.update(job, event="something", detail={"about": "it"})
    await store.transition(job, JobState.CANCELLED, reason="enough")
    await store.update(job, event="after the end")
    logged = [event async for event in client.events(job)]
    await until(lambda: any(event["event"] == "after the end" for event in mine()))
    assert mine()[: len(logged)] == logged and mine()[-1]["event"] == "after the end"


# --- tokens -----------------------------------------------------------------------------------------------------------


class Bytes:
    """A token per byte."""

    eos_token_id = 0
    chat_template = None

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return bytes(ids).decode("utf-8", errors="replace")


def test_the_pieces_of_a_text_are_the_text_whatever_its_signs_are_made_of() -> None:
    renderer = Renderer(Bytes(), "plain", frozenset([0]))
    for text in ("plain", "naïve – 漢字 🙂👍🏽!", "", "🙂"):
        pieces = renderer.pieces(list(text.encode()))
        assert "".join(pieces) == text and len(pieces) == len(text.encode())
    cut = renderer.pieces(list("a🙂".encode())[:-1])
    assert cut[0] == "a" and len(cut) == 4 and set("".join(cut[1:])) == {"�"}
    spoilt = renderer.pieces([97, 255, 255, 98, 99])
    assert len(spoilt) == 5 and spoilt[0] == "a" and "".join(spoilt).endswith("bc")
