"""One episode, as the field names its states:

    PENDING      open the environment, render its first messages
    GENERATING   the policy samples a turn          (mask 1, behaviour logprobs, weight-version spans)
    INTERACTING  the environment answers            (mask 0)  -> GENERATING, or
    TERMINATED   with a reason: the environment is done, or turns, tokens or context are used up

A turn cut by its budget still gets its environment step. A failure is data: EpisodeFailed with its Ending.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Protocol

import msgspec
import numpy as np

from opentinker.services.rollout_worker.engine import Completion, Engine, EngineError, EngineLost, Sampling
from opentinker.services.rollout_worker.render import Renderer
from opentinker.shared.sessions import SessionReply
from opentinker.shared.spec import JobSpec
from opentinker.shared.types import Ending, Message, Span, StopReason, Ticket, Trajectory, Turn


class EpisodeFailed(Exception):
    """An ordinary outcome: the sample is tried again, then its group is failed with this reason."""

    def __init__(self, ending: Ending, error: str) -> None:
        self.ending, self.error = ending, error
        super().__init__(f"{ending}: {error}")


class Sessions(Protocol):
    """The environment side of an episode; `shared.env_client.EnvClient` is the real one."""

    async def open(
        self, *, job: str, session: str, environment: str, config: dict[str, object], row: int, seed: int,
        deadline_s: float,
    ) -> SessionReply: ...  # fmt: skip

    async def step(self, *, worker: str, session: str, turn: int, text: str, stop: StopReason) -> SessionReply: ...

    async def close(self, *, worker: str, session: str) -> None: ...


class Tokens:
    """The trajectory's arrays while they grow."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.sampled = 0

    def observe(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def sample(self, completion: Completion) -> None:
        start = len(self.ids)
        self.ids += completion.ids
        self.mask += [1] * len(completion.ids)
        self.logprobs += completion.logprobs
        self.spans += [Span(start + s.start, start + s.end, s.version) for s in completion.spans]
        self.sampled += len(completion.ids)


class Episode:
    """Plays sample `index` of a ticket once. `run` returns its trajectory or raises EpisodeFailed."""

    def __init__(
        self, spec: JobSpec, ticket: Ticket, index: int, engine: Engine, renderer: Renderer, sessions: Sessions
    ) -> None:
        self.spec, self.ticket, self.index = spec, ticket, index
        self.engine, self.renderer, self.sessions = engine, renderer, sessions
        self.attempt = uuid.uuid4().hex[:12]
        self.session = f"{ticket.job}-{ticket.seq}-{index}-{self.attempt}"
        self.tokens = Tokens()
        self.turns: list[Turn] = []
        self.metrics: dict[str, float] = {}
        self.said: list[Message] = []
        """Both sides' words so far."""
        self.spoken = 0
        """How many of these messages there are up to the policy's last."""
        self.state = "PENDING"
        self.done = False
        limits = [engine.context_length]
        if spec.rollout.context_length is not None:
            limits.append(spec.rollout.context_length)
        self.context = min(limits)

    async def run(self) -> Trajectory:
        started = time.monotonic()
        worker = None
        try:
            async with asyncio.timeout(self.spec.rollout.episode_timeout_s):
                reply = self._good(
                    await self.sessions.open(
                        job=self.ticket.job,
                        session=self.session,
                        environment=self.spec.environment.name,
                        config=self.spec.environment.config,
                        row=self.ticket.row,
                        seed=self.ticket.seed,
                        deadline_s=self.spec.rollout.episode_timeout_s,
                    )
                )
                worker = reply.worker
                ending = await self._play(worker, reply.messages)
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
        return self._trajectory(ending, time.monotonic() - started)

    @staticmethod
    def _good(reply: SessionReply) -> SessionReply:
        if reply.failure is not None:
            raise EpisodeFailed(reply.failure, reply.error)
        return reply

    async def _play(self, worker: str, messages: list[Message]) -> Ending:
        """Turns until an ending that is ordinary data."""
        rollout, tokens = self.spec.rollout, self.tokens
        self.said += messages
        tokens.observe(self.renderer.prompt(messages))
        if not tokens.ids or len(tokens.ids) >= self.context:
            raise EpisodeFailed(
                Ending.PROMPT, f"the first observation has {len(tokens.ids)} tokens; 1 to {self.context - 1} fit"
            )
        while True:
            self.state = "GENERATING"
            began = time.monotonic()
            start = len(tokens.ids)
            completion = await self._generate()
            tokens.sample(completion)
            self.state = "INTERACTING"
            generated = time.monotonic()
            text = self.renderer.text(completion.ids)
            self.said.append(Message(role="assistant", content=text))
            self.spoken = len(self.said)
            reply = self._good(
                await self.sessions.step(
                    worker=worker,
                    session=self.session,
                    turn=len(self.turns),
                    text=text,
                    stop=completion.stop,
                )
            )
            self.turns.append(
                Turn(
                    start=start,
                    end=len(tokens.ids),
                    stop=completion.stop,
                    reward=reply.reward,
                    components=reply.components,
                    generate_s=generated - began,
                    env_s=time.monotonic() - generated,
                )
            )
            self.metrics = reply.metrics
            self.said += reply.messages
            if reply.done:
                self.done = True  # the env worker has closed the session itself
                return Ending.ENV_DONE
            if len(self.turns) >= rollout.max_turns:
                return Ending.MAX_TURNS
            if tokens.sampled >= rollout.max_tokens:
                return Ending.MAX_TOKENS
            observation = self.renderer.extend(completion.stop == StopReason.EOS, reply.messages)
            if len(tokens.ids) + len(observation) >= self.context:
                return Ending.CONTEXT
            tokens.observe(observation)

    async def _generate(self) -> Completion:
        rollout = self.spec.rollout
        budget = rollout.max_tokens - self.tokens.sampled
        if rollout.max_tokens_per_turn is not None:
            budget = min(budget, rollout.max_tokens_per_turn)
        room = self.context - len(self.tokens.ids)
        completion = await self.engine.generate(
            f"{self.session}-{len(self.turns)}",
            self.tokens.ids,
            Sampling(
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                max_tokens=min(budget, room),
                stop=rollout.stop,
                seed=None if rollout.seed is None else turn_seed(self.ticket.seed, self.index, len(self.turns)),
            ),
        )
        if completion.stop == StopReason.LENGTH and room < budget:
            return msgspec.structs.replace(completion, stop=StopReason.CONTEXT)
        return completion

    def _trajectory(self, ending: Ending, seconds: float) -> Trajectory:
        tokens = self.tokens
        return Trajectory(
            index=self.index,
            attempt=self.attempt,
            ids_T=np.asarray(tokens.ids, dtype="<i4").tobytes(),
            mask_T=np.asarray(tokens.mask, dtype="u1").tobytes(),
            logprobs_T=np.asarray(tokens.logprobs, dtype="<f4").tobytes(),
            spans=merge(tokens.spans),
            turns=self.turns,
            ending=ending,
            reward=float(sum(turn.reward for turn in self.turns)),
            metrics=self.metrics,
            seconds=seconds,
            messages=self.said[: self.spoken] if self.spec.reward_models else None,
        )


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
