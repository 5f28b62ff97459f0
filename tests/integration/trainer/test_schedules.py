"""Schedules on a simulated clock: the real admission script, assemblers and joint progress, with learners and rollouts
that only take time. Rates are the formula's, lags keep within their bounds, and no mixture of speeds stops a job."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from loadtest.schedules import rates
from opentinker.services.trainer.batch.assembler import Assembler
from opentinker.services.trainer.joint_progress import JointProgress
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.spec.matches.schedules import kept_groups, max_opponent_lag
from opentinker.shared.state.admission import Admission
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Discard, WeightVersion
from opentinker.shared.types.trajectories import Group
from tests.support.factories import group_of, make_spec, make_trajectory

jobs = itertools.count()


@dataclass
class Learner:
    """A policy in its trainer, as `TrainerJob` runs it."""

    name: str
    spec: JobSpec
    seconds: float
    admission: Admission
    assembler: Assembler
    step: int = 0
    served: int = 0
    busy: bool = False
    over: bool = False
    ended: list[float] = field(default_factory=list)
    """When each step did."""
    sizes: list[int] = field(default_factory=list)
    staleness: int = 0
    opponent_lag: int = 0


class World:
    """One job. Its clock goes from event to event."""

    def __init__(self, store: Store, spec: JobSpec, seconds: dict[str, float], gen_s: float, absent: float = 0.0):
        """`seconds`: of a step, by policy; `absent`: share of groups in which a policy has no turn."""
        self.now, self.gen_s, self.absent, self.rng = 0.0, gen_s, absent, random.Random(7)
        self.events: list[tuple[float, int, Callable[[], Awaitable[None]]]] = []
        self.count = itertools.count()
        self.joint = JointProgress.of(spec)
        self.learners = []
        self.job = f"clock-{next(jobs)}"
        for name in spec.policies:
            own = spec_of(spec, name)
            admission = Admission(store.redis, self.job, 1, policies=list(spec.policies), policy=name)
            assembler = Assembler(
                own.algorithm.max_staleness,
                1,
                opponent_lag=lambda group: self.joint.moved(group.opponents),
                max_opponent_lag=max_opponent_lag(own),
                keep=kept_groups(own),
            )
            self.learners.append(Learner(name, own, seconds[name], admission, assembler))

    async def run(self) -> None:
        for one in self.learners:
            algorithm, rule = one.spec.algorithm, self.joint.rule
            batch, total = algorithm.groups_per_batch, one.spec.train.steps * algorithm.groups_per_batch
            law: dict[str, Any] = {"max_staleness": algorithm.max_staleness, "groups_per_batch": batch, "total": total}
            await one.admission.restore(step=0, discarded={}, gate=rule.gate, turn=rule.turn, **law)
            self.joint.restore(one.name, 0, {1: 0})
        while not all(one.over for one in self.learners):
            while await self.work():
                pass
            if all(one.over for one in self.learners):
                break
            assert self.events, f"nothing happens any more at {self.now}: {[(o.name, o.step) for o in self.learners]}"
            self.now, _, happen = heapq.heappop(self.events)
            await happen()
        for one in self.learners:
            ledger = await one.admission.ledger()
            assert ledger.balanced and ledger.trained == sum(one.sizes) == one.assembler.trained, one.name
            assert ledger.discarded.keys() >= one.assembler.discarded.keys()

    def after(self, seconds: float, happen: Callable[[], Awaitable[None]]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.count), happen))

    async def work(self) -> bool:
        """Do what needs no time. Returns whether there may be more."""
        done = False
        for one in self.learners:
            if not one.busy and not one.over:
                done |= await self.continue_(one)
        _, seqs = await self.learners[0].admission.issue(64)
        for seq in seqs:
            versions = {one.name: WeightVersion(1, one.served) for one in self.learners}
            self.after(self.gen_s, lambda seq=seq, versions=versions: self.store(seq, versions))  # type: ignore[misc]
        return done or bool(seqs)

    async def store(self, seq: int, versions: dict[str, WeightVersion]) -> None:
        """A match has been played."""
        present = [name for name in versions if self.rng.random() >= self.absent] or list(versions)
        played = [make_trajectory(index=0, seat=name, policy=name, versions=[versions[name]]) for name in present]
        group: Group = group_of(played, seq, self.job)
        for one in self.learners:
            if not one.over and await one.admission.accept(seq) in ("ok", "p"):
                one.assembler.add(seq + 1, group.of(one.name))

    async def continue_(self, one: Learner) -> bool:
        if not self.joint.may_show(one.name):
            return False
        if one.served < one.step:
            await self.serve(one)
            return True
        if one.step == one.spec.train.steps:
            one.over = True
            await one.admission.finish(Discard.SURPLUS)
            self.joint.finish(one.name)
            return True
        one.assembler.resting = self.joint.rests(one.name)
        dropped = one.assembler.drop(one.step)
        for reason, seqs in dropped.items():
            await one.admission.discard(Assembler.discard_batch(reason, one.step), reason, seqs)
        batch = one.assembler.take(one.step, one.spec.algorithm.groups_per_batch, self.joint.growth(one.name))
        if batch is None:
            return bool(dropped)
        one.busy = True
        one.sizes.append(len(batch))
        one.staleness = max(one.staleness, *(one.step - group.oldest.step for group in batch))
        one.opponent_lag = max(one.opponent_lag, *(self.joint.moved(group.opponents) for group in batch))
        self.after(one.seconds, lambda: self.end_step(one, [group.seq for group in batch]))
        return True

    async def end_step(self, one: Learner, seqs: list[int]) -> None:
        one.busy = False
        one.step += 1
        one.ended.append(self.now)
        assert await one.admission.train(one.step, seqs) == len(seqs)
        self.joint.advance(one.name, one.step)
        if not self.joint.rule.together:
            await self.serve(one)

    async def serve(self, one: Learner) -> None:
        one.served = one.step
        await one.admission.set_version(one.step)


def job_of(match: dict[str, Any], steps: dict[str, int], batches: dict[str, int], max_staleness: int) -> JobSpec:
    policies = {
        name: {"train": {"steps": steps[name]}, "algorithm": {"groups_per_batch": batches[name]}} for name in steps
    }
    first = next(iter(steps))
    return make_spec(
        algorithm={"group_size": 2, "groups_per_batch": batches[first], "max_staleness": max_staleness},
        train={"learner": "simulated", "steps": steps[first]},
        policies=policies,
        seats={name: name for name in steps},
        match=match,
    )


@pytest.mark.parametrize(
    ("match", "slow", "fast", "staleness", "size"),
    [
        ({"schedule": "wait", "max_opponent_lag": 6}, 30, 30, 2, 2),
        ({"schedule": "drop", "max_opponent_lag": 6}, 30, 90, 2, 2),
        ({"schedule": "grow", "max_opponent_lag": 6}, 30, 90, 2, 6),
        ({"schedule": "lockstep"}, 30, 30, 0, 2),
        ({"schedule": "alternate", "alternate_steps": 3, "max_opponent_lag": 0}, 30, 30, 2, 2),
    ],
    ids=lambda value: value["schedule"] if isinstance(value, dict) else "",
)
async def test_rates_are_those_of_the_formula(
    store: Store, match: dict[str, Any], slow: int, fast: int, staleness: int, size: int
) -> None:
    """Steps of 3 s and 1 s, matches of 0.5 s. `size`: groups in the slow policy's usual batch."""
    spec = job_of(match, {"slow": slow, "fast": fast}, {"slow": 2, "fast": 2}, staleness)
    world = World(store, spec, {"slow": 3.0, "fast": 1.0}, 0.5)
    await world.run()
    expected = rates(match["schedule"], 3.0, 1.0, 0.5)
    first, last = (3, 27) if match["schedule"] == "alternate" else (5, 28)
    for one in world.learners:
        rate = (last - first) / (one.ended[last - 1] - one.ended[first - 1])
        assert rate == pytest.approx(expected[one.name], rel=0.05), (one.name, rate)
        assert one.staleness <= staleness
        bound = max_opponent_lag(spec)
        assert bound is not None and one.opponent_lag <= bound
    usual = Counter(world.learners[0].sizes).most_common(1)[0][0]
    assert usual == size and set(world.learners[1].sizes) == {2}


@pytest.mark.parametrize("schedule", ["wait", "drop", "grow", "lockstep", "alternate"])
@pytest.mark.parametrize("seed", range(3))
async def test_no_mixture_of_speeds_stops_a_job(store: Store, schedule: str, seed: int) -> None:
    """Three policies, with matches in which one or the other has no turn."""
    rng = random.Random(f"{schedule}/{seed}")
    names = ("a", "b", "c")
    batches = dict.fromkeys(names, 2) if schedule == "lockstep" else {name: rng.choice((1, 2, 4)) for name in names}
    steps = {name: 24 // batches[name] for name in names}
    if schedule in ("drop", "grow", "alternate"):
        steps = {name: rng.randint(3, 20) for name in names}
    match: dict[str, Any] = {"schedule": schedule}
    if schedule == "alternate":
        match["alternate_steps"] = rng.randint(1, 4)
    elif schedule != "lockstep" and rng.random() < 0.5:
        match["max_opponent_lag"] = rng.randint(4, 8)
    spec = job_of(match, steps, batches, 0 if schedule == "lockstep" else rng.randint(0, 3))
    world = World(store, spec, {name: rng.choice((0.1, 1.0, 3.0)) for name in names}, rng.choice((0.1, 2.0)), 0.2)
    await world.run()
    bound = max_opponent_lag(spec)
    for one in world.learners:
        assert one.step == steps[one.name] and one.staleness <= spec.algorithm.max_staleness
        assert bound is None or one.opponent_lag <= bound
