"""Teaches a tiny model to make each legal move of a game equally often, so that it learns to play by reinforcement
alone and does not have to find the form of a move first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def teach(
    directory: Path, moves: Mapping[str, Sequence[str]], *, steps: int, lr: float, batch: int | None = None
) -> None:
    """Minimise the cross-entropy to equal shares of the legal moves and save the model in its place.

    `moves`: legal moves by prompt, each of one token. `batch`: prompts per step, drawn at random; None: all.
    Trains the embeddings alone, which are also the output layer. If all weights learned, prompts with the same target
    would come to have the same hidden state (neural collapse; Papyan, Han and Donoho 2020), and training would hardly
    tell them apart.
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
    optimizer = torch.optim.AdamW(embeddings.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * (1 - step / steps))
    drawn = torch.Generator().manual_seed(0)
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
    model.save_pretrained(directory)
