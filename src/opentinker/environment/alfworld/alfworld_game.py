"""ALFWorld with the published rewards, on the games and the player of the environment `alfworld`."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, ClassVar

from opentinker.envs.adapters.library import is_installed
from opentinker.envs.builtin.alfworld_games import RELEASE, TASKS, GameFile, NoGames, listing, read
from opentinker.envs.builtin.alfworld_play import CommandResult, TextWorldGame, command_of
from opentinker.envs.game import AbstractGame, StepResult

SPLITS = {
    "train": ("train", "data_path"),
    "eval_in_distribution": ("valid_seen", "eval_id_data_path"),
    "eval_out_of_distribution": ("valid_unseen", "eval_ood_data_path"),
}
"""By their published names: the directory, and the key under `dataset` of a config file."""
SHOWN = 20
"""Commands shown per observation, with the number of the others."""


class ALFWorldGame(AbstractGame):
    """A command a turn, in `<action>` tags or as the last line.

    The `seed` of the start state chooses the game: of n games, the one that `random.Random(seed).randrange(n)` numbers,
    unless `task_type` asks for another kind of task; then one of that kind. Nothing else is random. The games lie where
    the config file says, else in ALFWORLD_DATA/json_2.1.1, else in ~/.cache/alfworld/json_2.1.1.
    """

    REWARD_SUCCESS = 10.0
    REWARD_FAILURE = -1.0
    REWARD_STEP = -0.01
    REWARD_INVALID_ACTION = -0.1
    DEFAULT_MAX_STEPS = 20
    ALL_TASK_TYPES: ClassVar[list[str]] = list(TASKS)

    def __init__(
        self,
        config_path: str | None = None,
        max_steps: int = DEFAULT_MAX_STEPS,
        task_types: list[str] | None = None,
        split: str = "train",
        num_games: int = -1,
        use_shared_env: bool = False,
    ) -> None:
        """`config_path`: ALFWorld's base_config.yaml. `num_games`: the first of them by name; -1: all. `use_shared_env`
        is refused: every game has a separate world."""
        if use_shared_env:
            raise ValueError("use_shared_env: games that share a world disturb each other; leave it out")
        if not is_installed("alfworld"):
            raise ImportError("alfworld is not installed here: pip install 'opentinker[alfworld]'")
        if split not in SPLITS:
            raise ValueError(f"split = {split!r}: there are {', '.join(SPLITS)}")
        if max_steps < 1 or (num_games < 1 and num_games != -1):
            raise ValueError("max_steps must be at least 1, num_games at least 1, or -1 for all")
        config = _config(config_path)
        types = list(task_types or _types_of(config) or TASKS)
        if odd := sorted(set(types) - set(TASKS)):
            raise ValueError(f"task_types: {', '.join(odd)}: there are {', '.join(TASKS)}")
        self.max_steps, self.task_types, self.split, self.num_games = max_steps, types, split, num_games
        self._directory = _directory(config, split)
        self._steps = self._invalid = 0
        self._result = self._said = ""
        self._play: TextWorldGame | None = None
        self._seen = CommandResult("", [], False, True)

    def generate_initial_state(self) -> dict[str, Any]:
        """Needs no games: a game server may have them."""
        return {"seed": random.randrange(2**31)}

    def reset(self, task_type: str | None = None, seed: int | None = None, **kwargs: Any) -> str:
        self.close()
        game = self.choose(task_type, random.randrange(2**31) if seed is None else seed)
        self._play = TextWorldGame(game, shuffle_names=False, seed=0)
        self._seen, self._steps, self._invalid, self._result, self._said = self._play.start, 0, 0, "", ""
        return self._shown("")

    def choose(self, task_type: str | None, seed: int) -> GameFile:
        """Raises NoGames."""
        games = self._games()
        draw = random.Random(seed)
        first = games[draw.randrange(len(games))]
        if task_type and first[1] != task_type:
            games = [game for game in games if game[1] == task_type]
            if not games:
                raise NoGames(f"{self._directory} has no game of {task_type}")
            first = draw.choice(games)
        for file, _ in [first, *draw.sample(games, len(games))]:
            game = read(file)
            if game.solvable:
                return game
        raise NoGames(f"no game of {self._directory} is marked as solvable")

    def _games(self) -> list[tuple[Path, str]]:
        """Files and kinds of task, by name. Raises NoGames."""
        games = listing(str(self._directory.parent), self._directory.name, tuple(self.task_types))
        return games[: None if self.num_games == -1 else self.num_games]

    def _get_cached_game_paths(self) -> list[str]:
        """The directories of all games, by number."""
        return [str(file.parent) for file, _ in self._games()]

    def step(self, action: str) -> StepResult:
        if self._play is None or self._result:
            return StepResult("The episode is over.", 0.0, True, self._info())
        self._steps += 1
        self._said = self.parse_action(action)
        self._seen = self._play.say(self._said)
        self._invalid += not self._seen.valid
        if self._seen.won:
            self._result = "win"
            return StepResult(self._shown("The task is done."), self.REWARD_SUCCESS, True, self._info())
        if self._steps >= self.max_steps:
            self._result = "timeout"
            return StepResult(self._shown("The time is over."), self.REWARD_FAILURE, True, self._info())
        reward = self.REWARD_STEP if self._seen.valid else self.REWARD_INVALID_ACTION
        return StepResult(self._shown(""), reward, False, self._info())

    def parse_action(self, raw_action: str) -> str:
        return command_of(raw_action, self._seen.commands)

    def expert_action(self) -> str:
        """A command on a way to the goal."""
        if self._play is None:
            raise ValueError("no game has begun: call reset() first")
        return self._play.expert()

    def get_system_prompt(self) -> str:
        return (
            "You are in a household, and have a task. Each turn, think as long as you like, then say one command in "
            "tags: <action>go to desk 1</action>. The commands are go to, take ... from, move ... to, open, close, "
            "use, heat, cool, clean and slice ... with, examine, inventory, look."
        )

    def get_initial_user_message(self) -> str:
        return "This is what you see, and your task."

    def get_state(self) -> dict[str, Any]:
        return {**self._info(), "max_steps": self.max_steps, "admissible_commands": self._seen.commands}

    def get_interaction_name(self) -> str:
        return "alfworld"

    def close(self) -> None:
        play, self._play = self._play, None
        if play is not None:
            play.close()

    def _info(self) -> dict[str, Any]:
        told: dict[str, Any] = {"exact": float(self._result == "win"), "success": self._result == "win"}
        told |= {"game_steps": float(self._steps), "invalid": float(self._invalid)}
        told |= {"action_taken": self._said, "task": self._task()}
        return told | ({"result": self._result} if self._result else {})

    def _task(self) -> str:
        """The sentence of the start that says what is to be done."""
        lines = self._play.start.text.splitlines() if self._play else []
        return next((line for line in lines if line.startswith("Your task is to")), "")

    def _shown(self, first: str) -> str:
        commands = self._seen.commands
        more = f", and {len(commands) - SHOWN} more" if len(commands) > SHOWN else ""
        possible = "" if self._result else f"Possible: {', '.join(commands[:SHOWN])}{more}."
        return "\n".join(filter(None, [first, self._seen.text, possible]))


def _config(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml  # alfworld brings it

    try:
        found = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"config_path = {path!r} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"config_path = {path!r} holds no settings of ALFWorld")
    return found


def _types_of(config: dict[str, Any]) -> list[str]:
    """Return the task types by the numbers that ALFWorld's config uses."""
    numbers = config.get("env", {}).get("task_types", [])
    if odd := [number for number in numbers if number not in range(1, len(TASKS) + 1)]:
        raise ValueError(f"env.task_types: {odd}: they are 1 to {len(TASKS)}")
    return [TASKS[number - 1] for number in numbers]


def _directory(config: dict[str, Any], split: str) -> Path:
    name, key = SPLITS[split]
    given = config.get("dataset", {}).get(key)
    data = os.environ.get("ALFWORLD_DATA") or str(Path("~/.cache/alfworld").expanduser())
    if given:
        return Path(os.path.expanduser(given.replace("$ALFWORLD_DATA", data)))
    return Path(data, RELEASE, name)
