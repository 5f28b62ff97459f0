"""Teaches a tiny model to make each legal move of a game equally often, so that it learns to play by reinforcement
alone and does not have to find the form of a move first."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class MakeModel(Protocol):
    def __call__(self, directory: Path, *, seed: int) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalMoves:
    """Minimises the cross-entropy to equal shares of the legal moves.

    The embeddings alone learn, which are also the output layer. If all weights learned, prompts with the same target
    would come to have the same hidden state (neural collapse; Papyan, Han and Donoho 2020), and training would hardly
    tell them apart. Where nearly every prompt has another target, all weights may follow.
    """

    game: str
    moves: Callable[[], Mapping[str, Sequence[str]]]
    """Returns the legal moves by prompt, of one token each."""
    steps: int
    lr: float
    batch: int | None = None
    """Prompts per step, drawn at random; None: all."""
    all_weights: int = 0
    """Further steps, of all weights, at a thirtieth of the rate."""

    def options(self) -> dict[str, Any]:
        names = ("game", "steps", "lr", "batch", "all_weights")
        return {"lesson": {name: getattr(self, name) for name in names}}

    def teach(self, directory: Path) -> None:
        moves = self.moves()
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        ids = tokenizer(list(moves), return_tensors="pt", padding=True, padding_side="right")
        last = ids.attention_mask.sum(1) - 1
        shares = torch.zeros(len(moves), model.config.vocab_size)
        for row, legal in enumerate(moves.values()):
            shares[row, tokenizer.convert_tokens_to_ids(list(legal))] = 1 / len(legal)
        drawn = torch.Generator().manual_seed(0)

        def train(weights: Iterable[torch.nn.Parameter], steps: int, lr: float) -> None:
            optimizer = torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
            falling = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda at: min(1.0, (at + 1) / 10) * (1 - at / steps)
            )
            rows = torch.arange(len(moves))
            for _ in range(steps):
                if self.batch is not None:
                    rows = torch.randint(len(moves), (self.batch,), generator=drawn)
                logits = model(input_ids=ids.input_ids[rows], attention_mask=ids.attention_mask[rows]).logits
                loss = torch.nn.functional.cross_entropy(logits[torch.arange(len(rows)), last[rows]], shares[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                falling.step()

        model.requires_grad_(False)
        train(model.get_input_embeddings().requires_grad_(True).parameters(), self.steps, self.lr)
        if self.all_weights:
            train(model.requires_grad_(True).parameters(), self.all_weights, self.lr / 30)
        model.save_pretrained(directory)


def command(make: MakeModel, description: str | None) -> None:
    """The command line of a module that makes such a model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"model in {make(options.directory, seed=options.seed)}")
