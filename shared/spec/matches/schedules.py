"""[match] schedule: what happens where policies learn at different speeds. All schedules are settings of one rule:

wait        every policy must have room for a match
drop        the fastest must; the others keep the newest matches that their staleness allows
grow        the fastest must; the others take all that wait as one larger batch
alternate   the one whose turn it is must; the others rest
lockstep    the one that lacks most must; new versions become visible together
"""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Literal, NamedTuple

from opentinker.shared.types.mistakes import Mistake, mistake

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

ScheduleName = Literal["wait", "drop", "grow", "alternate", "lockstep"]
Gate = Literal["all", "fastest", "turn", "neediest"]
DEFAULT_GROWTH = 8
MAX_ABSENT_BATCHES = 20
"""Batches' worth of groups without a turn of a policy between two of its steps with which the job fails."""


class Rule(NamedTuple):
    """The settings of a schedule."""

    gate: Gate = "all"
    """Policies that must have room for a match; see `shared/state/staleness.py`."""
    together: bool = False
    """A new version becomes visible when all policies have made theirs."""
    turn: int = 0
    """Steps that one policy makes while the others rest; 0: no policy rests."""
    growth: int = 1
    """Most batches that a step takes."""

    @property
    def trains_together(self) -> bool:
        """Return whether all policies train on every match."""
        return self.gate in ("all", "neediest")


def rule_of(spec: JobSpec) -> Rule:
    match = spec.match
    if match is None:
        return Rule()
    rules = {
        "wait": Rule(),
        "drop": Rule(gate="fastest"),
        "grow": Rule(gate="fastest", growth=match.max_growth or 1),
        "alternate": Rule(gate="turn", turn=match.alternate_steps or 0),
        "lockstep": Rule(gate="neediest", together=True),
    }
    return rules[match.schedule]


def kept_groups(spec: JobSpec) -> int | None:
    """Return how many groups may wait for a policy, given the job's spec with its settings; None: as many as come."""
    rule, algorithm = rule_of(spec), spec.algorithm
    if rule.gate != "fastest":
        return None
    return max(rule.growth, algorithm.max_staleness + 1) * algorithm.groups_per_batch


def max_opponent_lag(spec: JobSpec) -> int | None:
    if spec.match is None:
        return None
    return 0 if spec.match.schedule == "lockstep" else spec.match.max_opponent_lag


def steps_may_differ(spec: JobSpec) -> bool:
    """Return whether policies may end with different numbers of matches."""
    return rule_of(spec).gate in ("fastest", "turn")


def settle_schedule(spec: JobSpec) -> list[Mistake]:
    """Return what contradicts itself between [match] and the speeds of [policies]."""
    if spec.match is None:
        return []
    schedule, lag = spec.match.schedule, spec.match.max_opponent_lag
    if len(spec.policies) < 2:
        named = {"schedule": schedule if schedule != "wait" else None, "max_opponent_lag": lag}
        problem = "needs two [policies] or more"
        return [mistake(f"match.{name}", value, problem) for name, value in named.items() if value is not None]
    found = []
    if lag is not None and schedule != "alternate":
        found += _too_small_lag(spec, lag)
    if schedule == "lockstep":
        found += _not_in_step(spec)
    if schedule == "grow":
        found += _too_large_batches(spec)
    return found


def _too_small_lag(spec: JobSpec, lag: int) -> list[Mistake]:
    found = []
    for (name, own), (other, theirs) in permutations(spec.policies.items(), 2):
        least = -(-own.algorithm.groups_per_batch // theirs.algorithm.groups_per_batch) - 1
        if lag < least:
            problem = (
                f"must be {least} or more: policy {other!r} makes {least + 1} steps with the groups of one batch of "
            )
            found.append(mistake("match.max_opponent_lag", lag, f"{problem}{name!r}"))
    return found


def _not_in_step(spec: JobSpec) -> list[Mistake]:
    by = "with match.schedule = 'lockstep'"
    batch = spec.algorithm.groups_per_batch
    found = []
    if spec.match is not None and spec.match.max_opponent_lag:
        found.append(mistake("match.max_opponent_lag", spec.match.max_opponent_lag, f"must be 0 {by}, or left out"))
    tables = {"": spec.algorithm, **{f"policies.{name}.": own.algorithm for name, own in spec.policies.items()}}
    for at, own in tables.items():
        if own.max_staleness:
            found.append(mistake(f"{at}algorithm.max_staleness", own.max_staleness, f"must be 0 {by}"))
        if own.groups_per_batch != batch:
            problem = f"must be the job's, {batch}, {by}"
            found.append(mistake(f"{at}algorithm.groups_per_batch", own.groups_per_batch, problem))
    return found


def _too_large_batches(spec: JobSpec) -> list[Mistake]:
    from opentinker.shared.spec.algorithm import MAX_EPISODES

    growth = rule_of(spec).growth
    return [
        mistake(
            "match.max_growth",
            growth,
            f"times the batch of policy {name!r} is more than {MAX_EPISODES:,} episodes",
        )
        for name, policy in spec.policies.items()
        if growth * policy.algorithm.group_size * policy.algorithm.groups_per_batch > MAX_EPISODES
    ]
