"""Options that change what a step costs or how it rounds, gradient checkpointing and the float32 head; interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from opentinker.services.reference_forward.required_models import find_required_models
from opentinker.services.reference_forward.scorer import Scorer
from opentinker.services.trainer.learners.base import Interrupted
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.nn.layers import recompute_layers
from opentinker.shared.nn.layout import layout
from opentinker.shared.types.errors import JobFailed, SpecError
from tests.support.factories import V0, group_of, trajectory_of
from tests.support.learning import digest, random_groups, torch_learner, torch_spec

LORA = {"rank": 4, "dropout": 0.3}
PPO = {"name": "ppo", "critic_lr": 1e-3}


def weights(learner: RlLearner) -> list[torch.Tensor]:
    owners: list[Any] = [learner, *([learner.critic] if learner.critic else [])]
    return [parameter.detach().clone() for owner in owners for parameter in owner.parameters.values()]


def kept_bytes(learner: RlLearner) -> int:
    """Return the bytes that autograd keeps between the forward and the backward pass of one micro-batch, without the
    weights."""
    own = {p.untyped_storage().data_ptr() for p in learner.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    trajectories = [t for group in random_groups(0, groups=8, answer=(20, 40)) for t in group.trajectories]
    plan = layout([t.ids for t in trajectories], [t.mask for t in trajectories])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs = learner.forward(plan)[0]
    del logprobs
    return sum(kept.values())


@pytest.mark.parametrize(
    "parts",
    [{}, {"model": {"lora": LORA}}, {"model": {"dtype": "bfloat16"}}, {"algorithm": PPO}],
    ids=["full", "lora with dropout", "bfloat16", "critic"],
)
def test_gradient_checkpointing_makes_the_same_steps_with_less_memory(small: Path, parts: dict[str, Any]) -> None:
    plain, frugal = (
        torch_learner(small, **parts),
        torch_learner(small, **{**parts, "train": {"gradient_checkpointing": True}}),
    )
    plain.spec = frugal.spec  # but for this option it is the same
    for step in range(2):
        torch.manual_seed(step)  # dropout
        one = plain.step(random_groups(step), V0)
        torch.manual_seed(step)
        two = frugal.step(random_groups(step), V0)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-6)
    for a, b in zip(weights(plain), weights(frugal), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert kept_bytes(frugal) < 0.35 * kept_bytes(plain)
    assert not frugal.causal.training, "dropouts inside the layers stay as they were"


@pytest.mark.parametrize(
    ("parts", "after"),
    [
        *(({"algorithm": {"updates_per_batch": 2, "proximal": "recomputed"}}, n) for n in (0, 5, 7)),
        *(({"model": {"lora": LORA}}, n) for n in (0, 4, 6)),
        *(({"algorithm": PPO}, n) for n in (0, 1, 3)),
    ],
    ids=[
        f"{kind} after {n}" for kind in ("two updates", "lora with dropout", "critic") for n in ("none", "some", "most")
    ],
)
def test_interrupted_steps(small: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], after: int) -> None:
    """And the next trainer makes the very step that an unbroken one makes."""
    parts = {**parts, "train": {"tokens_per_micro_batch": 40}}
    learner, unbroken = torch_learner(small, **parts), torch_learner(small, **parts)
    for each in (learner, unbroken):
        torch.manual_seed(3)
        each.step(random_groups(0), V0)
    noise = torch.get_rng_state()
    asked = []

    def interrupted_in_time() -> None:
        asked.append(1)
        if len(asked) > after:
            learner.interrupt()
        RlLearner.raise_if_interrupted(learner)

    monkeypatch.setattr(learner, "raise_if_interrupted", interrupted_in_time)
    before = digest(learner)
    with pytest.raises(Interrupted):
        learner.step(random_groups(1), V0)
    assert len(asked) == after + 1 and torch.equal(torch.get_rng_state(), noise)
    assert digest(learner) == before
    owners: list[Any] = [learner, *([learner.critic] if learner.critic else [])]
    assert all(p.grad is None for owner in owners for p in owner.parameters.values()) and learner.steps == 1
    monkeypatch.undo()
    learner._interrupted.clear()
    learner.step(random_groups(1), V0)
    torch.set_rng_state(noise)
    unbroken.step(random_groups(1), V0)
    assert digest(learner) == digest(unbroken)


def test_fp32_head_computes_logits_in_float32_from_bfloat16_states_and_weights(small: Path) -> None:
    """Against a float64 product of the same states and weights; without it, the product is rounded to bfloat16."""
    groups = random_groups(3)
    trajectories = [t for group in groups for t in group.trajectories]
    plan = layout([t.ids for t in trajectories], [t.mask for t in trajectories])
    errors = {}
    for fp32_head in (False, True):
        learner = torch_learner(small, model={"dtype": "bfloat16", "fp32_head": fp32_head})
        with torch.no_grad():
            found = learner.forward(plan)[0]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                states = learner.causal.get_decoder()(
                    input_ids=plan.ids_N[None], position_ids=plan.positions_N[None], use_cache=False, plan=plan
                ).last_hidden_state[0]
            weight = learner.causal.get_output_embeddings().weight.bfloat16().double()
            logits = F.linear(states.bfloat16().double()[plan.predictors_P], weight)
            exact = logits.log_softmax(-1).gather(-1, plan.targets_U[:, None])[plan.selected_M, 0]
        errors[fp32_head] = float((found - exact).abs().max())
    assert errors[True] < 1e-5 and errors[False] > 1e-4


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_fp32_head_trains_like_its_reference(small: Path, tmp_path: Path, lora: dict[str, int] | None) -> None:
    model = {"dtype": "bfloat16", "fp32_head": True, "lora": lora}
    learner = torch_learner(small, model=model)
    trajectories = [trajectory_of([7, 8, 9, 1], [0, 1, 1, 1], reward=r) for r in (0.0, 1.0)]
    scorer, (key,) = (
        Scorer(),
        find_required_models(torch_spec(small, model=model, algorithm={"kl_coef": 0.1}), tmp_path),
    )
    (scored,) = scorer.score(scorer.load(key), [group_of(trajectories)], [1.0])
    plan = layout([t.ids for t in trajectories], [t.mask for t in trajectories])
    with torch.no_grad():
        ours = learner.forward(plan)[0]
    theirs = torch.cat([torch.from_numpy(x[t.mask == 1]) for x, t in zip(scored, trajectories, strict=True)])
    if lora is not None:  # the same bfloat16 base on both sides; else the trainer's norms are float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    learner.spec = torch_spec(small, model=model, algorithm={"group_size": 2, "groups_per_batch": 1})
    before = digest(learner)
    learner.step([group_of(trajectories)], V0)
    assert digest(learner) != before


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_what_cannot_have_them_says_so(small: Path) -> None:
    with pytest.raises(SpecError, match="float32 already"):
        torch_spec(small, model={"fp32_head": True})
    wrapped = {"dtype": "bfloat16", "fp32_head": True, "lora": {"target_modules": ["lm_head"]}}
    with pytest.raises(JobFailed, match="plain linear output layer"):
        torch_learner(small, model=wrapped)
    learner = torch_learner(small)
    learner.causal.supports_gradient_checkpointing = False
    with pytest.raises(JobFailed, match="does not support it"):
        recompute_layers(learner.causal)


def test_a_model_saved_with_a_float32_head_is_a_plain_one(small: Path, tmp_path: Path) -> None:
    learner = torch_learner(
        small, model={"dtype": "bfloat16", "fp32_head": True}, train={"gradient_checkpointing": True}
    )
    learner.step(random_groups(0), V0)
    learner.save(tmp_path / "c")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "c").dtype == torch.bfloat16
