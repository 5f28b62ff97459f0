"""One episode of an environment in this process, and the policies that can play it: its expert, guesses, repetition."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentinker.envs.base import Environment
from opentinker.envs.runtime.env_runner import LocalEnvRunner
from opentinker.shared.types.core import Message, StopReason
from opentinker.shared.types.env_protocol import OpenSession, SeatAction, SeatPrompt, SessionReply

TURNS = 1000
"""Turns of an episode that the policy does not end."""


Policy = Callable[[Environment, SessionReply, SeatPrompt], Message | None]
"""Returns the next message of a seat, which the reply asks with this prompt; None: the episode is abandoned."""


@dataclass
class Tried:
    """One episode."""

    row: int
    seed: int
    replies: list[SessionReply] = field(default_factory=list)
    turns: list[list[tuple[str, Message]]] = field(default_factory=list)
    """Seat that acted in each turn, and its message; several seats in a round."""
    open_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    """By seat."""
    seats: tuple[str, ...] = ()
    """Those of the environment, of which an episode may ask some alone."""

    @property
    def said(self) -> list[tuple[str, Message]]:
        return [one for turn in self.turns for one in turn]

    @property
    def ended(self) -> bool:
        return self.replies[-1].done

    @property
    def failure(self) -> str:
        last = self.replies[-1]
        where = "open()"
        if len(self.replies) > 1:
            where = f"{'step_all' if self.replies[-2].round else 'step'}() number {len(self.replies) - 1}"
        return (
            "" if last.failure is None else f"{where} of row {self.row}, seed {self.seed}: {last.failure}: {last.error}"
        )

    def transcript(self) -> str:
        lines: list[str] = []
        for number, reply in enumerate(self.replies):
            if number:
                lines += [_told(message, seat) for seat, message in self.turns[number - 1]]
                lines.append(_outcome(reply))
            lines += [_told(message, prompt.seat) for prompt in reply.prompts for message in prompt.messages]
        return "\n".join(line for line in lines if line)


def _told(message: Message, seat: str) -> str:
    calls = "".join(f"\n  calls {call.name}({call.arguments})" for call in message.tool_calls)
    pictures = f" [{len(message.images)} images]" if message.images else ""
    return f"{message.role}{f' ({seat})' if seat else ''}: {message.text}{pictures}{calls}"


def earned(reply: SessionReply, *, own: bool) -> list[str]:
    """Say what a turn earned. `own`: also the reward of its seat, if it is 0."""
    parts = [f"reward {reply.reward:g}"] if reply.reward or own else []
    parts += [f"{name} {value + 0.0:g}" for name, value in reply.components.items()]  # -0.0 as 0
    return parts + [f"{seat} gets {sum(named.values()):g}" for seat, named in reply.rewards.items()]


def _outcome(reply: SessionReply) -> str:
    parts = earned(reply, own=reply.done)
    parts += [f"{name}={value:g}" for name, value in reply.metrics.items()] if reply.done else []
    if reply.failure is not None:
        parts = [f"{reply.failure}: {reply.error}"]
    return f"  -> {', '.join(parts)}{'; done' if reply.done else ''}" if parts else ""


async def play(
    name: str,
    config: dict[str, Any],
    policy: Policy,
    *,
    row: int,
    seed: int,
    turns: int = TURNS,
    bots: dict[str, str] | None = None,
) -> Tried:
    """One episode to its end, or until it fails, the policy says nothing, or `turns` are over. `bots`: as in
    OpenSession."""
    tried = Tried(row, seed)
    player = LocalEnvRunner("here", modules=True)
    request = OpenSession(
        job="trial", session="trial", environment=name, config=config, row=row, seed=seed, deadline_s=3600.0,
        answer_within_s=3600.0, bots=bots or {},
    )  # fmt: skip
    began = time.perf_counter()
    reply = await player.open(request)
    tried.open_s = time.perf_counter() - began
    tried.replies.append(reply)
    tried.seats = () if player.environment is None else tuple(player.environment.seats)
    for turn in range(turns):
        if reply.failure is not None or reply.done:
            break
        assert player.environment is not None
        said: list[tuple[str, Message]] = []
        for prompt in reply.prompts:
            message = policy(player.environment, reply, prompt)
            if message is None:
                break
            said.append((prompt.seat, message))
        if len(said) < len(reply.prompts):
            break
        tried.turns.append(said)
        actions = [
            SeatAction(seat=seat, text=message.text, stop=StopReason.EOS, tool_calls=message.tool_calls)
            for seat, message in said
        ]
        began = time.perf_counter()
        reply = await player.step(reply.step("trial", turn, actions))
        tried.step_s.append(time.perf_counter() - began)
        tried.replies.append(reply)
        gains = [(said[0][0], reply.reward), *((seat, 0.0) for seat, _ in said[1:])]
        for seat, gain in gains + [(seat, sum(parts.values())) for seat, parts in reply.rewards.items()]:
            tried.rewards[seat] = tried.rewards.get(seat, 0.0) + gain
    await player.close()
    return tried


def expert(environment: Environment, reply: SessionReply, prompt: SeatPrompt) -> Message | None:
    gold = environment.gold_of(prompt.seat) if reply.round else environment.gold()
    return gold if gold is None or isinstance(gold, Message) else Message(role="assistant", content=gold)


def silent(_: Environment, __: SessionReply, ___: SeatPrompt) -> Message:
    """Say nothing."""
    return Message(role="assistant", content="")


class Guessing:
    """Says words and numbers that it has been shown, or single letters and digits: enough to reach most code."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, _: Environment, __: SessionReply, prompt: SeatPrompt) -> Message:
        shown = re.findall(r"[A-Za-z]+|-?\d+", " ".join(message.text for message in prompt.messages))
        pool = [*shown[-50:], *"ABCD", *map(str, range(10))]
        words = self._random.choices(pool, k=self._random.choice((1, 1, 1, 2, 4)))
        return Message(role="assistant", content=" ".join(words))


class Repeating:
    """Repeats the messages of an episode."""

    def __init__(self, said: Sequence[tuple[str, Message]]) -> None:
        self._said = [message for _, message in said]

    def __call__(self, *_: object) -> Message | None:
        return self._said.pop(0) if self._said else None
