"""The games of ALFWorld on this machine: one file each, by split and kind of task. Needs nothing of the library.

DIRECTORY/train/pick_and_place_simple-Mug-None-Desk-308/trial_T2019.../game.tw-pddl
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import msgspec

from opentinker.envs.data import Table

Split = Literal["train", "valid_seen", "valid_unseen", "valid_train"]
"""`valid_seen`: rooms of the training games; `valid_unseen`: other rooms; `valid_train`: more games of the former."""
Task = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
TASKS: tuple[Task, ...] = get_args(Task)
FILE = "game.tw-pddl"
RELEASE = "json_2.1.1"
"""Name of the directory in ALFWorld's own downloads, under ALFWORLD_DATA."""
LEFT_OUT = ("movable", "Sliced")
"""Parts of the names of tasks that ALFWorld leaves out of its text games."""


class GameFile(msgspec.Struct):
    """The fields of a game file that the library needs."""

    pddl_domain: str
    grammar: str
    pddl_problem: str
    solvable: bool = False
    walkthrough: list[str] = []
    """Commands that win the game from its start."""


class NoGames(ValueError):
    """No game was found; the message names the directory and its content."""


def split_of(path: str, split: str) -> Path:
    """Return the directory of a split. Raise NoGames."""
    root = Path(path).expanduser()
    if (root / RELEASE).is_dir():
        root = root / RELEASE
    if not root.is_dir():
        raise NoGames(f"path = {path!r} is not a directory on this machine; it must hold SPLIT/TASK/TRIAL/{FILE}")
    if not (root / split).is_dir():
        there = ", ".join(sorted(name for name in get_args(Split) if (root / name).is_dir()))
        raise NoGames(f"path = {path!r} has no split {split!r}; there are: {there or 'none'}")
    return root / split


def listing(path: str, split: str, tasks: tuple[str, ...] = ()) -> list[tuple[Path, str]]:
    """Return files and kinds of task by name, only of the kinds in `tasks` if given. Raise NoGames."""
    directory = split_of(path, split)
    found = [game for game in _listing(directory, directory.stat().st_mtime_ns) if not tasks or game[1] in tasks]
    if not found:
        raise NoGames(f"{directory} has no game of {' or '.join(tasks) or 'any known task'}: no TASK/TRIAL/{FILE}")
    return found


@lru_cache(maxsize=8)
def _listing(directory: Path, _: int) -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    for name in sorted(os.listdir(directory)):
        task = name.partition("-")[0]
        if task not in TASKS or any(word in name for word in LEFT_OUT) or not (directory / name).is_dir():
            continue
        files = (directory / name / trial / FILE for trial in sorted(os.listdir(directory / name)))
        found += [(file, task) for file in files if file.is_file()]
    return found


@lru_cache(maxsize=16)
def _table(games: tuple[tuple[Path, str], ...], seed: int, path: str) -> Table:
    return Table([(str(file), {"task": task}) for file, task in games], 0.0, "train", seed, path)


def read(file: str | Path) -> GameFile:
    """Raises NoGames."""
    try:
        return msgspec.json.decode(Path(file).read_bytes(), type=GameFile)
    except (OSError, msgspec.DecodeError) as error:
        raise NoGames(f"{file} cannot be read as a game of ALFWorld: {error}") from None


def choose(
    path: str, split: str, tasks: tuple[str, ...], *, row: int, seed: int, shuffle: bool
) -> tuple[GameFile, str, str]:
    """Return the game of a row, its file and its kind of task. Every game is played once per epoch, each epoch in a new
    order by `seed`. A game without a solution is replaced by the next one. Raise NoGames."""
    games = _table(tuple(listing(path, split, tasks)), seed, path)
    for place in range(row, row + len(games)):
        file, about = games.at(place, shuffle=shuffle)
        game = read(file)
        if game.solvable:
            return game, file, about["task"]
    raise NoGames(f"no game of {path}, {split} is marked as solvable")
