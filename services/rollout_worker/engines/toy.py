"""A simulated engine: deterministic tokens, given durations, no model. For everything that is not about generation.

Tokens are a function of prompt, seed (not at temperature 0) and `skill` alone, never of the version or of time. With a
real weight group it receives and verifies the bytes like any other member and throws them away.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from opentinker.services.rollout_worker.engines.base import (
    Completion,
    EngineError,
    GuideRefused,
    Progress,
    Sampling,
    Scores,
    Shown,
    SwapError,
)
from opentinker.shared.spec import LoraSpec, ToySpec
from opentinker.shared.time_limit import Stopwatch
from opentinker.shared.types.core import StopReason, WeightVersion
from opentinker.shared.types.errors import TransportError
from opentinker.shared.types.swap import SIMULATED, SwapCommand
from opentinker.shared.types.trajectories import Span

if TYPE_CHECKING:
    from opentinker.shared.nn.transport import WeightGroup


class ToyEngine:
    def __init__(
        self,
        spec: ToySpec,
        *,
        eos_id: int,
        vocab_size: int,
        context_length: int,
        echo_ids: frozenset[int] = frozenset(),
        group_timeout_s: float = 10.0,
        sleeps: bool = False,
    ) -> None:
        """`echo_ids`: tokens (digits, usually) that a skilled answer repeats from the last message of the prompt."""
        self.version: WeightVersion | None = None
        self.context_length = context_length
        self._shared = partial(
            ToyEngine,
            spec,
            vocab_size=vocab_size,
            context_length=context_length,
            echo_ids=echo_ids,
            group_timeout_s=group_timeout_s,
            sleeps=sleeps,
        )
        self._sleeps = sleeps
        self._spec = spec
        self._eos_id = eos_id
        self._vocab_size = vocab_size
        self._echo_ids = echo_ids
        self._group_timeout_s = group_timeout_s
        self._group: WeightGroup | None = None
        self._generation = -1
        self._adapters: dict[str, WeightVersion] = {}
        self._siblings: list[ToyEngine] = []
        self._running: dict[str, asyncio.Task[Completion]] = {}
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._asleep = Stopwatch()

    async def start(self) -> None:
        """Do nothing: there are no weights to load."""

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def lora(self) -> None:
        return None

    @property
    def sleeps(self) -> bool:
        """With `rollout.sleep = "always"` alone: it has no memory to give back."""
        return self._sleeps

    @property
    def asleep_s(self) -> float:
        return self._asleep.seconds

    async def sleep(self) -> None:
        self._asleep.start()
        self._unpaused.clear()

    async def wake(self) -> None:
        self._asleep.stop()
        self._unpaused.set()

    def sibling(self, eos_ids: Collection[int], lora: LoraSpec) -> ToyEngine:
        """There is nothing to share."""
        one = self._shared(eos_id=min(eos_ids))
        self._siblings.append(one)
        return one

    async def generate(
        self,
        request: str,
        prompt_ids: list[int],
        sampling: Sampling,
        progress: Progress | None = None,
        shown: Sequence[Shown] = (),
    ) -> Completion:
        if shown:
            raise EngineError("the simulated engine does not see")
        if sampling.likely or sampling.likely_prompt:
            raise EngineError("the simulated engine draws from no distribution: no tokens are the likeliest")
        if sampling.structure:
            raise GuideRefused("the simulated engine cannot force a call or a format")
        if self.version is None:
            raise EngineError("the engine has no weights yet")
        if len(prompt_ids) >= self.context_length:
            raise EngineError(f"the prompt has {len(prompt_ids)} tokens, the context holds {self.context_length}")
        if sampling.adapter and sampling.adapter not in self._adapters:
            raise EngineError(f"there is no adapter {sampling.adapter!r}")
        if request in self._running:
            raise EngineError(f"request {request} is already running")
        task = asyncio.ensure_future(self._sample(prompt_ids, sampling, progress))
        self._running[request] = task
        try:
            return await task
        except asyncio.CancelledError:
            if request in self._running:
                task.cancel()
                raise  # the caller was cancelled, not the request
            raise EngineError(f"request {request} was aborted") from None
        finally:
            self._running.pop(request, None)

    async def score(self, ids: list[int]) -> Scores | None:
        return None

    async def abort(self, request: str) -> None:
        task = self._running.pop(request, None)
        if task is not None:
            task.cancel()

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def serve(self, version: WeightVersion, adapter: Path | None = None) -> None:
        """Accept an adapter without effect: the engine has no weights."""
        self.version = version

    async def load(self, version: WeightVersion, directory: Path) -> None:
        """Change the version only."""
        if not await asyncio.to_thread(directory.is_dir):
            raise SwapError(f"there is no checkpoint in {directory}")
        if self._spec.swap_seconds:
            await asyncio.sleep(self._spec.swap_seconds)
        self.version = version

    async def add(self, name: str, version: WeightVersion, adapter: Path) -> None:
        """Sampling does not change; only the spans show the adapter."""
        self._adapters[name] = version

    async def drop(self, name: str) -> None:
        del self._adapters[name]

    async def join(self, command: SwapCommand) -> None:
        await self._leave()
        if command.device != SIMULATED:
            from opentinker.shared.nn.transport import WeightGroup

            try:
                self._group = await asyncio.to_thread(
                    WeightGroup.join, **command.member, timeout_s=self._group_timeout_s
                )
            except TransportError as error:
                raise SwapError(str(error)) from error
        self._generation = command.generation

    async def receive(self, command: SwapCommand) -> dict[str, float]:
        if command.version is None:
            raise SwapError("a receive must name its version")
        if command.generation != self._generation:
            raise SwapError(f"this engine is in group {self._generation}, not {command.generation}")
        started = time.perf_counter()
        if self._group is not None:
            await asyncio.to_thread(_verify, self._group, command)
        transferred = time.perf_counter()
        self._unpaused.clear()
        try:
            if self._spec.swap_seconds:
                await asyncio.sleep(self._spec.swap_seconds)
            self.version = command.version
        finally:
            self._unpaused.set()
        loaded = time.perf_counter()
        return {"pause": 0.0, "transfer": transferred - started, "load": loaded - transferred, "resume": 0.0}

    async def close(self) -> None:
        for sibling in self._siblings:
            await sibling.close()
        for request in list(self._running):
            await self.abort(request)
        await self._leave()

    async def _leave(self) -> None:
        group, self._group, self._generation = self._group, None, -1
        if group is not None:
            await asyncio.to_thread(group.close)

    async def _sample(self, prompt_ids: list[int], sampling: Sampling, progress: Progress | None) -> Completion:
        ids, stop = self._answer(prompt_ids, sampling)
        prompt = [] if sampling.likely_prompt is None else [self._logprob] * (len(prompt_ids) - 1)
        if not self._spec.seconds_per_token:
            await self._unpaused.wait()
            if progress is not None:
                progress(ids, [self._logprob] * len(ids), [])
            return self._completion(ids, stop, [self._current(sampling)] * len(ids), prompt)
        versions: list[WeightVersion] = []
        due = time.perf_counter()
        while len(versions) < len(ids):
            due += self._spec.seconds_per_token
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if not self._unpaused.is_set():
                await self._unpaused.wait()
                due = time.perf_counter()
            if progress is not None:
                progress([ids[len(versions)]], [self._logprob], [])
            versions.append(self._current(sampling))
        return self._completion(ids, stop, versions, prompt)

    def _current(self, sampling: Sampling) -> WeightVersion:
        if sampling.adapter:
            return self._adapters[sampling.adapter]
        if self.version is None:
            raise EngineError("the engine has no weights yet")
        return self.version

    def _answer(self, prompt_ids: list[int], sampling: Sampling) -> tuple[list[int], StopReason]:
        seed = sampling.seed if sampling.temperature > 0 else None  # greedy: the prompt decides alone
        digest = hashlib.blake2b(repr((prompt_ids, seed)).encode(), digest_size=8).digest()
        draw = random.Random(digest)
        if draw.random() < self._spec.skill:
            ids = [token for token in _last_run(prompt_ids, self._echo_ids)] + [self._eos_id]
        else:
            others = [token for token in range(self._vocab_size) if token != self._eos_id] or [self._eos_id]
            ids = draw.choices(others, k=draw.randint(1, sampling.max_tokens))
            ids.append(self._eos_id)
        room = self.context_length - len(prompt_ids)
        if sampling.stop_ids is not None:
            ids += draw.choices(range(self._vocab_size), k=max(0, min(room, sampling.max_tokens) + 1 - len(ids)))
            ends = (place for place, id in enumerate(ids, 1) if id in sampling.stop_ids)
            ids = ids[: next(ends, None)]
        if len(ids) <= min(room, sampling.max_tokens):
            return ids, StopReason.EOS
        if sampling.max_tokens <= room:
            return ids[: sampling.max_tokens], StopReason.LENGTH
        return ids[:room], StopReason.CONTEXT

    def _completion(
        self, ids: list[int], stop: StopReason, versions: list[WeightVersion], prompt_logprobs: list[float]
    ) -> Completion:
        spans: list[Span] = []
        for place, version in enumerate(versions):
            if spans and spans[-1].version == version:
                spans[-1] = Span(spans[-1].start, place + 1, version)
            else:
                spans.append(Span(place, place + 1, version))
        logprobs = [self._logprob] * len(ids)
        return Completion(ids=ids, logprobs=logprobs, spans=spans, stop=stop, prompt_logprobs=prompt_logprobs)

    @property
    def _logprob(self) -> float:
        return -math.log(self._vocab_size)


def _last_run(ids: list[int], wanted: frozenset[int]) -> list[int]:
    run: list[int] = []
    for token in reversed(ids):
        if token in wanted:
            run.append(token)
        elif run:
            break
    return run[::-1]


def _verify(group: WeightGroup, command: SwapCommand) -> None:
    from opentinker.shared.nn.buckets import bucket_sizes, fingerprint

    try:
        buckets = group.receive(bucket_sizes(command.manifest, command.bucket_bytes))
    except TransportError as error:
        raise SwapError(str(error)) from error
    if [fingerprint(bucket) for bucket in buckets] != command.fingerprints:
        raise SwapError("the received bytes do not have the announced fingerprints")
