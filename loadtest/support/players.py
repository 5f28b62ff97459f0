"""Episodes that are played side by side through an env worker or a served environment: a load test's own policy."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Mapping
from itertools import count

import msgspec
import numpy as np

from loadtest.support.machine import Meter
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.env_protocol import OpenSession, SeatAction

Turns = list[list[str]]
"""What is said in each turn of an episode: by one seat, or by those of a round."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `measure` reads."""
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=1.0)


class Players:
    """Say the words of `episodes`, one after the other and again from the first; `opening` is that of every session."""

    def __init__(self, bus: Bus, opening: OpenSession, episodes: list[Turns]) -> None:
        self._sessions, self._opening, self._episodes = EnvClient(bus), opening, episodes
        self._counting = self._stop = False
        self._begun = asyncio.Event()
        self.latencies: list[float] = []
        """Seconds of each step that is counted."""
        self.ended: list[float] = []
        """`exact` of each episode that came to its end, also before the counting."""

    async def measure(self, options: argparse.Namespace, pids: Callable[[], Mapping[str, int]]) -> Meter:
        """Play `sessions` episodes at once, and count for `seconds`, the first step and `warm_up` later. `pids`: called
        when the counting begins."""
        async with asyncio.TaskGroup() as players:
            for number in range(options.sessions):
                players.create_task(self._play(number))
            await self._begun.wait()
            await asyncio.sleep(options.warm_up)
            meter, self._counting = Meter(dict(pids())), True
            await asyncio.sleep(options.seconds)
            meter.stop()
            self._counting, self._stop = False, True
        return meter

    def quantiles_ms(self) -> tuple[float, float]:
        """Return p50 and p99 of a step."""
        p50, p99 = np.percentile(self.latencies, [50, 99]) * 1e3
        return float(p50), float(p99)

    async def _play(self, number: int) -> None:
        for episode in count(number):
            if self._stop:
                return
            await self._episode(f"load-{number}-{episode}", episode)

    async def _episode(self, session: str, episode: int) -> None:
        row = episode % len(self._episodes)
        reply = await self._sessions.open(msgspec.structs.replace(self._opening, session=session, row=row))
        assert reply.failure is None, reply.error
        for turn, texts in enumerate(self._episodes[row]):
            actions = [
                SeatAction(seat=prompt.seat, text=text, stop=StopReason.EOS)
                for prompt, text in zip(reply.prompts, texts, strict=True)
            ]
            began = time.perf_counter()
            reply = await self._sessions.step(reply.worker, reply.step(session, turn, actions))
            assert reply.failure is None, reply.error
            self._begun.set()
            if self._counting:
                self.latencies.append(time.perf_counter() - began)
            if self._stop:
                break
        if reply.done:
            self.ended.append(reply.metrics.get("exact", 0.0))
        else:
            await self._sessions.close(worker=reply.worker, session=session)
