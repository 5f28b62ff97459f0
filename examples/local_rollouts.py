"""Samples a job's groups in one process: real episodes (renderer, environment, masks, version spans) that ask the
learner's own weights, without services and without vLLM.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from opentinker.envs.runtime.env_runner import LocalEnvRunner
from opentinker.services.rollout_worker.engines.base import Completion, Sampling, Shown
from opentinker.services.rollout_worker.episode import Episode
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.seat_map import SeatMap
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.nn.attention import PACKED
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import StopReason, Ticket, WeightVersion
from opentinker.shared.types.env_protocol import OpenSession, SessionReply, StepSession
from opentinker.shared.types.trajectories import Group, Span

CONTEXT = 64


class BatchSampler:
    """Stands in for the engine: whatever asks in the same turn of the event loop is drawn in one batch.

    Padded on the left, and computed anew for each token, but what is alike only once: the sequences are a few tokens
    long, and siblings begin alike.
    """

    context_length = CONTEXT
    sleeps, asleep_s = False, 0.0

    def __init__(self, causal: Any, eos: int, seed: int) -> None:
        self.causal, self.eos = causal, eos
        self.noise = torch.Generator().manual_seed(seed)
        self.version = WeightVersion(1, 0)
        self.asked: list[tuple[list[int], Sampling, asyncio.Future[Completion]]] = []

    async def generate(
        self, request: str, prompt_ids: list[int], sampling: Sampling, shown: Sequence[Shown] = ()
    ) -> Completion:
        assert not shown, "these models see nothing"
        loop = asyncio.get_running_loop()
        if not self.asked:
            loop.call_soon(self._draw)  # after the other episodes that are about to ask
        answer: asyncio.Future[Completion] = loop.create_future()
        self.asked.append((prompt_ids, sampling, answer))
        return await answer

    def _draw(self) -> None:
        asked, self.asked = self.asked, []
        longest = max(len(ids) for ids, _, _ in asked)
        ids = torch.tensor([[0] * (longest - len(ids)) + ids for ids, _, _ in asked])
        seen = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _, _ in asked])
        limits = torch.tensor([sampling.max_tokens for _, sampling, _ in asked])
        going, columns = torch.ones(len(asked), dtype=torch.bool), []
        self.causal.set_attn_implementation("sdpa")
        with torch.no_grad():
            while going.any():
                distinct, same = torch.stack([ids, seen], 2).unique(dim=0, return_inverse=True)
                places = (distinct[..., 1].cumsum(1) - 1).clamp(min=0)
                logits = self.causal(
                    input_ids=distinct[..., 0],
                    attention_mask=distinct[..., 1],
                    position_ids=places,
                    use_cache=False,
                    logits_to_keep=1,
                ).logits[:, -1]
                now = (logits / asked[0][1].temperature).log_softmax(-1)[same]
                chosen = torch.multinomial(now.exp(), 1, generator=self.noise)
                chosen[~going] = self.eos  # of what has ended nothing more is read
                columns.append((chosen[:, 0], now.gather(1, chosen)[:, 0]))
                ids, seen = torch.cat([ids, chosen], 1), torch.cat([seen, torch.ones_like(chosen)], 1)
                going &= (chosen[:, 0] != self.eos) & (limits > len(columns))
        self.causal.set_attn_implementation(PACKED)
        tokens = torch.stack([column for column, _ in columns], 1).tolist()
        logprobs = torch.stack([column for _, column in columns], 1).tolist()
        for (_, sampling, answer), row, values in zip(asked, tokens, logprobs, strict=True):
            said = row[: sampling.max_tokens]
            ended = self.eos in said
            said = said[: said.index(self.eos) + 1] if ended else said
            answer.set_result(
                Completion(
                    ids=said,
                    logprobs=values[: len(said)],
                    spans=[Span(0, len(said), self.version)],
                    stop=StopReason.EOS if ended else StopReason.LENGTH,
                )
            )


class LocalSessions:
    """Environments in this process, behind the calls that a rollout worker makes."""

    def __init__(self) -> None:
        self.players: dict[str, LocalEnvRunner] = {}

    async def open(self, request: OpenSession, importing: object = None) -> SessionReply:
        player = self.players[request.session] = LocalEnvRunner("here", modules=False)
        return await player.open(msgspec.structs.replace(request, answer_within_s=request.deadline_s))

    async def step(self, worker: str, request: StepSession) -> SessionReply:
        reply = await self.players[request.session].step(request)
        if reply.done:
            await self.close(worker=worker, session=request.session)
        return reply

    async def close(self, *, worker: str, session: str) -> None:
        await self.players.pop(session).close()


class Sampled(NamedTuple):
    groups: list[Group]
    """What the learner gets."""
    exact: float
    """Mean over all that was sampled for it, dropped groups included."""


class Rollouts:
    """Batches of whole groups from the weights as they are now."""

    def __init__(self, spec: JobSpec, learner: RlLearner, seed: int) -> None:
        self.spec, self.seed = spec, seed
        self.renderer = Renderer.load_light(spec.model.base, "plain")
        self.engine = BatchSampler(learner.causal, learner.tokenizer.eos_token_id, seed)
        self.sessions = LocalSessions()
        self.started = 0

    async def batch(self) -> Sampled | None:
        """None: nothing but groups of equal rewards for as long as the spec allows."""
        algorithm = self.spec.algorithm
        kept: list[Group] = []
        seen: list[float] = []
        tries = algorithm.max_zero_variance_batches if algorithm.drop_zero_variance else 1
        for _ in range(tries or 1):
            made = await asyncio.gather(*(self._group() for _ in range(algorithm.groups_per_batch - len(kept))))
            seen += [t.metrics["exact"] for group in made for t in group.trajectories]
            kept += [g for g in made if not algorithm.drop_zero_variance or not g.equal]
            if len(kept) == algorithm.groups_per_batch:
                return Sampled(kept, statistics.fmean(seen))
        return None

    async def _group(self) -> Group:
        size, seq = self.spec.algorithm.group_size, self.started
        self.started += 1
        ticket = Ticket(job="learning", seq=seq, row=seq, seed=self.seed, group_size=size)
        engine: Any = self.engine  # the one method of the protocol that an episode calls
        seats = SeatMap.single(self.spec, engine, self.renderer)
        episodes = [Episode(self.spec, ticket, i, seats, self.sessions) for i in range(size)]
        made = await asyncio.gather(*(episode.run() for episode in episodes))
        name = self.spec.environment.name
        return Group(
            job="learning",
            seq=seq,
            environment=name,
            worker="here",
            trajectories=[t for sample in made for t in sample],
        )
