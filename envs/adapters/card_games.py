"""PettingZoo's poker games in words: their observations are arrays of zeros, ones and chips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from opentinker.envs.adapters.env_notes import base_name

RANKS = "A23456789TJQK"
SUITS = ("spades", "hearts", "diamonds", "clubs")
LEDUC = "JQK"
LEDUC_CHIPS = 15
"""Numbers of chips, from none, that a seat may have in the pot."""


def reader(id: str) -> Callable[[Any], str] | None:
    """Return what puts the observations of a game into words; None if the game is none of these."""
    return READERS.get(base_name(id))


def _leduc(seen: Any) -> str:
    own, public, mine, theirs = np.split(seen, [3, 6, 6 + LEDUC_CHIPS])
    shown = (
        f"The public card is {LEDUC[int(public.argmax())]}." if public.any() else "The public card is not shown yet."
    )
    pot = f"In the pot: {_chips(mine.argmax())} of yours, {theirs.argmax()} of theirs."
    return f"You hold {LEDUC[int(own.argmax())]}. {shown} {pot}"


def _limit(seen: Any) -> str:
    raises = seen[52:72].reshape(4, 5).argmax(axis=1)
    return f"{_cards(seen)} Raises in each round so far: {', '.join(map(str, raises))}."


def _no_limit(seen: Any) -> str:
    return f"{_cards(seen)} In the pot: {_chips(seen[52])} of yours; the highest bet is {int(seen[53])}."


def _cards(seen: Any) -> str:
    """Name the cards. The observation does not tell a hand from the public cards."""
    named = [f"{RANKS[card % 13]} of {SUITS[card // 13]}" for card in np.flatnonzero(seen[:52])]
    return f"Your two cards and the public ones, in no order: {', '.join(named)}."


def _chips(count: Any) -> str:
    return f"{int(count)} chip{'' if int(count) == 1 else 's'}"


READERS: dict[str, Callable[[Any], str]] = {
    "leduc_holdem": _leduc,
    "texas_holdem": _limit,
    "texas_holdem_no_limit": _no_limit,
}
