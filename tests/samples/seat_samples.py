"""Environments of several seats, in turn or at the same time, loaded as `tests.samples.seat_samples:Name`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from opentinker.envs.base import Action, Bot, Environment, EnvironmentConfig, Opening, Prompt, Step, user
from opentinker.envs.builtin.proposed_sums import ProposedSums
from opentinker.envs.tools import tool
from opentinker.shared.types.core import Tool


class Vote(Environment):
    """Every seat names a letter, `rounds` times: whoever says what most say gets 1, and each seat sees only its own
    vote. A seat that says `out` is not asked again."""

    class Config(EnvironmentConfig):
        seats: int = 4
        rounds: int = 2

    config: Config
    bots: ClassVar[Mapping[str, Bot]] = {
        "fixed": lambda _: "b",
        "named": lambda vote: vote.bot_seat[-1],
        "random": lambda vote: vote.random.choice("abc"),
    }

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seats = tuple(f"voter_{n}" for n in range(config.seats))

    async def open(self, row: int, seed: int) -> Opening:
        self.random = random.Random(f"{seed}/{row}")
        self.played: list[list[Action]] = []
        self.left = list(self.seats)
        return Opening(acting={seat: Prompt(messages=[user(f"row {row}: {seat}?")], stream="s") for seat in self.seats})

    async def step(self, action: Action) -> Step:
        raise AssertionError("every turn is a round")

    async def step_all(self, actions: list[Action]) -> Step:
        self.played.append(actions)
        votes = [action.text for action in actions]
        most = max(votes, key=votes.count)
        rewards = {action.seat: {"vote": 1.0} for action in actions if action.text == most}
        self.left = [action.seat for action in actions if action.text != "out"]
        done = len(self.played) == self.config.rounds or not self.left
        said = {action.seat: action.text for action in actions}
        return Step(
            acting=None
            if done
            else {seat: Prompt(messages=[user(f"you: {said[seat]}")], stream="s") for seat in self.left},
            rewards=rewards,
            done=done,
            metrics={"most": float(votes.count(most))},
        )

    def gold_of(self, seat: str) -> str:
        return "a"


class ToolVote(Vote):
    """With a tool, whose result tells how many rounds were played."""

    @tool
    def rounds(self) -> int:
        """Return the rounds so far."""
        return len(self.played)


class Deal(Environment):
    """`dealer` says a number alone, `left` and `right` guess it at the same time, and so on: rounds and turns mixed."""

    seats = ("left", "dealer", "right")
    bots: ClassVar[Mapping[str, Bot]] = {"seven": lambda _: "7"}

    async def open(self, row: int, seed: int) -> Opening:
        return Opening(messages=[user("deal")], seat="dealer")

    async def step(self, action: Action) -> Step:
        self.number = action.text
        return Step(acting={seat: [user(f"{seat}, guess")] for seat in ("right", "left")}, reward=0.25)

    async def step_all(self, actions: list[Action]) -> Step:
        guesses = {action.seat: action.text for action in actions}
        rewards = {seat: {"guess": float(text == self.number)} for seat, text in guesses.items()}
        done = self.number == "0"
        return Step(messages=[] if done else [user(f"{guesses}")], seat="dealer", rewards=rewards, done=done)


class Wrong(Environment):
    """Answers as `how` says, and no environment may."""

    class Config(EnvironmentConfig):
        how: str

    config: Config
    seats: tuple[str, ...] = ("a", "b")

    async def open(self, row: int, seed: int) -> Opening:
        both: Any = {"a": [user("a?")], "b": [user("b?")]}
        acting = {
            "unknown": {**both, "c": [user("c?")]},
            "empty": {},
            "list": ["a", "b"],
            "text": {"a": "a?", "b": "b?"},
            "silent": {**both, "b": []},
            "large": {seat: [user("x" * 300_000)] for seat in both},
        }
        if self.config.how == "beside":
            return Opening(messages=[user("go")], seat="a", acting=both)
        return Opening(acting=acting.get(self.config.how, both))

    async def step(self, action: Action) -> Step:
        raise AssertionError("every turn is a round")

    async def step_all(self, actions: list[Action]) -> Step:
        if self.config.how == "reward":
            return Step(reward=1.0, done=True)
        return Step(acting={"nobody": [user("?")]})


class Many(Wrong):
    """More seats in a round than are allowed."""

    seats = tuple(f"s{n}" for n in range(129))

    async def open(self, row: int, seed: int) -> Opening:
        return Opening(acting={seat: [user("go")] for seat in self.seats})


class Unfinished(Environment):
    """Names a round and does not define what to do with it."""

    seats = ("a", "b")

    async def open(self, row: int, seed: int) -> Opening:
        return Opening(acting={"a": [user("a?")], "b": [user("b?")]})

    async def step(self, action: Action) -> Step:
        return Step(done=True)


BACKER, RIVAL = "backer", "rival"


class Stakes(Environment):
    """Two settlements, each won by one seat at the other's cost: of what `backer` says alone, and of what both say at
    the same time. Every play has stakes of its own, of a match that is played again too, so that the rewards of two
    seats cancel out only if they are of the same play. Metrics: what each seat has won in all."""

    seats = (BACKER, RIVAL)

    async def open(self, row: int, seed: int) -> Opening:
        self.stakes = [random.SystemRandom().uniform(0.5, 1.5) for _ in range(2)]
        self.won = 0.0
        return Opening(messages=[user("back")], seat=BACKER)

    async def step(self, action: Action) -> Step:
        won = self._settle(len(action.text))
        acting = {seat: [user(f"{seat}?")] for seat in self.seats}
        return Step(acting=acting, reward=won, components={"stake": won}, rewards={RIVAL: {"stake": -won}})

    async def step_all(self, actions: list[Action]) -> Step:
        won = self._settle(sum(len(action.text) for action in actions))
        rewards = {BACKER: {"stake": won}, RIVAL: {"stake": -won}}
        return Step(done=True, rewards=rewards, metrics={BACKER: self.won, RIVAL: -self.won})

    def _settle(self, said: int) -> float:
        """Return what the backer wins or loses; the parity of all characters decides."""
        won = -self.stakes.pop() if said % 2 else self.stakes.pop()
        self.won += won
        return won


class SeededStakes(Stakes):
    """Stakes of the start state: what both say decides a match alone. Each fifth start state cannot be played."""

    async def open(self, row: int, seed: int) -> Opening:
        opening = await super().open(row, seed)
        if row % 5 == 4:
            raise RuntimeError(f"row {row} is broken")
        drawn = random.Random(f"{seed}/{row}")
        self.stakes = [drawn.uniform(0.5, 1.5) for _ in self.stakes]
        return opening


class Race(Environment):
    """Two seats in turn; whoever first says `win` wins, and the other loses."""

    class Config(EnvironmentConfig):
        next: str = ""
        """Who is said to act next, where that is not the other one."""
        rewarded: str = ""
        """Who gets what the loser should get."""

    config: Config
    seats = ("first", "second")

    async def open(self, row: int, seed: int) -> Opening:
        return Opening(messages=[user("go")], seat="first", stream="s", max_tokens=3, stop=["."])

    async def step(self, action: Action) -> Step:
        other = "second" if action.seat == "first" else "first"
        if action.text == "win":
            return Step(reward=1.0, done=True, rewards={self.config.rewarded or other: {"lost": -1.0}})
        return Step(messages=[user(f"{action.seat} said {action.text}")], seat=self.config.next or other)


class Duel(Environment):
    """Two seats in turn, `rounds` each; who said more wins. `first` begins a new stream with every turn."""

    class Config(EnvironmentConfig):
        rounds: int = 2

    config: Config
    seats = ("first", "second")

    async def open(self, row: int, seed: int) -> Opening:
        self.said = {"first": 0, "second": 0}
        return Opening(messages=[user(f"row {row} first 0")], seat="first", stream="0")

    async def step(self, action: Action) -> Step:
        self.said[action.seat] += len(action.text)
        other = "second" if action.seat == "first" else "first"
        if action.turn + 1 < 2 * self.config.rounds:
            stream = str(action.turn + 1) if other == "first" else "all"
            return Step(messages=[user(f"{other} {self.said[other]}")], seat=other, stream=stream)
        ahead = self.said[action.seat] - self.said[other]
        won = float((ahead > 0) - (ahead < 0))
        return Step(
            reward=won, components={"outcome": won}, rewards={other: {"outcome": -won}}, done=True,
            metrics={"exact": won},
        )  # fmt: skip


class Relay(Environment):
    """A referee of two seats, which tells each in turn what it has done; or, with `anew`, of one in a new context."""

    class Config(EnvironmentConfig):
        anew: bool = False

    config: Config
    seats = ("a", "b")

    @tool
    def look(self) -> str:
        """See."""
        return "nothing"

    async def open(self, row: int, seed: int) -> Opening:
        self.turn = 0
        own = Tool(name="move", description="", parameters={"type": "object", "properties": {}})
        return Opening(messages=[user("begin")], seat="a", stream="0", tools=[own])

    async def step(self, action: Action) -> Step:
        self.turn += 1
        if self.config.anew:
            return Step(messages=[user("anew")], seat="a", stream=str(self.turn))
        return Step(messages=[user(f"after {action.seat}")], seat="b" if action.seat == "a" else "a", stream="0")


class ParitySums(ProposedSums):
    """The proposer's addition is given, and a solver is right whose answer has an even number of characters: what
    engines without a skill do differs from solver to solver."""

    async def step(self, action: Action) -> Step:
        return await super().step(msgspec.structs.replace(action, text=f"{self.first[0]} + {self.first[1]}"))

    async def step_all(self, actions: list[Action]) -> Step:
        answers = [str(sum(self.first) + len(action.text) % 2) for action in actions]
        return await super().step_all(
            [msgspec.structs.replace(action, text=answer) for action, answer in zip(actions, answers, strict=True)]
        )
