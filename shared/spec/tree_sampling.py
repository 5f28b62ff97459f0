"""Tree sampling: group_size candidates of every turn are played from one state, and play continues from the best one
(AT-GRPO)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentinker.shared.spec.algorithm import AlgorithmSpec
from opentinker.shared.spec.algorithm_parts import TREE_SAMPLED
from opentinker.shared.spec.matches.seat_lists import list_of
from opentinker.shared.spec.rollout import ELSEWHERE
from opentinker.shared.types.env_protocol import MAX_CANDIDATES
from opentinker.shared.types.mistakes import mistake

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

MAX_EPISODE_CANDIDATES = 16_384
"""Candidates of all turns of an episode: each is a trajectory of its group."""


def is_tree(spec: JobSpec) -> bool:
    """Return whether the job's groups are trees."""
    return spec.kind == "rl" and any(algorithm.advantage == TREE_SAMPLED for algorithm in _algorithms(spec).values())


def _algorithms(spec: JobSpec) -> dict[str, AlgorithmSpec]:
    """Return the algorithms of all policies, by the place of their table in the spec."""
    own = {f"policies.{name}.algorithm": policy.algorithm for name, policy in spec.policies.items()}
    return own or {"algorithm": spec.algorithm}


def turn_rewards(seat: str, paid_K: Sequence[Mapping[str, float]], algorithm: AlgorithmSpec) -> list[float]:
    """Return the rewards [K] of one seat for the candidates of one turn: r = w * team + (1 - w) * own, with w =
    team_weight; without a team its own.

    `paid_K`: what the environment paid for each candidate, by seat. The team's reward is the mean over its seats that
    any of the candidates paid, and this one.
    """
    own_K = [paid.get(seat, 0.0) for paid in paid_K]
    teams = algorithm.team or {}
    team = list_of(teams, seat)
    if team is None:
        return own_K
    members = {seat, *(other for paid in paid_K for other in paid if list_of(teams, other) == team)}
    weight = algorithm.team_weight or 0.0
    return [
        weight * math.fsum(paid.get(member, 0.0) for member in members) / len(members) + (1.0 - weight) * own
        for paid, own in zip(paid_K, own_K, strict=True)
    ]


def settle_tree(spec: JobSpec) -> list[dict[str, Any]]:
    """Return what tree sampling cannot be combined with."""
    if not is_tree(spec):
        return []
    by = f"algorithm.advantage = {TREE_SAMPLED!r}"
    size, rollout, environment = spec.algorithm.group_size, spec.rollout, spec.environment
    found: list[tuple[str, Any, str]] = [
        (f"{table}.advantage", algorithm.advantage, f"must be {TREE_SAMPLED!r} as for the job's other policies: its "
         "groups are the candidates of each turn, and all policies share them")
        for table, algorithm in _algorithms(spec).items()
        if algorithm.advantage != TREE_SAMPLED
    ]  # fmt: skip
    if size > MAX_CANDIDATES:
        problem = f"must be at most {MAX_CANDIDATES} with {by}: candidates of a turn"
        found.append(("algorithm.group_size", size, problem))
    elif size * rollout.max_turns > MAX_EPISODE_CANDIDATES:
        problem = f"times group_size = {size} is more than {MAX_EPISODE_CANDIDATES:,} candidates in an episode ({by})"
        found.append(("rollout.max_turns", rollout.max_turns, problem))
    if rollout.oversample:
        problem = f"must be 0 with {by}: a group is one episode, and nothing is left to cut off"
        found.append(("rollout.oversample", rollout.oversample, problem))
    if spec.match is not None and spec.match.rotate:
        found.append(("match.rotate", True, f"does not apply with {by}: a group is one episode"))
    if spec.reward_models:
        problem = f"do not apply with {by}: they judge whole conversations, and the best candidate is chosen before"
        found.append(("reward_models", [model.base for model in spec.reward_models], problem))
    if environment.tools:
        problem = f"do not apply with {by}: tools of a job have state that cannot be copied"
        found.append(("environment.tools", len(environment.tools), problem))
    if environment.name.startswith(ELSEWHERE):
        problem = f"runs outside of the env workers, where its episodes cannot be copied, as {by} needs"
        found.append(("environment.name", environment.name, problem))
    return [mistake(*one) for one in found]
