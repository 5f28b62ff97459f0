"""The opponent pools of a job in one rollout worker: an engine for each, whose weights are those of one member.

A group holds the member that its ticket names from its first episode to its last. Groups that meet the same member play
side by side; the weights of another one are loaded, from the trainer's directory, when no group plays against the last.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from opentinker.services.rollout_worker.engines.base import EngineError, EngineLost, SwapError
from opentinker.services.rollout_worker.engines.weight_turns import WeightTurns
from opentinker.services.rollout_worker.episode_protocol import EpisodeFailed
from opentinker.services.rollout_worker.seat_map import LoadedPolicy
from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.pools import pool_player
from opentinker.shared.types.core import Ending, WeightVersion
from opentinker.shared.types.pools import members_of

log = structlog.get_logger()


class PoolEngine:
    """Lets groups in by member (`engines/weight_turns.py`)."""

    def __init__(self, policy: LoadedPolicy, pool: str, root: Path, loaded: Callable[[float], None]) -> None:
        """`policy`: as which its members play; `root`: directory of the members; `loaded(seconds)` is called after each
        change of the weights."""
        self._policy, self._pool, self._root, self._report = policy, pool, root, loaded
        self._turns = WeightTurns(self._load)

    @contextlib.asynccontextmanager
    async def playing(self, member: str) -> AsyncIterator[LoadedPolicy]:
        """Give the member as a player, who stays the same until the end of the body. Raises EngineError, SwapError."""
        async with self._turns.using(member):
            yield replace(self._policy, name=pool_player(self._pool, member))

    async def _load(self, member: str) -> None:
        began = time.monotonic()
        await finish_uncancelled(self._policy.engine.load(WeightVersion.parse(member), self._root / member))
        self._report(time.monotonic() - began)


class Opponents:
    """The pools of a job."""

    def __init__(
        self,
        spec: JobSpec,
        policies: Sequence[LoadedPolicy],
        data_dir: Path,
        job: str,
        loaded: Callable[[float], None],
    ) -> None:
        """`policies`: of the job, with those of its pools."""
        engines = {policy.name: policy for policy in policies}
        self._pools: Mapping[str, PoolEngine] = {
            name: PoolEngine(engines[pool_player(name)], name, members_of(data_dir, job, pool.policy or ""), loaded)
            for name, pool in spec.pools.items()
        }

    @contextlib.asynccontextmanager
    async def playing(self, members: Mapping[str, str]) -> AsyncIterator[dict[str, LoadedPolicy]]:
        """Hold the members of a ticket, and give them as players, by pool. Raises EpisodeFailed if one cannot be
        loaded, EngineLost."""
        async with contextlib.AsyncExitStack() as held:
            players = {}
            for name in sorted(members):  # in one order, so that no two groups wait for each other
                try:
                    players[name] = await held.enter_async_context(self._pools[name].playing(members[name]))
                except EngineLost:
                    raise
                except (EngineError, SwapError) as error:
                    log.warning("opponent_not_loaded", pool=name, member=members[name], error=str(error))
                    problem = f"member {members[name]} of pool {name!r} cannot play: {error}"
                    raise EpisodeFailed(Ending.ENGINE_ERROR, problem) from None
            yield players
