"""A learner that starts from another job's checkpoint: what is taken over, and which models do not fit. What a trainer
gives back after a job."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import orjson
import pytest
import torch

from examples.models.make_tiny import make_tiny
from opentinker.services.trainer.job_training import release_memory
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.nn.buckets import unpack
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.errors import JobFailed
from tests.support.factories import V0, version
from tests.support.learning import LORA, digest, loaded, random_groups, torch_spec


def trained(spec: JobSpec, directory: Path, steps: int = 3) -> RlLearner:
    """A learner after some steps, with its checkpoint in `directory`."""
    learner = loaded(RlLearner(spec))
    for step in range(steps):
        learner.step(random_groups(step), version(step))
    learner.save(directory)
    return learner


def started(spec: JobSpec, checkpoint: Path, *, optimizer: bool = False) -> RlLearner:
    learner = RlLearner(spec)
    learner.start(checkpoint, optimizer=optimizer)
    return learner


def same_weights(a: RlLearner, b: RlLearner) -> bool:
    return all(torch.equal(p, b.parameters[name]) for name, p in a.parameters.items())


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"model": {"dtype": "bfloat16"}},
        {"model": {"lora": {**LORA, "dropout": 0.3}}},
        {"model": {"lora": LORA, "dtype": "bfloat16"}},
        {"algorithm": {"name": "ppo"}},
    ],
    ids=["full", "bfloat16", "lora with dropout", "lora in bfloat16", "critic"],
)
def test_start_takes_weights_alone(small: Path, tmp_path: Path, parts: dict[str, dict[str, Any]]) -> None:
    spec = torch_spec(small, train={"lr": 1e-3, "warmup_steps": 5}, **parts)
    first = trained(spec, tmp_path / "c")
    fresh, again = loaded(RlLearner(spec)), started(spec, tmp_path / "c")
    assert torch.equal(torch.get_rng_state(), _random_state_of(spec)), "dropout draws what a first start would draw"
    assert same_weights(first, again) and not same_weights(fresh, again)
    assert (again.steps, again.lr_share, len(again.optimizer.state)) == (0, fresh.lr_share, 0)
    continued = started(spec, tmp_path / "c", optimizer=True)
    assert digest(continued) == digest(first) and continued.steps == 0
    if again.critic is not None and first.critic is not None and continued.critic is not None:
        assert all(torch.equal(p, again.critic.parameters[n]) for n, p in first.critic.parameters.items())
        assert len(again.critic.optimizer.state) == 0 < len(continued.critic.optimizer.state)
    again.step(random_groups(9), V0)
    continued.step(random_groups(9), V0)
    assert digest(again) != digest(continued), "the moments have an effect"


def _random_state_of(spec: JobSpec) -> torch.Tensor:
    """After a first start."""
    loaded(RlLearner(spec))
    return torch.get_rng_state()


def test_start_with_lr_zero_leaves_the_weights_of_the_checkpoint_alone(small: Path, tmp_path: Path) -> None:
    first = trained(torch_spec(small), tmp_path / "c")
    second = started(torch_spec(small, train={"lr": 0.0}), tmp_path / "c", optimizer=True)
    second.step(random_groups(7), V0)
    second.save(tmp_path / "d")
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == (tmp_path / "d" / "model.safetensors").read_bytes()
    sent = second.snapshot(V0)
    ours = dict(first.named_weights())
    assert all(torch.equal(tensor, ours[name]) for name, tensor in unpack(sent.manifest, sent.buckets))


def test_a_critic_is_taken_over_only_where_both_jobs_train_one(small: Path, tmp_path: Path) -> None:
    trained(torch_spec(small, algorithm={"name": "ppo"}), tmp_path / "ppo", steps=1)
    trained(torch_spec(small), tmp_path / "grpo", steps=1)
    assert started(torch_spec(small), tmp_path / "ppo", optimizer=True).critic is None
    new = started(torch_spec(small, algorithm={"name": "ppo"}), tmp_path / "grpo").critic
    assert new is not None and not new.head.weight.any(), "a head of zeros, as at a first start"


def test_start_from_another_model_names_tensors_or_settings(small: Path, tmp_path: Path) -> None:
    trained(torch_spec(small), tmp_path / "c", steps=1)
    other = make_tiny(tmp_path / "narrow", hidden_size=64)
    with pytest.raises(JobFailed, match=r"is not of the model '.*narrow': \d+ tensors differ, such as .*\[\d+"):
        started(torch_spec(other), tmp_path / "c")
    copied = shutil.copytree(small, tmp_path / "copied")
    config = orjson.loads((copied / "config.json").read_bytes())
    (copied / "config.json").write_bytes(orjson.dumps(config | {"bos_token_id": 2, "max_position_embeddings": 77}))
    started(torch_spec(copied), tmp_path / "c")
    (copied / "config.json").write_bytes(orjson.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(JobFailed, match=r"1 settings differ, such as rms_norm_eps \(1e-06 instead of 0.001\)"):
        started(torch_spec(copied), tmp_path / "c")


def test_start_from_another_adapter_names_tensors_with_their_shapes(small: Path, tmp_path: Path) -> None:
    trained(torch_spec(small, model={"lora": {**LORA, "target_modules": ["q_proj"]}}), tmp_path / "c", steps=1)
    with pytest.raises(JobFailed, match=r"\d+ tensors differ, such as .*down_proj\.lora_A\.weight \(absent instead of"):
        started(torch_spec(small, model={"lora": LORA}), tmp_path / "c")
    with pytest.raises(JobFailed, match=r"q_proj\.lora_A\.weight \(\[4, \d+\] instead of \[2, \d+\]\)"):
        started(torch_spec(small, model={"lora": {**LORA, "target_modules": ["q_proj"], "rank": 2}}), tmp_path / "c")


def test_memory_that_torch_keeps_on_the_gpu_is_given_back_after_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Mock()
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    release_memory()
    empty.assert_not_called()  # this process has not used a GPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    release_memory()
    empty.assert_called_once()
