"""Name the colour of a picture. No data, one turn, for vision models."""

from __future__ import annotations

import random
from typing import Annotated

import numpy as np
from pydantic import Field

from opentinker.envs.base import Action, Environment, EnvironmentConfig, Step
from opentinker.envs.png import png
from opentinker.shared.types.core import Image, Message, Text

COLOURS = {
    "r": ("red", (220, 30, 30)),
    "g": ("green", (30, 180, 30)),
    "b": ("blue", (30, 60, 220)),
    "y": ("yellow", (230, 220, 40)),
    "w": ("white", (245, 245, 245)),
    "k": ("black", (10, 10, 10)),
    "c": ("cyan", (40, 210, 220)),
    "m": ("magenta", (210, 40, 200)),
}


class Colours(Environment):
    """A square of one colour with a little noise, then `colour? `. The answer is its letter: r(ed), g(reen), b(lue),
    y(ellow), w(hite), k for black, c(yan), m(agenta); the first character of the action counts.

    Reward and `exact`: 1 for the right letter, otherwise 0.
    """

    class Config(EnvironmentConfig):
        colours: Annotated[int, Field(ge=2, le=len(COLOURS))] = 4
        """Number of colours, in this order."""
        side: Annotated[int, Field(ge=8, le=1024)] = 32
        """Width and height of the picture in pixels."""

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        self.right = random.Random(f"colours/{seed}/{row}").choice(list(COLOURS)[: self.config.colours])
        return [Message(role="user", content=[self._picture([seed, row]), Text("colour? ")])]

    def _picture(self, seed: list[int]) -> Image:
        noise = np.random.default_rng(seed).integers(-10, 11, (self.config.side, self.config.side, 3))
        return Image(png(np.clip(np.array(COLOURS[self.right][1]) + noise, 0, 255).astype(np.uint8)))

    async def step(self, action: Action) -> Step:
        hit = float(action.text[:1] == self.right)
        return Step(reward=hit, done=True, metrics={"exact": hit})

    def gold(self) -> str:
        return self.right
