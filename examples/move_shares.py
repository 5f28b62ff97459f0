"""Reads how likely each move is as a model's first token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from opentinker.envs.base import user
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.shared.types.errors import JobFailed


class MoveReader:
    def __init__(self, directory: Path, chat_template: str, words: Mapping[str, str]) -> None:
        """`words`: the move that each of them means. Raise JobFailed if the model cannot be loaded, or has no token for
        one of the moves."""
        self._renderer = Renderer.load(str(directory), chat_template)
        try:
            self._model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise JobFailed(f"no model in {directory}: {str(error).splitlines()[0]}") from None
        self._model.eval()
        tokens = range(self._renderer.vocab_size)
        self._moves = [words.get(self._renderer.text([token]).strip().lower(), "") for token in tokens]
        if missing := sorted(set(words.values()) - set(self._moves)):
            raise JobFailed(f"{directory}: the tokenizer has no single token for {', '.join(missing)}")

    def shares(self, prompt: str) -> dict[str, float]:
        """Return the probability of each move as the first token of an answer, in float64."""
        ids = self._renderer.prompt([user(prompt)])
        with torch.no_grad():
            logits = self._model(torch.tensor([ids])).logits[0, -1].double()
        likely = torch.softmax(logits, dim=0)[: len(self._moves)].tolist()
        found = {move: 0.0 for move in self._moves if move}
        for move, share in zip(self._moves, likely, strict=False):
            if move:
                found[move] += share
        return found
