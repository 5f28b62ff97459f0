"""torch's random state, which all learners of a process share.

In a deterministic job with several policies each has its own state: code that draws numbers or saves the state has
exclusive use of the generators, in the state in which its policy left them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import Tensor

from opentinker.services.trainer.learners import optimizer_state


class RandomState:
    _generators: ClassVar[threading.Lock] = threading.Lock()
    """Lock of torch's generators, which the whole process shares; held by the learner whose state they have."""

    def __init__(self, *, is_own: bool, cuda: bool) -> None:
        """`is_own` False: the learner is alone in its process, or need not draw the same again."""
        self._is_own, self._cuda = is_own, cuda
        self._state: dict[str, Tensor] | None = None
        """Where the learner's draws go on; None before the first."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Run the body with the learner's random state, after the bodies of other learners."""
        if not self._is_own:
            yield
            return
        with self._generators:
            if self._state is not None:
                optimizer_state.set_rng_state(self._state)
            try:
                yield
            finally:
                self._state = optimizer_state.rng_state(cuda=self._cuda)
