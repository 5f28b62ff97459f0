"""Teaches a tiny model to make each legal move of a game equally often, so that it learns to play by reinforcement
alone and does not have to find the form of a move first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def teach(
    directory: Path,
    moves: Mapping[str, Sequence[str]],
    *,
    steps: int,
    lr: float,
    batch: int | None = None,
    all_weights: int = 0,
) -> None:
    """Minimise the cross-entropy to equal shares of the legal moves and save the model in its place.

    `moves`: legal moves by prompt, each of one token. `batch`: prompts per step, drawn at random; None: all.
    Trains the embeddings alone, which are also the output layer. If all weights learned, prompts with the same target
    would come to have the same hidden state (neural collapse; Papyan, Han and Donoho 2020), and training would hardly
    tell them apart. Where nearly every prompt has another target, all weights may follow: `all_weights` is the number
    of such steps, at a thirtieth of the rate.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(list(moves), return_tensors="pt", padding=True, padding_side="right")
    last = ids.attention_mask.sum(1) - 1
    shares = torch.zeros(len(moves), model.config.vocab_size)
    for row, legal in enumerate(moves.values()):
        shares[row, tokenizer.convert_tokens_to_ids(list(legal))] = 1 / len(legal)
    model.requires_grad_(False)
    embeddings = model.get_input_embeddings().requires_grad_(True)
    drawn = torch.Generator().manual_seed(0)

    def train(weights: Iterable[torch.nn.Parameter], steps: int, lr: float) -> None:
        optimizer = torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
        falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min(1.0, (at + 1) / 10) * (1 - at / steps))
        rows = torch.arange(len(moves))
        for _ in range(steps):
            if batch is not None:
                rows = torch.randint(len(moves), (batch,), generator=drawn)
            logits = model(input_ids=ids.input_ids[rows], attention_mask=ids.attention_mask[rows]).logits
            loss = torch.nn.functional.cross_entropy(logits[torch.arange(len(rows)), last[rows]], shares[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            falling.step()

    train(embeddings.parameters(), steps, lr)
    if all_weights:
        train(model.requires_grad_(True).parameters(), all_weights, lr / 30)
    model.save_pretrained(directory)
