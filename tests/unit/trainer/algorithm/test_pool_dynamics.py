"""Matching pennies, simulated with the rules of pools, credit and loss: a policy settles near the equilibrium only
against all its past versions. Against the newest alone it chases itself."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from opentinker.services.trainer.algorithm import advantages, losses
from opentinker.shared.evaluation.pool_draws import GrowthRule, choose_opponent, grow_pool
from tests.conftest import Figure

STEPS, GROUPS, SIZE, SEEDS = 240, 16, 32, 3
ENTROPY_COEF, LR = 0.5, 0.05
RULE = GrowthRule(every=10, keep=100)
EVEN, ODD = 0, 1
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class Game(NamedTuple):
    seat: int
    coin: int
    """1: tails."""
    credit: float
    """Advantage."""


def played(mine_E: Floats, other_E: Floats, draw: np.random.Generator) -> list[Game]:
    """Play a group, half of it on either seat, against one member, with these probabilities of heads by seat."""
    games = []
    for seat in (EVEN, ODD):
        own = draw.random(SIZE // 2) >= mine_E[seat]
        theirs = draw.random(SIZE // 2) >= other_E[1 - seat]
        rewards = np.where((own == theirs) == (seat == EVEN), 1.0, -1.0)
        credit = advantages.dr_grpo(rewards).tolist()
        games += [Game(seat, int(coin), value) for coin, value in zip(own, credit, strict=True)]
    return games


def heads_of_versions(seed: int, latest: float) -> Floats:
    """Train a table of two logits per seat and return the probability of heads by version and seat.

    `latest`: share of the groups that meet the newest member, as in [pools].
    """
    draw = np.random.default_rng(seed)
    logits_EC = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits_EC], lr=LR, betas=(0.9, 0.99))
    versions = [np.array([0.5, 0.5])]
    members: tuple[str, ...] = ("1.0",)
    weights = {"1.0": versions[0]}
    for step in range(1, STEPS + 1):
        games: list[Game] = []
        for group in range((step - 1) * GROUPS, step * GROUPS):
            member = choose_opponent(members, {}, rule="uniform", latest=latest, seed=seed, match=group, pool="past")
            games += played(versions[-1], weights[member], draw)
        seats, coins, credit = (torch.tensor(values) for values in zip(*games, strict=True))
        logprobs_EC = logits_EC.log_softmax(-1)
        logprobs_M = logprobs_EC[seats, coins]
        policy = losses.ppo(logprobs_M, logprobs_M.detach(), credit, clip_low=0.2, clip_high=0.2)
        entropy = -(logprobs_EC.exp() * logprobs_EC).sum(-1).mean()
        optimizer.zero_grad()
        (policy.loss_M.mean() - ENTROPY_COEF * entropy).backward()
        optimizer.step()
        versions.append(logits_EC.detach().softmax(-1)[:, 0].numpy().copy())
        grown = grow_pool(members, RULE, candidate=f"1.{step}", step=step, rate=None)
        members, weights[f"1.{step}"] = grown.members, versions[-1]
    assert len(members) == 1 + STEPS // RULE.every
    return np.array(versions)


def test_only_a_pool_of_past_versions_settles_at_the_equilibrium(figure: Figure) -> None:
    last = slice(-STEPS // 3, None)
    for latest in (0.0, 0.5, 1.0):
        distances = [np.abs(heads_of_versions(seed, latest) - 0.5)[last].max(axis=0) for seed in range(SEEDS)]
        largest = [float(each.max()) for each in distances]
        figure(f"latest = {latest}: {min(largest):.3f} to {max(largest):.3f} from the equilibrium")
        if latest == 0:
            assert max(largest) <= 0.1, "every version of the last third, on both seats"
        if latest == 1:
            assert min(each.min() for each in distances) >= 0.4, "against the newest alone either seat swings past 0.9"
