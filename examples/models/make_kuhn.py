"""Make a tiny model that knows the legal moves of Kuhn poker and plays each of them equally often.

    python -m examples.models.make_kuhn DIR [--seed 0]

`make_tiny` with random weights, then some seconds of supervised learning of the 12 prompts of `kuhn_poker` with
`rules = false`. Calling it again does nothing, except with another seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.models.make_tiny import STAMP, make_tiny
from opentinker.envs.builtin.kuhn_poker import prompts
from opentinker.envs.builtin.kuhn_rules import actions_of

STEPS, LR = 300, 3e-3


def make_kuhn(directory: Path | str, *, seed: int = 0) -> Path:
    """Write the model to `directory` (made if missing) and return it. Raises FileExistsError as `make_tiny`."""
    directory = Path(directory)
    stamp = directory / STAMP
    if stamp.exists() and json.loads(stamp.read_text()) == _stamp(seed):
        return directory
    make_tiny(directory, seed=seed)
    _teach(directory)
    stamp.write_text(json.dumps(_stamp(seed)))
    return directory


def _stamp(seed: int) -> dict[str, int]:
    return {"kuhn_poker_steps": STEPS, "seed": seed}


def _teach(directory: Path) -> None:
    """Minimise the cross-entropy to equal shares of the legal moves, over all prompts at once.

    Trains the embeddings alone, which are also the output layer. If all weights learned, prompts with the same target
    would come to have the same hidden state (neural collapse; Papyan, Han and Donoho 2020), and training would hardly
    tell the cards apart.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = prompts(rules=False)
    ids = tokenizer(list(texts.values()), return_tensors="pt", padding=True, padding_side="right")
    last = ids.attention_mask.sum(1) - 1
    shares = torch.zeros(len(texts), model.config.vocab_size)
    for row, (_, history) in enumerate(texts):
        shares[row, tokenizer.convert_tokens_to_ids(list(actions_of(history)))] = 0.5
    model.requires_grad_(False)
    embeddings = model.get_input_embeddings().requires_grad_(True)
    optimizer = torch.optim.AdamW(embeddings.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * (1 - step / STEPS))
    for _ in range(STEPS):
        logits = model(**ids).logits[torch.arange(len(texts)), last]
        loss = torch.nn.functional.cross_entropy(logits, shares)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        falling.step()
    model.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"model in {make_kuhn(options.directory, seed=options.seed)}")


if __name__ == "__main__":
    main()
