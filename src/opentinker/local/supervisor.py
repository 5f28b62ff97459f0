"""Keeps a list of children alive: start in stages, restart what dies, kill what hangs, stop in reverse order.

    stage 0 (servers) --all answer--> stage 1 (services) ... --told to stop--> stage 1, then stage 0

It knows nothing of what the children do; `up.py` says which there are.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import structlog

from opentinker.local.processes import ServiceProcess
from opentinker.shared.backoff import exponential_delay_s

log = structlog.get_logger()

TICK_S = 0.05
MISSES = 3
"""Probes in a row without an answer, before a process counts as hung."""
CALM_S = 30.0
"""A life that long forgives the deaths before it."""
LOOP_DEATHS = 5
LOOP_S = 30.0
"""This many deaths within this many seconds are a crash loop."""


class Keeper:
    """One child and what we know of its lives."""

    def __init__(self, child: ServiceProcess, backoff_s: tuple[float, float]) -> None:
        self.child = child
        self.name = child.spec.name
        self.state = "waiting"
        """waiting | starting | running | down (waits for its restart) | stopping | stopped"""
        self.restarts = 0
        self.crash_loop = False
        self.answered = asyncio.Event()
        """Set while the present life has answered a probe."""
        self._backoff_s = backoff_s
        self._deaths: deque[float] = deque(maxlen=LOOP_DEATHS)
        self._failures = 0
        """Deaths in a row."""

    def describe(self) -> dict[str, Any]:
        spec = self.child.spec
        return {
            "state": self.state,
            "pid": self.child.pid,
            "restarts": self.restarts,
            "crash_loop": self.crash_loop,
            "url": spec.url,
            "log": str(spec.log),
        }

    def died(self, status: int, why: str) -> float:
        """Note a death; returns the pause before the restart in seconds."""
        lived_s = time.monotonic() - self.child.started_at
        if lived_s >= CALM_S:
            self._deaths.clear()
            self._failures = 0
            self.crash_loop = False
        self._deaths.append(time.monotonic())
        self._failures += 1
        pause_s = self._backoff_s[1] if self.crash_loop else exponential_delay_s(self._failures, *self._backoff_s)
        self.restarts += 1
        log.warning(
            "child_died",
            child=self.name,
            why=why,
            status=status,
            lived_s=round(lived_s, 1),
            restart_in_s=pause_s,
            log=str(self.child.spec.log),
        )
        looping = len(self._deaths) == LOOP_DEATHS and self._deaths[-1] - self._deaths[0] <= LOOP_S
        if looping and not self.crash_loop:
            self.crash_loop = True
            log.error(
                "crash_loop",
                child=self.name,
                deaths=LOOP_DEATHS,
                within_s=round(self._deaths[-1] - self._deaths[0], 1),
                log=str(self.child.spec.log),
                last_lines=self.child.tail(),
            )
        return pause_s


class Supervisor:
    """`run` keeps all children alive until `stopping` is set, then stops them; `state` is what state.json shows."""

    def __init__(
        self,
        stages: Sequence[Sequence[ServiceProcess]],
        state_file: Path,
        facts: Mapping[str, Any] | None = None,
        afterwards: Callable[[], None] = lambda: None,
        probe_every_s: float = 3.0,
        backoff_s: tuple[float, float] = (0.2, 10.0),
    ) -> None:
        """`afterwards`: called when the last stage has ended and those before still run; may block. `backoff_s`: first
        and longest pause before a restart; doubled with each death."""
        self.stages = [[Keeper(child, backoff_s) for child in stage] for stage in stages]
        self.ready = asyncio.Event()
        """Set once every child has answered."""
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()
        """Set to end the graceful stop immediately."""
        self._state_file = state_file
        self._afterwards = afterwards
        self._probe_every_s = probe_every_s
        self._facts = dict(facts or {})

    @property
    def keepers(self) -> list[Keeper]:
        return [keeper for stage in self.stages for keeper in stage]

    async def run(self) -> None:
        """Returns after `stopping` was set and every child is gone."""
        tasks: list[asyncio.Task[None]] = []
        try:
            for stage in self.stages:
                for keeper in stage:
                    task = asyncio.create_task(self._keep(keeper), name=keeper.name)
                    task.add_done_callback(lambda _: self.stopping.set())  # it ends only by an error of ours
                    tasks.append(task)
                for keeper in stage:
                    await self._unless_stopping(keeper.answered)
            if not self.stopping.is_set():
                self.ready.set()
                self.write_state()
            await self.stopping.wait()
        finally:
            self.stopping.set()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for stage in reversed(self.stages):
                await asyncio.gather(*(self._stop(keeper) for keeper in stage))
                if stage is self.stages[-1]:
                    await asyncio.to_thread(self._afterwards)
            self.write_state()
        for result in results:
            if isinstance(result, Exception):
                raise result

    def write_state(self) -> None:
        """Atomically, for `status`, `down` and a second `up`. A full disk must not end what we supervise."""
        state = {
            **self._facts,
            "pid": os.getpid(),
            "ready": self.ready.is_set(),
            "stopping": self.stopping.is_set(),
            "children": {keeper.name: keeper.describe() for keeper in self.keepers},
        }
        temporary = self._state_file.with_suffix(".tmp")
        try:
            self._state_file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(orjson.dumps(state, option=orjson.OPT_INDENT_2))
            temporary.replace(self._state_file)
        except OSError as error:  # written again at the next change
            log.warning("state_write_failed", file=str(self._state_file), error=str(error))

    async def _keep(self, keeper: Keeper) -> None:
        """Consumes: the child's deaths and missed probes. Produces: a living child. Woken by: a tick, forever."""
        child = keeper.child
        while True:
            try:
                if child.pid is None:  # an embedded server is handed over alive
                    child.start()
            except OSError as error:  # no memory, no log file: as any other death
                status, why = 127, f"could not be started: {error}"
            else:
                self._set(keeper, "starting")
                status, why = await self._live(keeper)
            keeper.answered.clear()
            pause_s = keeper.died(status, why)
            self._set(keeper, "down")
            await asyncio.sleep(pause_s)

    async def _live(self, keeper: Keeper) -> tuple[int, str]:
        """Watch one life to its end: (exit status, why)."""
        child, why = keeper.child, "ended"
        probes = asyncio.create_task(self._probe_until_hung(keeper))
        try:
            while (status := child.ended()) is None:
                if probes.done() and why == "ended":
                    why = probes.result()
                    log.error("child_hangs", child=keeper.name, why=why, pid=child.pid)
                    child.kill()
                await asyncio.sleep(TICK_S)
        finally:
            probes.cancel()
            await asyncio.gather(probes, return_exceptions=True)
        return status, why

    async def _probe_until_hung(self, keeper: Keeper) -> str:
        """Returns when the child counts as hung."""
        spec = keeper.child.spec
        while not await asyncio.to_thread(spec.healthy):
            if time.monotonic() - keeper.child.started_at > spec.grace_s:
                return f"no answer within {spec.grace_s:.0f} s of its start"
            await asyncio.sleep(TICK_S)
        keeper.answered.set()
        self._set(keeper, "running")
        misses = 0
        while misses < MISSES:
            await asyncio.sleep(self._probe_every_s)
            misses = 0 if await asyncio.to_thread(spec.healthy) else misses + 1
        return f"{MISSES} health probes in a row missed"

    async def _stop(self, keeper: Keeper) -> None:
        child = keeper.child
        if child.pid is None:
            self._set(keeper, "stopped")
            return
        self._set(keeper, "stopping")
        child.terminate()
        deadline = time.monotonic() + child.spec.stop_s
        while child.ended() is None:
            if time.monotonic() > deadline or self.hurry.is_set():
                child.kill()
            await asyncio.sleep(TICK_S)
        self._set(keeper, "stopped")

    async def _unless_stopping(self, event: asyncio.Event) -> None:
        """Wait for the event, or until told to stop."""
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self.stopping.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _set(self, keeper: Keeper, state: str) -> None:
        if keeper.state != state:
            keeper.state = state
            self.write_state()
