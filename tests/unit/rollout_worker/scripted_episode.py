"""Episodes whose engine and environment say what a test wants, with a tokenizer of characters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from opentinker.services.rollout_worker.engines.base import Completion, EngineError, Progress, Sampling, Shown
from opentinker.services.rollout_worker.engines.toy import ToyEngine
from opentinker.services.rollout_worker.episode import Episode
from opentinker.services.rollout_worker.episode_protocol import EpisodeFailed
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.seat_map import SeatMap
from opentinker.shared.types.core import Message, StopReason, WeightVersion
from opentinker.shared.types.env_protocol import OpenSession, SessionReply, StepSession
from opentinker.shared.types.trajectories import Span
from tests.support.factories import V0, make_spec, make_ticket

EOS = 1


V1 = WeightVersion(1, 1)


class Chars:
    """A tokenizer of characters with a ChatML-like template; id 1 is `$`, the end of a turn."""

    chat_template = "yes"
    eos_token_id = EOS

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [EOS if c == "$" else ord(c) for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids if i != EOS)

    def apply_chat_template(self, chat: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        text = "".join(f"<{m['role'][0]}>{m['content']}$\n" for m in chat)
        return text + ("<a>" if add_generation_prompt else "")


@dataclass
class Script:
    """An engine that says what it is told; records what it was asked."""

    answers: list[Completion]
    context_length: int = 1000
    version: WeightVersion | None = V0
    sleeps: bool = False
    asleep_s: float = 0.0
    asked: list[tuple[list[int], Sampling]] = field(default_factory=list)

    async def generate(
        self,
        request: str,
        prompt_ids: list[int],
        sampling: Sampling,
        progress: Progress | None = None,
        shown: Sequence[Shown] = (),
    ) -> Completion:
        self.asked.append((list(prompt_ids), sampling))
        if not self.answers:
            raise EngineError("nothing left to say")
        return self.answers.pop(0)


@dataclass
class Env:
    replies: list[SessionReply]
    steps: list[tuple[int, str, StopReason]] = field(default_factory=list)
    requests: list[StepSession] = field(default_factory=list)
    closed: int = 0
    hang: bool = False
    import_s: float = 0.0

    async def open(
        self, request: OpenSession, importing: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> SessionReply:
        with importing():
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=self.import_s)
        return self.replies.pop(0)

    async def step(self, worker: str, request: StepSession) -> SessionReply:
        self.steps.append((request.turn, request.text, request.stop))
        self.requests.append(request)
        if self.hang:
            await asyncio.Event().wait()
        return self.replies.pop(0)

    async def close(self, *, worker: str, session: str) -> None:
        self.closed += 1


def say(text: str, stop: StopReason = StopReason.EOS, spans: list[Span] | None = None) -> Completion:
    ids = Chars().encode(text)
    return Completion(ids=ids, logprobs=[-0.5] * len(ids), spans=spans or [Span(0, len(ids), V0)], stop=stop)


def reply(*texts: str, reward: float = 0.0, **changes: object) -> SessionReply:
    messages = [Message(role="user", content=t) for t in texts]
    return SessionReply(worker="env-0", messages=messages, reward=reward, **changes)  # type: ignore[arg-type]


def renderer(mode: str = "model") -> Renderer:
    return Renderer(Chars(), mode, frozenset({EOS}))


def episode(engine: Script | ToyEngine, env: Env, mode: str = "model", **spec: Any) -> Episode:
    job = make_spec(**({"rollout__max_turns": 3, "rollout__max_tokens": 50} | spec))
    return Episode(job, make_ticket(), 0, SeatMap.single(job, engine, renderer(mode)), env)  # type: ignore[arg-type]


async def failure_of(played: Episode) -> EpisodeFailed:
    with pytest.raises(EpisodeFailed) as failed:
        await played.run()
    return failed.value


def read_with(played: Episode, other: Renderer) -> None:
    played.seats = SeatMap.single(played.spec, played.seats.first.engine, other)
