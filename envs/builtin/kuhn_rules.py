"""Kuhn poker as a game tree: values, exact best responses and exploitability of policies. Pure functions.

Kuhn (1950), "A simplified two-person poker": three cards j < q < k, one for each player, one chip each in the pot.
`first` checks (c) or bets one chip (b); after a bet the other calls (c) or folds (f); after a check the other checks or
bets, and `first` then calls or folds. A showdown goes to the higher card.

A history is the letters of the moves so far. An information set is what a player knows: the card and the history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations, product

CARDS = "jqk"
FIRST, SECOND = "first", "second"
HISTORIES = {FIRST: ("", "cb"), SECOND: ("c", "b")}
"""In which each seat acts."""
InformationSet = tuple[str, str]
"""Card and history."""
Policy = Mapping[InformationSet, float]
"""Probability of the bet, or of the call after a bet, in each of the 12 information sets."""
INFORMATION_SETS: tuple[InformationSet, ...] = tuple(
    (card, history) for seat in (FIRST, SECOND) for history in HISTORIES[seat] for card in CARDS
)


def mover_of(history: str) -> str:
    return SECOND if len(history) % 2 else FIRST


def actions_of(history: str) -> tuple[str, str]:
    """Return the letters of the passive and of the active move: check and bet, or fold and call."""
    return ("f", "c") if history.endswith("b") else ("c", "b")


def payoff(cards: tuple[str, str], history: str) -> int | None:
    """Return the chips that `first` wins; None if the hand is not over. `cards`: those of first and second."""
    if history.endswith("f"):
        return 1 if mover_of(history) == FIRST else -1
    if history not in ("cc", "bc", "cbc"):
        return None
    won = 1 if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -1
    return 2 * won if "b" in history else won


def game_value(policy: Policy) -> float:
    """Return the expected chips of `first` if both seats follow `policy`. Raise ValueError for a policy that is not
    one."""
    _check(policy)
    deals = list(permutations(CARDS, 2))
    return sum(_value(cards, "", policy) for cards in deals) / len(deals)


def best_response_value(policy: Policy, seat: str) -> float:
    """Return the most chips that `seat` can expect against the other seat's part of `policy`.

    The maximum over all 64 deterministic policies: one of them is a best response.
    """
    sign, sets = (1 if seat == FIRST else -1), list(product(CARDS, HISTORIES[seat]))
    choices = product((0.0, 1.0), repeat=len(sets))
    return max(sign * game_value({**policy, **dict(zip(sets, choice, strict=True))}) for choice in choices)


def exploitability(policy: Policy) -> float:
    """Return the mean over both seats of what a best response wins against `policy`: 0 for an equilibrium, 11/24 for
    uniform play."""
    return (best_response_value(policy, FIRST) + best_response_value(policy, SECOND)) / 2


def equilibrium(alpha: float) -> dict[InformationSet, float]:
    """Return one of Kuhn's equilibria, whose value for `first` is -1/18. `alpha`: how often `first` bluffs with j,
    between 0 and 1/3."""
    if not 0.0 <= alpha <= 1 / 3:
        raise ValueError(f"alpha must be between 0 and 1/3, not {alpha}")
    opening = {"j": alpha, "q": 0.0, "k": 3 * alpha}
    calling = {"j": 0.0, "q": alpha + 1 / 3, "k": 1.0}
    betting = {"j": 1 / 3, "q": 0.0, "k": 1.0}
    answering = {"j": 0.0, "q": 1 / 3, "k": 1.0}
    tables = {"": opening, "cb": calling, "c": betting, "b": answering}
    return {(card, history): tables[history][card] for card, history in INFORMATION_SETS}


def average_policy(policies: Sequence[Policy]) -> dict[InformationSet, float]:
    """Return the policy that plays each hand like one of these, drawn at random, against any opponent.

    In an information set each counts by the probability that its own moves lead there (the average strategy of
    fictitious play: Heinrich, Lanctot, Silver 2015, "Fictitious self-play in extensive-form games"). Raise ValueError
    without policies.
    """
    if not policies:
        raise ValueError("there is no average of no policies")
    for policy in policies:
        _check(policy)
    found = {}
    for card, history in INFORMATION_SETS:
        reach = [1.0 - policy[card, ""] if history == "cb" else 1.0 for policy in policies]
        reach = reach if sum(reach) else [1.0] * len(policies)
        shares = (weight * policy[card, history] for weight, policy in zip(reach, policies, strict=True))
        found[card, history] = min(1.0, sum(shares) / sum(reach))
    return found


def _value(cards: tuple[str, ...], history: str, policy: Policy) -> float:
    end = payoff((cards[0], cards[1]), history)
    if end is not None:
        return float(end)
    active = policy[cards[len(history) % 2], history]
    passive_move, active_move = actions_of(history)
    found = 0.0
    for share, move in ((1.0 - active, passive_move), (active, active_move)):
        found += share * _value(cards, history + move, policy) if share else 0.0
    return found


def _check(policy: Policy) -> None:
    for card, history in INFORMATION_SETS:
        share = policy.get((card, history))
        if share is None or not 0.0 <= share <= 1.0:
            problem = "has no entry" if share is None else f"is {share}, not a probability"
            raise ValueError(f"the policy {problem} for card {card!r} after {history!r}")
