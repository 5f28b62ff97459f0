"""Scripted episodes for tests of environments, and requests to sessions: open one, say this, see what comes."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from opentinker.envs.base import Action, Environment, Opening, Step
from opentinker.envs.registry import make
from opentinker.envs.rounds import prompts_of
from opentinker.envs.runtime.env_runner import LocalEnvRunner
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.env_protocol import OpenSession, SessionReply, StepSession

E = TypeVar("E", bound=Environment)


def opening(
    environment: str,
    session: str = "s",
    *,
    job: str = "j",
    row: int = 0,
    seed: int = 0,
    deadline_s: float = 60.0,
    bots: dict[str, str] | None = None,
    **config: Any,
) -> OpenSession:
    """Whoever asks has at least a minute for the answer."""
    return OpenSession(
        job=job, session=session, environment=environment, config=config, row=row, seed=seed, deadline_s=deadline_s,
        answer_within_s=max(60.0, deadline_s), bots=bots or {},
    )  # fmt: skip


async def local_episode(request: OpenSession) -> tuple[LocalEnvRunner, SessionReply]:
    """Open it in this process and event loop. Return its player and the answer."""
    player = LocalEnvRunner("w", modules=True)
    return player, await player.open(request)


def step(turn: int = 0, text: str = "x", session: str = "s", **more: Any) -> StepSession:
    return StepSession(session=session, turn=turn, text=text, stop=StopReason.EOS, **more)


async def say(environment: Environment, *texts: str, stop: StopReason = StopReason.EOS) -> list[Step]:
    return [await environment.step(Action(text=text, stop=stop, turn=turn)) for turn, text in enumerate(texts)]


class Table:
    """One open episode."""

    def __init__(self, environment: Environment, opening: Opening) -> None:
        self.environment: Any = environment
        self.prompts = prompts_of(environment, opening, "open")
        """Who is asked, and what each sees; of a round, all its seats."""
        self.prompt = next(iter(self.prompts.values())).messages[-1].text
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
            self._go_on(step)
        return self.steps[-1]

    async def say_all(self, *texts: str) -> Step:
        """In a round: a text of every seat that is asked, in their order; the answer to all."""
        said = zip(self.prompts, texts, strict=True)
        actions = [Action(text=text, stop=StopReason.EOS, turn=self.turn, seat=seat) for seat, text in said]
        step: Step = await self.environment.step_all(actions)
        assert (step.reward, step.components) == (0.0, {})
        self.steps.append(step)
        for seat, parts in step.rewards.items():
            self.totals[seat] += sum(parts.values())
        self._go_on(step)
        return step

    def _go_on(self, step: Step) -> None:
        self.turn += 1
        self.seat = step.seat
        if not step.done:
            self.prompts = prompts_of(self.environment, step, "step")

    def said_to(self, seat: str) -> str:
        """The newest message to a seat of a round."""
        return self.prompts[seat].messages[-1].text

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


async def opened(kind: type[E], row: int = 0, seed: int = 0, /, **config: Any) -> tuple[E, Opening]:
    """An environment of one of our classes that names a seat in its opening, and the opening."""
    environment = kind(kind.Config.model_validate(config))
    opening = await environment.open(row, seed)
    assert isinstance(opening, Opening)
    return environment, opening


def deed(action_type: str, **fields: Any) -> str:
    """An action on a phone, as its policy says it."""
    return json.dumps({"action_type": action_type, **fields})


def named(seen: str, pattern: str) -> int:
    """The number of the element on the screen that matches."""
    found = re.search(rf"^\[(\d+)\] {pattern}", seen, re.MULTILINE)
    assert found is not None, seen
    return int(found[1])


async def tap(table: Table, pattern: str) -> None:
    await table.say(deed("click", index=named(table.seen, pattern)))


async def transcript(name: str, texts: list[str], row: int = 0, seed: int = 0, /, **config: Any) -> list[Any]:
    """Everything that an episode says until it is over or nothing is left to be said."""
    table = await sit(name, row, seed, **config)
    for text in texts:
        if (await table.say(text)).done:
            break
    await table.environment.close()
    return [table.prompt, *table.steps]
