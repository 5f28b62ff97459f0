"""Plays one game of ALFWorld through TextWorld and ALFWorld's own wrapper for names.

The library's parser is one per process and takes one call at a time, under a lock. It is slow (a step takes about 60
ms), so several processes play, not several threads.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import msgspec

from opentinker.envs.adapters.library import Randomness
from opentinker.envs.builtin.alfworld_games import GameFile

_one_call = threading.Lock()
_TAGGED = re.compile(r"<action>(.*?)(?:</action>|$)", re.IGNORECASE | re.DOTALL)
_AFTER = re.compile(r"action:[ \t]*\n*([^\n]*)", re.IGNORECASE)
_PUT = re.compile(r"put (.+?) (?:in/on|in|on|into|onto) (.+)")
_TITLE = re.compile(r"\A-= .*? =-\s*")


class CommandResult(NamedTuple):
    """Result of a command, or the start of the game."""

    text: str
    commands: list[str]
    """Commands that are possible now."""
    won: bool
    valid: bool
    """Whether the command was possible."""


class TextWorldGame:
    """One game, from its start to `close`."""

    def __init__(self, game: GameFile, *, shuffle_names: bool, seed: int) -> None:
        """`shuffle_names`: `seed` numbers the objects of a kind."""
        self._randomness = Randomness(seed)
        with self._library():
            named, bare, infos = _classes()
            self._inner: Any = bare(infos(feedback=True, won=True, admissible_commands=True))
            self._environment: Any = named(self._inner, shuffle=shuffle_names)
            self._environment.load(msgspec.to_builtins(game))
            self._state = self._environment.reset()
        self.start = CommandResult(_TITLE.sub("", self._state.feedback), self.commands, False, True)
        self._plan = [] if shuffle_names else list(game.walkthrough)
        """The expert's remaining commands; empty: it must plan."""

    @property
    def commands(self) -> list[str]:
        return [" ".join(command.split()) for command in self._state["admissible_commands"]]

    def say(self, command: str) -> CommandResult:
        """Play a command; an impossible one does not change the game."""
        exact = dict(zip(self.commands, self._state["admissible_commands"], strict=True))
        valid = command in exact
        with self._library():
            self._state, _, _ = self._environment.step(exact.get(command, command))
        if valid:
            self._plan = self._plan[1:] if self._plan[:1] == [command] else []
        return CommandResult(self._state.feedback, self.commands, bool(self._state["won"]), valid)

    def expert(self) -> str:
        """Return a command on a way to the goal: from the walkthrough of the game, else from the planner (seconds).

        Raise ValueError if there is no way.
        """
        if not self._plan:
            with self._library():
                found = self._inner._pddl_state.replan(self._inner._entity_infos)
            self._plan = [" ".join(command.split()) for command in found]
        if not self._plan:
            raise ValueError("the planner finds no way to the goal from here")
        return self._plan[0]

    def close(self) -> None:
        """Free the planner's memory; otherwise the library leaks several times as much."""
        with self._library():
            self._inner.downward_lib.cleanup()

    @contextlib.contextmanager
    def _library(self) -> Iterator[None]:
        """Guard the library's translator, which reads and writes sys.argv and uses the global generators."""
        with _one_call, self._randomness:
            arguments = sys.argv
            try:
                yield
            finally:
                sys.argv = arguments


def command_of(text: str, commands: list[str]) -> str:
    """Return the command in a text: in the last `<action>`, else after the last `Action:`, else the last line.

    Case does not matter. `put X in/on Y`, as in older games, becomes `move X to Y`.
    """
    tagged, after = _TAGGED.findall(text), _AFTER.findall(text)
    lines = [line for line in (tagged or after or [text])[-1].splitlines() if line.strip()]
    said = " ".join(lines[-1].lower().split()) if lines else ""
    said = said.strip(" .>*`'\"")
    if said not in commands and (put := _PUT.fullmatch(said)):
        said = f"move {put[1]} to {put[2]}"
    return said


@cache
def _classes() -> tuple[Any, Any, Any]:
    """Import the library, which takes about a second.

    ALFWorld creates a data directory when it is imported: ALFWORLD_DATA, otherwise in the user's home.
    """
    given = os.environ.get("ALFWORLD_DATA")
    os.environ["ALFWORLD_DATA"] = given or tempfile.gettempdir()
    try:
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld import EnvInfos
        from textworld.envs.pddl import PddlEnv
    finally:
        if given is None:
            del os.environ["ALFWORLD_DATA"]
    return AlfredDemangler, PddlEnv, EnvInfos
