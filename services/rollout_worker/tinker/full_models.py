"""Models that clients train with all weights: the engine has one at a time, which it loads when a request names its
directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from opentinker.services.rollout_worker.engines.base import Engine, EngineError, EngineLost, SwapError
from opentinker.services.rollout_worker.engines.weight_turns import WeightTurns
from opentinker.services.rollout_worker.tinker.adapter_files import AdapterGone, AdapterRefused, check_full
from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.durable_files import local_path
from opentinker.shared.types.core import WeightVersion

log = structlog.get_logger()

BASE = ("", "")
"""Stands for the base among directories and versions of their contents."""


class FullModels:
    """Takes the place of `AdapterCache`; requests have their turns by weights, not by tenant."""

    def __init__(self, engine: Engine, base: str) -> None:
        """`base`: model whose weights the engine has now."""
        self._engine, self._base = engine, base
        self._turns = WeightTurns(self._load, BASE)
        self.loads = 0

    @asynccontextmanager
    async def holding(self, directory: str, version: str) -> AsyncIterator[str]:
        """Keep the engine at the weights in a directory, or with an empty one at those of the base, while the block
        runs. Gives the engine's name of an adapter, which is empty. Raises AdapterGone, AdapterRefused, EngineLost."""
        async with self._turns.using((directory, version) if directory else BASE):
            yield ""

    async def _load(self, weights: tuple[str, str]) -> None:
        directory, version = weights
        place = Path(directory) if directory else await asyncio.to_thread(_place_of, self._base)
        if directory:
            await asyncio.to_thread(check_full, place)
        try:
            await finish_uncancelled(self._engine.load(WeightVersion(0, 0), place))
        except EngineLost:
            raise
        except (SwapError, EngineError) as error:
            if not await asyncio.to_thread(place.is_dir):
                raise AdapterGone("the weights of this sampler were removed") from None
            raise AdapterRefused(str(error)) from error
        self.loads += 1
        log.info("weights_loaded", directory=str(place), version=version)


def _place_of(base: str) -> Path:
    """Return the directory of a base that has been loaded before. Raises AdapterGone."""
    if (path := local_path(base)) is not None:
        return path
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(base, "config.json")
    if not isinstance(found, str):
        raise AdapterGone(f"the weights of {base} are not in this machine's cache any more")
    return Path(found).parent
