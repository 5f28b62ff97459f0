"""Reward models: one score per conversation.

The reward model's tokenizer and chat template render the conversation, which is scored as a whole, at its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from opentinker.shared.data.control_tokens import ControlTokens
from opentinker.shared.nn.models import load_classifier, load_tokenizer
from opentinker.shared.types.core import Message
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Group

Ids = tuple[int, ...]


@dataclass
class RewardModel:
    """With one label the score is its logit; with several, the probability of the label that the job names."""

    base: str
    model: Any
    tokenizer: Any
    label: int
    """Index of the model's output that is the score."""

    @classmethod
    def load(cls, base: str, dtype: torch.dtype, device: str, label: str | None) -> RewardModel:
        """Raise JobFailed if the model is not a sequence classifier, lacks the label, or cannot render a chat."""
        tokenizer = load_tokenizer(base)
        if not tokenizer.chat_template:
            raise JobFailed(
                f"reward model {base!r} has no chat template, and so no way to read a conversation: put the one that "
                "it was trained with into its directory as chat_template.jinja"
            )
        model = load_classifier(base, dtype, device)
        return cls(base, model, tokenizer, _find_label(base, model.config, label))

    @cached_property
    def control(self) -> ControlTokens:
        """Keeps control tokens in messages as text, so that no message can end a turn of the model's input."""
        return ControlTokens(self.tokenizer, "split", templated=True)

    def score(self, groups: Sequence[Group], tokens_per_batch: int) -> list[list[float]]:
        """Return the scores per group and trajectory. Raises JobFailed for conversations that the model cannot read."""
        for group in groups:
            for seat, samples in group.seats.items():
                if any(len(streams) > 1 for streams in samples):
                    raise JobFailed(
                        f"group {group.seq}: a reward model scores one conversation, and {_describe_seat(seat)} had "
                        "several in one episode, each in its own stream; use an environment with one stream per seat, "
                        "or no reward_models"
                    )
        rows = [[self._render(group, t.messages) for t in group.trajectories] for group in groups]
        distinct = sorted({ids for row in rows for ids in row}, key=len, reverse=True)
        scores: dict[Ids, float] = {}
        for batch in _batches(distinct, tokens_per_batch):
            scores |= dict(zip(batch, self._forward(batch), strict=True))
        for group, row in zip(groups, rows, strict=True):
            if not all(math.isfinite(scores[ids]) for ids in row):
                raise JobFailed(f"group {group.seq} got a score that is no finite number")
        return [[scores[ids] for ids in row] for row in rows]

    def _render(self, group: Group, messages: list[Message] | None) -> Ids:
        if not messages:
            raise JobFailed(f"group {group.seq} came without its conversations")
        chat, word = self.control.defuse([{"role": message.role, "content": message.text} for message in messages])
        try:
            text = self.tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception as error:  # noqa: BLE001 - a template is the model's code: any exception fails the job
            roles = [message.role for message in messages]
            raise JobFailed(f"its chat template refused the roles {roles}: {error}") from None
        ids = tuple(self.control.encode(text, word))
        config = self.model.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None) or len(ids)
        if len(ids) > longest:
            raise JobFailed(
                f"group {group.seq} holds a conversation of {len(ids)} tokens, and the reward model reads {longest}: "
                "lower rollout.context_length, or take one with a longer context"
            )
        if not ids or max(ids) >= config.vocab_size:
            raise JobFailed(f"its tokenizer made {len(ids)} tokens, some of which the model does not know")
        return ids

    def _forward(self, batch: list[Ids]) -> list[float]:
        """Score a batch padded at the end. For a model without a padding token, a token that is in no row replaces it:
        the model finds the end of a row by it."""
        config = self.model.config.get_text_config()
        pad = config.pad_token_id if config.pad_token_id is not None else _find_unused_token(batch, config.vocab_size)
        if pad is None:
            return [self._logits([row], 0)[0] for row in batch]
        named, config.pad_token_id = config.pad_token_id, pad
        try:
            return self._logits(batch, pad)
        finally:
            config.pad_token_id = named

    def _logits(self, batch: list[Ids], pad: int) -> list[float]:
        width, device = len(batch[0]), next(self.model.parameters()).device
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in batch], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch], device=device)
        with torch.inference_mode():
            logits: Tensor = self.model(input_ids=ids, attention_mask=mask).logits.float()
        if logits.shape[1] > 1:
            each = getattr(self.model.config, "problem_type", None) == "multi_label_classification"
            logits = logits.sigmoid() if each else logits.softmax(-1)
        return logits[:, self.label].tolist()  # type: ignore[no-any-return]


def _describe_seat(seat: str) -> str:
    return f"seat {seat!r}" if seat else "the policy"


def _find_label(base: str, config: Any, label: str | None) -> int:
    names = {str(name): int(number) for number, name in config.id2label.items()}
    if label is None and len(names) == 1:
        return 0
    if label not in names:
        said = "which label is the score?" if label is None else f"it has no label {label!r}."
        raise JobFailed(f"reward model {base!r}: {said} Set `label` to one of {', '.join(sorted(names))}")
    return names[label]


def _batches(rows: list[Ids], tokens_per_batch: int) -> Iterator[list[Ids]]:
    """Yield batches of `rows`, which are ordered longest first: as many as fit at the length of the first, at least
    one."""
    at = 0
    while at < len(rows):
        size = max(1, tokens_per_batch // len(rows[at]))
        yield rows[at : at + size]
        at += size


def _find_unused_token(batch: list[Ids], vocabulary: int) -> int | None:
    used = {number for row in batch for number in row}
    return next((number for number in range(vocabulary) if number not in used), None)
