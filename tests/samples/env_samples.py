"""Environments that misbehave, loaded by the tests as `tests.samples.env_samples:Name`."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import field_validator

from opentinker.envs.adapters.library import Randomness, episode_seed
from opentinker.envs.base import Action, Environment, EnvironmentConfig, Step, Unreachable, user
from opentinker.envs.builtin.copy_digits import CopyDigits
from opentinker.shared.types.core import Message, ToolCall


class Counting(Environment):
    """Well-behaved: rewards 1 per turn, `turns` turns; keeps a class-wide record of what was called."""

    class Config(EnvironmentConfig):
        turns: int = 3
        tag: str = ""

    config: Config
    calls: list[str] = []  # noqa: RUF012

    async def open(self, row: int, seed: int) -> list[Message]:
        self.calls.append(f"{self.config.tag} open")
        return [user(f"row {row} seed {seed}")]

    async def step(self, action: Action) -> Step:
        self.calls.append(f"{self.config.tag} step {action.turn}")
        return Step(messages=[user("next")], reward=1.0, done=action.turn + 1 == self.config.turns)

    async def close(self) -> None:
        self.calls.append(f"{self.config.tag} close")


class Cliff(Environment):
    """Rewards nearly nothing in the rows from `first` to `until`."""

    class Config(EnvironmentConfig):
        first: int = 0
        until: int = 0

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        self.row = row
        return [user("1")]

    async def step(self, action: Action) -> Step:
        best = 0.1 if self.config.first <= self.row < self.config.until else 0.8
        return Step(reward=best - 0.1 * ("1" in action.text), done=True)


class Switched(CopyDigits):
    """Cannot be reached while a file is there."""

    class Config(CopyDigits.Config):
        file: str

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        if os.access(self.config.file, os.F_OK):
            raise Unreachable("its server is gone")
        return await super().open(row, seed)


class Misbehaving(Environment):
    """Does `how` in its first step, or in open if `in_open`."""

    class Config(EnvironmentConfig):
        how: str
        in_open: bool = False

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        if self.config.in_open:
            await self.misbehave()
        return [user("go")]

    async def step(self, action: Action) -> Step:
        answer: Any = await self.misbehave()
        return answer  # type: ignore[no-any-return]

    async def misbehave(self) -> Any:  # noqa: PLR0911, PLR0912
        match self.config.how:
            case "raise":
                raise RuntimeError("the board is on fire")
            case "raise_surrogate":
                raise RuntimeError("\ud800")
            case "exit":
                sys.exit(3)
            case "cancel":
                raise asyncio.CancelledError
            case "hang":
                await asyncio.Event().wait()
            case "ignore_cancel":
                while True:
                    try:
                        await asyncio.sleep(0.2)
                    except asyncio.CancelledError:
                        if LET_GO.is_set():
                            raise
            case "nan":
                return Step(reward=float("nan"), done=True)
            case "infinite_metric":
                return Step(metrics={"x": float("inf")}, done=True)
            case "text_reward":
                return Step(reward="1.0", done=True)  # type: ignore[arg-type]
            case "truncated_alone":
                return Step(truncated=True)
            case "huge_reward":
                return Step(reward=10**400, done=True)
            case "tuple":
                return ([], 1.0, True, {})
            case "done_text":
                return Step(done="yes")  # type: ignore[arg-type]
            case "text_messages":
                return Step(messages="hello")  # type: ignore[arg-type]
            case "dict_message":
                return Step(messages=[{"role": "user", "content": "x"}])  # type: ignore[list-item]
            case "number_content":
                return Step(messages=[Message(role="user", content=3)])  # type: ignore[arg-type]
            case "surrogate":
                return Step(messages=[user("\ud800")])
            case "oversized":
                return Step(messages=[user("x" * (300 * 1024))])
            case "oversized_call":
                return Step(messages=[calling({"x": "x" * (300 * 1024)})])
            case "unsendable_call":
                return Step(messages=[calling({"x": object()})])
            case "oversized_name":
                return Step(messages=[Message(role="tool", name="x" * (300 * 1024))])
            case "many_ids":
                return Step(prompt_ids=[1] * (300 * 1024))
            case "many_metrics":
                return Step(metrics={str(i): 1.0 for i in range(100)})
            case _:
                raise AssertionError(self.config.how)


def calling(arguments: dict[str, Any]) -> Message:
    return Message(role="assistant", tool_calls=[ToolCall(id="c", name="add", arguments=arguments)])


class Blockwise(Environment):
    """Forgets that its methods are coroutines; answers with numpy's scalars where they are."""

    class Config(EnvironmentConfig):
        forgets: str = ""

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        return [user("go")]

    def step(self, action: Action) -> Any:
        numpy_step = Step(reward=np.bool_(True), done=np.bool_(True), metrics={"won": np.bool_(True)})  # type: ignore[arg-type, dict-item]

        async def answer() -> Step:
            return numpy_step

        return numpy_step if self.config.forgets == "step" else answer()


class Moody(Misbehaving):
    """Misbehaves in tasks whose row is a multiple of `every`; the others are won at once."""

    class Config(Misbehaving.Config):
        every: int = 4

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        self.well = row % self.config.every != 0
        return [user("go")]

    async def step(self, action: Action) -> Step:
        return Step(reward=1.0, done=True) if self.well else await super().step(action)


class BrokenRows(CopyDigits):
    """As `copy_digits`, but tasks whose row is a multiple of `every` cannot be opened. Who comes first is chance."""

    class Config(CopyDigits.Config):
        every: int = 5

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        if row % self.config.every == 0:
            raise RuntimeError(f"row {row} is broken")
        await asyncio.sleep(random.SystemRandom().uniform(0, 0.1))
        return await super().open(row, seed)


class Slow(Counting):
    """Each open adds a line to the file `opens`, and takes until the file `gate` is there."""

    class Config(Counting.Config):
        opens: str
        gate: str

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        await asyncio.to_thread(self._note)
        while not await asyncio.to_thread(Path(self.config.gate).exists):  # noqa: ASYNC110 - made by another process
            await asyncio.sleep(0.02)
        return await super().open(row, seed)

    def _note(self) -> None:
        with Path(self.config.opens).open("a") as file:
            file.write(f"{os.getpid()}\n")


class Stuck(Environment):
    """Holds the event loop in its first step, against the rules; `regex` holds the interpreter's lock as well."""

    class Config(EnvironmentConfig):
        how: str

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        return [user("go")]

    async def step(self, action: Action) -> Step:
        if self.config.how == "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")
        else:
            time.sleep(60)  # noqa: ASYNC251
        return Step(done=True)


LET_GO = asyncio.Event()


class Blocking(Environment):
    """Blocks its process in every step until the file `gate` is there, or dies in it."""

    blocking = True

    class Config(EnvironmentConfig):
        gate: str = ""
        how: str = "work"

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        return [user(str(os.getpid()))]

    async def step(self, action: Action) -> Step:
        if self.config.how == "crash":
            os._exit(7)
        if self.config.how == "spawn":
            if action.turn > 0:
                os._exit(7)
            return Step(messages=[user(str(subprocess.Popen(["sleep", "600"]).pid))])  # noqa: ASYNC220
        if self.config.how == "print":
            sys.stdout.write("noise that must not reach the protocol\n")
            sys.stdout.flush()
        if self.config.how == "variables":
            return Step(messages=[user(" ".join(sorted(os.environ)))])
        while self.config.gate and not Path(self.config.gate).exists():  # noqa: ASYNC240
            time.sleep(0.01)  # noqa: ASYNC251
        return Step(messages=[user("done")], reward=1.0)


class Leaky(Blocking):
    """Its process is good for two episodes."""

    recycle_after = 2


class Fat(Blocking):
    """Holds more than it should from its first step on."""

    memory_mb = 120

    async def step(self, action: Action) -> Step:
        self.held = b"x" * (150 * 2**20)
        return Step(messages=[user("more")])


class Costly(Counting):
    """Three of it are all that a worker of 8 can hold."""

    cost = 2.5


class Cheap(Counting):
    cost = 0.5


class Heavy(Blocking):
    """Its settings need a library, which only its child process is to import."""

    class Config(EnvironmentConfig):
        size: int = 1

        @field_validator("size")
        @classmethod
        def _with_the_library(cls, size: int) -> int:
            import tabnanny  # stands for the library: nothing else imports it

            if size > 5:
                raise ValueError(f"{tabnanny.__name__} has no such size")
            return size


class Reading(Counting):
    """Its settings take a while to be checked the first time."""

    class Config(EnvironmentConfig):
        turns: int = 3
        tag: str = ""
        threads: ClassVar[list[str]] = []

        @field_validator("tag")
        @classmethod
        def _noted(cls, tag: str) -> str:
            cls.threads.append(threading.current_thread().name)
            return tag


class Shuffled(Environment):
    """Draws from the random generators of the process, as libraries do, while another session may want to."""

    class Config(EnvironmentConfig):
        pass

    blocking = True
    begun: ClassVar[int] = 0
    changed: ClassVar[threading.Condition] = threading.Condition()

    async def open(self, row: int, seed: int) -> list[Message]:
        self._randomness = Randomness(episode_seed(row, seed))
        return [user(self.drawn())]

    async def step(self, action: Action) -> Step:
        return Step(messages=[user(self.drawn())], done=action.turn == 2)

    def drawn(self) -> str:
        with self._randomness:
            first = random.random()
            with self.changed:
                Shuffled.begun = mine = Shuffled.begun + 1
                self.changed.notify_all()
                self.changed.wait_for(lambda: Shuffled.begun > mine, 0.1)  # the next one begins meanwhile, if it can
            return f"{first} {random.random()} {np.random.random()}"


class Free(Counting):
    cost = 0.0


class NoProcess(Counting):
    recycle_after = 5


class UntilTold(Environment):
    """Well-behaved: some turns, then a metric `told`, 1 once a file is there; a job can wait for it by train.target."""

    class Config(EnvironmentConfig):
        file: str
        turns: int = 4

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        return [user(f"row {row}")]

    async def step(self, action: Action) -> Step:
        told = self.told()
        done = action.turn + 1 == self.config.turns
        return Step(messages=[user("?")], reward=told, done=done, metrics={"told": told})

    def told(self) -> float:
        return float(Path(self.config.file).exists())
