"""The sandboxes of Harbor tasks in one process: makes workspaces, and keeps some of them started in advance.

After the first episode of an image, the sandboxes of the next ones are started while it is played (`harbor_warm` in
all, of the images used last). One that is not taken within WARM_S ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from opentinker.envs.harbor.docker import DockerRuntime
from opentinker.envs.harbor.image import TaskImage
from opentinker.envs.harbor.overlays import OverlayRuntime
from opentinker.envs.harbor.task import Task, TaskMachine
from opentinker.envs.harbor.workspace import EPISODES, Runtime, Workspace
from opentinker.shared.asyncio_tools import cancel_and_wait, sleep
from opentinker.shared.config import Settings
from opentinker.shared.sandbox.sandbox import Unavailable
from opentinker.shared.settings_sources import load_settings

WARM_S = 60.0
POLL_S = 5.0


@dataclass
class Warm:
    key: Hashable
    workspace: Workspace
    since: float


class Boxes:
    """Make it with `open`. Coroutines of one event loop share it (`boxes`)."""

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        self.runtime, self.home = runtime, runtime.home
        self.episodes = self.home / EPISODES
        self._settings = settings
        self._warm: deque[Warm] = deque()
        self._starting: dict[Hashable, int] = {}
        """Sandboxes that are being started, by image and limits."""
        self._is_expiring = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.loaded: dict[tuple[str, str], tuple[Task, TaskImage]] = {}
        """Tasks and images that have been read, by their digests."""

    @classmethod
    async def open(cls, settings: Settings) -> Boxes:
        """Raises Unavailable, OSError. Removes leftovers of killed processes."""
        kind = DockerRuntime if settings.harbor_sandbox == "docker" else OverlayRuntime
        one = cls(await kind.open(settings), settings)
        await asyncio.to_thread(one._prepare)
        return one

    def _prepare(self) -> None:
        self.episodes.mkdir(parents=True, exist_ok=True)
        self.runtime.remove_stale()

    async def take(self, image: TaskImage, machine: TaskMachine) -> Workspace:
        """Return a started workspace, a warm one if there is one. Raises Unavailable, OSError."""
        key = _key(image, machine)
        while (found := next((one for one in self._warm if one.key == key), None)) is not None:
            self._warm.remove(found)
            self._refill(key, image, machine)
            if found.workspace.is_running:
                return found.workspace
            await _close(found.workspace)
        workspace = await self.start(image, machine)
        self._refill(key, image, machine)
        return workspace

    def has_warm(self, image: TaskImage, machine: TaskMachine) -> bool:
        """Return whether a started sandbox waits to be used."""
        return any(one.key == _key(image, machine) for one in self._warm)

    async def start(self, image: TaskImage, machine: TaskMachine) -> Workspace:
        """Return a started workspace, never a warm one. Raises Unavailable, OSError."""
        making = asyncio.ensure_future(asyncio.to_thread(self.runtime.make, image, machine))
        try:
            workspace = await asyncio.shield(making)
        except asyncio.CancelledError:  # its thread keeps running
            with contextlib.suppress(OSError):
                await (await making).close()
            raise
        try:
            await workspace.started()
        except BaseException:
            await asyncio.shield(workspace.close())
            raise
        return workspace

    def _refill(self, key: Hashable, image: TaskImage, machine: TaskMachine) -> None:
        """Have one more sandbox started in the background than there are, up to half of all."""
        most = self._settings.harbor_warm
        there = sum(one.key == key for one in self._warm) + self._starting.get(key, 0)
        if there < max(1, most // 2) and most:
            self._starting[key] = self._starting.get(key, 0) + 1
            self._background(self._add(key, image, machine))

    def _background(self, coroutine: object) -> None:
        assert asyncio.iscoroutine(coroutine)
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _add(self, key: Hashable, image: TaskImage, machine: TaskMachine) -> None:
        try:
            workspace = await self.start(image, machine)
        except (Unavailable, OSError):  # the next episode starts its own, and tells why it cannot
            return
        finally:
            self._starting[key] -= 1
            if not self._starting[key]:
                del self._starting[key]
        self._warm.append(Warm(key, workspace, time.monotonic()))
        if not self._is_expiring:
            self._is_expiring = True
            self._background(self._expire())
        while len(self._warm) > self._settings.harbor_warm:
            await _close(self._warm.popleft().workspace)

    async def _expire(self) -> None:
        """Ends warm sandboxes that have waited too long; waits for the next look, and ends when none is left."""
        try:
            while self._warm:
                await sleep(POLL_S)
                while self._warm and time.monotonic() - self._warm[0].since > WARM_S:
                    await _close(self._warm.popleft().workspace)
        finally:
            self._is_expiring = False

    async def close(self) -> None:
        await cancel_and_wait(*self._tasks)
        while self._warm:
            await _close(self._warm.pop().workspace)


async def _close(workspace: Workspace) -> None:
    """Close an unused one. Leftovers of an engine that does not answer are removed by the next process."""
    with contextlib.suppress(Unavailable, OSError):
        await workspace.close()


def _key(image: TaskImage, machine: TaskMachine) -> Hashable:
    return image.key, machine.model_dump_json()


_of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Boxes]] = weakref.WeakKeyDictionary()


async def boxes() -> Boxes:
    """Return the sandboxes of the running event loop, opened by the first call. Raises Unavailable, OSError."""
    loop = asyncio.get_running_loop()
    found = _of_loops.get(loop)
    if found is None or (found.done() and (found.cancelled() or found.exception() is not None)):
        found = _of_loops[loop] = loop.create_task(Boxes.open(load_settings()))
    return await asyncio.shield(found)


async def close_boxes() -> None:
    """Close the sandboxes of the running event loop, if `boxes` has opened any."""
    found = _of_loops.pop(asyncio.get_running_loop(), None)
    if found is not None:
        with contextlib.suppress(Unavailable, OSError):
            await (await found).close()
