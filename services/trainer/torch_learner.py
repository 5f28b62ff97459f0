"""The learner: batches in, gradient steps, weight snapshots and checkpoints out. Stands behind `learner.Learner`.

Master weights and optimizer state are float32; with dtype bfloat16 the forward pass runs under autocast and snapshots
and saved models are bfloat16. With LoRA only the adapter trains, travels and is saved; the frozen base is held in the
job's dtype.
"""

from __future__ import annotations

import contextlib
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
from opentinker.services.trainer.learner import BUCKET_BYTES, NonFinite
from opentinker.services.trainer.losses import decoupled_ppo, k3, loglinear_proximal, token_mean
from opentinker.services.trainer.micro_batch import MicroBatch, StepRecord, micro_batches
from opentinker.shared.nn import transport
from opentinker.shared.nn.forward import token_logprobs
from opentinker.shared.nn.lora import attach_lora, causal_lm
from opentinker.shared.nn.models import load_model, load_tokenizer, torch_dtype
from opentinker.shared.spec import JobSpec
from opentinker.shared.types import Group, WeightVersion


class TorchLearner:
    """AdamW on the decoupled-PPO loss of GRPO advantages, on one device."""

    def __init__(self, spec: JobSpec, device: str = "cpu") -> None:
        self.spec = spec
        self.device = device
        self.dtype = torch_dtype(spec.model.dtype)
        self.steps = 0
        """Batches trained on, over all resumes: the position of the learning-rate schedule."""

    def load(self, checkpoint: Path | None) -> None:
        """The base model, or the state of a checkpoint directory. Raises JobFailed if either is unusable."""
        spec = self.spec
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
        self.steps = 0
        if checkpoint is not None:
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
    def lr(self) -> float:
        """Learning rate of the next batch: lr * (batches so far + 1) / warmup_steps, then lr."""
        train = self.spec.train
        return train.lr * min(1.0, (self.steps + 1) / max(1, train.warmup_steps))

    def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        start = time.perf_counter()
        updates, lr = self.spec.algorithm.updates_per_batch, self.lr
        share = len(groups) // updates
        batches = [
            micro_batches(groups[u * share : (u + 1) * share], version, self.spec, torch.device(self.device))
            for u in range(updates)
        ]
        if self._drops_out or (updates > 1 and self.spec.algorithm.proximal == "recomputed"):
            self._measure_start(batches)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        record = StepRecord()
        before = train_state.remember(self.parameters, self.optimizer) if updates > 1 else None
        try:
            results = [self._update(micros, record, first=u == 0) for u, micros in enumerate(batches)]
        except NonFinite:
            if before is not None:
                train_state.restore(before, self.parameters, self.optimizer)
            raise
        self.steps += 1
        tokens = sum(len(micro.behaviour_M) for micros in batches for micro in micros)
        return {
            "loss/policy": sum(loss for loss, _ in results) / updates,
            "grad_norm": max(norm for _, norm in results),
            "lr": lr,
            "tokens": float(tokens),
            "tokens/total": float(sum(micro.tokens for micros in batches for micro in micros)),
            "tokens/computed": float(sum(len(micro.plan.ids_N) for micros in batches for micro in micros)),
            **record.metrics(),
            **batch_metrics(groups, version),
            "step_seconds": time.perf_counter() - start,
        }

    def _update(self, micros: list[MicroBatch], record: StepRecord, *, first: bool) -> tuple[float, float]:
        """One optimizer step: policy loss and gradient norm before clipping. Raises NonFinite instead of stepping.

        `first`: the weights are still those before the batch.
        """
        algorithm = self.spec.algorithm
        tokens = sum(len(micro.behaviour_M) for micro in micros)
        policy = torch.zeros((), device=self.device)
        penalty = torch.zeros((), device=self.device)
        self._dropout(on=True)
        for micro in micros:
            logprobs_M, entropy_M = self._forward(micro)
            if micro.start_M is None and first:
                micro.start_M = logprobs_M.detach()
            losses = decoupled_ppo(
                logprobs_M,
                self._proximal(logprobs_M, micro),
                micro.behaviour_M,
                micro.advantages_M,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                behaviour_cap=algorithm.behaviour_cap,
            )
            loss = token_mean(losses.loss_M, tokens)
            policy += loss.detach()
            if micro.reference_M is not None:
                kl_M = k3(logprobs_M, micro.reference_M)
                loss = loss + algorithm.kl_coef * token_mean(kl_M, tokens)
                penalty += kl_M.detach().sum()
                record.kl.append(kl_M.detach())
            loss.backward()
            record.logprobs.append(logprobs_M.detach())
            record.behaviour.append(micro.behaviour_M)
            if micro.start_M is not None:
                record.start.append((micro.start_M - micro.behaviour_M).abs())
                record.same.append(micro.current_M)
            record.entropy.append(entropy_M)
            record.clipped.append(losses.clipped_M)
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), self.spec.train.grad_clip)
        loss_value, norm_value, penalty_value = torch.stack([policy, norm, penalty]).tolist()
        if not all(abs(value) < float("inf") for value in (loss_value, norm_value, penalty_value)):
            self.optimizer.zero_grad()
            raise NonFinite(
                f"step refused: policy loss {loss_value}, KL {penalty_value}, gradient norm {norm_value} after "
                f"{self.steps} steps; the weights are unchanged. Try a lower lr or a lower behaviour_cap."
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss_value, norm_value

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        with self._autocast():
            return token_logprobs(self.causal, micro.plan, temperature=self.spec.rollout.temperature)

    def _proximal(self, logprobs_M: Tensor, micro: MicroBatch) -> Tensor:
        if self.spec.algorithm.proximal == "loglinear":
            return loglinear_proximal(logprobs_M, micro.behaviour_M, micro.lag_M)
        assert micro.start_M is not None
        return micro.start_M

    def _measure_start(self, batches: list[list[MicroBatch]]) -> None:
        """Log-probabilities of the whole batch under the weights before its first update, without dropout."""
        self._dropout(on=False)
        with torch.no_grad():
            for micro in (micro for micros in batches for micro in micros):
                micro.start_M, _ = self._forward(micro)

    @property
    def _drops_out(self) -> bool:
        return self.spec.model.lora is not None and self.spec.model.lora.dropout > 0

    def _dropout(self, *, on: bool) -> None:
        for module in self.dropouts:
            module.train(on)

    def _autocast(self) -> Any:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, dtype=self.dtype)

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
