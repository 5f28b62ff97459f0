"""Reasons why a batch never fills up, however many groups are played: the job then fails instead of waiting forever."""

from __future__ import annotations

from opentinker.services.trainer.batch.assembler import Assembler
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.schedules import MAX_ABSENT_BATCHES, max_opponent_lag

MAX_OVERTAKEN_BATCHES = 20


def unfillable(spec: JobSpec, policy: str, assembler: Assembler) -> str:
    """Return why the next batch could not be filled, or an empty string."""
    return _equal_rewards(spec, assembler) or _absence(spec, policy, assembler) or _moved_opponents(spec, assembler)


def _equal_rewards(spec: JobSpec, assembler: Assembler) -> str:
    """Return a warning after `max_zero_variance_batches` batches' worth of groups with equal rewards in a row."""
    algorithm = spec.algorithm
    allowed = (algorithm.max_zero_variance_batches or 0) * algorithm.groups_per_batch
    if not algorithm.drop_zero_variance or assembler.barren < allowed:
        return ""
    return (
        f"{assembler.barren} groups since the last step had {algorithm.group_size} equal rewards each: the task is too "
        "easy or too hard for the model by now. Set a `train.target` to end in time, take a larger group_size, or "
        "drop_zero_variance = false"
    )


def _absence(spec: JobSpec, policy: str, assembler: Assembler) -> str:
    """Return a warning after MAX_ABSENT_BATCHES batches' worth of matches in a row without a turn of this policy; in a
    deterministic job after the first."""
    if spec.train.deterministic and policy and assembler.absent:
        return (
            f"policy {policy!r} had no turn in a match of the batch, and in a deterministic job every match is trained "
            "by all policies, so that they can resume at the same one"
        )
    if assembler.absent < MAX_ABSENT_BATCHES * spec.algorithm.groups_per_batch:
        return ""
    seats = ", ".join(seat for seat, player in spec.seats.items() if player.policy == policy)
    who, which = (f"policy {policy!r}", f" ({seats})") if policy else ("the policy", "")
    return (
        f"{who} had no turn in {assembler.absent} groups since its last step: the environment never asks its "
        f"seats{which} with this config"
    )


def _moved_opponents(spec: JobSpec, assembler: Assembler) -> str:
    """Return a warning after MAX_OVERTAKEN_BATCHES batches' worth of groups that other policies had moved away from
    while this one waited."""
    if spec.match is None or assembler.overtaken < MAX_OVERTAKEN_BATCHES * spec.algorithm.groups_per_batch:
        return ""
    lag, advice = max_opponent_lag(spec), "Raise match.max_opponent_lag, or lower max_staleness"
    if spec.match.schedule == "lockstep":
        advice = "Use match.schedule = 'wait' with a match.max_opponent_lag"
    return (
        f"{assembler.overtaken} groups came after an opponent had made more than {lag} steps: opponents learn faster "
        f"than matches are played. {advice}"
    )
