"""Games as users of the published interface write them, loaded by the tests as `tests.samples.published_games:Name`."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np

from opentinker.environment.base_game import AbstractGame, StepResult


class HigherLower(AbstractGame):
    """Guess a number that the start state says; the dice make it a game of the global random numbers."""

    def __init__(self, largest: int = 9, tries: int = 3) -> None:
        self.largest, self.tries = largest, tries

    def reset(self, secret: int = 5, **kwargs: Any) -> str:
        self.secret, self.left = secret, self.tries
        return f"Dice: {random.randint(1, 6)}."

    def step(self, action: str) -> StepResult:
        self.left -= 1
        said = action.strip()
        if said == str(self.secret):
            return StepResult("Right!", 1.0, True, {"result": "win", "tries": self.tries - self.left, "note": "text"})
        hint = "higher" if said.isdigit() and int(said) < self.secret else "lower"
        return StepResult(f"{hint} ({random.random():.6f})", -0.1, self.left == 0, {"result": "loss"})

    def get_system_prompt(self) -> str:
        return "You guess numbers."

    def get_initial_user_message(self) -> str:
        return f"Guess my number, 1 to {self.largest}."

    def generate_initial_state(self) -> dict[str, Any]:
        return {"secret": random.randint(1, self.largest)}


class Worded(HigherLower):
    """Words its state itself, as Geometry games do, and has no system message."""

    def get_system_prompt(self) -> None:  # type: ignore[override]
        return None

    def render_state_for_prompt(self, **state: Any) -> str:
        return f"[{self.reset(**state)}]"


class Rolled(HigherLower):
    """Draws by numpy's global numbers, and words its state by playing it."""

    def reset(self, secret: int = 0, **kwargs: Any) -> str:
        self.secret, self.left = int(np.random.randint(1000)), self.tries
        return str(self.secret)

    def get_user_message_with_state(self, **state: Any) -> str:
        return self.render_state_for_prompt(**state)


class Lacking(HigherLower):
    """Imports what it needs when it is made."""

    def __init__(self) -> None:
        super().__init__()
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401


class Endless(HigherLower):
    """Is never made."""

    def __init__(self) -> None:
        threading.Event().wait()


class Careless(HigherLower):
    """Answers with something else than a StepResult."""

    def step(self, action: str) -> Any:
        return "ok", 1.0, True
