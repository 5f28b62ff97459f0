"""Our losses beside TRL's on random batches: its own code, run on a trainer object that was never initialised.

TRL pads to [B, T] and we pack to [M], so values and gradients are compared token by token. Where the names differ:
TRL's `delta` is our `dual_clip`, its `epsilon_high` of cispo is our `1 + clip_high`, and its entropy bonus is always a
mean over tokens, ours follows the aggregation: equal with `token_mean`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from opentinker.services.trainer.algorithm import advantages
from opentinker.services.trainer.algorithm.credit_assignment import assign
from opentinker.services.trainer.algorithm.objective import objective
from opentinker.services.trainer.batch.micro_batch import MicroBatch, give_credit, micro_batches
from opentinker.shared.nn.forward import token_scores
from opentinker.shared.nn.models import load_model
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.trajectories import Group
from tests.support.factories import V0, group_of, trajectory_of
from tests.support.learning import torch_spec

with mock.patch("trl.import_utils.is_vllm_available", return_value=False):  # it would load vLLM to look at its version
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head, nanstd

GROUPS, SIZE, LONGEST = 3, 4, 9


def random_batch(seed: int, *, reference: bool = False) -> list[Group]:
    """Single turns of 1 to LONGEST tokens after prompts of 2 to 4; behaviour logprobs between -5 and -0.5."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(GROUPS):
        prompt, made = rng.integers(3, 40, rng.integers(2, 5)).tolist(), []
        for i in range(SIZE):
            count = int(rng.integers(1, LONGEST + 1))
            mask = [0] * len(prompt) + [1] * count
            spread = [np.multiply(mask, rng.uniform(-5, -0.5, len(mask))).tolist() for _ in range(2)]
            made.append(
                trajectory_of(
                    [*prompt, *rng.integers(3, 40, count).tolist()],
                    mask,
                    reward=float(rng.normal()),
                    logprobs=spread[0],
                    reference=spread[1] if reference else None,
                    index=i,
                )
            )
        groups.append(group_of(made, g))
    return groups


def packed(groups: list[Group], spec: JobSpec) -> MicroBatch:
    """The trainer's own micro-batch of the whole batch, in float64."""
    ((micro,),) = micro_batches(groups, V0, spec, torch.device("cpu"))
    give_credit([micro], assign(groups, spec.algorithm))
    micro.behaviour_M, micro.advantages_M = micro.behaviour_M.double(), micro.advantages_M.double()
    micro.reference_M = None if micro.reference_M is None else micro.reference_M.double()
    return micro


def padding(micro: MicroBatch) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The [B, T] mask, and what puts [M] values into its ones; the rest is 0."""
    counts = torch.tensor(micro.counts)
    mask = torch.arange(int(counts.max()))[None] < counts[:, None]

    def pad(values_M: torch.Tensor) -> torch.Tensor:
        return torch.zeros(mask.shape, dtype=values_M.dtype).masked_scatter(mask, values_M)

    return mask, pad


def bare_trainer(loss_type: str, **changes: Any) -> Any:
    """What `_compute_loss` reads of a GRPOTrainer: one process, one accumulation step, training."""
    trainer: Any = GRPOTrainer.__new__(GRPOTrainer)
    arguments = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
    }
    fields: dict[str, Any] = {
        "loss_type": loss_type,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "max_completion_length": 32,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "use_adaptive_entropy": False,
        "_entropy_bonus_enabled": False,
        "entropy_coef": 0.0,
        "current_gradient_accumulation_steps": 1,
        "model": SimpleNamespace(training=True),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "accelerator": SimpleNamespace(
            num_processes=1,
            is_main_process=False,
            sync_gradients=True,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
    }
    for name, value in (fields | changes).items():
        setattr(trainer, name, value)
    trainer.args = SimpleNamespace(**{key: changes.get(key, value) for key, value in arguments.items()})
    return trainer


def inputs_of(micro: MicroBatch, pad: Callable[[torch.Tensor], torch.Tensor], mask: torch.Tensor) -> dict[str, Any]:
    first = torch.tensor(micro.counts).cumsum(0) - torch.tensor(micro.counts)
    one = torch.ones(len(mask), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": one,
        "prompt_mask": one,
        "completion_ids": mask.long(),
        "completion_mask": mask.long(),
        "advantages": micro.advantages_M[first],
        "old_per_token_logps": pad(micro.behaviour_M),
        "num_items_in_batch": mask.sum(),
    }
    if micro.reference_M is not None:
        inputs["ref_per_token_logps"] = pad(micro.reference_M)
    return inputs


PPO = {"loss": "ppo", "aggregation": "sequence_mean"}
KL = {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3"}
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "grpo": (PPO, "grpo", {}),
    "clip-higher, token mean": (
        {**PPO, "aggregation": "token_mean", "clip_high": 0.28},
        "dapo",
        {"epsilon_high": 0.28},
    ),
    "token mean": ({**PPO, "aggregation": "token_mean"}, "bnpo", {}),
    "dr_grpo": ({**PPO, "advantage": "dr_grpo", "aggregation": "constant"}, "dr_grpo", {}),
    "gspo": (
        {"name": "gspo", "clip_low": 0.1, "clip_high": 0.15},
        "grpo",
        {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
    ),
    "cispo": ({"name": "cispo", "clip_high": 0.5}, "cispo", {"epsilon_high": 1.5}),
    "sapo": ({"loss": "sapo", "aggregation": "sequence_mean"}, "sapo", {}),
    "two-sided clip": ({**PPO, "dual_clip": 1.4}, "grpo", {"delta": 1.4}),
    "kl": ({**PPO, **KL}, "grpo", {"beta": 0.1}),
    "kl, token mean": ({**PPO, **KL, "aggregation": "token_mean"}, "dapo", {"beta": 0.1}),
    "entropy bonus": (
        {**PPO, "aggregation": "token_mean", "entropy_coef": 0.05},
        "dapo",
        {"_entropy_bonus_enabled": True, "entropy_coef": 0.05},
    ),
}


def case_spec(algorithm: dict[str, Any]) -> JobSpec:
    shape = {"group_size": SIZE, "groups_per_batch": GROUPS}
    return torch_spec("m", algorithm={**shape, **algorithm}, rollout={"max_tokens": 32})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_those_of_trl(name: str, seed: int) -> None:
    algorithm, loss_type, options = CASES[name]
    spec = case_spec(algorithm)
    micro = packed(random_batch(seed, reference="kl" in name), spec)
    mask, pad = padding(micro)
    noise = torch.Generator().manual_seed(seed)
    now_M = micro.behaviour_M + 0.3 * torch.randn(len(micro.behaviour_M), generator=noise, dtype=torch.float64)
    entropy_M = torch.rand(len(now_M), generator=noise, dtype=torch.float64)
    leaves = [now_M.requires_grad_(), entropy_M.requires_grad_()]

    found = objective(now_M, entropy_M, micro, spec.algorithm)
    ours = torch.autograd.grad(found.loss, leaves, allow_unused=True)
    trainer = bare_trainer(loss_type, **options)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (pad(now_M), pad(entropy_M), None)
    loss = trainer._compute_loss(None, inputs_of(micro, pad, mask))
    theirs = torch.autograd.grad(loss, leaves, allow_unused=True)

    assert found.loss.item() == pytest.approx(loss.item(), abs=1e-6)  # TRL makes some of its constants in float32
    assert ours[0] is not None and ours[0].abs().max() > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)
    if name not in ("gspo", "two-sided clip", "cispo", "sapo"):  # there they count otherwise, or nothing
        clipped = trainer._metrics["train"]["clip_ratio/region_mean"]
        assert found.clipped_M.double().mean().item() == pytest.approx(clipped[0])


def test_truncated_importance_sampling_weighs_the_policy_term_alone_as_in_trl() -> None:
    """Three policies: mu sampled, pi_prox was recomputed at the batch's start, pi is trained; KL is not weighted."""
    spec = case_spec({**PPO, **KL, "proximal": "recomputed", "correction": "tis", "tis_cap": 1.3})
    micro = packed(random_batch(5, reference=True), spec)
    mask, pad = padding(micro)
    noise = torch.Generator().manual_seed(5)
    shift = torch.randn(2, len(micro.behaviour_M), generator=noise, dtype=torch.float64)
    micro.start_M = micro.behaviour_M + 0.4 * shift[0]
    now_M = (micro.start_M + 0.3 * shift[1]).requires_grad_()
    found = objective(now_M, torch.zeros_like(now_M), micro, spec.algorithm)
    trainer = bare_trainer("grpo", beta=0.1, use_vllm=True)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (pad(now_M), pad(now_M.detach()), None)
    inputs = inputs_of(micro, pad, mask) | {"old_per_token_logps": pad(micro.start_M)}
    ratio = (pad(micro.start_M) - pad(micro.behaviour_M)).exp()
    loss = trainer._compute_loss(None, inputs | {"importance_sampling_ratio": ratio.clamp(max=1.3)})
    assert (ratio > 1.3).any() and (ratio[mask] < 1.3).any()
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(x, now_M)[0] for x in (found.loss, loss)), rtol=1e-6, atol=1e-9)


def test_group_advantages_are_those_of_trl() -> None:
    rewards = torch.tensor(np.random.default_rng(0).normal(size=(5, 7)))
    centred = rewards - rewards.mean(1, keepdim=True)
    for row, scaled in zip(rewards, centred / (nanstd(rewards, dim=1)[:, None] + 1e-4), strict=True):
        np.testing.assert_allclose(advantages.grpo(row.numpy()), scaled.numpy())


def test_logprobs_entropies_and_the_gradient_of_every_weight_equal_those_of_trl(tiny: Path) -> None:
    """The whole way on a model: TRL's padded forward and fused head, our packed one; temperature 0.7, entropy bonus."""
    spec = torch_spec(
        tiny,
        algorithm={"group_size": SIZE, "groups_per_batch": GROUPS, "name": "cispo", "entropy_coef": 0.05},
        rollout={"temperature": 0.7, "max_tokens": 32},
    )
    groups = random_batch(1)
    ((micro,),) = micro_batches(groups, V0, spec, torch.device("cpu"))
    give_credit([micro], assign(groups, spec.algorithm))
    mask, pad = padding(micro)
    model: Any = load_model(str(tiny), torch.float32)
    now_M, entropy_M, _ = token_scores(model, micro.plan, temperature=0.7, entropy_gradient=True)
    loss = objective(now_M, entropy_M, micro, spec.algorithm).loss
    ours = torch.autograd.grad(loss, list(model.parameters()))

    trajectories = [t for group in groups for t in group.trajectories]
    prompts = [t.ids[t.mask == 0].tolist() for t in trajectories]
    longest = max(map(len, prompts))
    answers = torch.zeros(mask.shape, dtype=torch.long)
    for row, t in zip(answers, trajectories, strict=True):
        row[: int(t.mask.sum())] = torch.tensor(t.ids[t.mask == 1].tolist())
    inputs = inputs_of(micro, pad, mask) | {
        "prompt_ids": torch.tensor([[0] * (longest - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": answers,
    }
    model.set_attn_implementation("sdpa")
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    trainer = bare_trainer("cispo", epsilon_high=5.0, _entropy_bonus_enabled=True, entropy_coef=0.05)
    trainer.accelerator.autocast = nullcontext
    seen: list[Any] = []
    measured = trainer._get_per_token_logps_and_entropies

    def remembered(*args: Any, **options: Any) -> Any:
        seen.append(measured(*args, **options))
        return seen[0]

    trainer._get_per_token_logps_and_entropies = remembered
    theirs = torch.autograd.grad(trainer._compute_loss(model, inputs), list(model.parameters()))
    torch.testing.assert_close(now_M, seen[0][0][mask], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy_M, seen[0][1][mask], rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5 * float(other.abs().max()))
