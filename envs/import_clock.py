"""The clock of an episode, for environments that are imported elsewhere and can say so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


class ImportClock:
    """Mixin: the environment enters `importing()` while the other side imports it, and the episode's clock stops."""

    importing: Callable[[], AbstractContextManager[object]] = nullcontext
    """Set by the player; by default nothing is stopped."""
