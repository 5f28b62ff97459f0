"""Samples for the trainer's tests: specs, random groups, and a sampler in the place of the rollout worker."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from opentinker.services.trainer.learners.dpo import DpoLearner
from opentinker.services.trainer.learners.policy_model import PolicyModel
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.services.trainer.learners.sft import SftLearner
from opentinker.shared.nn.attention import PACKED
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.trajectories import Group
from tests.support.factories import group_of, make_spec, trajectory_of

LORA = {"rank": 4, "alpha": 8.0}


def torch_spec(base: object, **parts: Any) -> JobSpec:
    """Of a job that really trains `base`, with fields of its parts (or a whole list) replaced."""
    usual: dict[str, dict[str, Any]] = {
        "model": {"base": str(base)},
        "algorithm": {"group_size": 4, "groups_per_batch": 4},
        "rollout": {},
        "train": {"steps": 100, "lr": 1e-3},
    }
    tables = {name: part for name, part in parts.items() if isinstance(part, dict)}
    return make_spec(**{**parts, **{part: {**usual.get(part, {}), **tables.get(part, {})} for part in usual | tables}})


L = TypeVar("L", RlLearner, SftLearner, DpoLearner)


def loaded(learner: L, checkpoint: Path | None = None) -> L:
    learner.load(checkpoint)
    return learner


def torch_learner(base: object, checkpoint: Path | None = None, **parts: Any) -> RlLearner:
    return loaded(RlLearner(torch_spec(base, **parts)), checkpoint)


def digest(learner: PolicyModel) -> str:
    """Of weights and optimizer state, bit by bit; with the critic's, if there is one."""
    hashed = hashlib.sha256()
    critic = getattr(learner, "critic", None)
    for owner in (learner, *([critic] if critic else [])):
        for name, parameter in owner.parameters.items():
            hashed.update(name.encode() + parameter.detach().numpy().tobytes())
            for key, value in sorted(owner.optimizer.state.get(parameter, {}).items()):
                hashed.update(key.encode() + value.numpy().tobytes())
    return hashed.hexdigest()


def resumed_and_unbroken(
    load: Callable[[Path | None], L], step: Callable[[L, int], object], place: Path, half: int
) -> tuple[L, L]:
    """Return a learner that was saved at `place` after `half` of its steps and loaded there, and one that made all
    of them at once."""
    unbroken = load(None)
    for number in range(2 * half):
        step(unbroken, number)
    first = load(None)
    for number in range(half):
        step(first, number)
    first.save(place)
    torch.manual_seed(12345)
    second = load(place)
    for number in range(half, 2 * half):
        step(second, number)
    return second, unbroken


def relative_gap(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """Return how far weights are from those expected, as a share of the way that these have moved since the start."""
    gap, way = (
        torch.cat([(other[name].double() - expected[name].double()).flatten() for name in expected]).norm()
        for other in (found, start)
    )
    assert way > 0
    return float(gap / way)


def random_groups(
    seed: int,
    *,
    groups: int = 4,
    size: int = 4,
    vocabulary: int = 40,
    prompt: tuple[int, int] = (2, 6),
    answer: tuple[int, int] = (1, 7),
    two_turns: bool = True,
    reference: bool = False,
) -> list[Group]:
    """Groups with a shared prompt, answers of mixed length (some alike), and now and then a second turn."""
    rng = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        start = list(rng.integers(3, vocabulary, rng.integers(*prompt)))
        first = list(rng.integers(3, vocabulary, rng.integers(*answer)))
        trajectories = []
        for i in range(size):
            ids, mask = list(start), [0] * len(start)
            reply = first if rng.random() < 0.3 else list(rng.integers(3, vocabulary, rng.integers(*answer)))
            ids, mask = ids + reply, mask + [1] * len(reply)
            if two_turns and rng.random() < 0.4:
                observation, again = list(rng.integers(3, vocabulary, 3)), list(rng.integers(3, vocabulary, 2))
                ids, mask = ids + observation + again, mask + [0] * 3 + [1] * 2
            if rng.random() < 0.3:  # a last observation that nothing depends on
                ids, mask = [*ids, 5, 6], [*mask, 0, 0]
            logprobs = [float(x) for x in rng.uniform(-5, -3, len(ids)) * mask]
            trajectories.append(
                trajectory_of(
                    ids,
                    mask,
                    reward=float(rng.integers(0, 3)),
                    logprobs=logprobs,
                    index=i,
                    reference=[float(x) for x in rng.uniform(-5, -3, len(ids)) * mask] if reference else None,
                )
            )
        made.append(group_of(trajectories, g))
    return made


def as_trees(groups: list[Group]) -> list[Group]:
    """Groups of one turn, as if their samples were the candidates of it."""
    return [
        msgspec.structs.replace(
            group,
            is_tree=True,
            trajectories=[
                msgspec.structs.replace(
                    t, turns=[msgspec.structs.replace(turn, paid={"": turn.reward}) for turn in t.turns]
                )
                for t in group.trajectories
            ],
        )
        for group in groups
    ]


def plain_logprobs(causal: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[T - 1] log-probabilities of ids[1:] by one unpadded plain forward of the Hugging Face model."""
    with torch.no_grad():
        logits = causal(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


class Sampler:
    """Samples from the learner's own model, recomputing everything per token (the sequences are a few tokens long)."""

    def __init__(self, causal: Any, tokenizer: Any, seed: int) -> None:
        self.causal, self.eos = causal, tokenizer.eos_token_id
        self.encode = tokenizer.encode
        self.digits = np.random.default_rng(seed)
        self.noise = torch.Generator().manual_seed(seed)

    def copy_digit(self, groups: int, size: int, version: WeightVersion) -> list[Group]:
        """Prompt `7=`, right answer `7<eos>`, at most 4 tokens; reward = share of right tokens by position."""
        prompts = [self.encode(f"{self.digits.integers(10)}=") for _ in range(groups)]
        with torch.no_grad():
            answers, logprobs = self._sample([prompt for prompt in prompts for _ in range(size)])
        return [
            group_of(
                [self._trajectory(prompt, answers[i], logprobs[i], version) for i in range(g * size, (g + 1) * size)], g
            )
            for g, prompt in enumerate(prompts)
        ]

    def _sample(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Of prompts of one length, all at once."""
        ids, logprobs = torch.tensor(prompts), []
        self.causal.set_attn_implementation("sdpa")
        for _ in range(4):
            now = self.causal(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].log_softmax(-1)
            chosen = torch.multinomial(now.exp(), 1, generator=self.noise)
            logprobs.append(now.gather(1, chosen)[:, 0])
            ids = torch.cat([ids, chosen], 1)
        self.causal.set_attn_implementation(PACKED)
        answers = [
            row[: row.index(self.eos) + 1] if self.eos in row else row for row in ids[:, len(prompts[0]) :].tolist()
        ]
        return answers, torch.stack(logprobs, 1).tolist()

    def _trajectory(self, prompt: list[int], answer: list[int], logprobs: list[float], version: WeightVersion) -> Any:
        right = [prompt[0], self.eos]
        hits = sum(a == b for a, b in zip(answer, right, strict=False))
        return trajectory_of(
            prompt + answer,
            [0] * len(prompt) + [1] * len(answer),
            logprobs=[0.0] * len(prompt) + logprobs[: len(answer)],
            reward=hits / max(len(right), len(answer)),
            version=version,
            metrics={"exact": float(answer == right)},
        )
