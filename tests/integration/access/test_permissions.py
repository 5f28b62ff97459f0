"""Every service's user on real servers: what the table gives it is allowed, all else is refused, cell by cell."""

from __future__ import annotations

import asyncio
import itertools
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import pytest

from opentinker.local.embedded import valkey_binary
from opentinker.local.server_users import Access
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.permissions import (
    HISTORY,
    OPERATOR,
    REDIS_KEYS,
    STREAM_USES,
    TABLE,
    Use,
    stream_of,
    wide,
)
from opentinker.shared.messaging.subjects import (
    ENV,
    ENV_CHECK,
    KICK,
    LOGINS,
    ROLLOUT,
    SCHEDULER,
    SERVICES,
    STREAMS,
    TRAINER,
    Call,
)
from opentinker.shared.state.store import Store
from opentinker.shared.state.tinker.billing import HOUR_S, TinkerSpent
from opentinker.shared.state.tinker.requests import Quota
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.env_protocol import EnvCheck, EnvCheckReply
from opentinker.shared.types.tinker import (
    Answer,
    Loaded,
    LoraShape,
    ModelProgress,
    Sampled,
    Sampler,
    SampleSequence,
    TinkerCheckpoint,
    TinkerModel,
    TinkerSession,
)
from tests.conftest import Figure, Server, free_port, nats_conf, soon, until
from tests.support.streams import Guarded, comes_in, connected, guarded_nats

STREAM_NAMES = [str(stream.name) for stream in STREAMS]
FILTERS = {str(stream.name): str((stream.subjects or [""])[0]).replace("*", "x") for stream in STREAMS}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_nats(tmp_path_factory.mktemp("guarded")) as guarded:
        yield guarded


@pytest.fixture(scope="module")
def guarded_valkey(guarded: Guarded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, directory = free_port(), tmp_path_factory.mktemp("guarded-valkey")
    argv = [str(valkey_binary()), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
    argv += ["--aclfile", str(guarded.access.valkey_users)]
    server = Server(argv, port, f"redis://127.0.0.1:{port}/0")
    yield server
    server.kill()


def expected(service: str) -> tuple[dict[str, bool], dict[str, bool]]:
    """Subject -> whether the service may publish to it, subscribe to it; as subjects.py and STREAM_USES say."""
    publish, subscribe = {"$JS.API.INFO": True}, dict[str, bool]()
    uses = STREAM_USES.get(service, {})
    for subject in TABLE:
        concrete = wide(subject.pattern).replace("*", "x")
        kept = stream_of(subject) not in (None, *HISTORY)
        publish[concrete] = publish.get(concrete, False) or service in subject.by
        subscribe[concrete] = subscribe.get(concrete, False) or (service in subject.to and not kept)
    for stream in STREAM_NAMES:
        of = [subject for subject in TABLE if stream_of(subject) == stream]
        eats = stream not in HISTORY and any(service in subject.to for subject in of)
        knows = eats or stream in uses or (stream not in HISTORY and any(service in subject.by for subject in of))
        may = uses.get(stream, ())
        publish |= {
            f"$JS.API.STREAM.CREATE.{stream}": Use.MAKE in may,
            f"$JS.API.STREAM.UPDATE.{stream}": Use.MAKE in may,
            f"$JS.API.STREAM.DELETE.{stream}": False,
            f"$JS.API.STREAM.INFO.{stream}": knows,
            f"$JS.API.STREAM.PURGE.{stream}": Use.EMPTY in may,
            f"$JS.API.STREAM.MSG.GET.{stream}": Use.LOOK in may,
            f"$JS.API.STREAM.MSG.DELETE.{stream}": False,
            f"$JS.API.STREAM.SNAPSHOT.{stream}": False,
            f"$JS.API.STREAM.RESTORE.{stream}": False,
            f"$JS.API.DIRECT.GET.{stream}": False,
            f"$JS.API.CONSUMER.LIST.{stream}": Use.CONSUMERS in may,
            f"$JS.API.CONSUMER.NAMES.{stream}": False,
            f"$JS.API.CONSUMER.CREATE.{stream}": False,
            f"$JS.API.CONSUMER.CREATE.{stream}.c": False,
            f"$JS.API.CONSUMER.CREATE.{stream}.c.{FILTERS[stream]}": eats or Use.REPLAY in may,
            f"$JS.API.CONSUMER.CREATE.{stream}.c.other.x": False,
            f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.c": False,
            f"$JS.API.CONSUMER.DELETE.{stream}.c": eats or Use.CONSUMERS in may or Use.REPLAY in may,
            f"$JS.API.CONSUMER.INFO.{stream}.c": eats,
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.c": eats or Use.REPLAY in may,
            f"$JS.ACK.{stream}.c.1.1.1.1.0": eats,
        }
    for other in SERVICES:
        asks = any(isinstance(s, Call) and other in s.by and service in s.to for s in TABLE)
        publish[f"_INBOX.{other}.x"] = asks
        subscribe[f"_INBOX.{other}.x"] = other == service
    foreign = (
        "$SYS.REQ.SERVER.PING",
        KICK.format(server="X"),
        "$JS.API.STREAM.LIST",
        "$JS.API.STREAM.NAMES",
        "x",
        "_INBOX.x",
        f"_INBOX.{OPERATOR}.x",
    )
    publish |= {LOGINS: False, "$SYS._INBOX.x": service == SCHEDULER}
    subscribe |= {LOGINS: service == SCHEDULER, "$SYS._INBOX.>": False}
    publish |= dict.fromkeys(foreign, False)
    subscribe |= dict.fromkeys((">", "*.x", "_INBOX.>", "$JS.>", "$SYS.>", "metric.>", "group.>", "$JS.API.>"), False)
    return publish, subscribe


async def test_nats_users_follow_the_table(guarded: Guarded, figure: Figure) -> None:
    cells = allowed = 0
    for service in SERVICES:
        publish, subscribe = expected(service)
        password = guarded.access.password("nats", service)
        async with connected(guarded.server.url, user=service, password=password) as asker:
            for subject in publish:
                await asker.nc.publish(subject, b"x")
            for subject in subscribe:
                await asker.nc.subscribe(subject)
            await asker.said()
            for kind, wanted in (("publish", publish), ("subscription", subscribe)):
                for subject, may in wanted.items():
                    assert asker.was_refused(kind, subject) is not may, f"{service}: {kind} to {subject}"
        cells += len(publish) + len(subscribe)
        allowed += sum(publish.values()) + sum(subscribe.values())
    figure(f"NATS: {cells} cells, {allowed} allowed, {cells - allowed} refused")
    assert cells > 500 and 0 < allowed < cells / 3


async def test_nobody_without_the_password_of_a_user_comes_in(guarded: Guarded) -> None:
    """Nor does anybody else as long as no scheduler speaks for them."""
    wrong = [{"user": user, "password": "x" * 64} for user in ("scheduler", "root", "")]
    logins: list[dict[str, str]] = [{}, *wrong, {"user": OPERATOR, "password": ""}]
    came = await asyncio.gather(*(comes_in(guarded.server.url, **login) for login in logins))
    assert came == [False] * len(logins)


def bus_of(guarded: Guarded, service: str) -> AbstractAsyncContextManager[Bus]:
    return Bus.connect(guarded.server.url, service, service, guarded.access.password("nats", service))


async def test_services_have_private_inboxes(guarded: Guarded) -> None:
    """A request of the scheduler to an env worker, while a trainer tries to listen to everything."""

    async def answer(_: EnvCheck) -> EnvCheckReply:
        return EnvCheckReply()

    password = guarded.access.password("nats", TRAINER)
    async with (
        connected(guarded.server.url, user=TRAINER, password=password) as spy,
        bus_of(guarded, ENV) as env,
        bus_of(guarded, SCHEDULER) as scheduler,
    ):
        for subject in (">", "_INBOX.>", "_INBOX.scheduler.>", "env.check"):
            await spy.listen(subject)
        await spy.said()
        await env.serve(ENV_CHECK, answer, "env")
        await env.flush()
        check = EnvCheck(name="gsm8k", config={})
        assert (await soon(scheduler.request(ENV_CHECK, check, 30.0))).errors == []
        await spy.said()
        assert spy.heard == [] and len(spy.refused) == 4


async def test_streams_are_made_by_the_scheduler_and_awaited_by_the_others(tmp_path: Path) -> None:
    with guarded_nats(tmp_path) as guarded:
        async with bus_of(guarded, TRAINER) as trainer, bus_of(guarded, SCHEDULER) as scheduler:
            waiting = asyncio.create_task(trainer.await_streams(["GROUPS", "EXAMS"]))
            await until(lambda: trainer.nc.stats["out_msgs"] > 1)
            assert not waiting.done()
            await scheduler.ensure_streams()
            await soon(waiting)


KEYS = ("job:j", "job:j:events", "job:j:op:1", "jobs:of:t", "jobs:active", "jobs:ending", "worker:w", "workers",
        "leases", "adm:j", "adm:j:groups", "idem:t:k", "other", "key:k")  # fmt: skip
NEVER = (("flushall",), ("config", "get", "*"), ("keys", "*"), ("acl", "list"), ("shutdown",), ("debug", "sleep", "0"),
         ("script", "flush"), ("client", "kill", "id", "1"), ("client", "list"), ("monitor",), ("save",),
         ("bgrewriteaof",), ("replicaof", "no", "one"), ("function", "flush"), ("swapdb", "0", "1"),
         ("publish", "c", "m"))  # fmt: skip


async def test_redis_users_have_their_keys(guarded_valkey: Server, guarded: Guarded, figure: Figure) -> None:
    cells = allowed = 0
    password = guarded.access.password("valkey", OPERATOR)
    async with Store.connect(guarded_valkey.url, "test", OPERATOR, password) as store:

        async def may(user: str, *command: str) -> bool:
            return bool(await store.redis.execute_command("ACL", "DRYRUN", user, *command) == "OK")

        for service, key in itertools.product(SERVICES, KEYS):
            write, read = ([k.rstrip("*") for k in keys] for keys in REDIS_KEYS[service])
            writes = any(key == k or (key.startswith(k) and k[-1:] in (":", "")) for k in write)
            reads = writes or key in read
            assert await may(service, "set", key, "v") is writes, f"{service} writes {key}"
            if service in (ENV,):  # has no command for hashes
                assert await may(service, "get", key) is reads, f"{service} reads {key}"
                assert not await may(service, "hgetall", key)
            else:
                assert await may(service, "hmget", key, "f") is reads, f"{service} reads {key}"
            cells, allowed = cells + 2, allowed + writes + reads
        for user, command in itertools.product((*SERVICES, "default"), NEVER):
            assert not await may(user, *command), f"{user}: {command}"
            cells += 1
        for key in KEYS:
            assert not await may("default", "get", key)
            cells += 1
    figure(f"Redis: {cells} cells, {allowed} allowed, {cells - allowed} refused")
    assert cells > 200


async def test_each_service_of_the_tinker_api_may_do_its_work_in_redis(
    guarded_valkey: Server, guarded: Guarded
) -> None:
    """With each service's own user: one that lacks a command would stop all servers, and `dryrun` sees no scripts."""

    async with AsyncExitStack() as held:

        async def store_of(service: str) -> TinkerStore:
            password = guarded.access.password("valkey", service)
            opened = Store.connect(guarded_valkey.url, "test", service, password)
            return TinkerStore((await held.enter_async_context(opened)).redis)

        gateway, trainer, worker = [await store_of(service) for service in (SCHEDULER, TRAINER, ROLLOUT)]
        quota = Quota(job="j", tenant="t", minute=1, limit=1000)
        model = TinkerModel(id="s:train:0", tenant="t", job="j", base="b", lora=LoraShape(rank=1), created=1.0)
        await gateway.open_session(TinkerSession(id="s", tenant="t", created=1.0))
        await gateway.add_model(model)
        assert await gateway.ask(model.id, 0, "digest", tokens=5, quota=quota)
        assert await trainer.answer(Answer(request=f"{model.id}#0", result=Loaded()))
        made = TinkerCheckpoint(
            model=model.id, tenant="t", kind="weights", name="n", base="b", lora=model.lora, created=1.0, size=5, step=1
        )
        assert await trainer.add_checkpoint(made) and await trainer.checkpoints(model.id) == [made]
        sampler = Sampler(id="s:sampler:0", tenant="t", session="s", job="j", base="b", model=model.id, directory="/d")
        await trainer.add_sampler(sampler)
        assert await trainer.samplers_of(model.id) == [sampler] and await trainer.is_alive("s")
        await trainer.forget_use(model.id, [sampler.id])
        await trainer.set_unlisted("j", {"t": 1})
        await trainer.require_room_for_save("t", "j", "n")
        await trainer.leave_out(model.id, 3)
        await trainer.set_progress(model.id, ModelProgress(steps=1))
        for number in range(2):
            request = f"{sampler.id}#{number}"
            assert await gateway.ask_sample(request, "digest", quota, prompt=3, drawn=7) == ("new", 0)
            await gateway.sent(request, "j", "t")
            assert await worker.answered(request) is None
            await worker.begin_draw(request, alone=False)
            await worker.hand_back(request, alone=False)
            assert sum(await worker.losses(request)) == 0
            tokens = bytes(4 * 20 * number)
            drawn = Sampled(sequences=[SampleSequence(stop="stop", tokens=tokens, logprobs=tokens)])
            assert await worker.answer(Answer(request=request, result=drawn))
            await worker.drop_sample(request)
        for service in (trainer, worker):
            await TinkerSpent(service._redis).add("t", "s", "b", {"training": 5})
        (spent,) = await TinkerSpent(gateway._redis).between("t", (hour := int(time.time()) // HOUR_S) - 1, hour + 1)
        assert spent.amount == 10 and await TinkerSpent(gateway._redis).entries("t", hour - 1, hour + 1) == 1
        assert await gateway.remove_checkpoint(made)


def test_passwords_are_the_owners_alone_and_stay(tmp_path: Path) -> None:
    conf = nats_conf(tmp_path, 1)
    first = Access(tmp_path / "access", conf)
    made = {path.name: path.read_text() for path in first.folder.iterdir()}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in first.folder.iterdir())
    assert stat.S_IMODE(first.folder.stat().st_mode) == 0o700
    again = Access(tmp_path / "access", conf)
    assert {path.name: path.read_text() for path in again.folder.iterdir()} == made
    passwords = {again.password(server, user) for server in ("nats", "valkey") for user in (*SERVICES, OPERATOR)}
    assert len(passwords) == 2 * (len(SERVICES) + 1)
    assert not any(again.password("valkey", user) in again.valkey_users.read_text() for user in SERVICES), (
        "hashes alone"
    )


def test_a_deleted_password_is_made_anew(tmp_path: Path) -> None:
    conf = nats_conf(tmp_path, 1)
    first = Access(tmp_path / "access", conf)
    old, kept = first.password("nats", ENV), first.password("nats", TRAINER)
    first.password_file("nats", ENV).unlink()
    again = Access(tmp_path / "access", conf)
    assert again.password("nats", ENV) != old and again.password("nats", TRAINER) == kept
    assert again.password("nats", ENV) in (again.folder / "nats-users.conf").read_text()
