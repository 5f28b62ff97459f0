"""AT-GRPO from sampling to the optimizer, in one process: a pair learns from the reward of each turn."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec

from examples.learning_table import MODEL
from examples.local_rollouts import CONTEXT, BatchSampler, LocalSessions
from examples.models.make_tiny import make_tiny
from opentinker.envs.runtime.env_runner import LocalEnvRunner
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.seat_map import SeatMap
from opentinker.services.rollout_worker.tree_episode import TreeEpisode
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.asyncio_tools import gather_all
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.env_protocol import OpenSession, SessionReply
from opentinker.shared.types.trajectories import Group
from tests.conftest import Figure
from tests.support.factories import make_ticket
from tests.support.learning import loaded

SIZE, GROUPS, TURNS, STEPS = 8, 6, 4, 40


class Here(LocalSessions):
    """With the environments of the tests."""

    async def open(self, request: OpenSession, importing: object = None) -> SessionReply:
        player = self.players[request.session] = LocalEnvRunner("here", modules=True)
        return await player.open(msgspec.structs.replace(request, answer_within_s=request.deadline_s))


def climb(model: Path) -> JobSpec:
    return parse_spec(
        {
            "name": "climb",
            "model": {"base": str(model), "chat_template": "plain"},
            "environment": {"name": "tests.samples.tree_samples:Climb", "config": {"turns": TURNS}},
            "algorithm": {"name": "at_grpo", "group_size": SIZE, "groups_per_batch": GROUPS,
                          "team": {"both": ["left", "right"]}},
            "rollout": {"max_turns": TURNS, "max_tokens": TURNS, "max_tokens_per_turn": 1},
            "train": {"steps": STEPS, "lr": 1e-3, "warmup_steps": 5, "tokens_per_micro_batch": 1 << 20},
        }
    )  # fmt: skip


async def test_a_pair_learns_from_the_candidates_of_each_turn(tmp_path: Path, figure: Figure) -> None:
    spec = climb(make_tiny(tmp_path / "model", **MODEL, context_length=CONTEXT))
    learner = loaded(RlLearner(spec))
    engine: Any = BatchSampler(learner.causal, learner.tokenizer.eos_token_id, 0)
    sessions, seats = Here(), SeatMap.single(spec, engine, Renderer.load_light(spec.model.base, "plain"))

    async def play(seq: int) -> Group:
        episode = TreeEpisode(spec, make_ticket(seq=seq, row=seq, group_size=SIZE), 0, seats, sessions)
        found = Group(job="j", seq=seq, environment="climb", worker="w", trajectories=await episode.run(), is_tree=True)
        found.check()
        return found

    policy: list[float] = []
    for step in range(STEPS):
        engine.version = WeightVersion(1, step)
        groups = await gather_all([play(GROUPS * step + n) for n in range(GROUPS)])
        turns = [(t.seat, turn) for group in groups for t in group.trajectories for turn in t.turns]
        assert len(turns) == GROUPS * TURNS * SIZE
        policy.append(
            statistics.fmean(turn.paid[seat] for seat, turn in turns)
        )  # all candidates: the policy's own level
        metrics = learner.step(groups, engine.version)
        computed, total = metrics["tokens/computed"], metrics["tokens/total"]
        assert computed < 0.5 * total, "contexts that candidates and turns share are computed once"
    assert not sessions.players
    first, last = policy[0], statistics.fmean(policy[-5:])
    share = computed / total
    figure(f"AT-GRPO, {STEPS} steps: reward of a turn {first:.2f} -> {last:.2f}; {share:.2f} of the tokens computed")
    assert first < 0.3 and last > 0.7, policy
