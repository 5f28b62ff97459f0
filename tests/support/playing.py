"""Scripted episodes for tests of environments: open one, say this and that, see what comes."""

from __future__ import annotations

from typing import Any

from opentinker.envs.base import Action, Environment, Opening, Step
from opentinker.envs.registry import make
from opentinker.shared.types.core import StopReason


class Table:
    """One open episode."""

    def __init__(self, environment: Environment, opening: Opening) -> None:
        self.environment: Any = environment
        self.prompt = opening.messages[-1].text
        self.seat = opening.seat
        self.turn = 0
        self.totals = dict.fromkeys(environment.seats, 0.0)
        self.steps: list[Step] = []

    async def say(self, *texts: str) -> Step:
        """Each by whoever's turn it is; the answer to the last of them."""
        for text in texts:
            step = await self.environment.step(Action(text=text, stop=StopReason.EOS, turn=self.turn, seat=self.seat))
            assert not step.components or sum(step.components.values()) == step.reward
            self.steps.append(step)
            self.totals[self.seat] += step.reward
            for seat, parts in step.rewards.items():
                assert seat != self.seat
                self.totals[seat] += sum(parts.values())
            self.turn += 1
            self.seat = step.seat
        return self.steps[-1]

    @property
    def seen(self) -> str:
        """The newest message."""
        return self.steps[-1].messages[-1].text if self.steps else self.prompt


async def sit(name: str, row: int = 0, seed: int = 0, /, **config: Any) -> Table:
    environment = make(name, config)
    opened = await environment.open(row, seed)
    if not isinstance(opened, Opening):
        opened = Opening(messages=opened, seat=environment.seats[0])
    return Table(environment, opened)


async def transcript(name: str, texts: list[str], row: int = 0, seed: int = 0, /, **config: Any) -> list[Any]:
    """Everything that an episode says until it is over or nothing is left to be said."""
    table = await sit(name, row, seed, **config)
    for text in texts:
        if (await table.say(text)).done:
            break
    await table.environment.close()
    return [table.prompt, *table.steps]
