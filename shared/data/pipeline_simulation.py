"""Predicts a job's speed on N rollout workers and M env workers by discrete-event simulation of the pipeline, in
seconds.

tickets -> groups of episodes (generate, ask the environment, ...) -> batches -> steps -> weights that are swapped in

The rule of shared/state/staleness.py issues tickets; a rollout worker plays as many groups concurrently as the job
allows; an episode holds a session of a randomly chosen env worker from its beginning to its end, and waits in its queue
for a while if it is full (shared/messaging/env_client.py); the trainer takes whole batches in the order in which groups
arrive; every rollout worker pauses for a swap, and during steps if its engine sleeps then. An engine divides its tokens
a second evenly between its sequences, none of which is faster than it would be alone. Not simulated: retries,
oversampling, reference models, validation, and the start of workers. `python -m loadtest steady slow-env` checks it
against real runs.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import simpy

WARM_UP = 3
"""Steps that are not counted: the pipeline fills."""
EPISODE_TURNS = 10_000
"""Simulated at most by default, which takes about a second."""
SAME = 0.03
"""A step is as short as it gets if it is longer by less than this share."""
MOST_ENV_WORKERS = 4096
IN_LINE_S = 2.0
"""Time for which a full env worker keeps an episode queued: shared/messaging/env_client.py."""
IN_LINE_SHARE = 0.1
"""Fraction of an environment's time per turn, if that is longer: asking more often changes nothing and takes long."""
EVEN = 1e-3
"""A spread below which all turns are of one length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of a job and its durations, in seconds."""

    group_size: int
    groups_per_batch: int
    max_staleness: int
    concurrent_groups: int
    """Per rollout worker."""
    turns: float
    """Model outputs per episode; between two whole numbers it is one or the other."""
    tokens: float
    """Sampled per turn."""
    token_s: float
    """From token to token of a sequence that is alone in its engine."""
    tokens_per_s: float = math.inf
    """Per engine, at full concurrency."""
    spread: float = 0.0
    """Standard deviation of the tokens of a turn over their mean (gamma distribution)."""
    env_s: float
    """Per call of the environment; an episode opens and then calls once a turn."""
    train_s: float
    """Per optimizer step."""
    swap_s: float = 0.0
    """For which an engine stands still at each new version."""
    sleeps: bool = False
    """Whether engines stand still during each optimizer step, which begins after the swap before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    rollout_workers: int
    env_workers: int
    sessions: int
    """Concurrent sessions of an env worker."""
    calls: int | None = None
    """Concurrent calls of an env worker, for environments that block; None: one per session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Means over the counted steps; shares are of the time."""

    step_s: float
    trajectories_per_s: float
    tokens_per_s: float
    trainer_waits: float
    engines_busy: float
    """Share of the engines' time in which there is anything to generate."""
    sessions_used: float
    """Fraction of all sessions of all env workers."""
    staleness: float
    """Versions that the oldest token of an episode is behind the step that trains on it."""


class _Engine:
    """Processor sharing: `_done` is how many tokens a sequence that was always there would have got."""

    def __init__(self, env: simpy.Environment, work: Work) -> None:
        self._env, self._work = env, work
        self._running: list[tuple[float, int, simpy.Event]] = []
        self._done = self._since = self.busy_s = 0.0
        self._pauses = 0
        """Reasons to stand still now."""
        self._round = self._number = 0
        self.version = 0
        """Version of the weights that sample the next token."""

    def generate(self, tokens: float) -> simpy.Event:
        self._advance()
        self._number += 1
        event = self._env.event()
        heapq.heappush(self._running, (self._done + tokens, self._number, event))
        self._schedule()
        return event

    def swap(self, version: int, seconds: float) -> Generator[simpy.Event, Any, None]:
        self._advance()
        self.version = max(self.version, version)
        yield from self.pause(seconds)

    def pause(self, seconds: float) -> Generator[simpy.Event, Any, None]:
        self._advance()
        self._pauses += 1
        self._schedule()
        yield self._env.timeout(seconds)
        self._advance()
        self._pauses -= 1
        self._schedule()

    def _rate(self) -> float:
        if self._pauses or not self._running:
            return 0.0
        return min(1.0 / max(self._work.token_s, 1e-9), self._work.tokens_per_s / len(self._running))

    def _advance(self) -> None:
        passed = self._env.now - self._since
        self._done += self._rate() * passed
        self.busy_s += passed if self._running and not self._pauses else 0.0
        self._since = self._env.now

    def _schedule(self) -> None:
        self._round += 1
        rate = self._rate()
        if rate:
            due = self._env.timeout(max(0.0, self._running[0][0] - self._done) / rate, self._round)
            due.callbacks.append(self._due)

    def _due(self, timer: simpy.Event) -> None:
        if timer.value != self._round:  # something came between
            return
        self._advance()
        self._done = max(self._done, self._running[0][0])
        while self._running and self._running[0][0] <= self._done:
            heapq.heappop(self._running)[2].succeed()
        self._schedule()


class _EnvWorker:
    def __init__(self, env: simpy.Environment, pools: Pools) -> None:
        self.sessions = simpy.Resource(env, pools.sessions)
        self.calls = None if pools.calls is None else simpy.Resource(env, pools.calls)


class _Pipeline:
    def __init__(self, work: Work, pools: Pools, seed: int) -> None:
        self.work, self.pools = work, pools
        self.env = simpy.Environment()
        self.engines = [_Engine(self.env, work) for _ in range(pools.rollout_workers)]
        self.workers: defaultdict[int, _EnvWorker] = defaultdict(lambda: _EnvWorker(self.env, pools))
        """Those that any episode has asked, by number."""
        self.tickets, self.groups = simpy.Store(self.env), simpy.Store(self.env)
        self.random = np.random.default_rng(seed)
        self.issued = self.trained = self.served = 0
        self.serving: simpy.Event = self.env.timeout(0.0)
        """The end of the newest version's swap."""
        self.waited_s = self.session_s = self.tokens = 0.0
        self.staleness: list[int] = []

    def run(self, steps: int) -> Prediction:
        for _ in range(self.work.concurrent_groups):
            for engine in self.engines:
                self.env.process(self._slot(engine))
        self._issue()
        self.env.run(self.env.process(self._train(WARM_UP)))
        began, waited, tokens, sessions = self.env.now, self.waited_s, self.tokens, self.session_s
        busy = sum(engine.busy_s for engine in self.engines)
        self.staleness.clear()
        self.env.run(self.env.process(self._train(steps)))
        seconds = self.env.now - began
        episodes = steps * self.work.groups_per_batch * self.work.group_size
        return Prediction(
            step_s=seconds / steps,
            trajectories_per_s=episodes / seconds,
            tokens_per_s=(self.tokens - tokens) / seconds,
            trainer_waits=(self.waited_s - waited) / seconds,
            engines_busy=(sum(engine.busy_s for engine in self.engines) - busy) / seconds / len(self.engines),
            sessions_used=(self.session_s - sessions) / seconds / (self.pools.env_workers * self.pools.sessions),
            staleness=float(np.mean(self.staleness)),
        )

    def _issue(self) -> None:
        """Equation 3 of AReaL (arXiv 2505.24298), counted in groups."""
        allowed = (self.work.max_staleness + self.served + 1) * self.work.groups_per_batch
        for _ in range(allowed - self.issued):
            self.tickets.put(None)
        self.issued = allowed

    def _slot(self, engine: _Engine) -> Generator[simpy.Event, Any, None]:
        while True:
            yield self.tickets.get()
            episodes = [self.env.process(self._episode(engine)) for _ in range(self.work.group_size)]
            yield self.env.all_of(episodes)
            yield self.groups.put([episode.value for episode in episodes])

    def _episode(self, engine: _Engine) -> Generator[simpy.Event, Any, int]:
        """Gives the version of its oldest token."""
        turns = max(1, int(self.work.turns + self.random.random()))
        worker, place = yield from self._session()
        began = self.env.now
        yield from self._call(worker)
        oldest = engine.version
        for _ in range(turns):
            tokens = self._length()
            yield engine.generate(tokens)
            self.tokens += tokens
            yield from self._call(worker)
        self.session_s += self.env.now - began
        worker.sessions.release(place)
        return oldest

    def _session(self) -> Generator[simpy.Event, Any, tuple[_EnvWorker, simpy.resources.resource.Request]]:
        """Acquire a place at a randomly chosen env worker; after too long in its queue, try another."""
        in_line_s = max(IN_LINE_S, IN_LINE_SHARE * self.work.env_s)
        while True:
            worker = self.workers[int(self.random.integers(self.pools.env_workers))]
            place = worker.sessions.request()
            if not place.triggered:
                yield place if self.pools.env_workers == 1 else place | self.env.timeout(in_line_s)
            if place.triggered:
                return worker, place
            place.cancel()

    def _length(self) -> float:
        if self.work.spread < EVEN:
            return self.work.tokens
        shape = self.work.spread**-2
        return float(self.random.gamma(shape, self.work.tokens / shape))

    def _call(self, worker: _EnvWorker) -> Generator[simpy.Event, Any, None]:
        if worker.calls is None:
            yield self.env.timeout(self.work.env_s)
            return
        with worker.calls.request() as place:
            yield place
            yield self.env.timeout(self.work.env_s)

    def _train(self, steps: int) -> Generator[simpy.Event, Any, None]:
        for _ in range(steps):
            began = self.env.now
            taken = 0
            while taken < self.work.groups_per_batch:
                versions = yield self.groups.get()
                if self.trained - min(versions) > self.work.max_staleness:  # dropped, and another is played for it
                    yield self.tickets.put(None)
                    continue
                self.staleness += [self.trained - version for version in versions]
                taken += 1
            if self.work.sleeps:
                yield self.serving
                for engine in self.engines:
                    self.env.process(engine.pause(self.work.train_s))
            self.waited_s += self.env.now - began
            yield self.env.timeout(self.work.train_s)
            self.trained += 1
            self.serving = self.env.process(self._serve(self.trained))

    def _serve(self, version: int) -> Generator[simpy.Event, Any, None]:
        yield self.env.all_of([self.env.process(engine.swap(version, self.work.swap_s)) for engine in self.engines])
        self.served = max(self.served, version)
        self._issue()


def predict(work: Work, pools: Pools, steps: int | None = None, seed: int = 0) -> Prediction:
    """Predict `steps` optimizer steps (default: as EPISODE_TURNS allow, 4 to 50) after the pipeline has filled."""
    if steps is None:
        steps = int(EPISODE_TURNS / (work.group_size * work.groups_per_batch * max(1.0, work.turns)))
        steps = min(50, max(4, steps))
    return _Pipeline(work, pools, seed).run(steps)


def enough_env_workers(work: Work, pools: Pools) -> tuple[int, Prediction]:
    """The fewest env workers with which a step is as short as with any number of them (within SAME), and what it is
    like then. `pools.env_workers` is not looked at."""
    most = MOST_ENV_WORKERS
    best = predict(work, replace(pools, env_workers=most))
    at_best = best.step_s * (1 + SAME)
    count, below = max(1, int(best.sessions_used * most / 2)), 0  # with half of the sessions that are in use at best
    while (found := predict(work, replace(pools, env_workers=count))).step_s > at_best:
        below, count = count, min(2 * count, most)
    good = found
    while count - below > 1:
        middle = (count + below) // 2
        found = predict(work, replace(pools, env_workers=middle))
        if found.step_s <= at_best:
            count, good = middle, found
        else:
            below = middle
    return count, good
