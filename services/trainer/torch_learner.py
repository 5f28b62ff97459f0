"""The learner: batches in, gradient steps, weight snapshots and checkpoints out. Stands behind `learner.Learner`.

Master weights and optimizer state are float32; with dtype bfloat16 the forward pass runs under autocast and snapshots
and saved models are bfloat16. With LoRA only the adapter trains, travels and is saved; the frozen base is held in the
job's dtype.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from opentinker.services.trainer import train_state
from opentinker.services.trainer.batch_metrics import batch_metrics
from opentinker.services.trainer.credit import Credit, assign
from opentinker.services.trainer.critic import Critic, critic_metrics
from opentinker.services.trainer.learner import BUCKET_BYTES, NonFinite
from opentinker.services.trainer.micro_batch import MicroBatch, give_credit, micro_batches, values_of
from opentinker.services.trainer.objective import objective
from opentinker.services.trainer.step_record import StepRecord
from opentinker.shared.errors import JobFailed
from opentinker.shared.nn import transport
from opentinker.shared.nn.forward import token_logprobs
from opentinker.shared.nn.lora import attach_lora, causal_lm
from opentinker.shared.nn.models import autocast, load_model, load_tokenizer, torch_dtype
from opentinker.shared.spec import JobSpec
from opentinker.shared.types import Group, WeightVersion


class TorchLearner:
    """AdamW on the loss that the spec's algorithm puts together, on one device."""

    def __init__(self, spec: JobSpec, device: str = "cpu") -> None:
        self.spec = spec
        self.device = device
        self.dtype = torch_dtype(spec.model.dtype)
        self.steps = 0
        """Batches trained on, over all resumes: the position of the learning-rate schedule."""

    def load(self, checkpoint: Path | None) -> None:
        """The base model, or the state of a checkpoint directory. Raises JobFailed if either is unusable."""
        spec = self.spec
        if self.device == "cuda" and not torch.cuda.is_available():
            raise JobFailed("resources.trainer_gpus = 1, but this trainer has no GPU; set it to 0 to train on the CPU")
        self.tokenizer = load_tokenizer(spec.model.base)
        torch.manual_seed(spec.train.seed)
        if spec.model.lora is None:
            source = spec.model.base if checkpoint is None else str(checkpoint)
            self.model: nn.Module = load_model(source, torch.float32, self.device)
        else:
            self.model = attach_lora(load_model(spec.model.base, self.dtype, self.device), spec.model.lora)
        self.causal = causal_lm(self.model)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.dropouts = [module for name, module in self.model.named_modules() if name.endswith("lora_dropout")]
        self.optimizer = self._optimizer()
        self.critic = Critic(spec, self.device) if spec.algorithm.advantage == "gae" else None
        self.steps = 0
        if checkpoint is not None:
            if self.critic is not None:
                self.critic.load(checkpoint)
            self.steps = train_state.load(checkpoint, self.model, self.parameters, self.optimizer)

    def _optimizer(self) -> torch.optim.Optimizer:
        """Weight decay acts on matrices; norms and biases have none."""
        train = self.spec.train
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        vectors = [p for p in self.parameters.values() if p.ndim < 2]
        return torch.optim.AdamW(
            [
                {"params": part, "weight_decay": decay}
                for part, decay in ((matrices, train.weight_decay), (vectors, 0.0))
                if part
            ],
            lr=train.lr,
            betas=(train.beta1, train.beta2),
            eps=1e-8,
            fused=True,
        )

    @property
    def warmup(self) -> float:
        """Share of the learning rate for the next batch: (batches so far + 1) / warmup_steps, then 1."""
        return min(1.0, (self.steps + 1) / max(1, self.spec.train.warmup_steps))

    def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        start = time.perf_counter()
        algorithm, warmup = self.spec.algorithm, self.warmup
        batches = micro_batches(groups, version, self.spec, torch.device(self.device))
        micros = [micro for update in batches for micro in update]
        credit = self._give_credit(groups, micros)
        if self._drops_out or (algorithm.updates_per_batch > 1 and algorithm.proximal == "recomputed"):
            self._measure_start(micros)
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.train.lr * warmup
        record = StepRecord()
        before = self._remember() if len(batches) > 1 else []
        try:
            results = [self._update(update, record, warmup, first=u == 0) for u, update in enumerate(batches)]
        except NonFinite:
            for memory in before:
                train_state.restore(*memory)
            raise
        self.steps += 1
        return {
            "loss/policy": sum(r["policy"] for r in results) / len(results),
            "grad_norm": max(r["norm"] for r in results),
            "lr": self.spec.train.lr * warmup,
            "tokens": float(sum(len(micro.behaviour_M) for micro in micros)),
            "tokens/total": float(sum(micro.tokens for micro in micros)),
            "tokens/computed": float(sum(len(micro.plan.ids_N) for micro in micros)),
            **record.metrics(),
            **credit.metrics,
            **({} if self.critic is None else critic_metrics(micros, results)),
            **batch_metrics(groups, version),
            "step_seconds": time.perf_counter() - start,
        }

    def _give_credit(self, groups: list[Group], micros: list[MicroBatch]) -> Credit:
        """Advantages of the whole batch; with a critic, from its values before the batch."""
        values_S = None
        if self.critic is not None:
            self.critic.measure(micros)
            values_S = values_of(micros, sum(len(group.trajectories) for group in groups))
        credit = assign(groups, self.spec.algorithm, values_S)
        give_credit(micros, credit)
        return credit

    def _remember(self) -> list[tuple[Any, Any, Any]]:
        owners: list[Any] = [self, *([self.critic] if self.critic else [])]
        return [(train_state.remember(o.parameters, o.optimizer), o.parameters, o.optimizer) for o in owners]

    def _update(self, micros: list[MicroBatch], record: StepRecord, warmup: float, *, first: bool) -> dict[str, float]:
        """One optimizer step: losses and gradient norms before clipping. Raises NonFinite instead of stepping.

        `first`: the weights are still those before the batch.
        """
        sums = {name: torch.zeros((), device=self.device) for name in ("policy", "total", "value", "critic_norm")}
        self._dropout(on=True)
        for micro in micros:
            logprobs_M, entropy_M = self._forward(micro)
            if micro.start_M is None and first:
                micro.start_M = logprobs_M.detach()
            found = objective(logprobs_M, entropy_M, micro, self.spec.algorithm)
            found.loss.backward()
            sums["policy"] += found.policy
            sums["total"] += found.loss.detach()
            record.add(micro, logprobs_M, entropy_M, found)
            if self.critic is not None:
                sums["value"] += self.critic.accumulate(micro)
        sums["norm"] = nn.utils.clip_grad_norm_(list(self.parameters.values()), self.spec.train.grad_clip)
        if self.critic is not None:
            sums["critic_norm"] = self.critic.clip()
        result = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
        if not all(abs(value) < float("inf") for value in result.values()):
            self.optimizer.zero_grad()
            if self.critic is not None:
                self.critic.optimizer.zero_grad()
            said = ", ".join(f"{name} {value}" for name, value in result.items())
            raise NonFinite(
                f"step refused after {self.steps} steps: {said}; the weights are unchanged. "
                "Try a lower lr, or a tighter bound on the ratio."
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.critic is not None:
            self.critic.step(warmup)
        return result

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        with autocast(self.device, self.dtype):
            return token_logprobs(
                self.causal,
                micro.plan,
                temperature=self.spec.rollout.temperature,
                entropy_gradient=bool(self.spec.algorithm.entropy_coef),
            )

    def _measure_start(self, micros: list[MicroBatch]) -> None:
        """Log-probabilities of the whole batch under the weights before its first update, without dropout."""
        self._dropout(on=False)
        with torch.no_grad():
            for micro in micros:
                micro.start_M, _ = self._forward(micro)

    @property
    def _drops_out(self) -> bool:
        return self.spec.model.lora is not None and self.spec.model.lora.dropout > 0

    def _dropout(self, *, on: bool) -> None:
        for module in self.dropouts:
            module.train(on)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What travels and is saved, in the job's dtype: Hugging Face names without tied duplicates, or PEFT names."""
        if self.spec.model.lora is not None:
            state = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        else:
            untied: dict[int, tuple[str, Tensor]] = {}
            for name, tensor in self.causal.state_dict().items():
                untied.setdefault(tensor.data_ptr(), (name, tensor))
            state = revert_weight_conversion(self.causal, dict(untied.values()))
        for name, tensor in state.items():
            yield name, tensor.detach().to(self.dtype)

    def snapshot(self, version: WeightVersion) -> transport.Snapshot:
        return transport.snapshot(version, self.named_weights(), BUCKET_BYTES)

    def save(self, directory: Path) -> None:
        """Model (or adapter) and tokenizer at the top, trainer state below `trainer/`."""
        directory.mkdir(parents=True, exist_ok=True)
        train_state.save_model(directory, self.model, dict(self.named_weights()), self.dtype)
        self.tokenizer.save_pretrained(directory)
        masters = self.dtype != torch.float32 and self.spec.model.lora is None
        train_state.save(directory, self.parameters, self.optimizer, self.steps, masters=masters)
        if self.critic is not None:
            self.critic.save(directory)
