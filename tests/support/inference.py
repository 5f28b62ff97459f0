"""An endpoint to ask: a scheduler and rollout workers of this process, whose engines say what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from opentinker.client import AsyncClient
from opentinker.services.rollout_worker.engines.base import Completion, EngineLost, Likely, Progress, Sampling, Shown
from opentinker.services.rollout_worker.inference_job import InferenceJob
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.shared.openai.inference import BEAT_S
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import Lease, Pool, StopReason, WeightVersion
from opentinker.shared.types.trajectories import Span
from tests.conftest import WAIT_S, Server, soon, until
from tests.support.api import OPERATOR
from tests.support.scheduling import context
from tests.unit.rollout_worker.test_tool_calls import renderer_of

V = WeightVersion(3, 7)
HELLO: Any = [{"role": "user", "content": "Hello?"}]


class Speaker:
    """An engine that says `words(prompt)`, token by token. While `gate` is set to an event it waits there before the
    token number `at`."""

    def __init__(self, words: Callable[[str], str]) -> None:
        self.renderer, self.tokenizer = renderer_of("hermes")
        self.words = words
        self.version: WeightVersion | None = V
        self.context_length = 10_000
        self.sleeps, self.asleep_s = False, 0.0
        self.gate: asyncio.Event | None = None
        self.at = 0
        self.asked: list[tuple[str, Sampling]] = []
        self.running: set[str] = set()
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def generate(
        self,
        request: str,
        prompt_ids: list[int],
        sampling: Sampling,
        progress: Progress | None = None,
        shown: Sequence[Shown] = (),
    ) -> Completion:
        prompt = self.tokenizer.decode(prompt_ids)
        self.asked.append((prompt, sampling))
        ids = [*self.tokenizer.encode(self.words(prompt), add_special_tokens=False), self.tokenizer.eos_token_id]
        self.running.add(request)
        try:
            stop = StopReason.EOS
            said: list[int] = []
            likely: list[Likely] = []
            for place, id in enumerate(ids):
                if self.gate is not None and place >= self.at:
                    await self.gate.wait()
                if place >= sampling.max_tokens:
                    stop = StopReason.LENGTH
                    break
                said.append(id)
                likely += [there] if (there := self.likely(id, sampling.likely)) else []
                if progress is not None:
                    progress([id], [-0.5], likely[-1:])
                    await asyncio.sleep(0)
                if any(mark in self.tokenizer.decode(said) for mark in sampling.stop):
                    stop = StopReason.STOP
                    break
            spans = [Span(0, len(said), V)]
            return Completion(ids=said, logprobs=[-0.5] * len(said), spans=spans, stop=stop, likely=likely)
        finally:
            self.running.discard(request)

    def likely(self, id: int, count: int) -> Likely:
        """The token itself is the second, if there are two."""
        others = [other for other in self.tokenizer.encode("abcdef") if other != id]
        return [(others[0], -0.25), (id, -0.5), *((other, -3.0) for other in others[1:])][:count]

    async def watch(self) -> None:
        await self.died
        raise EngineLost("killed by the test")


class Site:
    """`speakers`: by worker, the engine of its latest lease."""

    def __init__(self, client: AsyncClient, nats: Server, valkey: Server, data: Path) -> None:
        self.client, self._nats, self._valkey, self._data = client, nats, valkey, data
        self.words: Callable[[str], str] = lambda prompt: "Hello there."
        self.speakers: dict[str, Speaker] = {}
        self.beat_s = BEAT_S
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._stack = contextlib.AsyncExitStack()

    async def worker(self, id: str) -> None:
        ctx = await self._stack.enter_async_context(context(self._nats, self._valkey, id, self._data))

        async def work(worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
            speaker = self.speakers[id] = Speaker(lambda prompt: self.words(prompt))
            engine: Any = speaker
            renderer: Renderer = speaker.renderer
            job = InferenceJob(worker, lease, spec, engine, renderer)
            job.beat_s = self.beat_s
            await job.run()

        self._lives[id] = asyncio.create_task(LeasedWorker(ctx, Pool.ROLLOUT, work).serve())

    async def kill(self, id: str) -> None:
        """It says nothing more, and its heartbeats run out."""
        self._lives[id].cancel()
        await asyncio.wait([self._lives.pop(id)])

    async def job(self, **parts: Any) -> str:
        """A running job."""
        model = {"base": "some/model", "tool_format": "hermes"}
        made = await self.client.submit({"name": "chat", "kind": "inference", "model": model, **parts})
        await self.runs(made["id"])
        return str(made["id"])

    async def runs(self, job: str) -> None:
        await until(lambda: self.client.job(job), lambda found: found["state"] == "running")

    def openai(self, job: str, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(
            base_url=f"{self.client.url}/v1/jobs/{job}/v1",
            api_key=OPERATOR,
            **{"max_retries": 0, "timeout": WAIT_S, **options},
        )

    @asynccontextmanager
    async def asked(self, **parts: Any) -> AsyncIterator[tuple[str, AsyncOpenAI]]:
        """A running job, and OpenAI's client of it."""
        job = await self.job(**parts)
        async with self.openai(job) as model:
            yield job, model

    async def close(self) -> None:
        for id in list(self._lives):
            await soon(self.kill(id))
        await self._stack.aclose()


@asynccontextmanager
async def site_of(client: AsyncClient, nats: Server, valkey: Server, data: Path) -> AsyncIterator[Site]:
    site = Site(client, nats, valkey, data)
    try:
        await site.worker("rollout-0")
        yield site
    finally:
        await site.close()


async def collected(stream: Any) -> tuple[str, list[Any]]:
    """The text of a stream, and its chunks."""
    chunks = [chunk async for chunk in stream]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return "".join(
        getattr(c, "text", None) or getattr(getattr(c, "delta", None), "content", None) or "" for c in choices
    ), chunks


async def opentinker(*arguments: str, lines: str = "") -> tuple[int, str, str]:
    """Exit status, output and complaints of a command."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "opentinker.cli", *arguments, stdin=pipe, stdout=pipe, stderr=pipe
    )
    out, complaints = await soon(process.communicate(lines.encode()))
    assert process.returncode is not None
    return process.returncode, out.decode(), complaints.decode()
