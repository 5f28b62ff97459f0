"""Describes the observations of PettingZoo's card games, which are arrays of zeros, ones and chips, as text."""

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


COLOURS = {"R": "red", "Y": "yellow", "G": "green", "W": "white", "B": "blue"}
Reader = Callable[[Any, Any, Any], str]
"""Turns an agent's observation into text. Arguments: the environment, the agent and its observation."""


def reader(id: str) -> Reader | None:
    """Return the reader of a game's observations; None if the game is not one of these."""
    return READERS.get(base_name(id))


def actions_of(id: str, environment: Any) -> list[str]:
    """Return the names of a game's actions, which depend on its settings; empty for every other game."""
    if base_name(id) != "hanabi":
        return []
    state = _open_spiel(environment)
    told = [state.action_to_string(0, action)[1:-1].split() for action in range(environment.action_space("player_0").n)]
    return [_hanabi_action(*words) for words in told]


def _open_spiel(environment: Any) -> Any:
    return environment.unwrapped.hanabi_env.unwrapped.game_state


def _hanabi_action(verb: str, *rest: str) -> str:
    """`Play 0` -> `play card 1`, `Reveal player +1 color R` -> `tell player +1 red`"""
    if verb != "Reveal":
        return f"{verb.lower()} card {int(rest[0]) + 1}"
    *who, _, what = rest
    return f"tell {' '.join(who)} {COLOURS.get(what, f'rank {what}')}"


def _hanabi(environment: Any, agent: Any, _: Any) -> str:
    """Put OpenSpiel's lines for the player into words: `XX || X3|RYB3` is a card that has been called a 3 and may be
    red, yellow or blue."""
    agents = list(environment.possible_agents)
    me = agents.index(agent)
    table, _, rest = _open_spiel(environment).observation_string(me).partition("Hands:")
    hands, _, end = rest.partition("Deck size:")
    lives, hints, fireworks = (line.partition(":")[2].strip() for line in table.strip().splitlines())
    deck, _, discards = end.partition("Discards:")
    piles = ", ".join(f"{COLOURS[pile[0]]} {pile[1:]}" for pile in fireworks.split())
    gone = ", ".join(f"{COLOURS[card[0]]} {card[1:]}" for card in discards.split())
    parts = [f"Lives: {lives}. Hints left: {hints}. Cards in the deck: {deck.strip()}. Fireworks: {piles}."]
    parts += [f"Discarded: {gone}."] if gone else []
    for place, hand in enumerate(hands.split("-----")):
        cards = [line.split(" || ") for line in hand.splitlines() if " || " in line]
        if place == 0:
            known = "; ".join(f"{number}: {_possible(about)}" for number, (_, about) in enumerate(cards, start=1))
            parts.append(f"Your cards: {known}.")
        else:
            shown = ", ".join(f"{COLOURS[card[0]]} {card[1:]}{_told(about)}" for card, about in cards)
            parts.append(f"{agents[(me + place) % len(agents)]} (+{place}) holds: {shown}.")
    return "\n".join(parts)


def _possible(about: str) -> str:
    """`X3|RYB3` -> `red, yellow or blue; rank 3`"""
    left = about.partition("|")[2]
    colours = [COLOURS[letter] for letter in left if letter in COLOURS]
    ranks = [letter for letter in left if letter.isdigit()]
    return f"{_either(colours)}, rank {_either(ranks)}"


def _told(about: str) -> str:
    """`X3|RYB3` -> ` (knows rank 3)`"""
    colour, rank = about[0], about[1]
    known = [COLOURS[colour]] if colour != "X" else []
    known += [f"rank {rank}"] if rank != "X" else []
    return f" (knows {' and '.join(known)})" if known else ""


def _either(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _leduc(_: Any, __: Any, seen: Any) -> str:
    own, public, mine, theirs = np.split(seen, [3, 6, 6 + LEDUC_CHIPS])
    shown = (
        f"The public card is {LEDUC[int(public.argmax())]}." if public.any() else "The public card is not shown yet."
    )
    pot = f"In the pot: {_chips(mine.argmax())} of yours, {theirs.argmax()} of theirs."
    return f"You hold {LEDUC[int(own.argmax())]}. {shown} {pot}"


def _limit(_: Any, __: Any, seen: Any) -> str:
    raises = seen[52:72].reshape(4, 5).argmax(axis=1)
    return f"{_cards(seen)} Raises in each round so far: {', '.join(map(str, raises))}."


def _no_limit(_: Any, __: Any, seen: Any) -> str:
    return f"{_cards(seen)} In the pot: {_chips(seen[52])} of yours; the highest bet is {int(seen[53])}."


def _cards(seen: Any) -> str:
    """Name the cards. The observation does not tell a hand from the public cards."""
    named = [f"{RANKS[card % 13]} of {SUITS[card // 13]}" for card in np.flatnonzero(seen[:52])]
    return f"Your two cards and the public ones, in no order: {', '.join(named)}."


def _chips(count: Any) -> str:
    return f"{int(count)} chip{'' if int(count) == 1 else 's'}"


READERS: dict[str, Reader] = {
    "hanabi": _hanabi,
    "leduc_holdem": _leduc,
    "texas_holdem": _limit,
    "texas_holdem_no_limit": _no_limit,
}
