"""[pools.NAME]: past versions of a policy, its members, play the seats that name the pool, and do not learn.

A pool begins with the weights that the policy starts from and grows by rule. Whom a match is played against is drawn
when its ticket is issued.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from opentinker.shared.spec.algorithm_parts import TREE_SAMPLED
from opentinker.shared.spec.base import Fraction, SpecPart, Steps
from opentinker.shared.spec.matches.schedules import MAX_ABSENT_BATCHES, rule_of
from opentinker.shared.types.mistakes import Mistake, mistake

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec
    from opentinker.shared.spec.matches.seats import SeatSpec

PoolRule = Literal["uniform", "pfsp_hard", "pfsp_even"]
PoolName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
"""Part of metric names."""
MAX_POOLS = 8
MAX_MEMBERS = 100
MAX_STRETCH = 10_000
ALONE = "the pool would never get a member beyond the initial weights"


class PoolSpec(SpecPart):
    """Past versions of a policy as opponents."""

    policy: PoolName | None = None
    """Policy whose versions enter: one of [policies]. Not given in a job without them."""
    every: Steps
    """Steps of the policy between two candidates."""
    keep: Annotated[int, Field(ge=1, le=MAX_MEMBERS)] = 10
    """Most members; the oldest leave first. The weights of each lie on disk."""
    add_if: Fraction | None = None
    """Least win rate of the policy against the members with which a candidate is added, draws counted half; results
    lose half their weight at each candidate. Not with advantage = "agent_turn". Default: every candidate is added."""
    latest: Fraction = 0.5
    """Share of the matches that the newest member plays in any case."""
    rule: PoolRule = "uniform"
    """How the member of all other matches is drawn, the newest included. `uniform`: all alike. `pfsp_hard`: those that
    the policy loses to, with probability proportional to (1 - win rate)^2. `pfsp_even`: those as strong as it is,
    proportional to win rate * (1 - win rate). Both not with advantage = "agent_turn"."""
    stretch: Annotated[int, Field(ge=1, le=MAX_STRETCH)] = 1
    """Consecutive groups of matches that meet the same member. A rollout worker loads the weights of the next member;
    where that takes long, a higher value makes it rarer."""


def pool_player(pool: str, version: str = "") -> str:
    """Return the name of a member as a player: `POOL@EPOCH.STEP`; `POOL@` for the pool. No policy and no frozen
    checkpoint has such a name."""
    return f"{pool}@{version}"


def pools_in(seats: Mapping[str, SeatSpec]) -> list[str]:
    """Return the pools that play, each once."""
    return list(dict.fromkeys(player.pool for player in seats.values() if player.pool is not None))


def pools_of(spec: JobSpec, policy: str) -> dict[str, PoolSpec]:
    """Return the pools that hold versions of a policy; the empty name is that of a job's one policy."""
    return {name: pool for name, pool in spec.pools.items() if (pool.policy or "") == policy}


def unknown_pools(data: Mapping[str, Any]) -> list[Mistake]:
    """Return the seats that a pool plays in a spec, as written, that has no [pools]."""
    seats = data.get("seats")
    if data.get("pools") or not isinstance(seats, dict):
        return []
    named = {seat: player["pool"] for seat, player in seats.items() if isinstance(player, dict) and player.get("pool")}
    return [
        mistake(f"seats.{seat}.pool", pool, "names a pool, and the job has no [pools]") for seat, pool in named.items()
    ]


def settle_pools(spec: JobSpec) -> list[Mistake]:
    """Return what contradicts itself between [pools], [seats] and the other parts."""
    found = []
    for seat, player in spec.seats.items():
        if spec.pools and player.pool is not None and player.pool not in spec.pools:
            known = f"its pools are: {', '.join(spec.pools)}"
            found.append(mistake(f"seats.{seat}.pool", player.pool, f"is not a pool of this job; {known}"))
    played = pools_in(spec.seats)
    for name, pool in spec.pools.items():
        if name not in played:
            found.append(mistake(f"pools.{name}", name, f"plays no seat: [seats] has no {{ pool = {name!r} }}"))
        found += _policy_mistakes(spec, name, pool)
    return found + (_unsupported(spec) if spec.pools else [])


def _policy_mistakes(spec: JobSpec, name: str, pool: PoolSpec) -> list[Mistake]:
    known = ", ".join(spec.policies)
    if pool.policy is None and spec.policies:
        return [mistake(f"pools.{name}.policy", None, f"is needed: whose versions enter ({known})")]
    if pool.policy is not None and pool.policy not in spec.policies:
        known = f"its policies are: {known}" if known else "it has no [policies]: leave it out"
        return [mistake(f"pools.{name}.policy", pool.policy, f"is not a policy of this job; {known}")]
    steps = (spec.policies[pool.policy] if pool.policy else spec).train.steps
    found = []
    if pool.every >= steps:
        found.append(mistake(f"pools.{name}.every", pool.every, f"must be below train.steps = {steps}: {ALONE}"))
    if pool.add_if == 1.0:
        problem = f"must be below 1, which no win rate reaches, because each has one more game that was drawn: {ALONE}"
        found.append(mistake(f"pools.{name}.add_if", pool.add_if, problem))
    return found


def mistakes_in_pools(spec: JobSpec) -> list[Mistake]:
    """Return what is wrong with [pools] and is not a part of `parse_spec`: such jobs were accepted once."""
    found = _of_trees(spec) + _unreachable(spec)
    for name in policies_without_opponent(spec):
        count = len(spec.validation.against) if spec.validation else 0
        found.append(mistake("validation.against", count, without_opponent(name)))
    return found


def policies_without_opponent(spec: JobSpec) -> list[str]:
    """Return the policies of a job with pools that have no opponent in `validation.against` but themselves: the players
    in [seats] would play, and members of pools, which change, play in no evaluation."""
    if spec.validation is None or not spec.pools:
        return []
    return [name for name in spec.policies if not spec.validation.opponents_of(name)]


def without_opponent(policy: str) -> str:
    """Return what is wrong with such a policy."""
    return (
        f"has no opponent for policy {policy!r} but itself, and the members of [pools] play in no evaluation: name "
        "another one too, e.g. { bot = 'random' }"
    )


def _of_trees(spec: JobSpec) -> list[Mistake]:
    """Return the rules of pools that go by win rates which are those of trees."""
    by = (
        f"does not apply with algorithm.advantage = {TREE_SAMPLED!r}: its games go on from the best of several "
        "candidates, so the policy wins more of them than it would by itself"
    )
    found = []
    for name, pool in spec.pools.items():
        if (spec.policies[pool.policy] if pool.policy else spec).algorithm.advantage != TREE_SAMPLED:
            continue
        if pool.add_if is not None:
            found.append(mistake(f"pools.{name}.add_if", pool.add_if, f"{by}. Leave it out: every candidate is added"))
        if pool.rule != "uniform":
            found.append(mistake(f"pools.{name}.rule", pool.rule, f"{by}. Leave it at 'uniform'"))
    return found


def _unreachable(spec: JobSpec) -> list[Mistake]:
    """Return the pools whose `add_if` is above the win rate of a policy that wins all games that a step may take, and
    those without a turn of it as well."""
    found = []
    for name, pool in spec.pools.items():
        own = spec.policies[pool.policy] if pool.policy else spec
        algorithm = own.algorithm
        is_tree = algorithm.advantage == TREE_SAMPLED
        if pool.add_if is None or is_tree or algorithm.drop_zero_variance:  # games of discarded groups count too
            continue
        absent = MAX_ABSENT_BATCHES + algorithm.max_staleness + 1  # the last may come with all that are in flight
        games = pool.every * (rule_of(spec).growth + absent) * algorithm.groups_per_batch * algorithm.group_size
        recent = 2 * games * (1 - 0.5 ** ((own.train.steps - 1) // pool.every))
        best = (recent + 0.5) / (recent + 1)
        if pool.add_if > best:
            problem = (
                f"is out of reach: with at most {games} games between two candidates, of which earlier ones count less "
                f"and less, and one more that was drawn, the win rate is at most {math.floor(best * 1e4) / 1e4:g}. "
                "Lower it, or raise `every`"
            )
            found.append(mistake(f"pools.{name}.add_if", pool.add_if, problem))
    return found


def _unsupported(spec: JobSpec) -> list[Mistake]:
    found = []
    if spec.train.deterministic:
        problem = "does not apply to a job with [pools]: timing decides which members a match may meet"
        found.append(mistake("train.deterministic", True, problem))
    if spec.train.learner == "simulated" and spec.rollout.engine != "toy":
        problem = "has no weights that a member of [pools] could play with, except with rollout.engine = 'toy'"
        found.append(mistake("train.learner", spec.train.learner, problem))
    if spec.validation is not None and not spec.validation.against:
        problem = (
            "is needed in a job with [pools], whose members change: name fixed opponents, e.g. "
            "against = [{ bot = 'random' }]"
        )
        found.append(mistake("validation.against", [], problem))
    return found
