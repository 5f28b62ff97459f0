"""Settings with which `train.deterministic` or `train.rewind_on` cannot hold, each with the reason."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.spec.matches.seats import all_players
from opentinker.shared.types.mistakes import mistake

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec


TIMED = re.compile(
    r"step_seconds|train_seconds|trainer/(wait_share|tokens_per_s)|rollout_workers|val/seconds"
    r"|(queue|swap|dropped|failed)/.*"
)
"""Metrics that say how long something took, or what was lost on the way."""


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
