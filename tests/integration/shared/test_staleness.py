"""The staleness law and the ledger against a plain model, over random schedules with crashes."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import redis.asyncio as aioredis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from opentinker.shared.state import admission as module
from opentinker.shared.state.admission import Admission
from opentinker.shared.state.group_ledger import Ledger
from opentinker.shared.state.staleness import MAX_OPEN
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Discard, Ending, JobState, WeightVersion
from opentinker.shared.types.errors import Fenced
from tests.conftest import Server
from tests.support.scheduling import new_job

T = TypeVar("T")
REASONS = (Ending.ENV_ERROR, Ending.ENV_TIMEOUT)


@dataclass
class Entry:
    """One group as the model sees it."""

    version: WeightVersion
    state: str = "r"
    """r running, p pending, t trained, d discarded"""
    batch: int = 0
    reason: str = ""
    forgotten: bool = False


@dataclass
class Model:
    """What must hold, written without counters: every number is counted from the groups themselves."""

    eta: int
    batch: int
    total: int
    epoch: int = 1
    step: int = 0
    served: int = 0
    groups: dict[int, Entry] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    checkpoints: list[int] = field(default_factory=list)
    committed: int = 0
    """Nobody goes back behind this step."""
    resumed: dict[int, int] = field(default_factory=dict)

    def these(self, state: str) -> list[int]:
        return [seq for seq, group in self.groups.items() if group.state == state]

    def discarded(self, up_to: int | None = None) -> dict[str, int]:
        ours = [g for g in self.groups.values() if g.state == "d" and (up_to is None or g.batch <= up_to)]
        return dict(Counter(group.reason for group in ours))

    def room(self) -> int:
        busy = len(self.these("t")) + len(self.these("p")) + len(self.these("r"))
        return min((self.eta + self.served + 1) * self.batch, self.total) - busy

    def answer(self, seq: int) -> str:
        group = self.groups.get(seq)
        if group is None or group.forgotten or group.state == "f":
            return "unknown"
        return "ok" if group.state == "r" else group.state

    def rolled_back(self, seq: int) -> bool:
        version = self.groups[seq].version
        return any(version.epoch < epoch and version.step > at for epoch, at in self.resumed.items())

    def restore(self, step: int) -> None:
        self.epoch += 1
        self.step = self.served = step
        self.resumed[self.epoch] = step
        self.checkpoints = [s for s in self.checkpoints if s <= step]
        for group in self.groups.values():
            if group.state in "td" and group.batch > step:
                group.state, group.batch, group.reason = "p", 0, ""


class Schedule(RuleBasedStateMachine):
    """One job with everything that may happen to it."""

    fifo = True
    """Batches are taken in order of group numbers, as the law assumes; else any pending groups are taken."""
    jobs = itertools.count()

    def __init__(self, redis: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.redis, self.loop = redis, loop

    def wait(self, call: Awaitable[T]) -> T:
        return self.loop.run_until_complete(call)

    @initialize(eta=st.integers(0, 3), batch=st.integers(1, 4), batches=st.integers(1, 8))
    def begin(self, eta: int, batch: int, batches: int) -> None:
        self.job = f"model-{next(self.jobs)}"
        self.model = Model(eta, batch, batch * batches)
        self.anyone = Admission(self.redis, self.job)
        self.restore_redis()

    def restore_redis(self) -> None:
        model = self.model
        self.trainer = Admission(self.redis, self.job, model.epoch)
        self.wait(
            self.trainer.restore(
                step=model.step,
                max_staleness=model.eta,
                groups_per_batch=model.batch,
                total=model.total,
                discarded=model.discarded(model.step),
                next_seq=len(model.groups),
            )
        )

    # --- what may happen --------------------------------------------------------------------------------------------

    @rule(want=st.integers(0, 20))
    def issue(self, want: int) -> None:
        model = self.model
        room = max(0, min(want, model.room()))
        version, seqs = self.wait(self.anyone.issue(want))
        assert seqs == list(range(len(model.groups), len(model.groups) + room))
        assert version == WeightVersion(model.epoch, model.served)
        for seq in seqs:
            model.groups[seq] = Entry(version)
        if seqs:
            assert model.room() >= 0, "the law is broken"

    @rule(back=st.integers(-1, 12), times=st.integers(1, 2), data=st.data())
    def accept(self, back: int, times: int, data: st.DataObject) -> None:
        seq = self.some_seq(back, data)
        for _ in range(times):
            expected = self.model.answer(seq)
            assert self.wait(data.draw(st.sampled_from([self.anyone, self.trainer])).accept(seq)) == expected
            if expected == "ok":
                self.model.groups[seq].state = "p"

    @rule()
    def accept_all(self) -> None:
        for seq in self.model.these("r"):
            assert self.wait(self.anyone.accept(seq)) == "ok"
            self.model.groups[seq].state = "p"

    @rule(back=st.integers(-1, 12), reason=st.sampled_from(REASONS), data=st.data())
    def fail(self, back: int, reason: Ending, data: st.DataObject) -> None:
        seq = self.some_seq(back, data)
        answer = self.wait(self.anyone.fail(seq, reason))
        if self.model.answer(seq) != "ok":
            assert answer is None
            return
        self.model.groups[seq].state = "f"
        self.model.failed[reason] += 1
        assert answer is not None and answer[0] == self.model.failed.total()

    def some_seq(self, back: int, data: st.DataObject) -> int:
        running = self.model.these("r")
        choice: int = data.draw(st.sampled_from([-1, *running]))
        if choice >= 0:
            return choice
        return len(self.model.groups) - 1 - back

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        """What the trainer does: drop what must not train, then take a batch, if there is one."""
        model = self.model
        live = sorted(model.these("p") + model.these("r"))
        ready = list(itertools.takewhile(lambda seq: model.groups[seq].state == "p", live))
        self.consume(ready if self.fifo else data.draw(st.permutations(model.these("p"))))

    def train_what_is_there(self) -> None:
        if not self.model.these("r"):
            self.consume(sorted(self.model.these("p")))

    def consume(self, ready: list[int]) -> None:
        model = self.model
        keep: list[int] = []
        for seq in ready:
            reason = self.verdict(seq)
            if reason is not None:
                assert self.wait(self.trainer.discard(model.step + 1, reason, [seq, seq])) == 1
                group = model.groups[seq]
                group.state, group.batch, group.reason = "d", model.step + 1, reason.value
            elif len(keep) < model.batch:
                keep.append(seq)
        if len(keep) < model.batch or model.step * model.batch >= model.total:
            return
        assert self.wait(self.trainer.train(model.step + 1, keep)) == len(keep)
        for seq in keep:
            model.groups[seq].state, model.groups[seq].batch = "t", model.step + 1
        model.step += 1

    def verdict(self, seq: int) -> Discard | None:
        model = self.model
        if seq % 7 == 3:
            return Discard.INVALID
        if model.rolled_back(seq):
            return Discard.FROM_FUTURE
        if model.step - model.groups[seq].version.step <= model.eta:
            return None
        assert not self.fifo, "the law let a group in that came too late"
        return Discard.STALE

    @rule()
    def round(self) -> None:
        """An uneventful step, so that schedules get far."""
        self.issue(20)
        self.accept_all()
        self.train_what_is_there()
        self.serve_version()

    @rule()
    def serve_version(self) -> None:
        self.wait(self.trainer.set_version(self.model.step))
        self.model.served = self.model.step

    @precondition(lambda self: self.model.step not in (0, *self.model.checkpoints))
    @rule()
    def checkpoint(self) -> None:
        model = self.model
        if model.checkpoints:  # one behind: the newest may turn out to be damaged
            model.committed = model.checkpoints[-1]
            self.wait(self.trainer.commit(model.committed))
            for group in model.groups.values():
                if group.state in "td" and group.batch <= model.committed:
                    group.forgotten = True
        model.checkpoints = [*model.checkpoints[-1:], model.step]

    @rule(back=st.integers(1, 2))
    def crash(self, back: int) -> None:
        """A new trainer goes on from the newest or the second newest checkpoint."""
        steps = [step for step in (0, *self.model.checkpoints) if step >= self.model.committed]
        self.model.restore(steps[-min(back, len(steps))])
        self.restore_redis()

    @precondition(lambda self: self.model.epoch > 1)
    @rule(data=st.data())
    def old_epoch(self, data: st.DataObject) -> None:
        old = Admission(self.redis, self.job, data.draw(st.integers(0, self.model.epoch - 1)))
        seqs = list(self.model.groups)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: old.train(99, seqs),
            lambda: old.discard(99, Discard.STALE, [0, *seqs]),
            lambda: old.set_version(99),
            lambda: old.commit(99),
            lambda: old.accept(0),
            lambda: old.issue(3),
            lambda: old.restore(step=9, max_staleness=9, groups_per_batch=9, total=99, discarded={}),
        ]
        before = self.stored()
        with pytest.raises(Fenced):
            self.wait(data.draw(st.sampled_from(calls))())
        assert self.stored() == before

    def stored(self) -> list[dict[str, str]]:
        return [self.wait(self.redis.hgetall(key)) for key in (f"adm:{self.job}", f"adm:{self.job}:groups")]

    # --- what must always hold --------------------------------------------------------------------------------------

    @invariant()
    def ledger_agrees(self) -> None:
        if not hasattr(self, "model"):
            return
        ledger: Ledger = self.wait(self.anyone.ledger())
        model = self.model
        assert ledger.balanced
        assert ledger.issued == len(model.groups)
        assert ledger.running == len(model.these("r"))
        assert ledger.pending == len(model.these("p"))
        assert ledger.trained == len(model.these("t")) == model.step * model.batch
        assert {k: n for k, n in ledger.discarded.items() if n} == model.discarded()
        assert ledger.failed == dict(model.failed)
        assert ledger.version == WeightVersion(model.epoch, model.served)
        assert self.wait(self.anyone.running()) == sorted(model.these("r"))


class AnyOrder(Schedule):
    """Groups are consumed as they happen to arrive: late ones are dropped at assembly, the ledger still balances."""

    fifo = False


@pytest.fixture
def run(valkey_server: Server) -> Iterator[Callable[..., None]]:
    loop = asyncio.new_event_loop()
    redis = aioredis.from_url(valkey_server.url, decode_responses=True)

    def run(machine: type[Schedule], examples: int, steps: int = 40, **more: Any) -> None:
        run_state_machine_as_test(
            lambda: machine(redis, loop),  # type: ignore[arg-type]
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                **more,
            ),
        )

    yield run
    loop.run_until_complete(redis.aclose())
    loop.close()


@pytest.mark.parametrize("machine", [Schedule, AnyOrder])
def test_law_and_ledger_hold_on_random_schedules(run: Callable[..., None], machine: type[Schedule]) -> None:
    run(machine, 25)


FAULTS = {
    "law one batch too wide": ("version + 1) * num(p, 'batch')", "version + 2) * num(p, 'batch')"),
    "total ignored": ("* num(p, 'batch'), num(p, 'total'))", "* num(p, 'batch'), 999)"),
    "pending groups not counted": ("num(p, 'trained') + num(p, 'pending') +", "num(p, 'trained') +"),
    "group accepted twice": (
        "elseif state == 'r' then\n      unchanged",
        "elseif state == 'r' or state == 'p' then\n      unchanged",
    ),
    "failed group still running": ("add(p, 'running', -1)", "if op ~= 'fail' then add(p, 'running', -1) end"),
    "restore keeps what was consumed": ("if tag_of(state) > step then", "if tag_of(state) > step + 1 then"),
    "restore forgets what a damaged checkpoint covers": (
        "elseif state == 'p' then",
        "elseif tag_of(state) >= 0 then redis.call('HDEL', me.G, seq) elseif state == 'p' then",
    ),
    "commit forgets too much": ("tag <= tonumber(ARGV[4])", "tag <= tonumber(ARGV[4]) + 2"),
    "old epochs may write": ("epoch < owner", "epoch < num(me, 'epoch') - 1"),
    "discard not counted": ("else add(me, 'discard:' .. ARGV[5], done) end", "end"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    right, wrong = FAULTS[fault]
    assert right in module._SCRIPT
    monkeypatch.setattr(module, "_SCRIPT", module._SCRIPT.replace(right, wrong))
    with pytest.raises(BaseException, match=r"assert|DID NOT RAISE|law|late"):
        run(Schedule, 400, phases=[Phase.generate], print_blob=False)


async def restored(ours: Admission, **changes: Any) -> Admission:
    fields: dict[str, Any] = {"step": 0, "max_staleness": 1, "groups_per_batch": 4, "total": 100, "discarded": {}}
    await ours.restore(**(fields | changes))
    return ours


async def admission(store: Store, job: str, epoch: int = 1, **changes: Any) -> Admission:
    return await restored(Admission(store.redis, job, epoch), **changes)


async def test_nothing_is_issued_before_the_trainer_has_started(store: Store) -> None:
    assert (await Admission(store.redis, "none").issue(5))[1] == []


async def test_only_a_trainer_restores(store: Store) -> None:
    with pytest.raises(ValueError, match="epoch"):
        await admission(store, "j", epoch=-1)


async def test_used_group_numbers_stay_used_when_redis_lost_them(store: Store) -> None:
    ours = await admission(store, "j", next_seq=17)
    assert (await ours.issue(2))[1] == [17, 18]


async def test_a_lost_reply_repeats_no_operation(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client repeats a command whose reply it lost: the answer and the effect are those of the first time."""
    ours = await admission(store, "j")
    once = ours._script

    async def twice(**call: Any) -> Any:
        await once(**call)
        return await once(**call)

    monkeypatch.setattr(ours, "_script", twice)
    assert (await ours.issue(3))[1] == [0, 1, 2]
    assert await ours.accept(0) == "ok"
    assert await ours.accept(1) == "ok"
    assert await ours.fail(2, Ending.ENV_ERROR) == (1, 2)
    assert await ours.train(1, [0]) == 1
    assert await ours.discard(1, Discard.INVALID, [1]) == 1
    ledger = await ours.ledger()
    assert (ledger.issued, ledger.running, ledger.trained, ledger.pending, ledger.accepted) == (3, 0, 1, 0, 2)
    assert ledger.balanced


async def test_an_operation_that_does_nothing_writes_nothing(store: Store) -> None:
    """The ticket loop asks for room five times a second per job: no key, and no line in the log on the disk."""
    ours = await admission(store, "j", total=1)
    assert (await ours.issue(5))[1] == [0]
    assert await ours.accept(0) == "ok"

    async def written() -> tuple[int, int]:
        return await store.redis.dbsize(), (await store.redis.info("persistence"))["rdb_changes_since_last_save"]

    before = await written()
    assert (await ours.issue(5))[1] == []
    assert await ours.accept(0) == "p" and await ours.accept(9) == "unknown"
    assert await ours.fail(0, Ending.ENV_ERROR) is None
    assert await ours.train(1, [9]) == 0
    assert await written() == before


async def test_cleared_job_keeps_its_ledger(store: Store) -> None:
    ours = await admission(store, "j")
    await ours.issue(4)
    await ours.accept(0)
    await ours.fail(1, Ending.ENV_ERROR)
    before = await ours.ledger()
    await ours.clear()
    assert await ours.ledger() == before and before.balanced
    assert await ours.running() == [] and await ours.accept(1) == "unknown"
    assert (await ours.issue(1))[1] == [], "a cleared job starts nothing, however much room its law leaves"


async def test_concurrent_issue_never_exceeds_the_law(store: Store) -> None:
    ours = await admission(store, "j")
    got = await asyncio.gather(*(Admission(store.redis, "j").issue(3) for _ in range(20)))
    seqs = [seq for _, some in got for seq in some]
    assert sorted(seqs) == list(range(8))
    assert (await ours.ledger()).running == 8


async def test_open_groups_have_a_bound_whatever_the_law_allows(store: Store) -> None:
    ours = await admission(store, "j", groups_per_batch=2**31, total=2**40)
    assert (await ours.issue(MAX_OPEN - 1))[1] == list(range(MAX_OPEN - 1))
    assert (await ours.issue(64))[1] == [MAX_OPEN - 1]
    assert (await ours.issue(64))[1] == []
    await ours.accept(0)
    await ours.fail(1, Ending.ENV_ERROR)
    assert (await ours.issue(64))[1] == [MAX_OPEN, MAX_OPEN + 1], "each that ends makes room for another"


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.PAUSED, JobState.CANCELLED])
async def test_a_job_without_workers_is_issued_nothing(store: Store, state: JobState) -> None:
    job = await new_job(store, f"j-{state}", JobState.RUNNING)
    ours = await admission(store, job)
    assert (await ours.issue(1))[1] == [0]
    await store.transition(job, state)
    assert (await ours.issue(1))[1] == []


# --- several policies ---------------------------------------------------------------------------------------------

PAIR = ("a", "b")


async def policy(store: Store, job: str, name: str, epoch: int = 1, **changes: Any) -> Admission:
    """The trainer of one of two policies."""
    return await restored(Admission(store.redis, job, epoch, policies=PAIR, policy=name), **changes)


async def pair(
    store: Store, job: str, batches: tuple[int, int] = (4, 2), **changes: Any
) -> tuple[Admission, Admission]:
    """Two trainers of one job, which take as many groups a step."""
    a, b = [
        await policy(store, job, name, groups_per_batch=batch, **changes)
        for name, batch in zip(PAIR, batches, strict=True)
    ]
    return a, b


async def test_a_match_starts_only_while_every_policy_has_room(store: Store) -> None:
    a, b = await pair(store, "two")
    assert (await a.issue(50))[1] == [0, 1, 2, 3]  # b: 2 versions of 2 groups; a alone would have room for 8
    assert (await b.issue(50))[1] == []
    for seq in range(4):
        assert await a.accept(seq) == "ok"
        assert await b.accept(seq) == "p"  # one acceptance is for all
    assert await b.train(1, [0, 1]) == 2
    await b.set_version(1)
    assert (await a.issue(50))[1] == [4, 5]
    assert await a.train(1, [0, 1, 2, 3]) == 4
    assert [(x.trained, x.pending, x.running, x.balanced) for x in [await a.ledger(), await b.ledger()]] == [
        (4, 0, 2, True),
        (2, 2, 2, True),
    ]


@pytest.mark.parametrize("gate", ["all", "fastest"])
async def test_no_match_starts_before_the_last_policy_is_restored(store: Store, gate: Any) -> None:
    a = await policy(store, f"half-{gate}", "a", step=3, gate=gate)
    assert (await a.issue(5))[1] == []


async def test_a_failed_match_is_void_for_all(store: Store) -> None:
    a, b = await pair(store, "void")
    await a.issue(1)
    assert await b.fail(0, Ending.ENV_ERROR) == (1, 0)
    assert await a.accept(0) == await b.accept(0) == "unknown"
    for one in (a, b):
        ledger = await one.ledger()
        assert (ledger.running, ledger.failed) == (0, {"env_error": 1}) and ledger.balanced


async def test_a_finished_policy_gates_no_match_and_counts_what_is_over_as_surplus(store: Store) -> None:
    a, b = await pair(store, "over", total=4)
    assert (await a.issue(9))[1] == [0, 1, 2, 3]
    for seq in range(4):
        await a.accept(seq)
    assert await a.discard(1, Discard.STALE, [0]) == 1  # a needs one more match than b
    assert await b.train(1, [0, 1]) == await b.train(2, [2, 3]) == 2
    await b.set_version(2)
    assert (await a.issue(9))[1] == [4], "b has had all that it may, and evaluates its last weights"
    assert await b.accept(4) == "ok"
    assert await b.finish(Discard.SURPLUS) == 1
    assert await b.accept(4) == "unknown" and await a.accept(4) == "p"
    assert await a.discard(1, Discard.STALE, [4]) == 1
    assert (await a.issue(9))[1] == [5]
    assert await b.accept(5) == "unknown" and await a.accept(5) == "p"
    assert await a.train(1, [1, 2, 3, 5]) == 4
    assert (await a.ledger()).balanced and (await b.ledger()).balanced


async def test_a_finished_policy_s_ledger_keeps_its_surplus_when_the_trainer_restarts(store: Store) -> None:
    a, b = await pair(store, "kept", total=4)
    await a.issue(9)
    for seq in range(4):
        await a.accept(seq)
    await a.discard(1, Discard.STALE, [0])
    await b.train(1, [0, 1])
    await b.discard(2, Discard.STALE, [2])
    await b.finish(Discard.SURPLUS)
    before = await b.ledger()
    assert (before.accepted, before.discarded, before.balanced) == (4, {"stale": 1, "surplus": 1}, True)
    for epoch in (2, 3):  # its last checkpoint is of step 1
        b = await policy(store, "kept", "b", epoch, step=1, groups_per_batch=2, total=4)
        ledger = await b.ledger()
        assert ledger.balanced and ledger.discarded["surplus"] == epoch - 1, "what it had undone, it discards again"
        await b.finish(Discard.SURPLUS)
        ledger = await b.ledger()
        assert (ledger.accepted, sum(ledger.discarded.values()), ledger.balanced) == (4, 2, True)
    b = await policy(store, "kept", "b", 4, groups_per_batch=2, total=4)  # the checkpoint of step 1 is damaged
    assert (await b.ledger()).discarded == {} and (await b.ledger()).balanced


async def test_policies_go_back_to_checkpoints_of_their_own(store: Store) -> None:
    a, b = await pair(store, "back")
    await a.issue(4)
    for seq in range(4):
        await a.accept(seq)
    await a.train(1, [0, 1, 2, 3])
    await b.train(1, [0, 1])
    second = await policy(store, "back", "a", 2), await policy(store, "back", "b", 2, step=1, groups_per_batch=2)
    ledgers = [await one.ledger() for one in second]
    assert [(x.trained, x.pending) for x in ledgers] == [(0, 4), (2, 2)] and all(x.balanced for x in ledgers)
    with pytest.raises(Fenced):
        await a.train(1, [0])


# --- schedules ----------------------------------------------------------------------------------------------------


async def scheduled(store: Store, job: str, **changes: Any) -> tuple[Admission, Admission]:
    return await pair(store, job, (2, 2), **{"max_staleness": 0, **changes})


async def play(one: Admission) -> list[int]:
    """Play what may start."""
    seqs = (await one.issue(50))[1]
    for seq in seqs:
        await one.accept(seq)
    return seqs


async def test_the_fastest_gates_alone(store: Store) -> None:
    a, b = await scheduled(store, "drop", gate="fastest")
    assert await play(a) == [0, 1], "both are as fast"
    assert await a.train(1, [0, 1]) == 2
    assert await play(a) == [], "its new version is not served"
    await a.set_version(1)
    assert await play(a) == [2, 3]
    await a.train(2, [2, 3])
    await a.set_version(2)
    assert await play(b) == [4, 5], "whoever asks"
    assert (await b.ledger()).pending == 6
    assert await b.discard(1, Discard.SURPLUS, [0, 1]) == 2 and await play(b) == []
    assert await a.finish(Discard.SURPLUS) == 2
    assert await b.train(1, [2, 3]) == 2
    await b.set_version(1)
    assert await play(b) == [], "alone it gates itself: two more are pending"
    assert await b.train(2, [4, 5]) == 2
    await b.set_version(2)
    assert await play(b) == [6, 7]
    assert (await a.ledger()).balanced and (await b.ledger()).balanced


async def test_a_step_of_several_batches_counts_as_one(store: Store) -> None:
    a, b = await scheduled(store, "grow", gate="fastest")
    for step in (1, 2, 3):
        await a.train(step, await play(a))
        await a.set_version(step)
    assert await b.train(1, [0, 1, 2, 3, 4, 5]) == 6
    await b.set_version(1)
    ledger = await b.ledger()
    assert (ledger.trained, ledger.pending, ledger.balanced) == (6, 0, True)
    await a.finish(Discard.SURPLUS)
    assert await play(b) == [6, 7], "room for a batch after one step, not after three"
    again = await policy(store, "grow", "b", 2, step=1, trained=6, gate="fastest", max_staleness=0, groups_per_batch=2)
    ledger = await again.ledger()
    assert (ledger.trained, ledger.pending, ledger.balanced) == (6, 2, True)
    assert await again.train(2, [6, 7]) == 2
    await again.set_version(2)
    assert await play(again) == [8, 9]


async def test_only_the_policy_whose_turn_it_is_gates_and_starts_no_more_than_its_turn_needs(store: Store) -> None:
    a, b = await scheduled(store, "turns", gate="turn", turn=2, max_staleness=5)
    assert await play(b) == [0, 1, 2, 3], "two steps, though its staleness allows more"
    assert await b.discard(1, Discard.RESTING, [0, 1, 2, 3]) == 4
    assert await play(a) == []
    await a.train(1, [0, 1])
    await a.train(2, [2, 3])
    await a.set_version(1)
    assert await play(a) == [], "the last version of its turn is not served"
    await a.set_version(2)
    assert await play(a) == [4, 5, 6, 7]
    assert await a.discard(3, Discard.RESTING, [4, 5, 6, 7]) == 4
    await b.train(1, [4, 5])
    await b.train(2, [6, 7])
    await b.set_version(2)
    assert await play(a) == [8, 9, 10, 11]
    assert (await a.ledger()).balanced and (await b.ledger()).balanced


async def test_in_lockstep_the_one_that_lacks_matches_gates(store: Store) -> None:
    a, b = await scheduled(store, "step", gate="neediest")
    assert await play(a) == [0, 1]
    assert await a.discard(1, Discard.ABSENT, [0]) == 1
    assert await play(b) == [2], "b has all it needs, a lacks one"
    assert await b.train(1, [0, 1]) == 2 and await b.discard(2, Discard.STALE, [2]) == 1
    assert await a.train(1, [1, 2]) == 2
    await a.set_version(1)
    await b.set_version(1)
    assert await play(a) == [3, 4]


async def test_in_lockstep_nothing_starts_while_only_one_new_version_is_served(store: Store) -> None:
    a, b = await scheduled(store, "swap", gate="neediest")
    seqs = await play(a)
    await a.train(1, seqs)
    await b.train(1, seqs)
    await a.set_version(1)
    assert await play(a) == [], "b still plays with its version 0"
    await b.set_version(1)
    assert await play(a) == [2, 3]


@pytest.mark.parametrize(("gate", "turn"), [("all", 0), ("fastest", 0), ("turn", 1), ("neediest", 0)])
async def test_a_policy_that_has_trained_all_its_groups_gates_no_longer(store: Store, gate: Any, turn: int) -> None:
    """Its last evaluation may take long; `finish` comes after that."""
    law: dict[str, Any] = {"max_staleness": 0, "groups_per_batch": 2, "gate": gate, "turn": turn}
    a, b = [await policy(store, f"last-{gate}", name, total=total, **law) for name, total in (("a", 2), ("b", 8))]
    first = await play(a)
    assert first == [0, 1]
    await a.train(1, first)
    await a.set_version(1)
    if gate != "turn":
        await b.train(1, first)
        await b.set_version(1)
    else:
        await b.discard(0, Discard.RESTING, first)
    assert await play(b) == [2, 3]
    assert (await a.ledger()).balanced and (await b.ledger()).balanced
