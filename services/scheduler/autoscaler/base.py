"""Protocol of launchers, which start trainers and rollout workers, and the state of a started worker.

Two implementations: `process.py`, processes of this machine, and `kubernetes.py`, pods. Both find their workers again
after a restart of the scheduler. A name belongs to at most one running worker, so there are never more workers than
names, even if two schedulers both believe that they lead. A worker without a job ends after `idle_exit_s`, whether or
not a scheduler runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from opentinker.services.scheduler.placement.types import Gpus
from opentinker.shared.types.core import Pool
from opentinker.shared.types.errors import OpenTinkerError


class LauncherFailed(OpenTinkerError):
    """Nothing could be started or seen now; tried again in the next round."""


@dataclass(frozen=True, slots=True)
class Launched:
    name: str
    pool: Pool
    ended: str = ""
    """Reason why it no longer runs."""


class Launcher(Protocol):
    prefix: str
    """Prefix of all names passed to `start`."""

    async def running(self) -> list[Launched]:
        """Everything that it started and that has not been forgotten by `end`. Raises LauncherFailed."""

    def gpus(self, pool: Pool, name: str) -> Gpus:
        """Return the GPUs that a worker of this name will have; memory known only to the worker is UNKNOWN."""

    async def start(self, pool: Pool, name: str) -> None:
        """Start a worker of this pool under this name, unless it runs. Raises LauncherFailed."""

    async def end(self, name: str) -> None:
        """Ask a worker to end, kill it when it does not, forget it when it has ended. Called in every round until
        `running` no longer lists it. Raises LauncherFailed."""


def names_of(prefix: str, pool: Pool, most: int) -> list[str]:
    """Return the names of all workers that a launcher may start of a pool."""
    return [f"{prefix}-{pool}-{n}" for n in range(most)]
