"""Preference optimisation on a tiny real model: loss and gradient of plain forwards, the reference, exact resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from opentinker.services.trainer.data.chat import Tokens
from opentinker.services.trainer.data.examples import Example, load_examples
from opentinker.services.trainer.learners import dpo as dpo_learner
from opentinker.services.trainer.learners.dpo import DpoLearner
from tests.samples.row_samples import chat_model, preferences, random_pairs, row_spec, write_rows
from tests.support.learning import digest, loaded, resumed_and_unbroken

LORA = {"lora": {"rank": 4, "alpha": 8.0}}
BETA = 0.3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "m")


def dpo_of(base: Path, checkpoint: Any = None, **parts: dict[str, Any]) -> DpoLearner:
    spec = row_spec(base, "unused.jsonl", "dpo", **{"dpo": {"beta": BETA}, "train": {"lr": 1e-3}, **parts})
    return loaded(DpoLearner(spec), checkpoint)


def log_likelihood(model: Any, tokens: Tokens) -> torch.Tensor:
    ids = torch.from_numpy(tokens.ids_T.astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0][torch.from_numpy(tokens.learned_T[1:])].sum()


def by_hand(policy: Any, reference: Any, pairs: list[Example], loss: str, smoothing: float) -> dict[str, torch.Tensor]:
    """Plain forwards, one sequence at a time, in float64."""
    losses, rewards = [], []
    for pair in pairs:
        with torch.no_grad():
            expected = [log_likelihood(reference, part) for part in pair.parts]
        chosen, rejected = (log_likelihood(policy, part) - e for part, e in zip(pair.parts, expected, strict=True))
        if loss == "ipo":
            c, r = (int(part.learned_T.sum()) for part in pair.parts)
            losses.append((chosen / c - rejected / r - 1 / (2 * BETA)) ** 2)
        else:
            p = torch.sigmoid(BETA * (chosen - rejected))
            losses.append(-(1 - smoothing) * p.log() - smoothing * (1 - p).log())
        rewards.append(torch.stack([BETA * chosen, BETA * rejected]).detach())
    both = torch.stack(rewards)
    return {
        "loss": torch.stack(losses).mean(),
        "rewards/chosen": both[:, 0].mean(),
        "rewards/rejected": both[:, 1].mean(),
        "rewards/margin": (both[:, 0] - both[:, 1]).mean(),
        "rewards/accuracy": (both[:, 0] > both[:, 1]).double().mean(),
    }


@pytest.mark.parametrize("budget", [1, 60, 8192], ids=["pair by pair", "some at once", "all at once"])
@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
def test_loss_and_gradient_are_exact(base: Path, tmp_path: Path, budget: int, loss: str, smoothing: float) -> None:
    dpo = {"beta": BETA, "loss": loss, "label_smoothing": smoothing}
    learner = dpo_of(base, dpo=dpo, train={"lr": 1e-3, "tokens_per_micro_batch": budget})
    pairs = random_pairs(0)
    learner.prepare(pairs, tmp_path)
    for _ in range(3):  # away from the reference
        learner.step(pairs)
    learner.save(tmp_path / "now")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "now", dtype=torch.float64)
    expected = by_hand(policy, AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64), pairs, loss, smoothing)
    expected["loss"].backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1e9)
    evaluated, metrics = learner.evaluate(pairs), learner.step(pairs)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), abs=2e-5), name
        assert evaluated[name] == pytest.approx(value.item(), abs=2e-5), name
    assert abs(metrics["rewards/margin"]) > 0.01
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("parts", [{}, {"model": LORA}], ids=["full", "lora"])
def test_the_first_step_stands_at_the_reference(base: Path, tmp_path: Path, parts: dict[str, Any]) -> None:
    learner = dpo_of(base, **parts)
    pairs = random_pairs(0)
    learner.prepare(pairs, tmp_path)
    metrics = learner.step(pairs)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["rewards/margin"] == pytest.approx(0.0, abs=1e-5)
    assert learner.step(pairs)["loss"] < math.log(2)


def test_the_reference_of_an_adapter_is_the_base_without_it(base: Path, tmp_path: Path) -> None:
    learner = dpo_of(base, model=LORA, train={"lr": 1e-2})
    pairs = random_pairs(1)
    learner.prepare(pairs, tmp_path)
    for _ in range(5):
        learner.step(pairs)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    with torch.no_grad():
        expected = np.array([[log_likelihood(plain, part).item() for part in pair.parts] for pair in pairs])
    metrics = learner.evaluate(pairs)
    reference = metrics["logprobs/chosen"] - metrics["rewards/chosen"] / BETA
    assert reference == pytest.approx(expected[:, 0].mean(), abs=1e-4)
    assert abs(metrics["rewards/chosen"]) > 0.01 and all(p.requires_grad for p in learner.parameters.values())
    assert not list(tmp_path.iterdir()), "nothing has to be kept"


@pytest.mark.parametrize(
    "parts",
    [{}, {"model": {"dtype": "bfloat16"}}, {"model": {"lora": {**LORA["lora"], "dropout": 0.3}}}],
    ids=["full", "bfloat16", "lora with dropout"],
)
@pytest.mark.parametrize("kept", [True, False], ids=["reference kept", "reference lost"])
def test_resume_is_exact_to_the_bit(base: Path, tmp_path: Path, parts: dict[str, Any], kept: bool) -> None:
    """Also where the reference has to be computed again, from the base model: the checkpoint's weights are not it."""
    batches = [random_pairs(seed) for seed in range(4)]
    everything = [pair for batch in batches for pair in batch]

    caches = iter("ab" + ("b" if kept else "c"))

    def prepared(checkpoint: Path | None) -> DpoLearner:
        for pair in everything:
            pair.reference = ()
        learner = dpo_of(base, checkpoint, **parts)
        learner.prepare(everything, tmp_path / next(caches))
        return learner

    second, unbroken = resumed_and_unbroken(
        prepared, lambda learner, step: learner.step(batches[step]), tmp_path / "checkpoint", half=2
    )
    assert digest(second) == digest(unbroken)


@pytest.mark.parametrize("parts", [{}, {"model": {"dtype": "bfloat16"}}, {"model": LORA}], ids=["full", "bf16", "lora"])
def test_the_reference_of_a_continued_job_is_its_start(base: Path, tmp_path: Path, parts: dict[str, Any]) -> None:
    before = dpo_of(base, **parts, train={"lr": 1e-2})
    pairs = random_pairs(0)
    before.prepare(pairs, tmp_path / "before")
    for _ in range(3):
        before.step(pairs)
    before.save(tmp_path / "job" / "start")
    spec = {"start": {"from": "j-0123456789@3"}, **parts}
    unbroken = dpo_of(base, **spec)
    unbroken.start(tmp_path / "job" / "start", optimizer=False)
    unbroken.prepare(pairs, tmp_path / "job")
    assert unbroken.step(pairs)["rewards/margin"] == pytest.approx(0.0, abs=1e-5)
    unbroken.save(tmp_path / "checkpoint")
    unbroken.step(pairs)
    (kept,) = (tmp_path / "job").glob("*.npy")
    kept.unlink()
    resumed = dpo_of(base, tmp_path / "checkpoint", **spec)
    resumed.prepare(pairs, tmp_path / "job")
    resumed.step(pairs)
    assert digest(resumed) == digest(unbroken)


def test_complete_reference_files_are_reused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = random_pairs(0)
    dpo_of(base).prepare(pairs, tmp_path)
    expected = [pair.reference for pair in pairs]
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    dpo_of(base).prepare(pairs, tmp_path)
    assert [pair.reference for pair in pairs] == expected, "a torn file is measured again"
    learner = dpo_of(base)
    monkeypatch.setattr(dpo_learner, "row_batches", None)
    learner.prepare(pairs, tmp_path)
    assert [pair.reference for pair in pairs] == expected
    with pytest.raises(TypeError):
        learner.prepare(random_pairs(1), tmp_path)  # other pairs have another file


def test_a_disk_that_takes_no_reference_does_not_end_the_job(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    pairs = random_pairs(0)
    dpo_of(base).prepare(pairs, tmp_path / "file")
    assert all(len(pair.reference) == 2 for pair in pairs)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_it_learns_what_is_preferred(base: Path, tmp_path: Path, loss: str) -> None:
    """Copies before mirror images: the order of two digits, on pairs that it never saw."""
    path = write_rows(tmp_path / "a.jsonl", preferences(100))
    parts: dict[str, dict[str, Any]] = {
        "model": {"chat_template": "plain"},
        "data": {"validation": 0.2},
        "dpo": {"beta": BETA, "loss": loss},
        "train": {"lr": 3e-3},
    }
    examples = load_examples(row_spec(base, path, "dpo", **parts))
    learner = dpo_of(base, **parts)
    learner.prepare([*examples.train, *examples.validation], tmp_path)
    before = learner.evaluate(examples.validation)
    for step in range(30):
        learner.step([examples.train[(step * 16 + n) % 80] for n in range(16)])
    after = learner.evaluate(examples.validation)
    assert after["loss"] < before["loss"] / 2
    assert after["rewards/accuracy"] > 0.9 and after["rewards/margin"] > 0.5
