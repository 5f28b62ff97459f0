"""The log of a job: lines of every service that are bound to it, without secrets, bounded, in order."""

from __future__ import annotations

import asyncio
import io
import uuid
from collections.abc import AsyncGenerator, Iterator

import pytest
import structlog

from opentinker import AsyncClient
from opentinker.cli.logs import format_job_line, grave
from opentinker.shared import api_types
from opentinker.shared.config import Settings
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import LOG
from opentinker.shared.runtime import telemetry
from opentinker.shared.runtime.job_logs import JobLogs
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.redact import HIDDEN, redacted, without_secrets
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from opentinker.shared.types.telemetry import LogLine
from tests.conftest import soon, until
from tests.support.api import SPEC, Http


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What this process wrote."""
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    return out


@pytest.fixture
def logs(said: io.StringIO) -> Iterator[JobLogs]:
    """Of a process that is called rollout-0."""
    found = JobLogs(room=20)
    telemetry.configure_logging(Settings(), "rollout-worker", "rollout-0", found)
    yield found
    structlog.contextvars.clear_contextvars()


def job_id() -> str:
    return f"j-{uuid.uuid4().hex[:10]}"


async def history(bus: Bus, job: str) -> list[LogLine]:
    return [line for _, line in await bus.history(LOG, 0, 100, job=job, level="*")]


async def test_lines_bound_to_a_job_are_kept_with_their_fields(bus: Bus, logs: JobLogs) -> None:
    job, log = job_id(), structlog.get_logger()
    log.info("of_nobody")
    log.info("of_another", job="j-x")
    with structlog.contextvars.bound_contextvars(job=job, epoch=2):
        log.info("group_failed", group=7, where={"a": [1, object]})
        try:
            raise ValueError("bad reward")
        except ValueError:
            log.error("broken", exc_info=True)
        await asyncio.to_thread(log.warning, "from_a_thread")
    await logs.send(bus)
    await until(lambda: _count(bus, job, 3))
    first, broken, threaded = await history(bus, job)
    assert (first.service, first.worker, first.level, first.event) == (
        "rollout-worker",
        "rollout-0",
        "info",
        "group_failed",
    )
    assert first.fields["epoch"] == 2 and first.fields["group"] == 7
    assert broken.trace.endswith("ValueError: bad reward") and "exception" not in broken.fields
    assert threaded.event == "from_a_thread" and threaded.level == "warning"


async def _count(bus: Bus, job: str, count: int) -> bool:
    return len(await history(bus, job)) == count


async def test_what_finds_no_room_is_counted_and_said(bus: Bus, logs: JobLogs) -> None:
    job, log = job_id(), structlog.get_logger()
    for number in range(50):
        log.info("much", job=job, number=number)
    await logs.send(bus)
    await until(lambda: _count(bus, job, 21))
    *kept, said = await history(bus, job)
    assert [line.fields["number"] for line in kept] == list(range(20))
    assert (said.event, said.fields) == ("log_lines_dropped", {"lines": 30})
    log.info("again", job=job)
    await logs.send(bus)
    await until(lambda: _count(bus, job, 22))


async def test_a_long_field_is_cut_and_a_secret_never_leaves(bus: Bus, logs: JobLogs, said: io.StringIO) -> None:
    job, canary = job_id(), "canary0123456789"
    try:
        raise OSError(f"cannot open nats://user:{canary}@host:4222")
    except OSError:
        structlog.get_logger().error(
            f"asked with Authorization: Bearer {canary}", job=job, api_key=canary, exc_info=True,
            deep={"token": canary, "tokens": 12}, url=f"https://x/?token={canary}", text="x" * 5000,
        )  # fmt: skip
    await logs.send(bus)
    await until(lambda: _count(bus, job, 1))
    (line,) = await history(bus, job)
    assert canary not in repr(line) and HIDDEN in line.event and line.fields["deep"]["tokens"] == 12
    assert line.fields["text"] == "x" * 2000 + "... (3000 more characters)"
    assert "x" * 5000 in said.getvalue() and canary not in said.getvalue()


@pytest.mark.parametrize(
    "text",
    [
        *("Bearer abcdefgh12345678", "redis://:s3cr3tpass@host/0", "ot_live_ab12cd_0123456789abcdef"),
        *("hf_ABCDEFGHIJKLMNOPQRST", 'api_key="abcdef123456"', "password: hunter22222", "OPENTINKER_TOKEN=abcdefgh"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    assert HIDDEN in redacted(text)


def test_words_of_ours_stay_as_they_are() -> None:
    line = {
        "tokens": 5,
        "group": 3,
        "max_tokens": 12,
        "error": "the tokenizer has no chat template",
        "token_ids": [1, 2],
    }
    assert without_secrets(line) == line


async def test_the_log_is_served_by_level_from_a_cursor_and_by_its_end(http: Http, ctx: Context, store: Store) -> None:
    job = await http.job()
    for number in range(6):
        level = "info" if number % 2 else "warning"
        line = LogLine(job=job, service="trainer", worker="trainer-0", level=level, time=1.0, event=f"e{number}")
        await ctx.bus.emit(LOG, line, job=job, level=level)
    await until(lambda: _count(ctx.bus, job, 6))
    path = f"/v1/jobs/{job}/logs?format=json"

    async def events(query: str) -> list[str]:
        return [line["event"] for line in (await http("GET", path + query))[1]["lines"]]

    assert await events("") == [f"e{number}" for number in range(6)]
    assert await events("&level=warning") == ["e0", "e2", "e4"]
    assert await events("&level=warning&last=2") == ["e2", "e4"]
    page = (await http("GET", path + "&limit=4"))[1]
    assert page["more"] and await events(f"&after={page['cursor']}") == ["e4", "e5"]
    for wrong in ("&level=loud", "&after=x", "&last=-1", "&limit=0"):
        assert (await http("GET", path + wrong))[0] == 422
    assert (await http("GET", f"/v1/jobs/{job}/logs?format=xml"))[0] == 422
    assert (await http("GET", "/v1/jobs/j-0000000000/logs"))[0] == 404


async def test_the_log_is_live_goes_on_where_it_was_and_ends_with_the_job(
    client: AsyncClient, ctx: Context, store: Store
) -> None:
    job = (await client.submit(SPEC))["id"]

    async def say(event: str) -> None:
        line = LogLine(job=job, service="trainer", worker="trainer-0", level="info", time=1.0, event=event)
        await ctx.bus.emit(LOG, line, job=job, level="info")

    heard = client.logs(job)
    await say("one")
    first = await soon(anext(heard))
    assert first["event"] == "one"
    await say("two")
    assert (await soon(anext(heard)))["event"] == "two"
    resumed = client.logs(job, first["cursor"])
    assert (await soon(anext(resumed)))["event"] == "two"
    await say("three")
    await until(lambda: _count(ctx.bus, job, 3))
    await store.transition(job, JobState.CANCELLED)
    await store.redis.hset(f"job:{job}", "finished", 1.0)  # its services have said how they let go of it

    async def rest(of: AsyncGenerator[api_types.LogLine, None]) -> list[str]:
        return [line["event"] async for line in of]

    assert await soon(rest(heard)) == ["three"] and await soon(rest(resumed)) == ["three"]
    assert [line["event"] for line in await client.log_lines(job, last=2)] == ["two", "three"]


def test_a_line_of_a_job_is_readable() -> None:
    line = {"time": 0.0, "worker": "rollout-0", "level": "info", "event": "ready", "fields": {"a": 1}, "trace": "T"}
    assert format_job_line(line).endswith("rollout-0     info     ready a=1\nT")
    assert grave('{"level": "error"}', "warning") and not grave("[1] nats says", "info") and grave("x", "debug")
