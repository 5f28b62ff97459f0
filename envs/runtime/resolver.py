"""Resolves environment classes for the event loop.

Importing `module:Class` and checking a config run user code that may take long (a library, a file of rows) or never
end. Both run in threads, so only requests for that environment wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from opentinker.envs.base import Environment
from opentinker.envs.bots import check_bots
from opentinker.envs.game import PlayedGame
from opentinker.envs.registry import check, check_fork, check_reachable, find, rehearse, wrong_name
from opentinker.envs.threads import in_daemon_thread
from opentinker.shared.types import codec

CHECK_S = 15.0
THREAD = "environment-import"
PREPARED = 1000
"""Number of cached pairs of environment and config."""


class Resolver:
    """`modules`: whether `module:Class` names are allowed. `check_s`: time limit of a check."""

    def __init__(self, *, modules: bool, check_s: float = CHECK_S) -> None:
        self.modules, self._check_s = modules, check_s
        self._found: dict[str, asyncio.Future[type[Environment]]] = {}
        self._prepared: set[tuple[str, bytes]] = set()

    async def find(self, name: str) -> type[Environment]:
        """Return the class, imported once: concurrent calls share one import, and a failed one is retried by the next.

        Raise SpecError, or any exception of the module.
        """
        coming = self._found.get(name)
        if coming is None:
            coming = self._found[name] = in_daemon_thread(partial(find, name, modules=self.modules), THREAD)
            coming.add_done_callback(partial(self._forget_failure, name))
        return await asyncio.shield(coming)

    def _forget_failure(self, name: str, coming: asyncio.Future[type[Environment]]) -> None:
        if coming.cancelled() or coming.exception() is not None:
            del self._found[name]

    async def prepare(self, name: str, config: dict[str, object]) -> None:
        """Run a config's validators once in a thread, because their first run may import and read files.

        Raise SpecError, or any exception of the validators.
        """
        key = (name, codec.encode(config))
        if key in self._prepared:
            return
        await in_daemon_thread(partial(check, name, config, modules=self.modules), THREAD)
        if len(self._prepared) >= PREPARED:
            self._prepared.clear()
        self._prepared.add(key)

    async def check(
        self,
        name: str,
        config: dict[str, object] | None,
        bots: Mapping[str, str] | None = None,
        forks: bool = False,
    ) -> tuple[str, ...]:
        """Return the seats, if known. Raise SpecError with every mistake in name, bots and config, or any exception of
        the module or its validators. `forks`: whether it must be able to fork.

        Exceeding the time limit is a mistake as well; the thread continues.
        """
        try:
            async with asyncio.timeout(self._check_s):
                named = await self.find(name)
                check_bots(named, bots or {})
                if forks:
                    check_fork(name, named)
                await in_daemon_thread(partial(check_reachable, name), THREAD)
                if config is not None:
                    checking = partial(check, name, config, modules=self.modules, forks=forks)
                    found, settings = await in_daemon_thread(checking, THREAD)
                    if not found.blocking and not issubclass(found, PlayedGame):
                        return rehearse(name, found, settings, bots)  # in the event loop, as episodes do
        except TimeoutError:
            problem = f"importing it and checking its config took more than {self._check_s:g} s"
            raise wrong_name(name, problem) from None
        return ()
