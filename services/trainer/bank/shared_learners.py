"""Learners of jobs that share a base model: losses, metrics and checkpoints are those of a job with a trainer to
itself; passes and optimizer steps are those of a bank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor

from opentinker.services.trainer.bank.adamw import AdamSettings
from opentinker.services.trainer.bank.adapter import Adapter
from opentinker.services.trainer.bank.adapter_files import CONFIG
from opentinker.services.trainer.bank.adapter_tensors import MOMENTS, matrices, read_checkpoint, trainer_tensors
from opentinker.services.trainer.bank.job_adapter import JobAdapter
from opentinker.services.trainer.bank.limits import NotFinite
from opentinker.services.trainer.bank.pass_part import PassOptions, Scores, Unit
from opentinker.services.trainer.batch.micro_batch import MicroBatch
from opentinker.services.trainer.batch.row_batch import RowBatch, row_batches
from opentinker.services.trainer.batch.token_metrics import StepRecord
from opentinker.services.trainer.data.examples import Example
from opentinker.services.trainer.learners.base import Interrupted, NonFinite, TooLong
from opentinker.services.trainer.learners.dpo import DpoLearner
from opentinker.services.trainer.learners.policy_model import CheckpointTensors, PolicyModel, RandomState
from opentinker.services.trainer.learners.rl import ADVICE, RlLearner
from opentinker.services.trainer.learners.sft import SftLearner
from opentinker.services.trainer.learners.supervised import SupervisedLearner
from opentinker.shared.nn.layout import Layout
from opentinker.shared.nn.models import load_tokenizer
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import F32, WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import ADAPTER
from opentinker.shared.types.trajectories import Group


class SharedPolicy(PolicyModel):
    """An adapter of a bank in the place of a model and its optimizer."""

    def __init__(self, spec: JobSpec, adapter: JobAdapter) -> None:
        tokens = min(spec.train.tokens_per_micro_batch, adapter.longest)
        train = spec.train.model_copy(update={"tokens_per_micro_batch": tokens})
        super().__init__(spec.model_copy(update={"train": train}), adapter.base.device)
        self.random_state = RandomState(is_own=False, cuda=False)  # draws nothing; other jobs' adapters are drawn here
        self._asked_tokens = spec.train.tokens_per_micro_batch
        self.adapter = adapter
        self.lr = 0.0
        """Learning rate of the next step."""

    def _build(self, checkpoint: Path | None) -> None:
        lora = self.spec.model.lora
        assert lora is not None
        if self.spec.train.deterministic:
            self._require_whole_micro_batches()
            import_module("torch._inductor.config")  # takes seconds, and torch's setting needs it: not in the bank
        self.tokenizer = load_tokenizer(self.spec.model.base)
        self.adapter.create(lora, self.spec.train.seed, deterministic=self.spec.train.deterministic)
        self.causal = self.adapter.base.causal
        self.dropouts = []

    def _require_whole_micro_batches(self) -> None:
        """Raise JobFailed for larger micro-batches than a pass takes: smaller ones round otherwise."""
        if self._asked_tokens > self.adapter.longest:
            raise JobFailed(
                f"train.tokens_per_micro_batch = {self._asked_tokens}: with train.deterministic at most "
                f"{self.adapter.longest}, the bank_tokens of this shared trainer; or take resources.trainer = 'own'"
            )

    def _resume(self, checkpoint: Path | None) -> None:
        self.steps = 0
        if checkpoint is not None:
            self._restore(checkpoint, moments=True)
            self.steps = int(orjson.loads((checkpoint / "trainer" / "state.json").read_bytes())["steps"])

    def _load_start(self, checkpoint: Path, *, moments: bool) -> None:
        self.steps = 0
        self._restore(checkpoint, moments=moments)

    def _restore(self, checkpoint: Path, *, moments: bool) -> None:
        vectors, steps = read_checkpoint(self.adapter.read(), checkpoint, moments=moments)
        self.adapter.write(vectors, steps)

    @property
    def plan_device(self) -> str:
        return "cpu"  # where a bank joins them

    @property
    def waits(self) -> tuple[float, float]:
        """Return the adapter's seconds of waiting so far, and those of them for other jobs."""
        return self.adapter.waited_s, self.adapter.other_jobs_s

    def without_waits(self, values: dict[str, float], began: tuple[float, float]) -> dict[str, float]:
        """Take the wait for other passes out of the step's time. `began`: `waits` before the step."""
        waited_s, others_s = (now - before for now, before in zip(self.waits, began, strict=True))
        return {
            **values,
            "step_seconds": max(0.0, values["step_seconds"] - waited_s),
            "trainer/bank_wait_seconds": waited_s,
            "trainer/bank_other_jobs_seconds": others_s,
        }

    def require_length(self, lengths: Sequence[int], subject: str) -> None:
        """Raise TooLong if there is a sequence, or a pair, of more tokens than a pass takes."""
        if (longest := max(lengths, default=0)) > self.adapter.longest:
            raise TooLong(
                f"{subject} {longest} tokens, and a pass of this shared trainer takes {self.adapter.longest} (its "
                "bank_tokens), the two completions of a pair together. Shorten them, or take resources.trainer = 'own'"
            )

    # --- steps --------------------------------------------------------------------------------------------------

    def set_lr(self) -> float:
        self.lr = self.spec.train.lr * self.lr_share
        return self.lr

    def run(self, units: Sequence[Unit], *, backward: bool, **options: Any) -> list[F32]:
        """Run units in passes; returns the log-probabilities of each. Raises NonFinite."""
        try:
            return self.adapter.run(units, PassOptions(**options), backward=backward)
        except NotFinite as error:
            raise self._refused(error, ADVICE) from None

    def step_adapter(self, advice: str) -> float:
        """Step the optimizer; returns the norm of the gradient before clipping. Raises NonFinite."""
        train = self.spec.train
        settings = AdamSettings(
            lr=self.lr, beta1=train.beta1, beta2=train.beta2, weight_decay=train.weight_decay, clip=train.grad_clip
        )
        try:
            return self.adapter.step(settings).grad_norm
        except NotFinite as error:
            raise self._refused(error, advice) from None

    def _refused(self, error: NotFinite, advice: str) -> NonFinite:
        self.discard_gradients()
        return NonFinite(f"step refused after {self.steps} steps: {error}; the weights are unchanged. Try {advice}.")

    def discard_gradients(self) -> None:
        self.adapter.write({})

    def rollback_point(self) -> Callable[[], None]:
        before = self.adapter.read()
        vectors = {name: getattr(before, name) for name in ("weights", *MOMENTS)}
        return partial(self.adapter.write, vectors, before.steps)

    def dropout(self, *, on: bool) -> None:
        """Do nothing: adapters of a bank have no dropout."""

    @contextmanager
    def undo_if_interrupted(self) -> Iterator[None]:
        try:
            yield
        except Interrupted:
            self.discard_gradients()
            raise

    def interrupt(self) -> None:
        super().interrupt()
        self.adapter.interrupt()

    def close(self) -> None:
        self.adapter.discard()

    # --- weights ------------------------------------------------------------------------------------------------

    def _weights(self, *, frozen: bool) -> Iterator[tuple[str, Tensor]]:
        return self._weights_of(self.adapter.read())

    def _weights_of(self, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
        for name, matrix in matrices(adapter.lora, adapter.weights):
            yield name, matrix.to(self.dtype)

    def _forward_whole(self, plan: Layout) -> Tensor:
        (logprobs_M,) = self.adapter.run([Unit(plan, len(plan.ids_N))], PassOptions(), backward=False, completes=True)
        return torch.from_numpy(logprobs_M)

    def collect(self) -> CheckpointTensors:
        adapter = self.adapter.read()
        return CheckpointTensors(dict(self._weights_of(adapter)), trainer_tensors(adapter, masters=self.has_masters))

    def write_weights(self, directory: Path, weights: dict[str, Tensor]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / ADAPTER)
        config = {**self.adapter.read().config, "inference_mode": True}
        (directory / CONFIG).write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
        self.tokenizer.save_pretrained(directory)


class SharedRlLearner(RlLearner, SharedPolicy):
    def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        lengths = [len(one.mask_T) for group in groups for one in group.trajectories]
        self.require_length(lengths, "the batch has a trajectory of")
        began = self.waits
        return self.without_waits(super().step(groups, version), began)

    def _accumulate(self, micros: list[MicroBatch], record: StepRecord, *, first: bool) -> dict[str, Tensor]:
        parts: dict[int, tuple[StepRecord, dict[str, Tensor]]] = {}
        """By micro-batch: if a pass has failed, its losses are computed again."""

        for micro in micros:
            micro.move_columns(self.device)

        def loss(number: int, micro: MicroBatch, scores: Scores) -> Tensor:
            own = {name: torch.zeros((), device=self.device) for name in ("policy", "total", "value")}
            parts[number] = StepRecord(), own
            return self._objective(micro, scores.logprobs_M, scores.entropy_M, *parts[number], first=first)

        units = [Unit(micro.plan, micro.tokens, partial(loss, n, micro)) for n, micro in enumerate(micros)]
        self.run(units, backward=True, **self._options)
        for one, _ in parts.values():
            record.extend(one)
        return _added(own for _, own in parts.values())

    @property
    def _options(self) -> dict[str, Any]:
        entropy = bool(self.spec.algorithm.entropy_coef)
        return {"temperature": self.spec.rollout.temperature, "entropy_gradient": entropy}

    def _apply(self, sums: dict[str, Tensor], lr_share: float) -> dict[str, float]:
        try:
            result = self.require_finite(sums, ADVICE)
        except NonFinite:
            self.discard_gradients()
            raise
        return {**result, "norm": self.step_adapter(ADVICE)}

    def _measure_start(self, micros: list[MicroBatch]) -> None:
        units = [Unit(micro.plan, micro.tokens) for micro in micros]
        measured = self.run(units, backward=False, temperature=self.spec.rollout.temperature)
        for micro, logprobs_M in zip(micros, measured, strict=True):
            micro.start_M = torch.from_numpy(logprobs_M).to(self.device)


class SharedRows(SupervisedLearner, SharedPolicy):
    """Rows in passes of a bank, for the losses of sft and dpo."""

    def prepare(self, examples: list[Example], home: Path) -> None:
        self.require_length([len(example) for example in examples], "[data] has rows with")
        super().prepare(examples, home)

    def step(self, batch: list[Example]) -> dict[str, float]:
        began = self.waits
        return self.without_waits(super().step(batch), began)

    def _sums(self, batch: list[Example], *, backward: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
        weight, parts = self.weight(batch), dict[int, dict[str, Tensor]]()

        def loss(number: int, micro: RowBatch, scores: Scores) -> Tensor:
            found = self.share(micro, scores.logprobs_M, scores.hits_M, weight)
            parts[number] = {name: value.detach().double() for name, value in found.items()}
            return found["loss"]

        micros = self._row_batches(batch)
        self._measure_reference(micros)
        units = [Unit(micro.plan, micro.tokens, partial(loss, n, micro)) for n, micro in enumerate(micros)]
        self.run(units, backward=backward, hits=self.hits)
        counts = {
            "tokens": sum(len(micro.sequence_M) for micro in micros),
            "tokens/total": sum(micro.tokens for micro in micros),
            "tokens/computed": sum(len(micro.plan.ids_N) for micro in micros),
        }
        return _added(parts.values()), {name: float(count) for name, count in counts.items()}

    def _row_batches(self, examples: list[Example]) -> list[RowBatch]:
        """Return micro-batches: their layouts where passes take them, the rest where losses are computed."""
        made = row_batches(examples, self.spec.train.tokens_per_micro_batch, torch.device(self.plan_device))
        return [replace(micro, sequence_M=micro.sequence_M.to(self.device)) for micro in made]

    def _measure_reference(self, micros: list[RowBatch]) -> None:
        """Do nothing: the loss has no reference."""

    def _apply(self, sums: dict[str, Tensor]) -> dict[str, float]:
        try:
            result = self.require_finite(sums, self.advice)
        except NonFinite:
            self.discard_gradients()
            raise
        return {**result, "grad_norm": self.step_adapter(self.advice)}


class SharedSftLearner(SharedRows, SftLearner):
    pass


class SharedDpoLearner(SharedRows, DpoLearner):
    """The reference of a fresh adapter is the base without it. That of another job's adapter is measured once, by an
    adapter that is removed afterwards."""

    _reference_policy: SharedPolicy | None = None

    def _measure_reference(self, micros: list[RowBatch]) -> None:
        if self.needs_preparation:
            return
        units = [Unit(micro.plan, micro.tokens) for micro in micros]
        measured = self.run(units, backward=False, adapted=False)
        for micro, logprobs_M in zip(micros, measured, strict=True):
            micro.reference_S = micro.sums_S(torch.from_numpy(logprobs_M).to(self.device))

    def _measure(self, examples: list[Example], start: Path) -> F32:
        policy: SharedPolicy = self if self.steps == 0 else self._at_start(start)
        found = np.zeros((len(examples), 2), np.float32)
        try:
            micros = self._row_batches(examples)
            measured = policy.run([Unit(micro.plan, micro.tokens) for micro in micros], backward=False)
            for micro, logprobs_M in zip(micros, measured, strict=True):
                sums_S = micro.sums_S(torch.from_numpy(logprobs_M).to(self.device))
                found[micro.places] = sums_S.view(-1, 2).cpu().numpy()
        finally:
            if policy is not self:
                policy.close()
        return found

    def _at_start(self, start: Path) -> SharedPolicy:
        policy = SharedPolicy(self.spec, JobAdapter(self.adapter.bank, f"{self.adapter.name}-reference"))
        self._reference_policy = policy
        self.raise_if_interrupted(changes=False)  # earlier than here it was not forwarded
        policy.start(start, optimizer=False)
        return policy

    def interrupt(self) -> None:
        super().interrupt()
        if self._reference_policy is not None:
            self._reference_policy.interrupt()


def _added(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


LEARNERS: dict[str, type[SharedRlLearner | SharedSftLearner | SharedDpoLearner]] = {
    "rl": SharedRlLearner, "sft": SharedSftLearner, "dpo": SharedDpoLearner,
}  # fmt: skip
"""By kind of job."""
