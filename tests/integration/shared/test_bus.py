"""The bus over a real NATS server, also one that is killed and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from opentinker.shared.messaging.bus import Bus, NoReply, NoResponders, StreamFull, TooLarge
from opentinker.shared.messaging.stored_messages import stream_sequence
from opentinker.shared.messaging.subjects import ENV_STEP, GROUP, GROUPS, METRIC, SAMPLES, TICKET, WAKE, Subject
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.types.codec import WireError
from opentinker.shared.types.core import StopReason, Ticket
from opentinker.shared.types.env_protocol import SessionReply, StepSession
from opentinker.shared.types.errors import OpenTinkerError
from opentinker.shared.types.tinker import ANSWER_KEPT_S
from tests.conftest import WAIT_S, Server, soon, until
from tests.integration.shared.bus_tickets import connected, none_left, publish, restart
from tests.support.factories import make_ticket
from tests.support.scheduling import messages

# --- request and reply --------------------------------------------------------------------------------------------


def step(text: str = "hello") -> StepSession:
    return StepSession(session="s", turn=0, text=text, stop=StopReason.EOS)


async def test_request_that_nobody_serves_fails_at_once(bus: Bus) -> None:
    with pytest.raises(NoResponders):
        await soon(bus.request(ENV_STEP, step(), 10 * WAIT_S, worker="nobody"))


async def test_slow_request_does_not_hold_up_others_and_ends_at_its_time(bus: Bus) -> None:
    gate = asyncio.Event()

    async def handler(noun: StepSession) -> SessionReply:
        if noun.text == "slow":
            await gate.wait()
        return SessionReply(worker="w", error=noun.text)

    await bus.serve(ENV_STEP, handler, worker="both")
    with pytest.raises(NoReply):
        await bus.request(ENV_STEP, step("slow"), 0.1, worker="both")
    slow = asyncio.create_task(bus.request(ENV_STEP, step("slow"), WAIT_S, worker="both"))
    assert (await bus.request(ENV_STEP, step("fast"), WAIT_S, worker="both")).error == "fast"
    gate.set()
    assert (await slow).error == "slow"


async def test_handler_that_raises_or_garbage_leaves_the_server_serving(bus: Bus) -> None:
    async def handler(noun: StepSession) -> SessionReply:
        if noun.text == "bad":
            raise RuntimeError("no")
        return SessionReply(worker="w")

    await bus.serve(ENV_STEP, handler, worker="hardy")
    with pytest.raises(NoReply):  # at the end of its time
        await bus.request(ENV_STEP, step("bad"), 0.1, worker="hardy")
    await bus.nc.publish(ENV_STEP.at(worker="hardy"), b"\xc1garbage")
    assert (await bus.request(ENV_STEP, step(), WAIT_S, worker="hardy")).worker == "w"


async def test_reply_of_the_wrong_kind_is_a_wire_error(bus: Bus) -> None:
    async def answer(msg: object) -> None:
        await msg.respond(b"\x01")  # type: ignore[attr-defined]

    await bus.nc.subscribe(ENV_STEP.at(worker="liar"), cb=answer)
    with pytest.raises(WireError):
        await bus.request(ENV_STEP, step(), WAIT_S, worker="liar")


async def test_queue_shares_requests(bus: Bus) -> None:
    counts = [0, 0]

    def handler(place: int) -> Callable[[StepSession], object]:
        async def answer(noun: StepSession) -> SessionReply:
            counts[place] += 1
            return SessionReply(worker="w")

        return answer

    for place in (0, 1):
        await bus.serve(ENV_STEP, handler(place), queue="q", worker="shared")  # type: ignore[arg-type]
    await asyncio.gather(*(bus.request(ENV_STEP, step(), WAIT_S, worker="shared") for _ in range(100)))
    assert sum(counts) == 100 and min(counts) > 10


async def test_wake_reaches_listeners(bus: Bus) -> None:
    heard = await messages(bus, WAKE, who="me")
    await bus.emit(WAKE, {"job": "x"}, who="me")
    await until(lambda: heard == [{"job": "x"}])


# --- publish ------------------------------------------------------------------------------------------------------


async def test_message_id_is_stored_once(bus: Bus, job: str) -> None:
    await publish(bus, job, 1, 1, 1, 2)
    assert await bus.count("TICKETS", TICKET.at(job=job)) == 2


async def test_full_job_is_refused_while_another_publishes(own_server: Server) -> None:
    async with connected(own_server) as bus:
        await bus.js.update_stream(GROUPS.evolve(max_msgs_per_subject=3, discard_new_per_subject=True))
        group = Subject(GROUP.pattern, Ticket)
        for seq in range(3):
            await bus.publish(group, make_ticket(seq=seq), f"full/{seq}", job="full")
        with pytest.raises(StreamFull):
            await bus.publish(group, make_ticket(seq=3), "full/3", job="full")
        await bus.publish(group, make_ticket(), "other/0", job="other")
        await bus.purge("GROUPS", GROUP.at(job="full"))
        await bus.publish(group, make_ticket(seq=3), "full/3", job="full")
        assert await bus.count("GROUPS", GROUP.at(job="full")) == 1


async def test_a_full_store_refuses_messages_until_there_is_room(small_server: Server) -> None:
    """Of the whole server: what one subject has filled is missing to all others."""
    async with Bus.connect(small_server.url, "test") as bus:
        await bus.js.add_stream(GROUPS)
        group = Subject(GROUP.pattern, bytes)
        stored = 0
        with pytest.raises(StreamFull, match="insufficient resources"):
            while stored < 100:
                await bus.publish(group, bytes(100_000), f"big/{stored}", job="big")
                stored += 1
        assert 10 < stored < 25
        with pytest.raises(StreamFull):
            await bus.publish(group, b"small", "small/0", job="small")
        await bus.purge("GROUPS", GROUP.at(job="big"))
        await bus.publish(group, b"small", "small/0", job="small")
        assert await bus.count("GROUPS", GROUP.at(job="small")) == 1


async def test_a_store_too_small_for_our_streams_is_refused_with_what_to_do(small_server: Server) -> None:
    async with Bus.connect(small_server.url, "test") as bus:
        with pytest.raises(OpenTinkerError, match=r"stream METRICS.*352 MiB.*store_dir.*raise max_file_store"):
            await bus.ensure_streams()


async def test_a_publish_that_is_not_stored_says_so_once(bus: Bus, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"error": {"code": 503, "err_code": 10008, "description": "unavailable"}}] * 5)
    publish = bus._acks.publish

    async def unavailable(subject: str, payload: bytes, headers: dict[str, str]) -> dict[str, Any]:
        answer = next(answers, None)
        return answer or await publish(subject, payload, headers)

    monkeypatch.setattr(bus._acks, "publish", unavailable)
    monkeypatch.setattr(bus, "reconnect_timeout_s", 0.1)
    with capture_logs() as logs:
        await bus.publish(TICKET, make_ticket(job=job), f"{job}/0", job=job)
    assert [(line["event"], line["error"]) for line in logs] == [("publish_delayed", "unavailable")]


async def test_nothing_but_the_disk_limits_the_groups_between_two_checkpoints(own_server: Server) -> None:
    """At any limit a trainer would wait for groups, and the checkpoint that makes room would never come."""
    async with connected(own_server) as bus:
        await bus.js.update_stream(GROUPS.evolve(max_msgs_per_subject=1, discard_new_per_subject=True))
        await bus.ensure_streams()
        group = Subject(GROUP.pattern, Ticket)
        for seq in range(2):
            await bus.publish(group, make_ticket(seq=seq), f"long/{seq}", job="long")
        config = (await bus.js.stream_info("GROUPS")).config
        assert (config.max_msgs, config.max_msgs_per_subject, config.max_bytes, config.max_age) == (-1, -1, -1, 0)


async def test_requests_for_samples_leave_the_stream_when_they_count_no_longer(own_server: Server) -> None:
    async with connected(own_server) as bus:
        await bus.js.update_stream(SAMPLES.evolve(max_age=0.0))  # as an earlier release made it
        await bus.ensure_streams()
        assert (await bus.js.stream_info("SAMPLES")).config.max_age == ANSWER_KEPT_S


async def test_message_over_the_limit_of_the_server_is_refused_with_both_numbers(bus: Bus, job: str) -> None:
    group = Subject(GROUP.pattern, bytes)
    limit = bus.nc.max_payload
    overhead = len(b"NATS/1.0\r\nNats-Msg-Id: m\r\n\r\n") + 5  # msgpack: type and length
    with pytest.raises(TooLarge, match=f"{limit + 1} bytes.* {limit} "):
        await soon(bus.publish(group, bytes(limit + 1 - overhead), "m", job=job))
    await bus.publish(group, bytes(limit - overhead), "m", job=job)
    assert await bus.count("GROUPS", GROUP.at(job=job)) == 1, "the largest one is stored"
    await bus.purge("GROUPS", GROUP.at(job=job))


async def test_publish_and_next_after_close_raise_instead_of_waiting(nats_server: Server, job: str) -> None:
    async with Bus.connect(nats_server.url, "closing") as bus:
        await bus.ensure_streams()
    with pytest.raises(Exception, match="closed"):
        await soon(publish(bus, job, 1))


# --- metrics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "end"), [("METRICS", ""), ("_.ACCOUNT.METRICS", ""), ("hub.ACCOUNT.METRICS", ".random")]
)
def test_stream_sequences_are_read_as_by_the_client_library(stream: str, end: str) -> None:
    reply = f"$JS.ACK.{stream}.consumer.1.1234.55.1764331123456789012.99{end}"
    assert stream_sequence(reply) == Msg.Metadata._from_reply(reply).sequence.stream == 1234


async def test_metric_points_are_kept_as_history(bus: Bus, job: str) -> None:
    source = MetricSource(bus, job, "trainer")
    sent = [await source.emit(i, {"reward": i / 2}) for i in range(5)]
    await bus.nc.flush()
    await until(lambda: bus.count("METRICS", METRIC.at(job=job, source="trainer")), lambda found: found == 5)
    found = await bus.history(METRIC, 0, 100, job=job, source="*")
    assert [point for _, point in found] == sent
    assert [point.seq for _, point in await bus.history(METRIC, found[2][0], 100, job=job, source="*")] == [3, 4]
    assert [point.seq for _, point in await bus.history(METRIC, 0, 2, job=job, source="*")] == [0, 1]
    assert await bus.history(METRIC, 0, 2, job="none", source="*") == []


async def test_metric_that_is_not_a_number_is_left_out(bus: Bus, job: str) -> None:
    heard = await messages(bus, METRIC, job=job, source="*")
    await MetricSource(bus, job, "trainer").emit(1, {"good": 1.0, "nan": float("nan"), "inf": float("inf")})
    await until(lambda: heard)
    assert heard[0].values == {"good": 1.0}


async def test_what_was_emitted_is_with_the_server_once_it_has_settled(own_server: Server) -> None:
    async with Bus.connect(own_server.url, "test") as bus:
        source = MetricSource(bus, "j", "trainer")
        for step in range(20):
            await source.emit(step, {"reward": 1.0})
        assert bus.nc.pending_data_size > 0
        await bus.settle()
        assert bus.nc.pending_data_size == 0
        own_server.kill()
        await until(lambda: not bus.nc.is_connected)
        await soon(bus.settle())  # nobody waits for a server that is away


async def test_points_that_die_with_the_server_are_sent_again_once_it_is_back(own_server: Server) -> None:
    async with Bus.connect(own_server.url, "test") as bus:
        await bus.ensure_streams()
        source = MetricSource(bus, "j", "trainer")
        sent = [await source.emit(1, {"reward": 1.0})]
        await bus.settle()
        own_server.process.send_signal(signal.SIGSTOP)  # what comes now is in its socket, and dies with it
        sent += [await source.emit(step, {"reward": 1.0}) for step in range(2, 12)]
        await until(lambda: bus.nc.pending_data_size == 0)
        own_server.kill()
        await until(lambda: not bus.nc.is_connected)
        sent.append(await source.emit(12, {"reward": 1.0}))
        own_server.start()

        async def whole() -> bool:
            with contextlib.suppress(NoReply):
                kept = [point for _, point in await bus.history(METRIC, 0, 100, job="j", source="*")]
                return len(kept) == len(sent) and sorted(kept, key=lambda point: point.seq) == sent
            return False

        await until(whole)
        source.close()


# --- a server that goes away --------------------------------------------------------------------------------------


async def test_calls_wait_while_the_server_is_away(own_server: Server) -> None:
    async with connected(own_server) as bus:
        await publish(bus, "j", 1)
        back = restart(own_server, 0.3)
        assert await bus.count("TICKETS", TICKET.at(job="j")) == 1
        await bus.purge("TICKETS", TICKET.at(job="j"))
        await back


@pytest.mark.parametrize("seed", [2])
async def test_all_messages_arrive_over_random_restarts(own_server: Server, seed: int) -> None:
    """Bursts, pauses, and kills at random moments: everything acked is delivered, and nothing stalls."""
    dice = random.Random(seed)
    total = 600
    async with connected(own_server) as bus, connected(own_server, "producer") as producer:
        consumer = await bus.consume(TICKET, "c", batch=dice.choice((4, 16, 64)), ack_wait_s=1.5, job="j")
        produced = asyncio.Event()

        async def produce() -> None:
            seq = 0
            while seq < total:
                burst = min(dice.choice((1, 3, 40)), total - seq)
                await publish(producer, "j", *range(seq, seq + burst))
                seq += burst
                await asyncio.sleep(dice.choice((0.0, 0.01, 0.1)))
            produced.set()

        async def kill() -> None:
            for _ in range(3):
                await asyncio.sleep(dice.uniform(0.05, 0.6))
                await restart(own_server, dice.uniform(0.0, 0.4))

        seen: set[int] = set()
        tasks = [asyncio.create_task(produce()), asyncio.create_task(kill())]
        last = time.monotonic()
        while len(seen) < total:
            delivery = await consumer.next(0.5)
            assert time.monotonic() - last < WAIT_S, (
                f"stalled with {len(seen)} of {total}, produced: {produced.is_set()}"
            )
            if delivery is None:
                continue
            assert delivery.noun is not None
            if dice.random() < 0.02:
                continue  # not acked: comes again
            if await delivery.ack_sync():
                seen.add(delivery.noun.seq)
                last = time.monotonic()
        await asyncio.gather(*tasks)
        assert seen == set(range(total))
        assert await none_left(bus, "j")
        await consumer.close()
