"""Inference jobs: answers requests to the job's endpoint with the job's model, without training.

asks         consumes ASK by this worker's address, starts a task for each; more than may wait are refused
ask task     renders in a thread, one request at a time, waits for a place in the engine, generates, produces PIECEs
beat loop    produces empty PIECEs for requests without new text, and asks whether they are still wanted
report loop  produces METRIC, and reports the time since the last request in the heartbeat

Rendering, tokenisation, stops and the reading of tool calls are those of episodes: the same renderer and engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import structlog

from opentinker.services.rollout_worker.detokenizer import Detokenizer, TextOffsets
from opentinker.services.rollout_worker.engines.base import (
    Completion,
    Engine,
    EngineError,
    EngineLost,
    GuideRefused,
    Likely,
    Sampling,
    Shown,
)
from opentinker.services.rollout_worker.inference_request import RequestState, TokenQueue, sampling_of
from opentinker.services.rollout_worker.renderer import Renderer, images_of
from opentinker.services.rollout_worker.weight_receiver import WeightReceiver
from opentinker.shared.asyncio_tools import cancel_and_wait, finish_uncancelled, forward_exception, sleep
from opentinker.shared.messaging.bus import NoReply, NoResponders, TooLarge
from opentinker.shared.messaging.streaming import Send, answer
from opentinker.shared.messaging.subjects import ABANDON, GENERATE, SWAP, WAKE, WANTED
from opentinker.shared.openai.answers import cut
from opentinker.shared.openai.fields import InvalidField, too_long
from opentinker.shared.openai.inference import (
    BEAT_S,
    CancelGenerate,
    GenerateChunk,
    GenerateError,
    GenerateRequest,
    GenerateResult,
    InFlight,
    models_of,
)
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import first_failure
from opentinker.shared.runtime.telemetry import Meters, Reporter
from opentinker.shared.spec import JobSpec
from opentinker.shared.types import codec
from opentinker.shared.types.codec import WireError
from opentinker.shared.types.core import Lease, StopReason
from opentinker.shared.types.errors import BadImage, JobFailed

log = structlog.get_logger()

REPORT_S = 1.0
TOKEN_BYTES = 64
"""A prompt with more bytes for each token of the context is refused unread: tokens of text have about four."""
LOST = GenerateError(message="the rollout worker that was answering is gone", status=503, elsewhere=True)


class InferenceJob:
    """Work of one lease. `engine` is started and has the job's weights, except for another job's live policy: those
    arrive when its trainer sends them. It has the adapters served with them."""

    def __init__(self, worker: LeasedWorker, lease: Lease, spec: JobSpec, engine: Engine, renderer: Renderer) -> None:
        self.beat_s = BEAT_S
        self.worker, self.lease, self.spec = worker, lease, spec
        self.engine, self.renderer = engine, renderer
        self.bus = worker.ctx.bus
        self.models = sorted(set(models_of(lease.job, spec.model_dump(mode="json")).values()))
        self.adapters = {adapter.name for adapter in spec.serving.adapters}
        self.address = f"{worker.info.id}-{uuid.uuid4().hex[:12]}"
        self.places = asyncio.Semaphore(spec.serving.max_concurrent)
        self.tasks: dict[str, tuple[RequestState, asyncio.Task[None]]] = {}
        """By id of the request."""
        self.closing: set[asyncio.Task[None]] = set()
        """Refusals on their way."""
        self.pieces: dict[int, str] = {}
        """Tokens as text, as far as they were asked for."""
        self.over = False
        """True: no new requests are started."""
        self.renderings = ThreadPoolExecutor(1, "rendering")
        """Renders prompts and parses answers one at a time, off the event loop, because their authors are untrusted.
        The event loop decodes streamed tokens concurrently, a few at a time: neither encoding nor decoding changes a
        tokenizer."""
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.follows = spec.start.job if spec.start is not None and spec.start.live else ""
        """The job whose live policy it serves; the trainer's versions come through SWAP."""
        self.taker = WeightReceiver(worker.ctx.store, worker.info, self.follows, 0, engine, self.broken, self._taken)
        self.quiet_since = time.monotonic()
        self.meters = Meters()
        self.meter = self.meters.of(lease.job)
        self.reporter = Reporter(self.bus, worker.info.id, self.meters)

    async def run(self) -> None:
        """Serve until the lease ends or is taken back, or the service stops. Requests in progress are then answered."""
        async with AsyncExitStack() as held:
            asks = await answer(self.bus, GENERATE, self._begin, worker=self.address)
            held.push_async_callback(asks.unsubscribe)
            abandons = await self.bus.listen(ABANDON, self._abandon, worker=self.address)
            held.push_async_callback(abandons.unsubscribe)
            held.callback(self.worker.tell, {})
            held.push_async_callback(self._end)
            self._tell()
            if self.follows:
                held.push_async_callback(self.taker.end)
                swaps = await self.bus.serve(SWAP, self.taker.answer, worker=self.address)
                held.push_async_callback(swaps.unsubscribe)
                await self._say("loading")  # until it has a version
                await self.bus.emit(WAKE, {"worker": self.worker.info.id}, who=f"trainer-{self.follows}")
            else:
                await self._say("ready")
            await first_failure(
                {
                    "beat": self._beat_loop(),
                    "report": self._report_loop(),
                    "broken": asyncio.wait_for(self.broken, None),
                    "engine": self.engine.watch(),
                    "stop": self._until_stopped(),
                }
            )

    async def _say(self, status: str) -> None:
        await self.worker.status(status, job=self.lease.job, epoch=self.lease.epoch, address=self.address)

    async def _taken(self, seconds: dict[str, float]) -> None:
        self.meter.counts["serving/versions"] += 1
        if self.worker.info.status == "loading":
            self.quiet_since = time.monotonic()
            self._tell()
            await self._say("ready")

    async def _until_stopped(self) -> None:
        await self.worker.ended()
        if self.tasks:
            log.info("draining", requests=len(self.tasks))
            await asyncio.wait([task for _, task in self.tasks.values()])

    async def _end(self) -> None:
        """Send the last report with what came since the previous one; after the job's end no gauge is shown."""
        self.over = True
        await finish_uncancelled(self._give_up())
        self.renderings.shutdown(wait=False, cancel_futures=True)
        self.meter.gauges.clear()
        await self.reporter.report()
        self.meters.jobs.clear()
        await self.reporter.report()

    async def _give_up(self) -> None:
        """Tell all waiting requesters to try elsewhere, including requests whose task has not started."""
        waiting = list(self.tasks.values())
        await cancel_and_wait(*(task for _, task in waiting))
        for talk, task in waiting:
            if task.cancelled() and not talk.abandoned:
                await talk.say(refusal=LOST)
        if self.closing:
            await asyncio.wait(self.closing)

    # --- requests -----------------------------------------------------------------------------------------------

    def _begin(self, ask: GenerateRequest, send: Send[GenerateChunk]) -> None:
        talk = RequestState(ask, send)
        self.meter.counts["serving/requests"] += 1
        room = self.spec.serving.max_concurrent + self.spec.serving.max_waiting
        refusal = None
        if self.over or self.worker.ending:
            refusal = LOST
        elif len(self.tasks) >= room:
            self.meter.counts["serving/overloaded"] += 1
            refusal = GenerateError(
                message=f"{room} requests are being answered or wait (serving.max_concurrent, serving.max_waiting): "
                "try again in a moment, or give the job more rollout workers",
                status=429,
                code="overloaded",
                elsewhere=True,
            )
        elif ask.job != self.lease.job or ask.model not in self.models:
            served = ", ".join(self.models)
            refusal = GenerateError(message=f"this rollout worker serves {served} of job {self.lease.job}", status=404)
        if refusal is not None:
            closing = asyncio.create_task(talk.say(refusal=refusal))
            self.closing.add(closing)
            closing.add_done_callback(self.closing.discard)
            return
        task = asyncio.create_task(self._run(talk))
        self.tasks[ask.id] = talk, task
        task.add_done_callback(lambda task: self._done(ask.id, task))

    def _done(self, id: str, task: asyncio.Task[None]) -> None:
        del self.tasks[id]
        self.quiet_since = time.monotonic()
        forward_exception(task, self.broken)

    async def _abandon(self, message: CancelGenerate) -> None:
        self._leave(message.id)

    def _leave(self, id: str) -> None:
        if id in self.tasks:
            talk, task = self.tasks[id]
            talk.abandoned = True
            self.meter.counts["serving/abandoned"] += 1
            task.cancel()

    async def _run(self, talk: RequestState) -> None:
        """One request to its last piece; one that is cancelled says nothing more. Raises what is a failure of this
        service."""
        within = self.spec.serving.request_timeout_s
        try:
            async with asyncio.timeout(within):
                reply = await self._answer(talk)
            await talk.say(reply=reply)
        except InvalidField as refused:
            await self._refuse(talk, refused.message, refused.status, refused.param, refused.code)
        except TimeoutError:
            late = f"no answer within {within:g} s (serving.request_timeout_s), its waiting included"
            await self._refuse(talk, late, 504, code="timeout")
        except EngineLost:
            await talk.say(refusal=LOST)
            raise
        except EngineError as error:
            await self._refuse(talk, str(error), 400 if isinstance(error, GuideRefused) else 500)
        except TooLarge as error:
            size = f"the answer has {error.size} bytes, and the NATS server takes {error.limit} (max_payload)"
            await self._refuse(talk, f"{size}: ask for fewer tokens, or without logprobs", 500)
        except Exception as error:  # one failing request must not end the others
            log.exception("request_failed", job=self.lease.job, request=talk.ask.id)
            await self._refuse(talk, f"no answer, for a fault of ours ({type(error).__name__}), which is logged", 500)

    async def _refuse(self, talk: RequestState, message: str, status: int, param: str = "", code: str = "") -> None:
        self.meter.counts["serving/refused"] += 1
        await talk.say(refusal=GenerateError(message=message, status=status, param=param, code=code))

    async def _answer(self, talk: RequestState) -> GenerateResult:
        ask = talk.ask
        self._check_size(ask)
        asked = await asyncio.get_running_loop().run_in_executor(self.renderings, self._prompt, ask)
        prompt, shown, structure = asked
        room = self.engine.context_length - len(prompt)
        sampling = sampling_of(ask, room, ask.model if ask.model in self.adapters else "", structure)
        places = TextOffsets(self.renderer)
        async with self.places:
            if ask.stream and not ask.tools:
                completion = await self._stream(talk, prompt, sampling, places, shown)
            else:
                completion = await self.engine.generate(ask.id, prompt, sampling, None, shown)
        self.meter.counts["serving/answers"] += 1
        self.meter.counts["serving/prompt_tokens"] += len(prompt)
        self.meter.counts["serving/tokens"] += len(completion.ids)
        self.worker.spent["tokens_generated"] += len(completion.ids)
        return await asyncio.get_running_loop().run_in_executor(
            self.renderings, self._reply, talk, len(prompt), completion, places
        )

    def _check_size(self, ask: GenerateRequest) -> None:
        """Refuses what is certainly too long, before any work is done for it. Raises Refused."""
        limit = self.engine.context_length
        if ask.token_ids is not None:
            size, unit, most = len(ask.token_ids), "tokens", limit - 1
        else:
            chat = [[message.text, message.tool_calls] for message in ask.messages]
            size, unit, most = len(codec.encode([ask.text, chat, ask.tools])), "bytes", limit * TOKEN_BYTES
        if size > most:
            raise too_long(limit, size, unit)

    def _prompt(self, ask: GenerateRequest) -> tuple[list[int], list[Shown], str]:
        """Return the prompt, its images and what is forced of the answer. In a thread. Raises InvalidField."""
        shown: list[Shown] = []
        structure = ""
        if ask.stop and self.spec.rollout.engine == "toy":
            raise InvalidField("the simulated engine knows no stop strings", param="stop")
        if ask.likely and self.spec.rollout.engine == "toy":
            name = "top_logprobs" if ask.messages else "logprobs"
            raise InvalidField(f"{name} can only be 0: the simulated engine draws from no distribution", param=name)
        if self.spec.rollout.engine == "toy" and (ask.guide is not None or ask.manner.reshapes):
            what = "forces no call or format" if ask.guide is not None else "has no penalties and no min_p"
            raise InvalidField(f"the simulated engine {what}")
        if ask.token_ids is not None:
            if max(ask.token_ids) >= self.renderer.vocab_size:
                raise InvalidField(f"the model has token ids up to {self.renderer.vocab_size - 1}", param="prompt")
            ids = ask.token_ids
        elif ask.text is not None:
            ids = self.renderer.plain(ask.text, first=True)
        else:
            try:
                ids = self.renderer.rendered(ask.messages, ask.tools)
                shown = self.renderer.shown(self.renderer.pictures(ask.messages, ids), images_of(ask.messages))
                structure = "" if ask.guide is None else self.renderer.structure(ask.guide, ask.tools)
            except (JobFailed, BadImage) as error:
                raise InvalidField(str(error), param="messages") from None
        limit = self.engine.context_length
        if not 0 < len(ids) < limit:
            raise too_long(limit, len(ids))
        return ids, shown, structure

    async def _stream(
        self, talk: RequestState, prompt: list[int], sampling: Sampling, places: TextOffsets, shown: list[Shown]
    ) -> Completion:
        """Sends what is certain of the text while it grows; the rest comes with the reply."""
        news, unfolding = TokenQueue(), Detokenizer(self.renderer, talk.ask.stop)
        generating = asyncio.create_task(self.engine.generate(talk.ask.id, prompt, sampling, news.add, shown))
        ids: list[int] = []
        logprobs: list[float] = []
        likely: list[Likely] = []
        offsets: list[int] = []
        try:
            while not generating.done():
                new = await news.more(generating)
                ids, logprobs, likely = ids + new.ids, logprobs + new.logprobs, likely + new.likely
                if talk.ask.offsets:
                    offsets += places.add(new.ids)
                if text := unfolding.add(new.ids):
                    names = {"tokens": self._tokens(talk.ask, ids), "likely": self._named(likely)}
                    await talk.say(text=text, ids=ids, logprobs=logprobs, offsets=offsets, **names)
                    ids, logprobs, likely, offsets = [], [], [], []
            return generating.result()
        finally:
            await cancel_and_wait(generating)

    def _reply(
        self, talk: RequestState, prompt_tokens: int, completion: Completion, places: TextOffsets
    ) -> GenerateResult:
        """Build the reply in a thread. `places`: of the tokens that were streamed."""
        ask = talk.ask
        text = self.renderer.text(completion.ids)
        answered = sum(message.role == "assistant" for message in ask.messages)
        said = self.renderer.said(completion.ids, ask.tools, stop=completion.stop, turn=answered)
        assert self.engine.version is not None
        return GenerateResult(
            text=cut(text, ask.stop) if completion.stop == StopReason.STOP else text,
            stop=completion.stop,
            ids=completion.ids,
            logprobs=completion.logprobs,
            prompt_tokens=prompt_tokens,
            version=completion.spans[-1].version if completion.spans else self.engine.version,
            tool_calls=said.calls,
            words=said.words,
            tokens=self._tokens(ask, completion.ids),
            offsets=places.of(completion.ids) if ask.offsets else [],
            likely=self._named(completion.likely[talk.told :]),
        )

    def _tokens(self, ask: GenerateRequest, ids: list[int]) -> list[str]:
        return [self._piece(id) for id in ids] if ask.tokens else []

    def _named(self, likely: list[Likely]) -> list[list[tuple[str, float]]]:
        return [[(self._piece(id), logprob) for id, logprob in there] for there in likely]

    def _piece(self, id: int) -> str:
        if id not in self.pieces:
            self.pieces[id] = self.renderer.piece(id)
        return self.pieces[id]

    # --- loops --------------------------------------------------------------------------------------------------

    async def _beat_loop(self) -> None:
        """Consumes nothing; produces empty pieces, and asks with WANTED; looks every `beat_s`."""
        while True:
            await sleep(self.beat_s)
            now = time.monotonic()
            talks = [talk for talk, _ in self.tasks.values()]
            for talk in talks:
                if now - talk.spoke_at >= self.beat_s / 2:
                    await talk.say()
            for asker in {talk.ask.asker for talk in talks}:
                await self._ask_after(asker, [talk.ask.id for talk in talks if talk.ask.asker == asker])

    async def _ask_after(self, asker: str, ids: list[str]) -> None:
        try:
            wanted = (await self.bus.request(WANTED, InFlight(ids), self.beat_s, asker=asker)).ids
        except NoResponders:
            wanted = []
        except (NoReply, WireError):
            return  # NATS is away, or the scheduler busy: the next round tells
        for id in set(ids) - set(wanted):
            self._leave(id)

    async def _report_loop(self) -> None:
        while True:
            await sleep(REPORT_S)
            self._tell()
            waiting = max(0, len(self.tasks) - self.spec.serving.max_concurrent)
            self.meter.gauges["serving/waiting"] = waiting
            self.meter.gauges["serving/running"] = len(self.tasks) - waiting
            await self.reporter.report()

    def _tell(self) -> None:
        quiet_s = 0.0 if self.tasks else time.monotonic() - self.quiet_since
        follows = {"follows": self.follows} if self.follows else {}
        self.worker.tell({"requests": len(self.tasks), "quiet_s": round(quiet_s, 1), **follows})
