"""Opponents from a pool: frequencies as the rules say, the same opponent for the same match, and how pools grow."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from opentinker.shared.evaluation.pool_draws import (
    GrowthRule,
    Rule,
    choose_opponent,
    draw_uniform,
    grow_pool,
    opponent_weights,
    win_rate,
)

MEMBERS = ["oldest", "older", "old", "newest"]
RATES = {"oldest": 0.9, "older": 0.5, "old": 0.2}
MATCHES = 20_000


def frequencies(rule: Rule, latest: float, seed: int, power: float = 2.0) -> Counter[str]:
    return Counter(
        choose_opponent(MEMBERS, RATES, rule=rule, latest=latest, seed=seed, match=match, power=power)
        for match in range(MATCHES)
    )


def test_weights_follow_the_formulas() -> None:
    assert opponent_weights("uniform", [0.1, 0.9]) == [0.5, 0.5]
    assert opponent_weights("pfsp_hard", [0.5, 0.9], power=2) == pytest.approx([25 / 26, 1 / 26])
    assert opponent_weights("pfsp_hard", [0.5, 0.9], power=1) == pytest.approx([5 / 6, 1 / 6])
    assert opponent_weights("pfsp_even", [0.5, 0.9, 1.0]) == pytest.approx([25 / 34, 9 / 34, 0.0])
    assert opponent_weights("pfsp_hard", [1.0, 1.0]) == opponent_weights("pfsp_even", [0.0, 1.0]) == [0.5, 0.5]


@pytest.mark.parametrize("rule", ["uniform", "pfsp_hard", "pfsp_even"])
@pytest.mark.parametrize("latest", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", [0, 7])
def test_opponents_are_as_frequent_as_their_weights(rule: Rule, latest: float, seed: int) -> None:
    """Within three standard deviations of a binomial distribution."""
    shares = {member: (1 - latest) * weight for member, weight in zip(MEMBERS, _weights(rule), strict=True)}
    shares["newest"] += latest
    found = frequencies(rule, latest, seed)
    for member, share in shares.items():
        deviation = math.sqrt(MATCHES * share * (1 - share))
        assert abs(found[member] - MATCHES * share) <= 3 * deviation


def _weights(rule: Rule) -> list[float]:
    x = [0.9, 0.5, 0.2, 0.5]
    raw = {"uniform": [1.0] * 4, "pfsp_hard": [(1 - p) ** 2 for p in x], "pfsp_even": [p * (1 - p) for p in x]}[rule]
    return [weight / sum(raw) for weight in raw]


def test_seed_match_and_pool_decide_the_opponent_and_nothing_else() -> None:
    def opponents(seed: int, pool: str) -> list[str]:
        return [
            choose_opponent(MEMBERS, RATES, rule="pfsp_even", latest=0.3, seed=seed, match=match, pool=pool)
            for match in range(200)
        ]

    assert opponents(1, "main") == opponents(1, "main")
    assert opponents(1, "main") != opponents(2, "main") != opponents(2, "other")
    same = sum(one == other for one, other in zip(opponents(1, "main"), opponents(1, "other"), strict=True))
    assert same < 120, "pools of one match draw independently"
    assert draw_uniform(5, 6, "x") == 0.878560599840478, "draws stay the same in later versions"
    assert all(0.0 <= draw_uniform(seed, 0, "x") < 1.0 for seed in range(1000))


def test_the_last_member_is_the_latest() -> None:
    assert frequencies("uniform", 1.0, 3) == {"newest": MATCHES}
    assert choose_opponent(["one"], {}, rule="pfsp_hard", latest=0.0, seed=0, match=0) == "one"


def test_win_rates_count_draws_half_and_are_never_certain() -> None:
    assert win_rate(0, 0, 0) == 0.5
    assert win_rate(3, 2, 0) == 4.5 / 6
    assert 0.0 < win_rate(0, 0, 1000) < 0.001 and 0.999 < win_rate(1000, 0, 0) < 1.0
    with pytest.raises(ValueError, match="must not be negative"):
        win_rate(-1, 0, 0)


def test_a_pool_takes_in_what_is_due_and_keeps_the_newest() -> None:
    rule = GrowthRule(every=20, keep=3)
    members: tuple[str, ...] = ("step-0",)
    removed: list[str] = []
    for step in range(1, 101):
        growth = grow_pool(members, rule, candidate=f"step-{step}", step=step, rate=None)
        members, removed = growth.members, [*removed, *growth.removed]
    assert members == ("step-60", "step-80", "step-100")
    assert removed == ["step-0", "step-20", "step-40"]


def test_a_candidate_must_beat_the_pool_if_the_rule_says_so() -> None:
    rule = GrowthRule(every=10, keep=5, add_if=0.55)

    def grown(rate: float | None, members: tuple[str, ...] = ("first",), candidate: str = "new") -> tuple[str, ...]:
        return grow_pool(members, rule, candidate=candidate, step=10, rate=rate).members

    assert grown(0.6) == grown(0.55) == ("first", "new")
    assert grown(0.54) == grown(None) == ("first",), "no games are no proof"
    assert grown(None, members=()) == ("new",), "an empty pool has none to beat"
    assert grown(0.9, candidate="first") == ("first",), "a repeated step changes nothing"


@pytest.mark.parametrize(
    ("problem", "change"),
    [
        ("has no members", {"members": []}),
        ("latest must be between 0 and 1", {"latest": 1.5}),
        ("power must be above 0", {"power": 0.0}),
        ("a win rate must be between 0 and 1", {"win_rates": {"a": 1.1}}),
        ("no such rule: 'best'", {"rule": "best"}),
    ],
)
def test_what_cannot_be_drawn_is_refused(problem: str, change: dict[str, object]) -> None:
    given = {"members": ["a"], "win_rates": {}, "rule": "pfsp_hard", "latest": 0.0, "seed": 0, "match": 0} | change
    with pytest.raises(ValueError, match=problem):
        choose_opponent(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("every", "keep", "add_if"), [(0, 1, None), (1, 0, None), (1, 1, 1.5), (1, 1, math.nan)])
def test_rules_that_mean_nothing_are_refused(every: int, keep: int, add_if: float | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        GrowthRule(every=every, keep=keep, add_if=add_if)
