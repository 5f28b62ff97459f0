"""The learner on a small model: exact logprobs, exact resume, refusals that change nothing, and learning itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from opentinker.services.trainer.learners.base import NonFinite, SimulatedLearner
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.nn.buckets import unpack
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Group
from tests.support.factories import V0, group_of, trajectory_of, version
from tests.support.learning import (
    LORA,
    Sampler,
    digest,
    loaded,
    plain_logprobs,
    random_groups,
    resumed_and_unbroken,
    torch_learner,
    torch_spec,
)

PPO = {"name": "ppo", "critic_lr": 1e-3}


def test_mismatch_with_a_plain_forward_is_rounding_only(small: Path) -> None:
    """Behaviour logprobs from unpadded plain forwards of the same weights, at a temperature that is not 1."""
    plain = AutoModelForCausalLM.from_pretrained(small)
    groups = []
    for group in random_groups(1):
        made = []
        for t in group.trajectories:
            logprobs = [0.0, *plain_logprobs(plain, t.ids.tolist(), 0.7).tolist()]
            honest = [x * m for x, m in zip(logprobs, t.mask.tolist(), strict=True)]
            made.append(trajectory_of(t.ids.tolist(), t.mask.tolist(), logprobs=honest, reward=t.reward))
        groups.append(group_of(made))
    metrics = torch_learner(small, rollout={"temperature": 0.7}).step(groups, V0)
    assert metrics["mismatch/max"] < 1e-5
    assert metrics["mismatch/tokens"] == metrics["tokens"] > 0
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["clip_share"] == 0


def test_one_step_equals_a_step_written_by_hand(small: Path) -> None:
    """Padded-free loop over single trajectories, torch's AdamW, clipping, warm-up: same weights."""
    train = {"lr": 1e-3, "warmup_steps": 2, "weight_decay": 0.1, "tokens_per_micro_batch": 40}
    groups, learner = random_groups(2), torch_learner(small, train=train, algorithm={"proximal": "recomputed"})
    metrics = learner.step(groups, V0)

    model = AutoModelForCausalLM.from_pretrained(small)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=5e-4, betas=(0.9, 0.95)
    )
    total, count = torch.zeros(()), sum(int(t.mask.sum()) for g in groups for t in g.trajectories)
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories])
        for t, advantage in zip(group.trajectories, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True):
            ids, mask = torch.tensor(t.ids.tolist()), torch.tensor(t.mask.tolist()).bool()[1:]
            logits = model(input_ids=ids[None]).logits[0, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0][mask]
            weight = (logprobs.detach() - torch.tensor(t.logprobs.copy())[1:][mask]).exp().clamp(max=5.0)
            total = total - (weight * (logprobs - logprobs.detach()).exp() * advantage).sum() / count
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    assert metrics["loss/policy"] == pytest.approx(total.item(), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["lr"] == 5e-4
    for ours, theirs in zip(learner.causal.parameters(), model.parameters(), strict=True):
        gap = (ours - theirs).abs()  # Adam divides by the gradient: where that is rounding noise, the step is too
        assert gap.mean() < 1e-8 and gap.max() < 1e-4


def test_the_batch_describes_itself(small: Path) -> None:
    ids, mask = [7, 8, 9, 1], [0, 0, 1, 1]
    first = [trajectory_of(ids, mask, reward=r, version=version(3), metrics={"exact": r}) for r in (0.0, 1.0)]
    second = [trajectory_of([7, 8, 9, 9, 1], [0, 0, 1, 1, 1], reward=0.5, version=version(5)) for _ in range(2)]
    learner = torch_learner(small, algorithm={"group_size": 2, "groups_per_batch": 2})
    metrics = learner.step([group_of(first), group_of(second, 1)], version(5))
    assert {key: round(metrics[key], 6) for key in EXPECTED} == EXPECTED
    assert metrics["mismatch/tokens"] == 6 and metrics["tokens"] == 10


EXPECTED = {
    "reward/mean": 0.5,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/env/copy_digits": 0.5,
    "exact": 0.5,
    "zero_variance": 0.5,
    "response_length/mean": 2.5,
    "response_length/max": 3.0,
    "turns/mean": 1.0,
    "stop/eos": 1.0,
    "ending/env_done": 1.0,
    "staleness/min": 0.0,
    "staleness/mean": 1.0,
    "staleness/max": 2.0,
    "spans/mean": 1.0,
    "tokens/total": 18.0,
}


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"algorithm": {"updates_per_batch": 2}},
        {"model": {"dtype": "bfloat16"}},
        {"model": {"lora": {**LORA, "dropout": 0.3}}},
        {"model": {"lora": {**LORA, "dropout": 0.3}, "dtype": "bfloat16"}},
        {"algorithm": PPO},
        {"algorithm": PPO, "model": {"lora": LORA}},
        {"algorithm": PPO, "model": {"dtype": "bfloat16"}},
    ],
    ids=[
        *("full", "two updates", "bfloat16", "lora with dropout", "lora in bfloat16"),
        *("critic", "critic with lora", "critic in bfloat16"),
    ],
)
def test_resume_is_exact_to_the_bit(small: Path, tmp_path: Path, parts: dict[str, dict[str, object]]) -> None:
    spec = torch_spec(small, train={"lr": 1e-3, "warmup_steps": 5}, **parts)
    second, unbroken = resumed_and_unbroken(
        lambda checkpoint: loaded(RlLearner(spec), checkpoint),
        lambda learner, step: learner.step(random_groups(step), version(step)),
        tmp_path / "checkpoint",
        half=3,
    )
    assert second.steps == 6
    assert digest(second) == digest(unbroken)


@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_that_is_not_finite_changes_nothing(small: Path, updates: int) -> None:
    learner = torch_learner(small, algorithm={"updates_per_batch": updates})
    learner.step(random_groups(0), version(0))
    before, steps = digest(learner), learner.steps
    groups = random_groups(1)
    rewards = [0.0, float("inf"), 0.0, 1.0]
    broken = [
        trajectory_of(t.ids.tolist(), t.mask.tolist(), reward=r)
        for t, r in zip(groups[3].trajectories, rewards, strict=True)
    ]
    with np.errstate(invalid="ignore"), pytest.raises(NonFinite, match="refused"):
        learner.step([*groups[:3], group_of(broken, 3)], version(1))
    assert (digest(learner), learner.steps) == (before, steps)
    learner.step(random_groups(2), version(1))
    assert digest(learner) != before


def test_kl_needs_and_uses_reference_logprobs(small: Path) -> None:
    with_kl, without = torch_learner(small, algorithm={"kl_coef": 0.5}), torch_learner(small)
    with pytest.raises(JobFailed, match="without reference"):
        with_kl.step(random_groups(0), V0)
    metrics = with_kl.step(random_groups(0, reference=True), V0)
    assert metrics["loss/kl"] > 0
    assert "loss/kl" not in without.step(random_groups(0, reference=True), V0)
    assert digest(with_kl) != digest(without)


def test_several_updates_clip_against_the_weights_at_the_start_of_the_batch(small: Path) -> None:
    algorithm = {"updates_per_batch": 4, "clip_low": 0.0, "clip_high": 0.0, "proximal": "recomputed"}
    learner = torch_learner(small, algorithm=algorithm)
    metrics = learner.step(random_groups(0), V0)
    assert 0 < metrics["clip_share"] < 1
    assert metrics["ratio/mean"] != pytest.approx(np.exp(metrics["drift/mean"]))


def test_snapshot_carries_hugging_face_names_without_tied_copies(small: Path) -> None:
    learner = torch_learner(small)
    learner.step(random_groups(0), V0)
    snapshot = learner.snapshot(version(1))
    sent = dict(unpack(snapshot.manifest, snapshot.buckets))
    assert set(sent) == set(load_file(small / "model.safetensors"))
    assert snapshot.version == version(1)
    before = {name: tensor.clone() for name, tensor in sent.items()}
    learner.step(random_groups(1), version(1))
    assert all(torch.equal(before[name], sent[name]) for name in sent), "training must not reach into a snapshot"


def test_bfloat16_trains_float32_masters_and_sends_bfloat16(small: Path, tmp_path: Path) -> None:
    learner = torch_learner(small, model={"dtype": "bfloat16"})
    metrics = learner.step(random_groups(0), V0)
    assert np.isfinite(metrics["loss/policy"])
    assert all(p.dtype == torch.float32 for p in learner.parameters.values())
    assert {info.dtype for info in learner.snapshot(V0).manifest} == {"bfloat16"}
    learner.save(tmp_path / "c")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "c").dtype == torch.bfloat16


def test_saved_directory_is_a_plain_hugging_face_model(small: Path, tmp_path: Path) -> None:
    learner = torch_learner(small)
    learner.step(random_groups(0), V0)
    learner.save(tmp_path / "c")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "c", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = [5, 6, 7, 8, 1]
    torch.testing.assert_close(plain_logprobs(model, ids), plain_logprobs(_sdpa(learner), ids), atol=1e-6, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "c")("472=").input_ids == [7, 10, 5, 40]
    assert not list((tmp_path / "c").rglob("*.bin")) and not list((tmp_path / "c").rglob("*.pt"))


def _sdpa(learner: RlLearner) -> object:
    learner.causal.set_attn_implementation("sdpa")
    return learner.causal


@pytest.mark.parametrize(
    ("settings", "may_merge"),
    [
        ({"model": {"lora": LORA}}, True),
        ({"model": {"lora": LORA, "dtype": "bfloat16"}}, False),
        ({"model": {"lora": LORA, "dtype": "bfloat16"}, "rollout": {"lora": "merged"}}, True),
        ({"model": {"lora": LORA}, "rollout": {"lora": "adapter"}}, False),
        ({}, False),
    ],
    ids=["auto", "rounded", "insists", "layers", "whole"],
)
def test_snapshot_counts_the_base_where_engines_may_merge_into_it(
    small: Path, settings: dict[str, Any], may_merge: bool
) -> None:
    learner = torch_learner(small, **settings)
    base = sum(p.numel() for n, p in learner.model.named_parameters() if "lora_" not in n)
    counted = learner.snapshot(V0).base_bytes
    assert counted >= base * learner.dtype.itemsize if may_merge else counted == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_trains_sends_and_saves_only_the_adapter(small: Path, tmp_path: Path, dtype: str) -> None:
    learner = torch_learner(small, model={"lora": LORA, "dtype": dtype})
    base = {n: p.detach().clone() for n, p in learner.model.named_parameters() if "lora_" not in n}
    for step in range(2):
        learner.step(random_groups(step), version(step))
    assert all(torch.equal(base[n], p) for n, p in learner.model.named_parameters() if n in base)
    names = {info.name for info in learner.snapshot(version(2)).manifest}
    modules = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    modules += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert names == {
        f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"
        for layer in range(2)
        for module in modules
        for side in "AB"
    }
    learner.save(tmp_path / "c")
    assert set(load_file(tmp_path / "c" / "adapter_model.safetensors")) == names
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small), tmp_path / "c")
    ids = [5, 6, 7, 8, 1]
    tolerance = 1e-5 if dtype == "float32" else 0.05
    torch.testing.assert_close(plain_logprobs(again, ids), plain_logprobs(_sdpa(learner), ids), atol=tolerance, rtol=0)
    with pytest.raises(JobFailed, match="does not fit"):
        torch_learner(small, tmp_path / "c", model={"lora": {**LORA, "rank": 2}})


def test_wrong_lora_targets_and_missing_state_are_named(small: Path) -> None:
    with pytest.raises(JobFailed, match="target_modules"):
        torch_learner(small, model={"lora": {"target_modules": ["nothing"]}})
    with pytest.raises(JobFailed, match=r"no module 'v_porj', 'proj'$"):
        torch_learner(small, model={"lora": {"target_modules": ["q_proj", "v_porj", "self_attn.o_proj", "proj"]}})
    with pytest.raises(JobFailed, match="cannot be resumed"):
        torch_learner(small, small)


@pytest.mark.parametrize(
    ("train", "shares"),
    [
        ({"warmup_steps": 2}, [0.5, 1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 2, "schedule": "linear"}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "linear", "lr_end": 0.5}, [1, 11 / 12, 10 / 12, 9 / 12, 8 / 12, 7 / 12, 0.5]),
        ({"warmup_steps": 2, "schedule": "cosine", "lr_end": 0.2}, [0.5, 1, 1, 0.8828427, 0.6, 0.3171573, 0.2]),
        ({"warmup_steps": 6, "schedule": "cosine"}, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1]),
    ],
)
def test_learning_rate_schedules(small: Path, train: dict[str, Any], shares: list[float]) -> None:
    """Of six steps; a job that is told of fewer by its data ends there."""
    learner = RlLearner(torch_spec(small, train={"steps": 6, "lr": 1e-3, **train}))
    found = []
    for step in range(7):
        learner.steps = step
        found.append(learner.lr_share)
    assert found == pytest.approx(shares, abs=1e-6)
    if learner.spec.train.schedule != "constant":
        learner.steps, learner.total_steps = 3, 3
        assert learner.lr_share == pytest.approx(4 / 6 if train.get("warmup_steps") == 6 else learner.spec.train.lr_end)


def test_simulated_learner_takes_its_time_and_counts(small: Path, tmp_path: Path) -> None:
    simulated = {"learner": "simulated", "simulated_step_s": 0.05, "lr": 1e-5}
    learner = SimulatedLearner(torch_spec(small, train=simulated))
    learner.load(None)
    metrics = learner.step(random_groups(0), V0)
    assert metrics["step_seconds"] >= 0.05 and metrics["tokens"] > 0
    assert learner.snapshot(V0).buckets == []
    learner.save(tmp_path)
    learner.load(tmp_path)
    assert learner.steps == 1


def test_grpo_learns_to_copy_one_digit(small: Path) -> None:
    """The sampler works in this process; 16 samples of each of 8 digits."""
    train = {"lr": 2e-3, "warmup_steps": 10, "steps": 150}
    learner = torch_learner(small, train=train, algorithm={"group_size": 16, "groups_per_batch": 8})
    sampler = Sampler(learner.causal, learner.tokenizer, seed=0)
    rewards: list[float] = []
    for step in range(150):
        batch: list[Group] = sampler.copy_digit(groups=8, size=16, version=version(step))
        metrics = learner.step(batch, version(step))
        assert metrics["mismatch/max"] < 1e-4
        rewards.append(metrics["reward/mean"])
        if np.mean(rewards[-5:]) > 0.5:
            break
    assert np.mean(rewards[:3]) < 0.1
    assert np.mean(rewards[-5:]) > 0.5
