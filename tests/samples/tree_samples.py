"""Environments for tree sampling, loaded by the tests as `tests.samples.tree_samples:Name`."""

from __future__ import annotations

import copy
import random
import time
from typing import Any, ClassVar

from opentinker.envs.base import Action, Environment, EnvironmentConfig, Opening, Step, user


class Climb(Environment):
    """Two seats add the last digit of their answers to a height in turn. The seat that acts earns a tenth of its digit,
    the other one half of that; `fall` ends the episode."""

    class Config(EnvironmentConfig):
        turns: int = 4

    config: Config
    can_fork = True
    seats = ("left", "right")
    closed: ClassVar[list[int]] = []
    """Heights of the instances that were closed."""

    async def open(self, row: int, seed: int) -> Opening:
        self.draw = random.Random(f"climb/{seed}/{row}")
        self.digits: list[int] = []
        return Opening(messages=[user("climb=")], seat="left")

    async def step(self, action: Action) -> Step:
        if action.text == "raise":
            raise RuntimeError("the rope broke")
        digits = [int(sign) for sign in action.text if sign in "0123456789"]
        self.digits.append(digits[-1] if digits else 0)
        other = self.seats[len(self.digits) % 2]
        earned = self.digits[-1] / 10
        return Step(
            messages=[user(f"{sum(self.digits)} {self.draw.randrange(1000)}=")],
            reward=earned,
            components={"step": earned},
            rewards={other: {"step": earned / 2}},
            seat=other,
            done=len(self.digits) == self.config.turns or action.text == "fall",
            metrics={"height": float(sum(self.digits))},
        )

    async def close(self) -> None:
        self.closed.append(sum(self.digits))


class Brittle(Climb):
    """Can be copied once."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, object]) -> Brittle:
        if self.copies:
            raise RuntimeError("no second copy")
        self.copies = 1
        twin = Brittle(self.config)
        twin.draw, twin.digits = self.draw, list(self.digits)
        return twin


class BlockingClimb(Climb):
    blocking = True


class SlowClimb(Climb):
    """Is copied within 0.2 s."""

    slow_fork = True

    def __deepcopy__(self, memo: dict[int, Any]) -> SlowClimb:
        time.sleep(0.2)
        other = SlowClimb(self.config)
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


class Wordy(Climb):
    """Shows more than the candidates of a turn may see together."""

    async def step(self, action: Action) -> Step:
        return Step(messages=[user("x" * 200_000)], seat="left")


class Together(Environment):
    """A round of both seats, again and again: each earns its digit if the digits differ."""

    can_fork = True
    seats = ("left", "right")
    rounds = 0

    async def open(self, row: int, seed: int) -> Opening:
        return Opening(acting={seat: [user("differ=")] for seat in self.seats})

    async def step_all(self, actions: list[Action]) -> Step:
        self.rounds += 1
        digits = [int(action.text[-1:]) if action.text[-1:].isdigit() else 0 for action in actions]
        paid = digits if digits[0] != digits[1] else [0, 0]
        rewards = {seat: {"digit": float(digit)} for seat, digit in zip(self.seats, paid, strict=True)}
        if self.rounds == 2:
            return Step(done=True, rewards=rewards)
        return Step(acting={seat: [user("again=")] for seat in self.seats}, rewards=rewards)


class Glued(Climb):
    """Says that it can fork, and cannot."""

    async def open(self, row: int, seed: int) -> Opening:
        self.glue = (number for number in range(3))
        return await super().open(row, seed)
