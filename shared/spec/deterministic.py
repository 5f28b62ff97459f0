"""Settings with which `train.deterministic` or `train.rewind_on` cannot hold, each with the reason."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.spec.matches.seats import all_players
from opentinker.shared.spec.train import ALARM_WINDOW, SIMULATED
from opentinker.shared.types.mistakes import mistake

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec


TIMED = re.compile(
    r"step_seconds|train_seconds|trainer/(wait_share|tokens_per_s)|rollout_workers|val/seconds"
    r"|(queue|swap|dropped|failed)/.*"
)
"""Metrics that say how long something took, or what was lost on the way."""
BOUNDS = {"entropy": "entropy_alarm", "reward_cliff": "collapse_alarm"}
"""Settings of [train] with the bound of an alarm, if not in `train.alarms`."""
OF_TENSORS = {"entropy", "kl", "ratio_tails", "non_finite"}
"""Causes of a rewind that a simulated learner does not know."""


Broken = list[tuple[str, Any, str]]
"""Field, value and problem of each."""


def broken_promises(spec: JobSpec) -> list[dict[str, Any]]:
    """Return settings under which the weights would depend on timing or on unseeded state."""
    if not spec.train.deterministic:
        return []
    found = _in_sampling(spec) + _in_reference_forward(spec) + _between_policies(spec)
    found += [
        (f"{place}.url", player.url, "cannot play: nothing fixes what it answers")
        for place, player in all_players(spec).items()
        if player.url is not None
    ]
    found += [
        (f"train.target.{name}", value, "depends on timing, and with it when the job would end")
        for name, value in spec.train.target.items()
        if TIMED.fullmatch(name)
    ]
    return [mistake(field, value, f"{problem} (train.deterministic)") for field, value, problem in found]


def cannot_rewind(spec: JobSpec) -> list[dict[str, Any]]:
    """Return why the job cannot go back to a checkpoint by itself, if it asks for that."""
    if not (spec.train.rewind_on or any(policy.train.rewind_on for policy in spec.policies.values())):
        return []
    why = ""
    if spec.kind != "rl":
        why = f"does not apply to kind = {spec.kind!r}: its alarms look at rewards"
    elif spec.train.deterministic:
        why = "cannot be exact: new episodes after a rewind depend on when the alarm rang (train.deterministic)"
    elif spec.policies:
        why = "cannot work with [policies]: matches of the others were played against the discarded weights"
    elif spec.pools:
        why = "cannot work with [pools]: members made of discarded steps have been met by others"
    return [mistake("train.rewind_on", spec.train.rewind_on, why)] if why else []


def idle_rewinds(spec: JobSpec) -> list[dict[str, Any]]:
    """Return causes of `train.rewind_on` for which the job could never go back."""
    train = spec.train
    if not train.rewind_on or not train.steps or cannot_rewind(spec):
        return []
    why_not = {cause: why for cause in train.rewind_on if (why := _never(spec, cause))}
    found = [mistake("train.rewind_on", train.rewind_on, f"{cause!r} {why}") for cause, why in why_not.items()]
    every, latest = train.checkpoint_every, train.steps - ALARM_WINDOW
    why = f"train.rewind_on needs a checkpoint from before the {ALARM_WINDOW} steps that an alarm looks at"
    if set(train.rewind_on) == {"non_finite"}:
        if every >= train.steps:
            problem = f"must be below the {train.steps} steps of the job: train.rewind_on needs a checkpoint"
            found.append(mistake("train.checkpoint_every", every, problem))
        return found
    if latest < 1:
        found.append(mistake("train.steps", train.steps, f"must be more than {ALARM_WINDOW}: {why}"))
    elif every > latest:
        problem = f"must be at most {latest} in a job of {train.steps} steps: {why}"
        found.append(mistake("train.checkpoint_every", every, problem))
    if train.keep_checkpoints * every < ALARM_WINDOW:
        problem = f"must be at least {1 - (1 - ALARM_WINDOW) // every} with checkpoint_every = {every}: {why}"
        found.append(mistake("train.keep_checkpoints", train.keep_checkpoints, problem))
    return found


def _never(spec: JobSpec, cause: str) -> str:
    """Return why a cause never occurs in the job; empty if it may."""
    train = spec.train
    if train.learner == "simulated" and cause in OF_TENSORS:
        return f"does not apply to train.{SIMULATED}"
    if cause == "zero_variance" and spec.algorithm.learns_from == "more":
        return "never rings in this job, which learns from groups of equal rewards too"
    bound = BOUNDS.get(cause, f"alarms.{cause}")
    return "" if cause == "non_finite" or attrgetter(bound)(train) else f"never rings: train.{bound} is 0"


def _in_sampling(spec: JobSpec) -> Broken:
    staleness, oversample = spec.algorithm.max_staleness, spec.rollout.oversample
    workers = spec.resources.rollout_workers
    found: Broken = []
    if staleness != 0:
        problem = "must be 0: with more, timing decides which weights sample a token"
        found.append(("algorithm.max_staleness", staleness, problem))
    if spec.rollout.seed is None:
        found.append(("rollout.seed", None, "must be set: without it nothing fixes what requests sample"))
    if oversample != 0:
        found.append(("rollout.oversample", oversample, "must be 0: timing decides which episodes end first"))
    if workers != 1:
        problem = "must be 1: different machines may round differently, and timing decides who plays a group"
        found.append(("resources.rollout_workers", workers, problem))
    return found


def _in_reference_forward(spec: JobSpec) -> Broken:
    owns = {f"policies.{name}.": spec_of(spec, name) for name in spec.policies} or {"": spec}
    used: Broken = [("reward_models", [judge.name for judge in spec.reward_models], "none")]
    for place, own in owns.items():
        used += [
            (f"{place}algorithm.kl_coef", own.algorithm.kl_coef, "0"),
            (f"{place}algorithm.distill_coef", own.algorithm.distill_coef, "0"),
            (f"{place}value_model", own.value_model and own.value_model.base, "none"),
        ]
    why = "reference-forward computes what comes together in one batch, and its sums depend on that"
    return [(field, value, f"must be {wanted}: {why}") for field, value, wanted in used if value]


def _between_policies(spec: JobSpec) -> Broken:
    """Several policies take the same matches, step by step, and resume where each of them has a checkpoint."""
    if not spec.policies:
        return []
    found: Broken = []
    match = spec.match
    if match is not None and match.schedule not in ("wait", "lockstep"):
        problem = "must be 'wait' or 'lockstep': otherwise timing decides which matches a policy is trained on"
        found.append(("match.schedule", match.schedule, problem))
    elif match is not None and match.schedule == "wait" and match.max_opponent_lag is not None:
        problem = "must be left out: timing decides how far opponents have moved when a batch is complete"
        found.append(("match.max_opponent_lag", match.max_opponent_lag, problem))
    if spec.train.target:
        problem = "must be empty in a job with several policies: all end at the same match"
        found.append(("train.target", spec.train.target, problem))
    due = spec.train.checkpoint_every * spec.algorithm.groups_per_batch
    for name, own in spec.policies.items():
        at, algorithm, train = f"policies.{name}", own.algorithm, own.train
        if algorithm.max_staleness not in (0, spec.algorithm.max_staleness):
            problem = "must be 0: with more, timing decides which weights sample a token"
            found.append((f"{at}.algorithm.max_staleness", algorithm.max_staleness, problem))
        if algorithm.drop_zero_variance:
            problem = "must be false in a job with several policies: all are trained on the same matches"
            found.append((f"{at}.algorithm.drop_zero_variance", True, problem))
        if train.target and train.target != spec.train.target:
            problem = "must be empty in a job with several policies: all end at the same match"
            found.append((f"{at}.train.target", train.target, problem))
        if train.checkpoint_every * algorithm.groups_per_batch != due:
            problem = (
                f"times groups_per_batch = {algorithm.groups_per_batch} must be {due}, as for the job: policies resume "
                "where all of them have a checkpoint"
            )
            found.append((f"{at}.train.checkpoint_every", train.checkpoint_every, problem))
    return found
