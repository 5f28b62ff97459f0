"""How long policies of different speed take per step under each schedule of [match]. `python -m loadtest.schedules`
measures it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from opentinker.shared.data.pipeline_simulation import Pools, Work, predict
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.spec.matches.schedules import ScheduleName, rule_of


class Pace(NamedTuple):
    """Speed of one policy, in seconds per step."""

    train_s: float
    gen_s: float
    """To play the matches of a batch."""
    share: float = 1.0
    """Steps that it makes for one step of the job."""


def step_seconds(schedule: ScheduleName, paces: Mapping[str, Pace], turn: int = 1) -> dict[str, float]:
    """Return the seconds per step of each policy. `turn`: steps of a turn (`alternate`).

    wait        all wait for the slowest, in training or generation
    drop, grow  each takes what it needs itself; `grow` has larger batches for the slower ones
    lockstep    nothing is generated while anybody trains
    alternate   turns follow each other, and the first batch of each is waited for
    """
    alone = {name: max(pace.train_s, pace.gen_s) for name, pace in paces.items()}
    if schedule in ("drop", "grow"):
        return alone
    if schedule == "alternate":
        cycle = turn * sum(alone.values()) + sum(pace.gen_s for pace in paces.values())
        return dict.fromkeys(paces, cycle / turn)
    if schedule == "lockstep":
        return dict.fromkeys(paces, max(p.gen_s for p in paces.values()) + max(p.train_s for p in paces.values()))
    of_job = max(alone[name] * pace.share for name, pace in paces.items())
    return {name: of_job / pace.share for name, pace in paces.items()}


class JointBatch(NamedTuple):
    group_size: int
    groups: int
    """Per simulated step."""
    max_staleness: int
    """In simulated steps."""


def own_specs(spec: JobSpec) -> dict[str, JobSpec]:
    """Return the job's spec with the settings of each policy."""
    return {name: spec_of(spec, name) for name in spec.policies or ("",)}


def joint_batch(spec: JobSpec) -> JointBatch:
    """Return the batch of a job's step and its staleness bound: of several policies that of the one which lets the
    fewest groups begin."""
    policies = list(own_specs(spec).values())
    first = policies[0]
    groups = max(1, first.train.steps * first.algorithm.groups_per_batch // max(1, spec.train.steps))
    room = min((own.algorithm.max_staleness + 1) * own.algorithm.groups_per_batch for own in policies)
    return JointBatch(first.algorithm.group_size, groups, max(0, room // groups - 1))


def training_times(spec: JobSpec, alone: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds for which each policy trains per step of the job, in one trainer that policies which train at
    the same time share evenly. `alone`: seconds per step of a policy that had the trainer to itself.

    wait, lockstep  a smaller step ends first, and leaves the trainer to the others
    drop, grow      all train all the time
    alternate       the others rest
    """
    rule = rule_of(spec)
    own_s = {name: seconds * _share(spec, name) for name, seconds in alone.items()}
    if rule.turn:
        return own_s
    if rule.gate == "fastest":
        return {name: seconds * len(own_s) for name, seconds in own_s.items()}
    return {name: sum(min(seconds, other) for other in own_s.values()) for name, seconds in own_s.items()}


def paces_of(
    spec: JobSpec, train_s: float | None, measured: Mapping[str, float], alone: Mapping[str, float]
) -> dict[str, Pace] | None:
    """Return the pace of each policy in training. `measured`: seconds per step by policy, used if all are there.
    `train_s`: of a step of the job, by the policy that trains longest; the others take a part of it, by `alone` (see
    `training_times`). None: as the simulated learners say, and None where one is not simulated."""
    specs = own_specs(spec)
    shares = {name: _share(spec, name) for name in specs}
    if specs.keys() <= measured.keys():
        return {name: Pace(measured[name], 0.0, share) for name, share in shares.items()}
    if train_s is not None:
        times = training_times(spec, alone)
        longest = max(times.values())
        return {name: Pace(train_s * times[name] / longest / share, 0.0, share) for name, share in shares.items()}
    simulated = {name: own.train.simulated_step_s for name, own in specs.items()}
    paces = {name: Pace(step_s, 0.0, shares[name]) for name, step_s in simulated.items() if step_s is not None}
    return paces if paces.keys() == specs.keys() else None


def _share(spec: JobSpec, policy: str) -> float:
    """Return the steps of a policy for one step of the job."""
    return spec_of(spec, policy).train.steps / max(1, spec.train.steps)


def pipeline_of(spec: JobSpec, paces: Mapping[str, Pace]) -> tuple[JointBatch, float]:
    """Return the batch and the training time of the step that admission follows: the job's with all policies, or the
    fastest policy's own; with turns all train one after the other."""
    rule = rule_of(spec)
    if rule.gate == "fastest":
        own = own_specs(spec)
        fastest = min(paces, key=lambda name: paces[name].train_s / own[name].algorithm.groups_per_batch)
        algorithm = own[fastest].algorithm
        batch = JointBatch(algorithm.group_size, algorithm.groups_per_batch, algorithm.max_staleness)
        return batch, paces[fastest].train_s
    of_job = [pace.train_s * pace.share for pace in paces.values()]
    return joint_batch(spec), sum(of_job) if rule.turn else max(of_job)


def policy_steps(spec: JobSpec, paces: Mapping[str, Pace], work: Work, pools: Pools) -> dict[str, float]:
    """Return the seconds per step of each policy: by the formula, with the simulated time to play the matches; of one
    batch alone where training waits for it, else of batches that overlap."""
    rule = rule_of(spec)
    played = replace(work, train_s=0.0, max_staleness=0 if rule.together or rule.turn else work.max_staleness)
    group_s = predict(played, pools).step_s / work.groups_per_batch
    own = own_specs(spec)
    timed = {name: pace._replace(gen_s=group_s * own[name].algorithm.groups_per_batch) for name, pace in paces.items()}
    schedule: ScheduleName = "wait" if spec.match is None else spec.match.schedule
    return step_seconds(schedule, timed, rule.turn or 1)
