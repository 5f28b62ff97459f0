"""`python -m examples.pennies_probabilities`: the probabilities of real models at the two prompts of the game."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.models.make_tiny import VOCABULARY, make_tiny
from examples.pennies_probabilities import main, read_heads
from opentinker.envs.base import user
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.shared.types.errors import JobFailed


def test_heads_are_read_from_the_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_tiny(tmp_path / "random", hidden_size=64, layers=1, seed=3)
    reading = read_heads(directory, "plain", rules=False)
    renderer = Renderer.load(str(directory), "plain")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for seat in ("even", "odd"):
        logits = model(torch.tensor([renderer.prompt([user(f"{seat}=")])])).logits[0, -1].detach().double()
        heads, tails = (float(logits[VOCABULARY.index(letter)].exp()) for letter in "ht")
        assert reading.heads[seat] == pytest.approx(heads / (heads + tails), abs=1e-12)
        assert reading.illegal[seat] == pytest.approx(1 - (heads + tails) / float(logits.exp().sum()), abs=1e-12)
    assert reading.distance == max(abs(share - 0.5) for share in reading.heads.values()) > 0
    options = ["--chat-template", "plain", "--no-rules"]
    monkeypatch.setattr(sys, "argv", ["pennies_probabilities", str(directory), *options])
    main()
    assert capsys.readouterr().out.endswith(f"distance {reading.distance:.3f}\n")
    assert read_heads(directory, "plain", rules=True).heads != reading.heads, "other prompts"


def test_what_holds_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="tokenizer in model"):
        read_heads(tmp_path, "plain", rules=False)
