"""Tokens a minute, and the bound of requests for samples that wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from opentinker.services.scheduler.jobs.cleanup import JobCleaner
from opentinker.services.scheduler.tinker.sampling_api import ASSUMED_TOKENS
from opentinker.shared.messaging.bus import Bus, StreamFull
from opentinker.shared.messaging.subjects import SAMPLE
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.state.tinker.requests import UNSENT_S, Quota, TokensSpent
from opentinker.shared.types.core import JobState
from opentinker.shared.types.tinker import ANSWER_KEPT_S, Answer, Failed
from tests.conftest import until
from tests.integration.tinker.site import Client, FakeWorkers, passes, start_server
from tests.integration.tinker.test_sampling import asked, sampler_of
from tests.support.api import Http, new_key_of

NOW = 1_700_000_000.0
MINUTE = int(NOW // 60)


class Site:
    """A server with 1000 tokens a minute. Its minute does not end."""

    def __init__(self, user: Client, workers: FakeWorkers) -> None:
        self.user, self.workers, self.store, self.job = user, workers, workers.store, workers.job

    async def counted(self) -> int:
        return await self.store.tokens(self.job, "default", MINUTE)

    async def use(self, tokens: int) -> None:
        await self.workers.ctx.store.redis.incrby(f"tinker:tokens:{self.job}:default:{MINUTE}", tokens)

    async def model(self) -> str:
        body = {"session_id": await self.user.session(), "base_model": self.job, "lora_config": {"rank": 4}}
        return str((await self.user.result(await self.user.ok("create_model", **body, model_seq_id=0)))["model_id"])


@pytest.fixture
async def site(user: Client, ctx: Context, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    clock = SimpleNamespace(time=lambda: NOW)
    for module in ("services.scheduler.tinker.access", "shared.state.tinker.requests"):
        monkeypatch.setattr(f"opentinker.{module}.time", clock)
    async with FakeWorkers(ctx, await start_server(ctx, tokens_per_minute=1000)).work() as workers:
        yield Site(user, workers)


async def test_tokens_a_minute_are_bounded(site: Site) -> None:
    model = await site.model()
    await site.user.raw("forward_backward", passes(model, 1))
    await site.use(997)
    status, answer = await site.user.raw("forward_backward", passes(model, 2))
    assert status == 429 and "1000 a minute" in answer["detail"]
    assert (await site.user.post("optim_step", model_id=model, seq_id=2))[0] == 200
    assert (await site.user.raw("forward_backward", passes(model, 1)))[0] == 200, "it was admitted before"


async def test_requests_at_the_same_time_are_counted_before_any_passes(site: Site) -> None:
    model = await site.model()
    await site.use(997)
    calls = [site.user.raw("forward_backward", passes(model, seq)) for seq in range(1, 9)]
    statuses = sorted([status for status, _ in await asyncio.gather(*calls)])
    assert statuses == [200] + [429] * 7 and await site.counted() == 1000


async def test_what_a_command_has_beyond_the_limit_is_charged_to_the_next_minutes(site: Site) -> None:
    def quota(minute: int) -> Quota:
        return Quota(job="j", tenant="t", minute=MINUTE + minute, limit=1000)

    async def ask(minute: int, seq: int, tokens: int) -> bool:
        try:
            return await site.store.ask("m", seq, "digest", tokens=tokens, quota=quota(minute))
        except TokensSpent:
            return False

    assert await ask(0, 1, 2500)
    assert [await ask(minute, 2, 600) for minute in (0, 1, 2)] == [False, False, True], "1500 tokens are owed"
    with pytest.raises(TokensSpent):
        await site.store.ask_sample("s#0", "digest", quota(2), prompt=1)
    assert await ask(3, 3, 1), "100 are owed"
    await site.store.ask_sample("s#0", "digest", quota(3), prompt=1)
    assert await ask(4, 4, 10_000_000)
    assert [await ask(minute, 5, 1) for minute in (5, 6, 7, 8)] == [False, False, False, True], "three at most"


async def test_a_request_that_could_not_be_sent_is_counted_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    model, publish = await site.model(), type(site.workers.ctx.bus).publish
    failures = [StreamFull("the stream has no room")] * 2

    async def failing(bus: Any, subject: Any, *of: Any, **more: Any) -> int:
        if subject.pattern.startswith("command.") and failures:
            raise failures.pop()
        return await publish(bus, subject, *of, **more)

    monkeypatch.setattr(type(site.workers.ctx.bus), "publish", failing)
    statuses = [(await site.user.raw("forward_backward", passes(model, 1)))[0] for _ in range(4)]
    assert statuses == [503, 503, 200, 200] and await site.counted() == 3


async def test_samples_are_counted_when_they_are_asked_for_and_corrected_when_they_are_drawn(site: Site) -> None:
    site.workers.answers = False
    sampler = await sampler_of(site.user, base_model=site.job)
    body: dict[str, Any] = {"num_samples": 2, "sampling_params": {"max_tokens": 400}}
    promise = await site.user.ok("asample", **asked(sampler, **body))
    assert await site.counted() == 3 + 2 * 400, "before any of them is drawn, and before a client reads one"
    await site.workers.draw(promise["request_id"])
    assert await site.counted() == 3 + 2 * 3
    for _ in range(2):
        await site.user.result(promise)
        await site.user.ok("asample", **asked(sampler, **body))
    assert await site.counted() == 9, "each request once"
    calls = [site.user.post("asample", **asked(sampler, seq, **body)) for seq in range(1, 9)]
    statuses = sorted([status for status, _ in await asyncio.gather(*calls)])
    assert statuses == [200] * 2 + [429] * 6


async def test_samples_without_a_length_are_counted_as_long_ones_until_they_are_drawn(site: Site) -> None:
    site.workers.answers = False
    sampler = await sampler_of(site.user, base_model=site.job)
    await site.user.ok("asample", **asked(sampler))
    assert await site.counted() == 3 + ASSUMED_TOKENS
    assert (await site.user.post("asample", **asked(sampler, 1)))[0] == 429


async def test_samples_that_wait_do_not_delay_training(site: Site) -> None:
    model, sampler = await site.model(), await sampler_of(site.user, base_model=site.job)
    site.workers.answers = False
    body: dict[str, Any] = {"num_samples": 2, "sampling_params": {"max_tokens": 1000}}
    promise = await site.user.ok("asample", **asked(sampler, **body))
    assert (await site.user.post("asample", **asked(sampler, 1)))[0] == 429
    assert (await site.user.raw("forward_backward", passes(model, 1)))[0] == 200
    await site.use(990)
    assert (await site.user.raw("forward_backward", passes(model, 2)))[0] == 200, "993 of 1000 were used"
    await site.workers.draw(promise["request_id"])
    assert (await site.user.raw("forward_backward", passes(model, 3)))[0] == 429, "more than 1000 were used"


async def test_longer_samples_than_foreseen_are_counted_too(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker.services.scheduler.tinker.sampling_api.ASSUMED_TOKENS", 1)
    sampler = await sampler_of(site.user, base_model=site.job)
    await site.user.result(await site.user.ok("asample", **asked(sampler, num_samples=4)))  # without max_tokens
    assert await site.counted() == 3 + 4 * 3


async def test_samples_that_were_lost_or_failed_count_nothing(site: Site) -> None:
    site.workers.answers = False
    sampler = await sampler_of(site.user, base_model=site.job)
    body = asked(sampler, sampling_params={"max_tokens": 100})
    promise = await site.user.ok("asample", **body)
    await site.workers.say(promise["request_id"], Failed(error="its worker has left", lost=True))
    assert await site.counted() == 0
    for _ in range(2):
        await site.user.ok("asample", **body)
    assert await site.counted() == 103, "again, once"
    await site.user.ok("cancel_future", request_id=promise["request_id"])
    assert await site.counted() == 103, "they may have been drawn"


async def test_the_bytes_of_a_tenants_requests_without_an_answer_are_bounded(
    user: Client, workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [await user.model() for _ in range(2)]
    redis, sizes = workers.ctx.store.redis, []

    async def held() -> int:
        return int(await redis.hget("tinker:bytes", "default") or 0)

    workers.answers = False
    assert await held() == 0
    assert (await user.raw("forward_backward", passes(models[0], 2)))[0] == 200
    sizes.append(await held())
    monkeypatch.setattr("opentinker.shared.state.tinker.held_bytes.MAX_HELD_BYTES", 2 * sizes[0])
    assert (await user.raw("forward_backward", passes(models[0], 3)))[0] == 200
    for model, seq in ((models[0], 4), (models[1], 1)):
        status, answer = await user.raw("forward_backward", passes(model, seq))
        assert status == 429 and f"have {2 * sizes[0]} bytes" in answer["detail"]
    assert (await user.raw("forward_backward", passes(models[0], 3)))[0] == 200, "it was admitted before"
    assert (await user.raw("forward_backward", passes(models[0], 1)))[0] == 200, "the others wait for it"
    assert await held() == 3 * sizes[0]
    for seq in (1, 2):
        await workers.say(f"{models[0]}#{seq}", Failed(error="no"))
        await workers.say(f"{models[0]}#{seq}", Failed(error="no"))
    assert await held() == sizes[0]
    assert (await user.raw("forward_backward", passes(models[1], 1)))[0] == 200
    await workers.store.remove_model(await workers.store.model("default", models[0]))
    assert await held() == sizes[0]


async def held(ctx: Context) -> int:
    return int(await ctx.store.redis.hget("tinker:bytes", "default") or 0)


async def test_the_bytes_of_a_server_that_ends_without_workers_count_no_longer(
    user: Client, workers: FakeWorkers, ctx: Context
) -> None:
    model, sampler = await user.model(), await sampler_of(user)
    workers.answers = False
    assert (await user.raw("forward_backward", passes(model, 1)))[0] == 200
    assert (before := await held(ctx)) > 0
    await user.ok("asample", **asked(sampler))
    assert await held(ctx) == before + 3 * 4
    await ctx.store.transition(workers.job, JobState.CANCELLED, reason="over")
    await JobCleaner(ctx, UNFENCED).clean()
    assert await held(ctx) == 0
    quota = Quota(job=workers.job, tenant="default", minute=MINUTE)
    assert await workers.store.ask(model, 2, "digest", quota=quota, size=100), "of a scheduler that has not heard of it"
    assert await held(ctx) == 0


async def test_the_bytes_of_prompts_that_wait_are_bounded(
    site: Site, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker.shared.state.tinker.held_bytes.MAX_HELD_BYTES", 3 * 12)
    publishing, site.workers.answers = Publishing(Bus, monkeypatch), False
    sampler = await sampler_of(site.user, base_model=site.job)

    async def ask(seq: int) -> int:
        return (await site.user.post("asample", **asked(sampler, seq, sampling_params={"max_tokens": 1})))[0]

    assert [await ask(seq) for seq in (0, 1, 1)] == [200, 200, 200] and await held(ctx) == 24
    publishing.failures = 1
    assert [await ask(seq) for seq in (2, 3)] == [503, 429]
    later = SimpleNamespace(time=lambda: NOW + UNSENT_S + 1)
    monkeypatch.setattr("opentinker.shared.state.tinker.requests.time", later)
    assert [await ask(seq) for seq in (3, 4)] == [200, 429], "one that was sent still waits"
    await site.workers.say(f"{sampler}#0", Failed(error="no"))
    assert await held(ctx) == 24
    await site.user.ok("cancel_future", request_id=f"{sampler}#1")
    assert await held(ctx) == 24, "it is in the stream until it is taken"
    await site.workers.store.drop_sample(f"{sampler}#1")
    assert await held(ctx) == 12
    monkeypatch.setattr(later, "time", lambda: NOW + UNSENT_S + ANSWER_KEPT_S + 2)
    assert await ask(5) == 200 and await held(ctx) == 12, "the others are forgotten"


async def test_the_bytes_of_large_answers_count_before_they_are_there(
    user: Client, workers: FakeWorkers, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, answer = 3 * 4, 2 * 5000 * 8 + 3 * 4
    monkeypatch.setattr("opentinker.shared.state.tinker.held_bytes.MAX_HELD_BYTES", 2 * (prompt + answer))
    sampler, workers.answers = await sampler_of(user), False

    async def ask(seq: int, max_tokens: int = 5000) -> int:
        body: dict[str, Any] = {"sampling_params": {"max_tokens": max_tokens}, "num_samples": 2}
        return (await user.post("asample", **asked(sampler, seq, prompt_logprobs=True, **body)))[0]

    assert [await ask(seq) for seq in (0, 1, 0, 2)] == [200, 200, 200, 429]
    assert await held(ctx) == 2 * (prompt + answer)
    await workers.draw(f"{sampler}#0")
    assert await held(ctx) == prompt + answer, "the answer is a small one"
    assert [await ask(2, 4000), await ask(3, 4000)] == [200, 200], "answers of 64 kB count nothing"
    await workers.say(f"{sampler}#1", Failed(error="its worker has left", lost=True))
    assert await held(ctx) == 2 * prompt
    assert [await ask(1), await ask(4), await held(ctx)] == [200, 429, 3 * prompt + answer]
    await user.ok("cancel_future", request_id=f"{sampler}#1")
    assert await held(ctx) == 3 * prompt, "there will be none; the prompt is in the stream"
    assert [await ask(4), await held(ctx)] == [200, 4 * prompt + answer]
    await workers.store.release_samples(workers.job)
    assert await held(ctx) == 0


async def test_answers_that_nobody_reads_are_bounded(
    user: Client, workers: FakeWorkers, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sampler = await user.model(), await sampler_of(user)
    workers.answers = False
    assert (await user.raw("forward_backward", passes(model, 1)))[0] == 200
    command, answer = await held(ctx), 3 * 4
    await workers.say(f"{model}#1", Failed(error="no"))
    workers.answers, clock = True, SimpleNamespace(time=time.time)
    monkeypatch.setattr("opentinker.shared.state.tinker.requests.time", clock)
    monkeypatch.setattr("opentinker.shared.state.tinker.requests.LARGE_ANSWER", answer - 1)
    monkeypatch.setattr("opentinker.shared.state.tinker.held_bytes.MAX_HELD_BYTES", command + answer - 1)

    async def answered(number: int) -> dict[str, Any]:
        status, promise = await user.raw("forward_backward", passes(model, number))
        assert status == 200, promise
        await until(lambda: workers.store.answered(promise["request_id"]))
        return dict(promise)

    for number in range(2, 6):  # a client that reads does not notice
        promise = await answered(number)
        assert await held(ctx) == answer
        first, again = [await user.result(promise) for _ in range(2)]
        assert first == again and await held(ctx) == 0
    promise = await answered(6)
    status, refusal = await user.raw("forward_backward", passes(model, 7))
    assert status == 429 and "answers that were not read" in refusal["detail"]
    await workers.say(promise["request_id"], Failed(error="a trainer that was lost answers again"))
    assert await held(ctx) == answer
    await user.result(promise)
    await answered(7)
    clock.time = lambda: time.time() + ANSWER_KEPT_S + 1
    await answered(8)
    assert await held(ctx) == answer, "the other one has expired"
    await user.result({"request_id": f"{model}#8"})
    drawn = await user.ok("asample", **asked(sampler, sampling_params={"max_tokens": 3}))
    await until(lambda: workers.store.answered(drawn["request_id"]))
    assert await held(ctx) == 3 * 8, "tokens and log-probabilities"
    await user.result(drawn)
    assert await held(ctx) == 0


class Publishing:
    """Publishes of SAMPLE fail as often as `failures` says; `ids` has all message ids."""

    def __init__(self, bus: type[Bus], monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures, self.ids, publish = 0, list[str](), bus.publish

        async def failing(bus: Any, subject: Any, noun: Any, msg_id: str, **keys: str) -> int:
            if subject.pattern.startswith("sample."):
                self.ids.append(msg_id)
                if self.failures:
                    self.failures -= 1
                    raise StreamFull("the stream has no room")
            return await publish(bus, subject, noun, msg_id, **keys)

        monkeypatch.setattr(bus, "publish", failing)


async def test_a_lost_sample_is_sent_again_though_a_first_try_fails(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishing = Publishing(Bus, monkeypatch)
    site.workers.answers = False
    body = asked(await sampler_of(site.user, base_model=site.job))
    promise = await site.user.ok("asample", **body)
    for round in (1, 2):
        await site.workers.say(promise["request_id"], Failed(error="its worker has left", lost=True))
        publishing.failures = 1
        statuses = [(await site.user.post("asample", **body))[0] for _ in range(2)]
        assert statuses == [503, 200]
        subject = SAMPLE.at(job=site.job, tenant="*")
        assert await site.workers.ctx.bus.count("SAMPLES", subject) == 1 + round, "not a repetition for the stream"
    assert len(set(publishing.ids)) == 3


async def test_what_could_not_be_sent_does_not_wait_for_long(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker.shared.state.tinker.requests.MAX_WAITING_SAMPLES", 2)
    publishing = Publishing(Bus, monkeypatch)
    site.workers.answers = False
    sampler = await sampler_of(site.user, base_model=site.job)
    body: dict[str, Any] = {"sampling_params": {"max_tokens": 1}}
    await site.user.ok("asample", **asked(sampler, 0, **body))
    publishing.failures = 1
    statuses = [(await site.user.post("asample", **asked(sampler, seq, **body)))[0] for seq in (1, 2)]
    assert statuses == [503, 429]
    later = SimpleNamespace(time=lambda: NOW + UNSENT_S + 1)
    monkeypatch.setattr("opentinker.shared.state.tinker.requests.time", later)
    statuses = [(await site.user.post("asample", **asked(sampler, seq, **body)))[0] for seq in (2, 3, 1)]
    assert statuses == [200, 429, 429], "one that was sent still waits, and so does a second one"


async def test_a_tenant_has_a_bound_of_samples_that_wait(
    user: Client, api: Http, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker.shared.state.tinker.requests.MAX_WAITING_SAMPLES", 3)
    blue = Client(api, await new_key_of(ctx.store, "blue"))
    async with FakeWorkers(ctx, await start_server(ctx, open_to=["blue"])).work() as workers:
        workers.answers, store = False, workers.store
        sampler = await sampler_of(user, base_model=workers.job)
        answers = await asyncio.gather(*[user.post("asample", **asked(sampler, seq)) for seq in range(8)])
        waiting = [answer["request_id"] for status, answer in answers if status == 200]
        refusals = [answer["detail"] for status, answer in answers if status == 429]
        assert len(waiting) == 3 and len(refusals) == 5
        assert "3 requests for samples of tenant default wait" in refusals[0] and "num_samples" in refusals[0]
        await user.ok("asample", **asked(sampler, int(waiting[0].partition("#")[2])))
        other = await blue.ok("asample", **asked(await sampler_of(blue, base_model=workers.job)))
        await workers.say(waiting[0], Failed(error="no"))
        await user.ok("asample", **asked(sampler, 20))
        assert (await user.post("asample", **asked(sampler, 21)))[0] == 429
        await user.ok("cancel_future", request_id=waiting[1])
        assert (await user.post("asample", **asked(sampler, 21)))[0] == 429, "it is in the stream until it is taken"
        await store.drop_sample(waiting[1])
        await user.ok("asample", **asked(sampler, 21))
        for request in (waiting[2], f"{sampler}#20", f"{sampler}#21", other["request_id"]):
            await store.answer(Answer(request=request, result=Failed(error="no")))
        await user.ok("asample", **asked(sampler, 22))
