"""Action names and task descriptions that well-known environments of Gymnasium and PettingZoo lack."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from opentinker.envs.adapters.library import is_installed

NAMES = {
    "FrozenLake": ["left", "down", "right", "up"],
    "CliffWalking": ["up", "right", "down", "left"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
    "Blackjack": ["stick", "hit"],
    "CartPole": ["left", "right"],
    "MountainCar": ["left", "none", "right"],
    "Acrobot": ["negative", "none", "positive"],
    "rps": ["rock", "paper", "scissors"],
    "leduc_holdem": ["call", "raise", "fold", "check"],
    "texas_holdem": ["call", "raise", "fold", "check"],
    "texas_holdem_no_limit": ["fold", "check or call", "raise half the pot", "raise the pot", "all in"],
}
ABOUT = {
    "FrozenLake": "Cross the frozen lake from S to the goal G over F; a hole H ends it. [x] marks where you stand.",
    "CliffWalking": "Walk from x to the target T in as few steps as you can; the cliff C throws you back to the start.",
    "Taxi": "You drive a taxi, shown as [x]. Fetch the passenger, shown as <x>, and drop them at (x). | are walls.",
    "Blackjack": "Blackjack. You see: your sum, the dealer's open card, and 1 if you hold an ace that counts 11.",
    "CartPole": "Keep the pole on the cart upright. You see: position, speed, angle of the pole, its angular speed.",
}
GAMES = {
    "tictactoe": "Your marks are 1, the other's 2. Cells are numbered down the columns: 0 3 6 is the first row.",
    "connect_four": "Your pieces are 1, theirs 2. An action is the column to drop a piece into. Four in line win.",
    "leduc_holdem": "Leduc poker, with two each of J, Q, K: a card each, a public one after round one. A pair wins.",
    "texas_holdem": "Poker with two cards each and up to five public ones, raises of a fixed size.",
    "texas_holdem_no_limit": "Poker with two cards each and up to five public ones, raises of any size.",
    "hanabi": "All play together: a pile of each color grows from 1 up. You see the others' cards, not your own. A "
    "card that fits no pile costs a life; a hint costs one of the hints left, a discarded card gives one back.",
    "rps": "You see what the other played last: 0 rock, 1 paper, 2 scissors, 3 nothing yet.",
}
PACKAGES = {
    "MiniGrid-": ("minigrid", "opentinker[gymnasium]"),
    "BabyAI-": ("minigrid", "opentinker[gymnasium]"),
    "ALE/": ("ale_py", "ale-py"),
}
"""Prefixes of ids -> the module whose import registers them, and the package that installs it."""
_COLOURED = re.compile(r"\x1b\[([\d;]*)m([^\x1b]*)\x1b\[0?m")
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
STOPS = "RGYB"


def register(id: str) -> None:
    """Register environments of packages other than gymnasium. Raise ValueError if the package is missing."""
    for beginning, (module, source) in PACKAGES.items():
        if id.startswith(beginning):
            if not is_installed(module):
                raise ValueError(f"id = {id!r} is of {module}, which is not installed here: pip install '{source}'")
            import_module(module)


def base_name(id: str) -> str:
    """`toy_text/FrozenLake8x8-v1` -> `FrozenLake`, `classic/rps_v2` -> `rps`"""
    return re.sub(r"(8x8)?([-_]v\d+)?$", "", id.rpartition("/")[2])


def names_of(id: str, environment: Any) -> list[str]:
    """Return the names of discrete actions in lower case; empty if there are none."""
    plain = environment.unwrapped
    if callable(meanings := getattr(plain, "get_action_meanings", None)):
        return [str(name).lower() for name in meanings()]
    members = getattr(getattr(plain, "actions", None), "__members__", None)
    return [name.lower() for name in members] if members else NAMES.get(base_name(id), [])


def plain_colours(text: str) -> str:
    """Return terminal colours as brackets, because they may be the only mark of a position: `[x]` on a coloured
    background, `<x>` bold, `(x)` any other colour."""
    found = 1
    while found:  # from the inside out: a taxi at its target has two colours
        text, found = _COLOURED.subn(_bracket, text)
    return _ESCAPE.sub("", text)


def _bracket(found: re.Match[str]) -> str:
    codes = [int(code) for code in found[1].split(";") if code]
    if any(40 <= code <= 47 or 100 <= code <= 107 for code in codes):
        return f"[{found[2]}]"
    return f"<{found[2]}>" if 1 in codes else f"({found[2]})"


def remark(id: str, environment: Any, observation: Any) -> str:
    """Return the part of the state that the text rendering does not show."""
    if base_name(id) != "Taxi":
        return ""
    _, _, passenger, target = environment.unwrapped.decode(observation)
    place = "in the taxi" if passenger == len(STOPS) else f"at {STOPS[passenger]}"
    return f"The passenger is {place} and wants to go to {STOPS[target]}."
