"""Direct preference optimisation on pairs, without a reward model. Implements `base.RowLearner`.

The reference is the model that the job starts from. For a fresh adapter it is the base with the adapter off, evaluated
in every step. Otherwise its log-probabilities are computed once, before the first step, and stored with the job.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor

from opentinker.services.trainer.algorithm.preference import ipo, sigmoid
from opentinker.services.trainer.batch.row_batch import RowBatch, row_batches
from opentinker.services.trainer.data.examples import Example, fingerprint
from opentinker.services.trainer.learners.policy_model import PolicyModel
from opentinker.services.trainer.learners.supervised import SupervisedLearner
from opentinker.shared.types.core import F32
from opentinker.shared.types.manifest import START

log = structlog.get_logger()


class DpoLearner(SupervisedLearner):
    """The mean over pairs of a loss of `preference.py`.

    `rewards/chosen` and `rewards/rejected` are beta (log pi - log ref) of the completions, `rewards/margin` is their
    difference and `rewards/accuracy` the share of pairs where it is positive; `logprobs/...` are log pi of completions.
    """

    advice = "a lower lr, or a larger dpo.beta"

    def weight(self, batch: list[Example]) -> int:
        return len(batch)

    def share(self, micro: RowBatch, logprobs_M: Tensor, hits_M: Tensor, weight: int) -> dict[str, Tensor]:
        dpo = self.spec.dpo
        assert dpo is not None
        reference_S = self._reference(micro)
        own_S = micro.sums_S(logprobs_M)
        ratio_S = own_S - reference_S
        chosen_P, rejected_P = ratio_S[0::2], ratio_S[1::2]
        if dpo.loss == "ipo":
            tokens_S = micro.sums_S(torch.ones_like(micro.sequence_M, dtype=torch.float32))
            loss_P = ipo(chosen_P, rejected_P, tokens_S[0::2], tokens_S[1::2], beta=dpo.beta)
        else:
            loss_P = sigmoid(chosen_P, rejected_P, beta=dpo.beta, label_smoothing=dpo.label_smoothing)
        sums = {
            "loss": loss_P,
            "rewards/chosen": dpo.beta * chosen_P,
            "rewards/rejected": dpo.beta * rejected_P,
            "rewards/margin": dpo.beta * (chosen_P - rejected_P),
            "rewards/accuracy": (chosen_P > rejected_P).float(),
            "logprobs/chosen": own_S[0::2],
            "logprobs/rejected": own_S[1::2],
        }
        return {name: values_P.sum() / weight for name, values_P in sums.items()}

    # --- the reference ------------------------------------------------------------------------------------------

    def _reference(self, micro: RowBatch) -> Tensor:
        """Return [S] log ref of each completion."""
        if self.needs_preparation:
            known = [value for example in micro.examples for value in example.reference]
            return torch.tensor(known, dtype=torch.float32, device=self.device)
        if micro.reference_S is not None:
            return micro.reference_S
        adapted: Any = self.model
        with torch.no_grad(), adapted.disable_adapter():
            return micro.sums_S(self.forward(micro.plan)[0])

    @property
    def needs_preparation(self) -> bool:
        return self.spec.model.lora is None or self.spec.start is not None

    def prepare(self, examples: list[Example], home: Path) -> None:
        """Read the reference's log-probabilities, or compute them with the current or the initial weights."""
        if not self.needs_preparation:
            return
        file = home / f"reference-{fingerprint(examples)}.npy"
        known = _read_reference(file, len(examples))
        if self.process_group.max_across_ranks(known is None) or known is None:  # ranks compute together, or not at all
            known = self._measure(examples, home / START)
            if self.process_group.rank == 0:
                _write_reference(file, known)
        for example, values in zip(examples, known.tolist(), strict=True):
            example.reference = tuple(values)

    def _measure(self, examples: list[Example], start: Path) -> F32:
        """Return the reference's log-probabilities, float32 [examples, 2]."""
        policy = self if self.steps == 0 else self._at_start(start)
        policy.dropout(on=False)
        found = torch.zeros(len(examples), 2, device=self.device)
        budget = self.spec.train.tokens_per_micro_batch
        with torch.no_grad():
            for micro in row_batches(examples, budget, torch.device(self.device), self.process_group):
                self.raise_if_interrupted(changes=False)
                sums_S = micro.sums_S(policy.forward(micro.plan)[0])
                if micro.places:
                    found[micro.places] = sums_S.view(-1, 2)
        measured: F32 = self.process_group.sum(found).cpu().numpy()
        return measured

    def _at_start(self, start: Path) -> PolicyModel:
        """Return the model before the first step, whole on every rank. The random state is preserved."""
        policy = PolicyModel(self.spec, self.device)
        with torch.random.fork_rng(devices=None if self.device == "cuda" else []):
            if self.spec.start is None:
                policy.load(None)
            else:
                policy.start(start, optimizer=False)
        return policy


def _read_reference(file: Path, count: int) -> F32 | None:
    try:
        found: F32 = np.load(file, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("reference_unreadable", file=str(file), error=str(error))
        return None
    return found if found.shape == (count, 2) else None


def _write_reference(file: Path, values: F32) -> None:
    """Write the log-probabilities. A disk error only costs a restarted trainer time."""
    new = file.with_suffix(".new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as out:
            np.save(out, values, allow_pickle=False)
        new.rename(file)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        log.warning("reference_not_stored", file=str(file), error=str(error))
