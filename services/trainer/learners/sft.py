"""Supervised fine-tuning: maximises the likelihood of rows. Implements `base.RowLearner`."""

from __future__ import annotations

from torch import Tensor

from opentinker.services.trainer.batch.row_batch import RowBatch, learned_tokens
from opentinker.services.trainer.data.examples import Example
from opentinker.services.trainer.learners.supervised import SupervisedLearner


class SftLearner(SupervisedLearner):
    """L = -(1/N) sum_{s,t} log pi(x_{s,t} | x_{s,<t}) over the N learned tokens of the batch: a mean per token, not per
    row. `accuracy` is the share of those tokens that pi finds the likeliest."""

    hits = True

    def weight(self, batch: list[Example]) -> int:
        return learned_tokens(batch)

    def share(self, micro: RowBatch, logprobs_M: Tensor, hits_M: Tensor, weight: int) -> dict[str, Tensor]:
        return {"loss": -logprobs_M.sum() / weight, "accuracy": hits_M.sum() / weight}
