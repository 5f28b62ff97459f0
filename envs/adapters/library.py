"""Common parts of the adapters of environment libraries: a library is looked up where episodes are played, its errors
become messages with the next step, and its use of the global random generators does not affect other episodes.
"""

from __future__ import annotations

import difflib
import json
import random
import re
import threading
from collections.abc import Collection
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from pydantic import Field, ValidationInfo, model_validator

from opentinker.envs.base import ELSEWHERE, EnvironmentConfig, Step, user

NAMED = 8
_MARK = re.compile(r"\baction\s*:", re.IGNORECASE)


class Illegal(Exception):
    """The text is not a valid action; the message tells the policy why."""


class LibraryConfig(EnvironmentConfig):
    """Settings of an adapter. Checks that need the library run where it is installed."""

    library: ClassVar[str]
    """Module of the library, and the extra of this package that installs it."""

    def check(self) -> None:
        """Check settings that only the library knows, such as names of its environments. Raise ValueError."""

    @classmethod
    def advice(cls) -> str:
        """Return how to install the library."""
        return f"pip install 'opentinker[{cls.library}]'"

    @model_validator(mode="after")
    def _known_to_the_library(self, info: ValidationInfo) -> Self:
        if not (info.context or {}).get(ELSEWHERE):
            if not is_installed(self.library):
                raise ValueError(f"{self.library} is not installed here: {self.advice()}")
            self.check()
        return self


class IllegalConfig(EnvironmentConfig):
    """Configuration of environments that penalize illegal actions."""

    penalty: Annotated[float, Field(ge=0.0)] = 0.1
    """Deducted from the reward for an invalid or masked action (component `illegal`)."""
    max_illegal: Annotated[int, Field(ge=1)] = 3
    """Number of such actions that ends an episode; the environment never sees them."""

    def refuse(self, why: object, left: str, count: int, metrics: dict[str, float]) -> Step:
        """Return the answer to an action that is not played, the episode's `count`-th; `left`: as in `refusal`."""
        return Step(
            messages=[user(refusal(why, left))],
            reward=-self.penalty,
            components={"illegal": -self.penalty},
            done=count >= self.max_illegal,
            metrics=metrics,
        )


class ActionConfig(LibraryConfig, IllegalConfig):
    """Settings of an adapter that converts text to actions."""

    instruction: str | None = None
    """First message to the policy, instead of the default text; may be empty."""
    hint: bool = True
    """Explain in the prompt how actions are written."""
    actions: list[Annotated[str, Field(min_length=1)]] = []
    """Names of the actions 0, 1, 2... of a discrete action space; default: the environment's."""

    def introduction(self, about: str, hint: str) -> str:
        """Return the first words to the policy."""
        told = about if self.instruction is None else self.instruction
        return "\n".join(filter(None, [told, hint if self.hint else ""]))


def action_text(text: str) -> str:
    """Return the text after the last `Action:`, or the whole text."""
    return _MARK.split(text)[-1].strip()


def last_object(text: str) -> dict[str, Any] | None:
    """Return the last JSON object that stands in a text by itself."""
    found, start = None, text.find("{")
    decoder = json.JSONDecoder()
    while start >= 0:
        try:
            found, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return found


def shortened(text: str, most: int) -> str:
    """Return the text in one line of about `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}..."


def refusal(why: object, left: str) -> str:
    """Return the message to the policy about an action that was not played; `left` lists possible actions."""
    return f"That is no action: {why}." + (f" Possible: {left}." if left else "")


def is_installed(module: str) -> bool:
    """Return whether a module is installed, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def check_known(kind: str, name: str, known: Collection[str]) -> None:
    """Raise ValueError with the nearest names for one that a library does not have."""
    if name in known:
        return
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    listed = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
    offer = f": did you mean {' or '.join(near)}?" if near else f"; there are: {listed}"
    raise ValueError(f"no such {kind} = {name!r}{offer}")


def episode_seed(row: int, seed: int) -> int:
    """Return a seed of 31 bits, which every library accepts."""
    return random.Random(f"{seed}/{row}").getrandbits(31)


class Randomness:
    """Separate states of the global random generators for one episode: active within `with`, replaced by the others'
    after it.

    Libraries reseed and use generators shared by the whole process. With this, episodes do not affect each other, and
    an episode that never seeds begins with its own seed. If episodes are played in threads (classes served from
    Python), only one at a time holds the generators.
    """

    _theirs: ClassVar = threading.RLock()

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.MT19937(seed)

    def __enter__(self) -> None:
        self._theirs.acquire()
        self._other_python, self._other_numpy = random.getstate(), get_bit_generator()
        random.setstate(self._python)
        set_bit_generator(self._numpy)

    def __exit__(self, *_: object) -> None:
        self._python = random.getstate()
        random.setstate(self._other_python)
        set_bit_generator(self._other_numpy)
        self._theirs.release()
