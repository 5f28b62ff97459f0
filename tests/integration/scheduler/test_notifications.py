"""People are told what becomes of their jobs: webhooks that are signed, texts for Slack, e-mails; none is lost."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiosmtpd.controller import Controller

from opentinker.services.scheduler.notifications import notifier as notifier_module
from opentinker.services.scheduler.notifications.delivery import NotDelivered
from opentinker.services.scheduler.notifications.notifier import MAILS, TRIES, UNKNOWN_S, Notifier
from opentinker.shared.messaging.subjects import METRIC
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.notifications import HOUR_S, Message, Notifications
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from tests.conftest import free_port, until
from tests.support.api import SPEC, Http
from tests.support.factories import make_point
from tests.support.http_server import http_server
from tests.support.scheduling import kinds, new_job


class Receiver:
    """A webhook of somebody's own."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.status = 200
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        self.got.append((dict(request.headers), await request.read()))
        return web.Response(status=self.status, text="so it is")

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [orjson.loads(body) for _, body in self.got]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    one = Receiver()
    async with http_server(web.post("/hook", one.take)) as url:
        one.url = f"{url}/hook"
        yield one


def allowing(ctx: Context, **settings: Any) -> Context:
    """The same scheduler of an operator who lets jobs reach this machine."""
    more = {"env_egress_allow": ["127.0.0.0/8"], "public_url": "https://tinker.example/", **settings}
    return Context(**{**vars(ctx), "settings": ctx.settings.model_validate({**ctx.settings.model_dump(), **more})})


async def notifying(store: Store, id: str, *entries: dict[str, Any]) -> str:
    job = await new_job(store, id, JobState.RUNNING, notify=list(entries))
    await Notifications(store.redis).follow(job, time.time())
    return job


async def tells(notifier: Notifier) -> None:
    await notifier.look()
    await notifier.send()
    await notifier.sent()


async def test_the_end_of_a_job_is_told_once_and_signed(ctx: Context, store: Store, receiver: Receiver) -> None:
    job = await notifying(store, "j-hooked", {"url": receiver.url})
    told = Notifier(allowing(ctx))
    await tells(told)
    assert receiver.got == []
    await store.transition(job, JobState.FAILED, reason="the loss is NaN")
    for other in (told, Notifier(allowing(ctx))):  # a scheduler that takes over tells nothing twice
        await tells(other)
        await tells(other)
    ((headers, body),) = receiver.got
    (said,) = receiver.bodies
    assert (said["occasion"], said["job"]["id"], said["job"]["reason"]) == ("failed", job, "the loss is NaN")
    assert said["page"] == f"https://tinker.example/#/jobs/{job}"
    key = base64.b64decode((await Notifications(store.redis).secret("default")).removeprefix("whsec_"))
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}" and said["id"] == headers["webhook-id"]
    assert job not in await Notifications(store.redis).followed()


async def test_a_webhook_that_is_away_is_tried_again_and_given_up_in_the_end(
    ctx: Context, store: Store, receiver: Receiver
) -> None:
    job = await notifying(store, "j-away", {"url": receiver.url, "on": ["succeeded"]})
    receiver.status = 503
    await store.transition(job, JobState.SUCCEEDED)
    kept, told = Notifications(store.redis), Notifier(allowing(ctx))
    for tries in range(1, TRIES + 1):
        await tells(told)
        assert len(receiver.got) == tries
        await tells(told)
        assert len(receiver.got) == tries, "the next try waits"
        for message in await kept.due(time.time() + 1e6, 10):
            await store.redis.zadd(f"notify:due:{message.tenant}", {message.id: 0.0})
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert (await kinds(store, job))[-1] == "notification_failed" and await kept.due(time.time() + 1e6, 10) == []


async def test_alarms_and_targets_are_told_and_what_nobody_wants_is_not(
    ctx: Context, store: Store, receiver: Receiver
) -> None:
    target = {"metric": "val/reward/mean", "above": 0.5}
    job = await notifying(
        store, "j-target", {"url": receiver.url, "on": ["alarm"], "target": target},
        {"url": receiver.url, "format": "slack", "on": ["cancelled"]},
    )  # fmt: skip
    await store.update(job, event="collapse_alarm", detail={"reason": "entropy", "hint": "raise it"})
    told = Notifier(allowing(ctx), metrics_s=0.0)
    for step, value in enumerate((0.1, 0.6, 0.7), 1):
        point = make_point(job, step, {"val/reward/mean": value})
        await ctx.bus.publish(METRIC, point, f"{job}/{step}", job=job, source="trainer")
        await tells(told)
    alarm, reached = receiver.bodies
    assert alarm["occasion"] == "alarm"
    assert (alarm["detail"]["alarm"], alarm["detail"]["hint"]) == ("collapse_alarm", "raise it")
    assert (reached["occasion"], reached["detail"]["value"], reached["detail"]["step"]) == ("target", 0.6, 2)
    await store.transition(job, JobState.CANCELLED)
    await tells(told)
    assert len(receiver.got) == 3 and f"({job}) cancelled" in receiver.bodies[-1]["text"]
    await tells(told)
    assert job not in await Notifications(store.redis).followed(), "no target is open"


async def test_no_text_of_a_job_is_markup_of_slack(ctx: Context, store: Store, receiver: Receiver) -> None:
    webhook = {"url": receiver.url, "format": "slack"}
    job = await new_job(store, "j-markup", JobState.RUNNING, name="<!channel> run", notify=[webhook])
    await Notifications(store.redis).follow(job, time.time())
    await store.transition(job, JobState.FAILED, reason="TypeError: <class 'int'> && \"x\"")
    await tells(Notifier(allowing(ctx, public_url="https://tinker.example/a&b")))
    ((text,),) = [body.values() for body in receiver.bodies]
    assert text.splitlines()[0].startswith("&lt;!channel&gt; run (j-markup) failed")
    assert text.splitlines()[1] == "TypeError: &lt;class 'int'&gt; &amp;&amp; \"x\""
    assert text.splitlines()[-1].startswith("https://tinker.example/a&b"), "an address is as it is"


async def test_a_target_is_told_however_long_the_history_and_after_the_end(
    ctx: Context, store: Store, receiver: Receiver
) -> None:
    target = {"metric": "loss", "below": 0.5}
    job = await notifying(store, "j-long", {"url": receiver.url, "on": ["target"], "target": target})
    for step in range(1, 11):
        point = make_point(job, step, {"loss": 0.4 if step == 10 else 1.0})
        await ctx.bus.publish(METRIC, point, f"{job}/{step}", job=job, source="trainer")
    await store.transition(job, JobState.SUCCEEDED)
    told = Notifier(allowing(ctx), points=3)
    for _ in range(5):
        await tells(told)
    assert [body["detail"]["step"] for body in receiver.bodies] == [10]
    assert job not in await Notifications(store.redis).followed()


async def test_a_receiver_that_hangs_keeps_up_no_other_tenant(
    ctx: Context, store: Store, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = asyncio.Event()

    async def deliver(message: Message, *rest: Any) -> None:
        if message.tenant == "slow":
            await released.wait()
        if message.job == "j-odd":
            raise ValueError("nobody has thought of this")

    monkeypatch.setattr(notifier_module, "deliver", deliver)
    kept, told = Notifications(store.redis), Notifier(allowing(ctx))
    for id, tenant in [*((f"j-slow{n}", "slow") for n in range(9)), ("j-quick", "quick"), ("j-odd", "quick")]:
        job = await new_job(store, id, JobState.RUNNING, tenant=tenant, notify=[{"url": receiver.url}])
        await kept.follow(job, time.time())
        await store.transition(job, JobState.SUCCEEDED)
    await told.look()

    async def left() -> dict[str, int]:
        await told.send()
        return Counter(message.tenant for message in await kept.due(time.time(), 100))

    await until(left, lambda found: found == {"slow": 9})
    (odd,) = [one for one in await kept.due(time.time() + 1e6, 100) if one.job == "j-odd"]
    assert odd.tries == 1, "it is tried again, and ends nothing else"
    released.set()
    await until(left, lambda found: not found)


async def test_a_tenant_sends_so_many_mails_an_hour(
    ctx: Context, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    async def deliver(message: Message, *_: Any) -> None:
        sent.append(message.job)

    monkeypatch.setattr(notifier_module, "deliver", deliver)
    kept = Notifications(store.redis)
    for _ in range(MAILS - 2):
        await kept.take_mail("default", MAILS)
    for number in range(3):
        job = await notifying(store, f"j-mail{number}", {"email": "me@lab.example"})
        await store.transition(job, JobState.SUCCEEDED)
    told = Notifier(allowing(ctx))
    await tells(told)
    assert len(sent) == 2
    (waits,) = await kept.due(time.time() + 1e6, 10)
    ((_, at),) = await store.redis.zrange("notify:due:default", 0, -1, withscores=True)
    assert waits.tries == 0 and at == pytest.approx(time.time() + HOUR_S, abs=60), "the end of the hour is waited for"
    for _ in range(TRIES):
        await store.redis.zadd("notify:due:default", {waits.id: 0.0})
        await tells(told)
    assert [one.tries for one in await kept.due(time.time() + 1e6, 10)] == [0] and len(sent) == 2
    await store.redis.delete("notify:mails:default")  # the hour is over
    await store.redis.zadd("notify:due:default", {waits.id: 0.0})
    await tells(told)
    assert len(sent) == 3 and await kept.due(time.time() + 1e6, 10) == []


async def test_a_mail_that_fails_takes_no_place_of_another(
    ctx: Context, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    async def deliver(message: Message, *_: Any) -> None:
        if message.job == "j-dead":
            raise NotDelivered("no such mailbox")
        sent.append(message.job)

    monkeypatch.setattr(notifier_module, "deliver", deliver)
    kept, told = Notifications(store.redis), Notifier(allowing(ctx))
    for _ in range(MAILS - 1):
        await kept.take_mail("default", MAILS)
    for id in ("j-dead", "j-read"):
        await store.transition(await notifying(store, id, {"email": "me@lab.example"}), JobState.SUCCEEDED)
        await tells(told)
    assert sent == ["j-read"]
    assert await kept.take_mail("default", MAILS) > 0, "the one that was sent took the last place"


@pytest.mark.parametrize(
    "address",
    [".:@x.com", "():@x.com", "=?utf-8?q?=0a?=@x.com", "a@b\nSubject: c", "a..b@x.com", '"a"@x.com', "@x.com"],
)
def test_an_address_is_what_a_header_takes_as_it_is(address: str) -> None:
    with pytest.raises(Exception, match="email"):
        parse_spec({**SPEC, "notify": [{"email": address}]})
    assert parse_spec({**SPEC, "notify": [{"email": "a.b+c@x-y.example.com"}]}).notify


async def test_a_mail_is_sent_by_the_operators_server(ctx: Context, store: Store) -> None:
    mails: list[Any] = []

    class Taking:
        async def handle_DATA(self, _: Any, __: Any, envelope: Any) -> str:
            mails.append(envelope)
            return "250 taken"

    job = await notifying(store, "j-mail", {"email": "me@lab.example"})
    await store.transition(job, JobState.SUCCEEDED)
    server = Controller(Taking(), hostname="127.0.0.1", port=free_port())
    server.start()
    try:
        mail = {"smtp_host": "127.0.0.1", "smtp_port": server.port, "smtp_security": "none"}
        await tells(Notifier(allowing(ctx, **mail, smtp_from="bot@lab.example")))
    finally:
        server.stop()
    (found,) = mails
    assert (found.mail_from, found.rcpt_tos) == ("bot@lab.example", ["me@lab.example"])
    assert b"(j-mail) succeeded" in found.content and b"https://tinker.example/#/jobs/j-mail" in found.content


async def test_where_nothing_may_be_sent_is_refused_at_submission(http: Http) -> None:
    entries = [
        {"url": "http://127.0.0.1:8099/hook"}, {"email": "me@lab.example"},
        {"url": "https://x.example", "email": "a@b.c"},
        {"url": "https://x.example", "on": ["target"]}, {"url": "ftp://x"},
        {"url": "https://x.example", "target": {"metric": "m"}},
    ]  # fmt: skip
    for entry, words in zip(
        entries, ("loopback", "sends no mail", "one of url and email", "is needed for", "", "one of above and below"),
        strict=True,
    ):  # fmt: skip
        status, body = await http("POST", "/v1/jobs", json={**SPEC, "notify": [entry]})
        assert status == 422 and words in str(body["errors"]), body
        assert all(mistake["field"].startswith("notify.0") for mistake in body["errors"]), body


async def test_a_job_that_was_never_stored_is_forgotten(ctx: Context, store: Store) -> None:
    kept = Notifications(store.redis)
    await kept.follow("j-just-now", time.time())
    await kept.follow("j-nothing", time.time() - UNKNOWN_S)
    await Notifier(ctx).look()
    assert (await kept.followed()).keys() == {"j-just-now"}


async def test_a_secret_stays_until_it_is_renewed(store: Store) -> None:
    kept = Notifications(store.redis)
    first = await kept.secret("t")
    assert first == await kept.secret("t") and len(base64.b64decode(first.removeprefix("whsec_"))) == 32
    assert await kept.secret("t", renew=True) != first and await kept.secret("u") != await kept.secret("t")
