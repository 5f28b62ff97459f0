"""One episode, as the field names its states:

    PENDING      open the environment, render its first messages
    GENERATING   the policy samples a turn          (mask 1, behaviour logprobs, weight-version spans)
    INTERACTING  the environment answers            (mask 0)  -> GENERATING, or
    TERMINATED   with a reason: the environment is done, or turns, tokens or context are used up

The environment's last reply says which seat acts next, and in which of its contexts; each (seat, stream) is a separate
stream of tokens and becomes a trajectory. Limits of turns and tokens count per seat, that of context per stream. A turn
cut by its budget still gets its environment step. A failure is data: EpisodeFailed with its Ending.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from opentinker.services.rollout_worker.engines.base import Completion, Engine, EngineError, EngineLost, Sampling, Shown
from opentinker.services.rollout_worker.renderer import Renderer, images_of
from opentinker.services.rollout_worker.transcripts import CHARACTERS, TOKENS, is_kept, shortened
from opentinker.shared.asyncio_tools import paused_timeout
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import Ending, Message, StopReason, Ticket, Tool
from opentinker.shared.types.env_protocol import Isolation, Policy, SessionReply, StepSession
from opentinker.shared.types.errors import BadImage, JobFailed
from opentinker.shared.types.trajectories import Picture, Span, Trajectory, Turn

Busy = Callable[[str], AbstractContextManager[object]]
"""Context manager by lane (`generation`, `env`), entered while the episode waits for that lane."""


class EpisodeFailed(Exception):
    """An ordinary outcome: the sample is tried again, then its group is failed with this reason."""

    def __init__(self, ending: Ending, error: str) -> None:
        self.ending, self.error = ending, error
        super().__init__(f"{ending}: {error}")


class Sessions(Protocol):
    """The environment side of an episode; `shared.env_client.EnvClient` is the real one."""

    async def open(
        self, *, job: str, session: str, environment: str, isolation: Isolation, config: dict[str, object], row: int,
        seed: int, deadline_s: float, policy: Policy, tools: list[dict[str, object]], tool_turns: int,
        importing: Callable[[], AbstractContextManager[object]],
    ) -> SessionReply: ...  # fmt: skip

    async def step(self, worker: str, request: StepSession) -> SessionReply: ...

    async def close(self, *, worker: str, session: str) -> None: ...


class Stream:
    """One context of one seat: the trajectory's arrays while they grow."""

    def __init__(self, seat: str, name: str, tools: list[Tool]) -> None:
        self.seat, self.name, self.tools = seat, name, tools
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.turns: list[Turn] = []
        self.sampled = 0
        self.said: list[Message] = []
        """Both sides' words so far."""
        self.spoken = 0
        """How many of these messages there are up to the policy's last."""
        self.pictures: list[Picture] = []
        self.images: dict[str, bytes] = {}

    def observe(self, ids: list[int], messages: list[Message], pictures: list[Picture]) -> None:
        """`pictures`: where `ids` show what images."""
        if pictures:
            self.pictures += [picture.moved(len(self.ids)) for picture in pictures]
            self.images |= images_of(messages)
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.said += messages

    def sample(self, completion: Completion, text: str) -> None:
        start = len(self.ids)
        self.ids += completion.ids
        self.mask += [1] * len(completion.ids)
        self.logprobs += completion.logprobs
        self.spans += [Span(start + s.start, start + s.end, s.version) for s in completion.spans]
        self.sampled += len(completion.ids)
        self.said.append(Message(role="assistant", content=text))
        self.spoken = len(self.said)

    def award(self, parts: dict[str, float]) -> None:
        """Named rewards that came after the stream's last turn, and are its own."""
        last = self.turns[-1]
        components = dict(last.components)
        for name, value in parts.items():
            components[name] = components.get(name, 0.0) + value
        self.turns[-1] = msgspec.structs.replace(last, reward=last.reward + sum(parts.values()), components=components)


class Episode:
    """Plays sample `index` of a ticket once. `run` gives a trajectory per seat and stream, or raises EpisodeFailed."""

    def __init__(
        self,
        spec: JobSpec,
        ticket: Ticket,
        index: int,
        engine: Engine,
        renderer: Renderer,
        sessions: Sessions,
        busy: Busy = nullcontext,
    ) -> None:
        """`busy`: tells somebody what it is doing."""
        self._busy = busy
        self.spec, self.ticket, self.index = spec, ticket, index
        self.engine, self.renderer, self.sessions = engine, renderer, sessions
        self.attempt = uuid.uuid4().hex[:12]
        self.is_kept = is_kept(spec, ticket.seq, index)
        self.session = f"{ticket.job}-{ticket.seq}-{index}-{self.attempt}"
        self.streams: dict[tuple[str, str], Stream] = {}
        self.latest: dict[str, Stream] = {}
        """Where each seat acted last."""
        self.owed: dict[str, dict[str, float]] = {}
        """Rewards of seats that have not acted yet."""
        self.turn = 0
        self.metrics: dict[str, float] = {}
        self.wants_tokens = False
        self.state = "PENDING"
        self.done = self.truncated = False
        limits = [engine.context_length]
        if spec.rollout.context_length is not None:
            limits.append(spec.rollout.context_length)
        self.context = min(limits)

    @property
    def sampled(self) -> int:
        """Tokens, so far."""
        return sum(stream.sampled for stream in self.streams.values())

    @property
    def said(self) -> list[Message]:
        """Return all messages, stream after stream."""
        return [message for stream in self.streams.values() for message in stream.said]

    async def run(self) -> list[Trajectory]:
        started = time.monotonic()
        worker = None
        try:
            async with asyncio.timeout(self.spec.rollout.episode_timeout_s) as clock:
                reply = self._good(await self._open(clock))
                worker = reply.worker
                self.wants_tokens = reply.wants_tokens
                ending = await self._play(worker, reply)
        except TimeoutError:
            late = Ending.TIMEOUT if self.state == "GENERATING" else Ending.ENV_TIMEOUT
            raise EpisodeFailed(
                late, f"no end after {self.spec.rollout.episode_timeout_s:g} s (state {self.state})"
            ) from None
        except EngineLost:
            raise  # not this episode's failure: the process ends and the ticket goes elsewhere
        except EngineError as error:
            raise EpisodeFailed(Ending.ENGINE_ERROR, str(error)) from None
        finally:
            self.state = "TERMINATED"
            if worker is not None and not self.done:
                await self.sessions.close(worker=worker, session=self.session)
        seconds = time.monotonic() - started
        return [self._trajectory(stream, ending, seconds) for stream in self.streams.values() if stream.turns]

    async def _open(self, clock: asyncio.Timeout) -> SessionReply:
        with self._busy("env"):
            return await self.sessions.open(
                job=self.ticket.job,
                session=self.session,
                environment=self.spec.environment.name,
                isolation=self.spec.environment.isolation or "process",
                config=self.spec.environment.config,
                row=self.ticket.row,
                seed=self.ticket.seed,
                deadline_s=self.spec.rollout.episode_timeout_s,
                policy=Policy(model=self.spec.model.base, context_length=self.context),
                tools=[tool.model_dump() for tool in self.spec.environment.tools],
                tool_turns=self.spec.environment.tool_turns,
                importing=partial(paused_timeout, clock),
            )

    @staticmethod
    def _good(reply: SessionReply) -> SessionReply:
        if reply.failure is not None:
            raise EpisodeFailed(reply.failure, reply.error)
        return reply

    async def _play(self, worker: str, reply: SessionReply) -> Ending:
        """Turns until an ending that is ordinary data."""
        while True:
            await self._look(reply)
            stream = self._observe(reply)
            if stream is None:
                self.truncated = True
                return Ending.CONTEXT
            reply = await self._take_turn(worker, stream, reply)
            self.metrics = reply.metrics
            self.done, self.truncated = reply.done, reply.truncated  # when done, the env worker has closed the session
            ending = self._ending(reply)
            if ending is not None:
                if self.truncated and reply.messages and self.spec.algorithm.advantage == "gae":
                    self._observe(reply)  # the state whose value counts: critics know those before a turn
                return ending

    def _ending(self, reply: SessionReply) -> Ending | None:
        if reply.done:
            return Ending.ENV_DONE
        if self._turns(reply.seat) >= self.spec.rollout.max_turns:
            self.truncated = True
            return Ending.MAX_TURNS
        if self._sampled(reply.seat) >= self.spec.rollout.max_tokens:
            self.truncated = True
            return Ending.MAX_TOKENS
        return None

    async def _take_turn(self, worker: str, stream: Stream, asked: SessionReply) -> SessionReply:
        """One model output in `stream`, and the environment's answer to it."""
        self.state = "GENERATING"
        began = time.monotonic()
        start = len(stream.ids)
        with self._busy("generation"):
            completion = await self._generate(stream, asked)
        text = self.renderer.text(completion.ids)
        said = self.renderer.said(completion.ids, stream.tools, stop=completion.stop, turn=self.turn)
        stream.sample(completion, text)
        self.state = "INTERACTING"
        generated = time.monotonic()
        request = StepSession(
            session=self.session,
            turn=self.turn,
            seat=stream.seat,
            text=text,
            stop=completion.stop,
            tool_calls=said.calls,
            problem=said.problem,
            words=said.words,
            ids=completion.ids if self.wants_tokens else [],
            logprobs=completion.logprobs if self.wants_tokens else [],
            prompt_tokens=start if self.wants_tokens else 0,
        )
        with self._busy("env"):
            reply = self._good(await self.sessions.step(worker, request))
        stream.turns.append(
            Turn(
                start=start,
                end=len(stream.ids),
                stop=completion.stop,
                reward=reply.reward,
                number=self.turn,
                components=reply.components,
                generate_s=generated - began,
                env_s=time.monotonic() - generated,
            )
        )
        self.turn += 1
        self.latest[stream.seat] = stream
        if stream.seat in self.owed:
            stream.award(self.owed.pop(stream.seat))
        for seat, parts in reply.rewards.items():
            if seat in self.latest:
                self.latest[seat].award(parts)
            else:
                owed = self.owed.setdefault(seat, {})
                owed.update({name: owed.get(name, 0.0) + value for name, value in parts.items()})
        return reply

    async def _look(self, reply: SessionReply) -> None:
        """Preprocess the images in a thread; rendering finds them in the cache."""
        if any(message.images for message in reply.messages):
            try:
                await asyncio.to_thread(self.renderer.look, reply.messages)
            except BadImage as error:
                raise EpisodeFailed(Ending.ENV_BAD_REPLY, str(error)) from None

    def _observe(self, reply: SessionReply) -> Stream | None:
        """The stream that acts next, with what it now sees; None if that does not fit into the context."""
        stream = self.streams.get((reply.seat, reply.stream))
        new = stream is None
        if stream is None:
            stream = self.streams[reply.seat, reply.stream] = Stream(reply.seat, reply.stream, reply.tools)
        elif reply.tools and reply.tools != stream.tools:
            raise EpisodeFailed(Ending.ENV_BAD_REPLY, "the tools of a stream cannot change after its first turn")
        pictures: list[Picture] = []
        if (reply.prompt_ids, reply.prompt_text) != (None, None) and any(m.images for m in reply.messages):
            raise EpisodeFailed(
                Ending.ENV_BAD_REPLY, "images are shown in messages, not beside prompt_ids or prompt_text"
            )
        if reply.prompt_ids is not None:
            if reply.prompt_ids[: len(stream.ids)] != stream.ids:
                raise EpisodeFailed(Ending.ENV_BAD_REPLY, "prompt_ids do not begin with the stream's tokens so far")
            observed = reply.prompt_ids[len(stream.ids) :]
        elif reply.prompt_text is not None:
            observed = self.renderer.plain(reply.prompt_text, first=new)
        else:
            observed, pictures = self._rendered(stream, new, reply)
        fits = len(stream.ids) + len(observed) < self.context
        if self.turn == 0 and not (fits and observed):
            raise EpisodeFailed(
                Ending.PROMPT, f"the first observation has {len(observed)} tokens; 1 to {self.context - 1} fit"
            )
        if new and not observed:
            raise EpisodeFailed(Ending.ENV_BAD_REPLY, f"stream {reply.stream!r} of seat {reply.seat!r} begins empty")
        if not fits:
            return None
        stream.observe(observed, reply.messages, pictures)
        return stream

    def _rendered(self, stream: Stream, new: bool, reply: SessionReply) -> tuple[list[int], list[Picture]]:
        try:
            if new:
                ids = self.renderer.prompt(reply.messages, reply.tools)
            else:
                ids = self.renderer.extend(stream.turns[-1].stop == StopReason.EOS, reply.messages)
            return ids, self.renderer.pictures(reply.messages, ids)
        except BadImage as error:
            raise EpisodeFailed(Ending.ENV_BAD_REPLY, str(error)) from None
        except JobFailed as error:
            if self.turn == 0:
                raise  # no episode of the job would begin
            raise EpisodeFailed(Ending.ENV_BAD_REPLY, str(error)) from None

    def _turns(self, seat: str) -> int:
        return sum(len(stream.turns) for stream in self.streams.values() if stream.seat == seat)

    def _sampled(self, seat: str) -> int:
        return sum(stream.sampled for stream in self.streams.values() if stream.seat == seat)

    async def _generate(self, stream: Stream, asked: SessionReply) -> Completion:
        rollout = self.spec.rollout
        budget = rollout.max_tokens - self._sampled(stream.seat)
        for limit in (rollout.max_tokens_per_turn, asked.max_tokens):
            if limit is not None:
                budget = min(budget, limit)
        room = self.context - len(stream.ids)
        shown: list[Shown] = []
        if stream.pictures:  # evicted entries are computed again
            shown = await asyncio.to_thread(self.renderer.shown, list(stream.pictures), dict(stream.images))
        completion = await self.engine.generate(
            f"{self.session}-{self.turn}",
            stream.ids,
            Sampling(
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                max_tokens=min(budget, room),
                stop=[*rollout.stop, *asked.stop],
                seed=None if rollout.seed is None else turn_seed(self.ticket.seed, self.index, self.turn),
            ),
            shown=shown,
        )
        if completion.stop == StopReason.LENGTH and room < budget:
            return msgspec.structs.replace(completion, stop=StopReason.CONTEXT)
        return completion

    def _trajectory(self, stream: Stream, ending: Ending, seconds: float) -> Trajectory:
        return Trajectory(
            index=self.index,
            attempt=self.attempt,
            seat=stream.seat,
            stream=stream.name,
            ids_T=np.asarray(stream.ids, dtype="<i4").tobytes(),
            mask_T=np.asarray(stream.mask, dtype="u1").tobytes(),
            logprobs_T=np.asarray(stream.logprobs, dtype="<f4").tobytes(),
            spans=merge(stream.spans),
            turns=stream.turns,
            ending=ending,
            truncated=self.truncated,
            reward=float(sum(turn.reward for turn in stream.turns)),
            metrics=self.metrics,
            seconds=seconds,
            messages=[in_words(m) for m in stream.said[: stream.spoken]] if self.spec.reward_models else None,
            transcript=shortened(stream.said, CHARACTERS) if self.is_kept else None,
            pieces=self.renderer.pieces(stream.ids[:TOKENS]) if self.is_kept else None,
            pictures=stream.pictures,
            images=stream.images,
        )


def in_words(message: Message) -> Message:
    """Without its images: reward models read."""
    return msgspec.structs.replace(message, content=message.text) if message.images else message


def merge(spans: list[Span]) -> list[Span]:
    """Join neighbours of the same version, turn boundaries included only where they touch."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].version == span.version and merged[-1].end == span.start:
            merged[-1] = Span(merged[-1].start, span.end, span.version)
        else:
            merged.append(span)
    return merged


def turn_seed(group_seed: int, index: int, turn: int) -> int:
    """A different, reproducible sampling seed for each turn of each sample of a group."""
    return int(np.random.SeedSequence([group_seed & 0xFFFFFFFF, index, turn]).generate_state(1)[0])
