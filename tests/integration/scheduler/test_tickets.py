"""Room under the staleness law becomes tickets: each once, none lost, and a job that only fails is stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from nats.js.api import DiscardPolicy

from opentinker.services.scheduler.jobs.cleanup import JobCleaner
from opentinker.services.scheduler.jobs.tickets import JUDGED_FROM, TicketIssuer, ticket_seed
from opentinker.shared.evaluation.pool_draws import choose_opponent
from opentinker.shared.messaging.subjects import GROUP, GROUPS, SCORE, SCORES, TICKET, TICKETS, WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.admission import Admission
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Ending, JobState, Pool, Ticket
from opentinker.shared.types.pools import PoolRecord
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import WAIT_S, Server, soon, until
from tests.support.factories import make_group, make_ticket
from tests.support.scheduling import context, kinds, new_job, running

G, BATCH, ETA = 2, 2, 1
FRAMED = "LookupError: \n******\n  Resource 'words' not found.\n******"


async def restored(store: Store, job: str, steps: int = 100) -> Admission:
    """As the trainer of epoch 1 leaves it when it has loaded the model."""
    admission = Admission(store.redis, job, 1)
    await admission.restore(step=0, max_staleness=ETA, groups_per_batch=BATCH, total=steps * BATCH, discarded={})
    return admission


async def running_job(store: Store, id: str, **changes: object) -> str:
    return await new_job(store, id, JobState.RUNNING, **changes)


async def ready_job(store: Store, id: str) -> str:
    """A running job whose trainer has loaded the model."""
    await restored(store, await running_job(store, id))
    return id


async def tickets(ctx: Context, job: str) -> list[Ticket]:
    return await ctx.bus.stored(TICKET, job=job)


async def test_tickets_fill_the_room_and_no_more(ctx: Context, store: Store) -> None:
    job = await running_job(store, "j-fill", rollout__seed=5)
    issuer = TicketIssuer(ctx)
    await issuer.issue()
    assert await tickets(ctx, job) == []  # no trainer has loaded the model yet
    admission = await restored(store, job)
    for _ in range(3):
        await issuer.issue()
    found = await tickets(ctx, job)
    assert [t.seq for t in found] == list(range((ETA + 1) * BATCH))
    assert [t.row for t in found] == [t.seq for t in found]
    assert [t.seed for t in found] == [ticket_seed(5, seq) for seq in range(len(found))]
    assert {t.group_size for t in found} == {G}
    for seq in (0, 1):
        await admission.accept(seq)
    await admission.train(1, [0, 1])
    await issuer.issue()
    assert len(await tickets(ctx, job)) == (ETA + 1) * BATCH  # trained groups count until the version is raised
    await admission.set_version(1)
    await issuer.issue()
    assert len(await tickets(ctx, job)) == (ETA + 2) * BATCH


async def test_job_without_a_seed_has_the_start_states_of_seed_0(ctx: Context, store: Store) -> None:
    job = await ready_job(store, "j-unseeded")
    await TicketIssuer(ctx).issue()
    assert [t.seed for t in await tickets(ctx, job)] == [ticket_seed(0, seq) for seq in range((ETA + 1) * BATCH)]


async def test_a_wake_issues_at_once(ctx: Context, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await running_job(store, "j-wake")
    issuer, looked = TicketIssuer(ctx, poll_s=4 * WAIT_S), asyncio.Event()
    sweep = issuer.sweep

    async def first_sweep() -> None:
        await sweep()
        looked.set()

    monkeypatch.setattr(issuer, "sweep", first_sweep)
    async with running(issuer.run()):
        await soon(looked.wait())
        await restored(store, job)
        await ctx.bus.emit(WAKE, {"job": job}, who="admission")
        await until(lambda: tickets(ctx, job))


def test_seeds_are_the_same_on_every_machine_and_differ_by_group() -> None:
    assert ticket_seed(0, 0) == 2993405329634522
    seeds = {ticket_seed(seed, seq) for seed in range(20) for seq in range(500)}
    assert len(seeds) == 10_000
    assert max(seeds) < 2**53


async def test_numbers_issued_before_a_crash_get_their_tickets(ctx: Context, store: Store) -> None:
    job = await running_job(store, "j-crash")
    admission = await restored(store, job)
    await admission.issue(3)  # and here the scheduler was killed
    anew = TicketIssuer(ctx)
    await anew.issue()
    assert [t.seq for t in await tickets(ctx, job)] == [3]
    for _ in range(2):
        await anew.sweep()
    assert sorted(t.seq for t in await tickets(ctx, job)) == [0, 1, 2, 3]


async def test_a_job_that_wants_absurdly_much_starves_nobody(ctx: Context, store: Store) -> None:
    huge = await running_job(store, "j-huge", tenant="greedy")
    await Admission(store.redis, huge, 1).restore(
        step=0, max_staleness=ETA, groups_per_batch=2**31, total=2**40, discarded={}
    )
    job = await running_job(store, "j-small")
    admission = await restored(store, job)
    steps = iter(range(1, 100))

    async def train_one() -> None:
        step = next(steps)
        await until(lambda: tickets_are_out(step))
        seqs = (await admission.running())[:BATCH]
        for seq in seqs:
            await admission.accept(seq)
        await admission.train(step, seqs)
        await admission.set_version(step)

    async def tickets_are_out(step: int) -> bool:
        return len(await tickets(ctx, job)) >= (ETA + step) * BATCH

    async with running(TicketIssuer(ctx).run()):
        await until(lambda: tickets(ctx, huge))
        for _ in range(3):
            await train_one()
        await store.transition(huge, JobState.CANCELLED)
        clearing = JobCleaner(ctx, UNFENCED)
        await clearing.clean()
        for _ in range(3):
            await train_one()
        assert (await Admission(store.redis, huge).issue(1))[1] == []
        await clearing.sweep()  # a portion that was on its way when the job was cleared
        assert await tickets(ctx, huge) == []


async def test_claimed_ticket_is_not_stored_again(ctx: Context, store: Store) -> None:
    job = await ready_job(store, "j-claimed")
    issuer = TicketIssuer(ctx)
    await issuer.issue()
    consumer = await ctx.bus.consume(TICKET, f"roll-{job}", batch=2, job=job)
    assert await consumer.next(WAIT_S) is not None
    for _ in range(2):
        await issuer.sweep()
    assert len(await tickets(ctx, job)) == (ETA + 1) * BATCH
    await consumer.close(delete=True)


async def test_lost_ticket_of_a_running_group_comes_back(ctx: Context, store: Store) -> None:
    job = await ready_job(store, "j-lost")
    issuer = TicketIssuer(ctx)
    await issuer.issue()
    assert TICKETS.name is not None
    await ctx.bus.purge(TICKETS.name, TICKET.at(job=job))
    for _ in range(2):  # the first sweep uses the old id, which the server takes for a repetition
        await issuer.sweep()
    assert sorted(t.seq for t in await tickets(ctx, job)) == list(range((ETA + 1) * BATCH))


async def test_tickets_wait_for_room(own_server: Server, valkey_server: Server, store: Store, tmp_path: Path) -> None:
    job = await ready_job(store, "j-full")
    async with context(own_server, valkey_server, "scheduler-0", tmp_path) as ctx:
        await ctx.bus.js.update_stream(TICKETS.evolve(max_msgs=1, discard=DiscardPolicy.NEW))
        issuer = TicketIssuer(ctx)
        await issuer.issue()
        await issuer.sweep()
        assert len(await tickets(ctx, job)) == 1
        await ctx.bus.ensure_streams()
        await issuer.sweep()
        assert sorted(t.seq for t in await tickets(ctx, job)) == list(range((ETA + 1) * BATCH))


async def fail_groups(ctx: Context, issuer: TicketIssuer, job: str, count: int, reason: Ending) -> None:
    admission = Admission(ctx.store.redis, job)
    for _ in range(count):
        await issuer.issue()
        await admission.fail((await admission.running())[0], reason)


async def test_job_that_only_fails_is_stopped_with_the_reasons(ctx: Context, store: Store) -> None:
    job = await ready_job(store, "j-failing")
    issuer = TicketIssuer(ctx)
    await fail_groups(ctx, issuer, job, 4, Ending.ENV_TIMEOUT)
    await store.update(job, event="group_failed", detail={"error": FRAMED})
    await fail_groups(ctx, issuer, job, JUDGED_FROM - 5, Ending.ENV_ERROR)
    assert (await store.job(job)).state == JobState.RUNNING
    await fail_groups(ctx, issuer, job, 1, Ending.ENV_ERROR)
    await issuer.issue()
    record = await store.job(job)
    assert record.state == JobState.FAILED
    assert record.reason == (
        "20 of 20 groups failed (rollout.max_failed_share is 0.5): env_error 16, env_timeout 4; "
        "last error: LookupError: Resource 'words' not found."
    )


async def test_failures_within_the_allowed_share_are_lived_with(ctx: Context, store: Store) -> None:
    job = await running_job(store, "j-some", rollout__max_failed_share=0.5)
    admission = await restored(store, job)
    issuer = TicketIssuer(ctx)
    for step in range(1, 9):
        await issuer.issue()
        seqs = (await admission.running())[:BATCH]
        for seq in seqs:
            await admission.accept(seq)
        await admission.train(step, seqs)
        await admission.set_version(step)
    await fail_groups(ctx, issuer, job, 8 * BATCH, Ending.ENV_ERROR)
    await issuer.issue()
    assert (await store.job(job)).state == JobState.RUNNING
    await fail_groups(ctx, issuer, job, 1, Ending.ENV_ERROR)
    await issuer.issue()
    assert (await store.job(job)).state == JobState.FAILED
    assert (await kinds(store, job))[-1] == "failed"


async def test_messages_of_an_ended_job_are_removed(ctx: Context, store: Store) -> None:
    job = await ready_job(store, "j-over")
    await TicketIssuer(ctx).issue()
    await ctx.bus.publish(GROUP, make_group(job=job), "g", job=job)
    await (await ctx.bus.consume(TICKET, f"roll-{job}", batch=2, job=job)).close()
    await (await ctx.bus.consume(GROUP, f"train-{job}", batch=2, job=job)).close()
    worker = WorkerInfo(id="rollout-9", incarnation="i", pool=Pool.ROLLOUT, host="here", pid=1, job=job)
    await store.beat(worker, 60.0)
    await store.transition(job, JobState.SUCCEEDED)
    clearing = JobCleaner(ctx, UNFENCED)
    await clearing.clean()
    assert await tickets(ctx, job) != []
    await store.leave(worker)
    await clearing.clean()
    assert TICKETS.name is not None and GROUPS.name is not None
    assert await tickets(ctx, job) == []
    assert await ctx.bus.count(GROUPS.name, GROUP.at(job=job)) == 0
    for stream in (TICKETS.name, GROUPS.name):
        assert [c.name for c in await ctx.bus.js.consumers_info(stream) if job in c.name] == []
    assert await store.ending_jobs() == []
    ledger = await Admission(store.redis, job).ledger()
    assert (ledger.issued, ledger.balanced) == ((ETA + 1) * BATCH, True)
    assert not await store.redis.exists(f"adm:{job}:groups"), "one entry per group for ever"


async def test_messages_that_arrive_after_the_clearing_are_swept(ctx: Context, store: Store) -> None:
    """A ticket on its way; a group that reference-forward was scoring when its job was cancelled."""
    alive, over = await running_job(store, "j-alive"), await running_job(store, "j-late")
    await store.transition(over, JobState.CANCELLED)
    clearing = JobCleaner(ctx, UNFENCED)
    await clearing.clean()
    for job in (alive, over):
        await ctx.bus.publish(TICKET, make_ticket(job=job), f"{job}/0", job=job)
        for subject in (SCORE, GROUP):
            await ctx.bus.publish(subject, make_group(job=job), f"{job}/0:a", job=job)

    async def left(job: str) -> list[int]:
        streams = ((TICKETS, TICKET), (SCORES, SCORE), (GROUPS, GROUP))
        return [await ctx.bus.count(str(stream.name), subject.at(job=job)) for stream, subject in streams]

    await clearing.sweep()
    assert await left(alive) == [1, 1, 1]
    assert await left(over) == [0, 0, 0]
    await clearing._clear(await ctx.store.job(alive))


async def test_a_ticket_names_the_members_of_its_pools_and_again_when_it_is_lost(ctx: Context, store: Store) -> None:
    pool = {"every": 2, "rule": "pfsp_hard", "latest": 0.2, "stretch": 2}
    seats = {"odd": {"pool": "past"}}
    job = await running_job(store, "j-pool", rollout__seed=5, pools={"past": pool}, seats=seats)
    members, rates = ["0.0", "1.2", "1.4"], {"0.0": 0.9, "1.2": 0.1, "1.4": 0.5}
    admission = Admission(store.redis, job, 1)
    await admission.set_pools({"past": PoolRecord(members=members, win_rates=rates)})
    await admission.restore(step=0, max_staleness=9, groups_per_batch=BATCH, total=2 * BATCH * 10, discarded={})
    issuer = TicketIssuer(ctx)
    await issuer.issue()
    drawn = [
        choose_opponent(members, rates, rule="pfsp_hard", latest=0.2, seed=5, match=seq // 2, pool="past")
        for seq in range(10 * BATCH)
    ]
    found = await tickets(ctx, job)
    assert [ticket.opponents for ticket in found] == [{"past": member} for member in drawn] and len(set(drawn)) > 1
    assert TICKETS.name is not None
    await ctx.bus.purge(TICKETS.name, TICKET.at(job=job))
    await issuer.sweep()
    await issuer.sweep()
    assert [ticket.opponents["past"] for ticket in await tickets(ctx, job)] == drawn
