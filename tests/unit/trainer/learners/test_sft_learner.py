"""Supervised learning on a tiny real model: the loss of the definition however it is packed; exact resume; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from opentinker.services.trainer.data.examples import Example, load_examples
from opentinker.services.trainer.learners.base import NonFinite
from opentinker.services.trainer.learners.sft import SftLearner
from opentinker.shared.nn.models import longest_context
from tests.samples.row_samples import chat_model, copies, random_rows, row_spec, write_rows
from tests.support.learning import LORA, digest, loaded, resumed_and_unbroken


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "m")


def sft_learner(base: Path, checkpoint: Path | None = None, **parts: dict[str, Any]) -> SftLearner:
    return loaded(SftLearner(row_spec(base, "unused.jsonl", **parts)), checkpoint)


def padded_loss(model: Any, rows: list[Example]) -> tuple[torch.Tensor, float]:
    """The plain way, in float64: one padded batch, labels of -100 where nothing is learned; and the share of hits."""
    parts = [row.parts[0] for row in rows]
    longest = max(map(len, parts))
    ids = torch.zeros(len(parts), longest, dtype=torch.long)
    attention, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for n, part in enumerate(parts):
        ids[n, : len(part)] = torch.from_numpy(part.ids_T.astype(np.int64))
        attention[n, : len(part)] = 1
        labels[n, : len(part)] = torch.where(torch.from_numpy(part.learned_T), ids[n, : len(part)], -100)
    out = model(input_ids=ids, attention_mask=attention, labels=labels)
    targets, chosen = labels[:, 1:], out.logits[:, :-1].argmax(-1)
    return out.loss, float((chosen == targets)[targets != -100].double().mean())


@pytest.mark.parametrize("budget", [1, 40, 8192], ids=["one by one", "some at once", "all at once"])
def test_packed_loss_and_gradient_are_those_of_a_padded_batch(model: Path, budget: int) -> None:
    rows = random_rows(0)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    loss, hits = padded_loss(reference, rows)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)

    learner = sft_learner(model, train={"tokens_per_micro_batch": budget})
    evaluated = learner.evaluate(rows)
    metrics = learner.step(rows)
    assert evaluated["loss"] == pytest.approx(loss.item(), abs=2e-6)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=2e-6)
    assert metrics["accuracy"] == evaluated["accuracy"] == pytest.approx(hits)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert metrics["tokens"] == sum(row.parts[0].learned_T.sum() for row in rows)
    assert metrics["tokens/total"] == sum(map(len, rows)) >= metrics["tokens/computed"]


def test_evaluation_changes_nothing_and_drops_nothing_out(model: Path) -> None:
    learner = sft_learner(model, model={"lora": {**LORA, "dropout": 0.5}})
    learner.step(random_rows(0))
    before, state = digest(learner), torch.get_rng_state()
    assert learner.evaluate(random_rows(1)) == learner.evaluate(random_rows(1))
    assert digest(learner) == before and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "parts",
    [{}, {"model": {"dtype": "bfloat16"}}, {"model": {"lora": {**LORA, "dropout": 0.3}}}],
    ids=["full", "bfloat16", "lora with dropout"],
)
def test_resume_is_exact_to_the_bit(model: Path, tmp_path: Path, parts: dict[str, dict[str, Any]]) -> None:
    def step(learner: SftLearner, number: int) -> None:
        if number > 1:
            learner.evaluate(random_rows(9))
        learner.step(random_rows(number))

    second, unbroken = resumed_and_unbroken(
        lambda checkpoint: sft_learner(model, checkpoint, **parts), step, tmp_path / "checkpoint", half=2
    )
    assert digest(second) == digest(unbroken) and second.steps == 4


def test_a_step_that_is_not_finite_changes_nothing(model: Path) -> None:
    learner = sft_learner(model)
    learner.step(random_rows(0))
    before = digest(learner)
    weight = next(iter(learner.parameters.values()))
    kept = weight.detach()[7].clone()
    with torch.no_grad():
        weight[7] = torch.nan
    with pytest.raises(NonFinite, match="refused after 1 steps: loss nan"):
        learner.step(random_rows(1))
    with torch.no_grad():
        weight[7] = kept
    assert digest(learner) == before and learner.steps == 1
    learner.step(random_rows(1))
    assert digest(learner) != before


def test_it_learns_what_the_rows_say(model: Path, tmp_path: Path) -> None:
    """Two digits are copied and the turn is ended: from chance to nearly all tokens right, and better on other rows."""
    path = write_rows(tmp_path / "a.jsonl", copies(100))
    spec = row_spec(model, path, model={"chat_template": "plain"}, data={"validation": 0.2}, train={"lr": 1e-2})
    examples = load_examples(spec)
    learner = loaded(SftLearner(spec))
    assert longest_context(str(model)) == 4096
    before, held_before = learner.evaluate(examples.train), learner.evaluate(examples.validation)
    for step in range(60):
        learner.step([examples.train[(step * 16 + n) % 80] for n in range(16)])
    after, held_after = learner.evaluate(examples.train), learner.evaluate(examples.validation)
    assert before["loss"] > 3 and before["accuracy"] < 0.2
    assert after["loss"] < 0.3 and after["accuracy"] > 0.9
    assert held_after["loss"] < held_before["loss"] / 5, "of rows that it never saw"
