"""ALFWorld: household tasks in text, with the original games and library. Many turns, slow, in child processes."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from opentinker.envs.adapters.library import LibraryConfig, episode_seed
from opentinker.envs.base import Action, Environment, Step, user
from opentinker.envs.builtin.alfworld_games import Split, Task, choose, listing, read
from opentinker.envs.builtin.alfworld_play import TextWorldGame, command_of
from opentinker.envs.data import in_event_loop
from opentinker.shared.types.core import Message

INSTRUCTION = (
    "You are in a household, and have a task. Each turn, say one command. What stands after the last `Action:` counts, "
    "else your last line."
)
Penalty = Annotated[float, Field(ge=0.0)]


class AlfWorld(Environment):
    """One possible command per turn; an impossible one changes nothing.

    Reward components: `outcome` is `win` at the goal, -`lose_penalty` after `max_steps` turns without it; `step` is
    -`step_penalty` in every turn; `invalid` is -`invalid_penalty` for an impossible command.
    """

    class Config(LibraryConfig):
        library: ClassVar[str] = "alfworld"

        path: Annotated[str, Field(min_length=1)]
        """Directory with the games, SPLIT/TASK/TRIAL/game.tw-pddl, or one with them in json_2.1.1; on the env workers'
        machines."""
        split: Split = "train"
        """Games: `train` 3,553, `valid_seen` 140, `valid_unseen` 134."""
        tasks: tuple[Task, ...] = ()
        """Play only these kinds of task; empty: all six."""
        shuffle: bool = True
        """A new order in every pass; false: by name."""
        seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
        """Seed of the order."""
        shuffle_names: bool = False
        """Number the objects of a kind (drawer 1, drawer 2) by row and the job's seed, for more variety in training."""
        max_steps: Annotated[int, Field(ge=1)] = 50
        """Turns before the game is lost. `rollout.max_turns` of the job must leave room for them."""
        commands: bool = True
        """List the possible commands in every turn."""
        instruction: str = INSTRUCTION
        """Text before the description of the room; may be empty."""
        win: Annotated[float, Field(gt=0.0)] = 1.0
        """Reward of the goal."""
        lose_penalty: Penalty = 0.0
        """Deducted after `max_steps`."""
        step_penalty: Penalty = 0.0
        """Deducted in every turn."""
        invalid_penalty: Penalty = 0.0
        """Deducted for an impossible command."""

        def check(self) -> None:
            if not in_event_loop():
                read(listing(self.path, self.split, self.tasks)[0][0])

    config: Config
    blocking = True
    cost = 8.0
    recycle_after = 100
    memory_mb = 600

    async def open(self, row: int, seed: int) -> list[Message]:
        config = self.config
        game, self._file, self._task = choose(
            config.path, config.split, config.tasks, row=row, seed=config.seed, shuffle=config.shuffle
        )
        self._play = TextWorldGame(game, shuffle_names=config.shuffle_names, seed=episode_seed(row, seed))
        self._turns = self._invalid = 0
        start = self._play.start
        told = "\n\n".join(part for part in (config.instruction, self._shown(start.text, start.commands)) if part)
        return [user(told)]

    async def step(self, action: Action) -> Step:
        config = self.config
        seen = self._play.say(command_of(action.text, self._play.commands))
        self._turns += 1
        self._invalid += not seen.valid
        over = self._turns >= config.max_steps
        parts = {
            "outcome": config.win if seen.won else -config.lose_penalty if over else 0.0,
            "step": -config.step_penalty,
            "invalid": 0.0 if seen.valid else -config.invalid_penalty,
        }
        return Step(
            messages=[] if seen.won else [user(self._shown(seen.text, seen.commands))],
            reward=sum(parts.values()),
            components=parts,
            done=seen.won or over,
            truncated=over and not seen.won,
            metrics={
                "exact": float(seen.won),
                "steps": float(self._turns),
                "invalid": float(self._invalid),
                f"task/{self._task}": 1.0,
            },
        )

    async def close(self) -> None:
        if hasattr(self, "_play"):
            self._play.close()

    def gold(self) -> str:
        """Return a command that leads to the goal."""
        return f"Action: {self._play.expert()}"

    def _shown(self, text: str, commands: list[str]) -> str:
        return f"{text}\nPossible: {', '.join(commands)}." if self.config.commands else text
