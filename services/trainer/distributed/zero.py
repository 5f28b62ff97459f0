"""Learners with partitioned state, by DeepSpeed's ZeRO (Rajbhandari et al., arXiv 1910.02054).

    zero1   each rank holds a share of masters and moments and steps with it; weights and gradients are whole everywhere
    zero2   and a share of the gradients
    zero3   and a share of the weights: they are gathered module by module while a pass needs them

DeepSpeed is used as a library: its engine partitions the loaded policy, reduces gradients and steps torch's AdamW on
the shares. Masters are float32 and the forward pass is that of a single rank, so that results are equal to it.
Tensors are gathered one by one. Imported only for jobs that need it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import (
    logger,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from opentinker.services.trainer.distributed.process_group import ProcessGroup
from opentinker.services.trainer.learners import optimizer_state
from opentinker.services.trainer.learners.base import BUCKET_BYTES
from opentinker.services.trainer.learners.policy_model import CheckpointTensors, PolicyModel
from opentinker.shared.nn import buckets
from opentinker.shared.nn.forward import VISION_ATTENTION, token_scores
from opentinker.shared.nn.layout import Layout
from opentinker.shared.nn.models import autocast
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import JobFailed, OpenTinkerError
from opentinker.shared.types.swap import TensorInfo

BUCKET_ELEMENTS = 1 << 24
"""Size of the flat buckets in which gradients are reduced."""
WHOLE_ELEMENTS = 4096
"""Tensors up to this size (norms, biases) are kept whole on every rank under zero3."""

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled here, for minutes; gloo does it
logger.setLevel("WARNING")
warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning, module="torch.distributed")


class _Packed(nn.Module):  # type: ignore[misc]
    """The module that the engine wraps: a pass over one micro-batch, so that the engine sees where each begins."""

    def __init__(self, causal: nn.Module, dtype: torch.dtype, process_group: ProcessGroup) -> None:
        super().__init__()
        self.causal, self.device, self.dtype, self.process_group = causal, process_group.device, dtype, process_group

    def forward(self, plan: Layout, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        with autocast(self.device, self.dtype):
            return token_scores(self.causal, plan, agree=self.process_group.max_across_ranks, **options)


def zero_class(learner: type[PolicyModel]) -> type[PolicyModel]:
    """Return a subclass of `learner` with partitioned state."""
    return type(f"Zero{learner.__name__}", (Zero, learner), {})


class Zero(PolicyModel):
    """Mixin that runs a policy on DeepSpeed's engine."""

    engine: Any = None

    @property
    def stage(self) -> int:
        return int(self.spec.train.parallel.removeprefix("zero"))

    @property
    def load_device(self) -> str:
        """The CPU: a model may fit the device only once it is partitioned."""
        return "cpu"

    def _resume(self, checkpoint: Path | None) -> None:
        super()._resume(checkpoint)
        self._share()

    def _load_start(self, checkpoint: Path, *, moments: bool) -> None:
        super()._load_start(checkpoint, moments=moments)
        self._share()

    def _share(self) -> None:
        """Partition the policy: afterwards each rank holds its share only. Raises JobFailed."""
        if hasattr(self.causal, VISION_ATTENTION):
            raise JobFailed(
                f"train.parallel = {self.spec.train.parallel!r} is not supported for vision models, of which a part "
                "is frozen; take 'data'"
            )
        self._whole = self._named_tensors()
        moments = optimizer_state.moments(self.parameters, self.optimizer)
        self.optimizer.state.clear()
        self.engine = self._make_engine()
        self._put_moments(moments)

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return tensors by Hugging Face name without tied duplicates, before partitioning. Raises JobFailed if the
        saved names differ."""
        named = {name: p for name, p in self.causal.named_parameters()}
        named |= {name: b for name, b in self.causal.named_buffers() if name in self.causal.state_dict()}
        if self.stage == 3 and self.spec.model.lora is None:
            shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in named.items()}
            if revert_weight_conversion(self.causal, dict(shapes)).keys() != shapes.keys():
                raise JobFailed(
                    f"{type(self.causal).__name__} is saved in another layout than it is trained in, which needs its "
                    "weights in one place: train.parallel = 'zero3' cannot gather them one by one; take 'zero2'"
                )
        return list(named.items())

    def _make_engine(self) -> Any:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": self.spec.train.grad_clip,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": False,
                "reduce_bucket_size": BUCKET_ELEMENTS,
                "allgather_bucket_size": BUCKET_ELEMENTS,
                "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
                "stage3_param_persistence_threshold": WHOLE_ELEMENTS,
                "stage3_max_reuse_distance": 0,
            },
        }
        packed = _Packed(self.causal, self.dtype, self.process_group)
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks for it; every process sees its own device as the first one
        # DeepSpeed numbers modules and parameters by counts of the process, and compares the numbers between ranks:
        # those of a process that has had another job, and of one that has not, must be the same.
        DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
        Init.param_id = 0
        with self.process_group.on_interface():
            engine, *_ = deepspeed.initialize(
                model=packed, optimizer=self.optimizer, config=config, dist_init_required=False
            )
        self.process_group.destroy = deepspeed.comm.destroy_process_group
        return engine

    def close(self) -> None:
        """Destroy the engine, whose hooks would keep the model."""
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None

    # --- training -----------------------------------------------------------------------------------------------

    def forward(
        self, plan: Layout, *, temperature: float = 1.0, entropy_gradient: bool = False, hits: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = self.engine(
            plan, temperature=temperature, entropy_gradient=entropy_gradient, hits=hits
        )
        return found

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient. The loss is scaled because the engine divides sums by the number of ranks; a
        non-finite loss makes every gradient NaN, so that the engine refuses the step too."""
        self.engine.set_gradient_accumulation_boundary(last)
        poison = torch.where(loss.detach().isfinite(), 1.0, float("nan"))
        self.engine.backward(loss * (poison * self.process_group.world))

    def clip(self) -> Tensor:
        """Return the norm of the gradient; the engine clips it in its step."""
        optimizer = self.engine.optimizer
        norm = (
            combine_grad_norm_groups(optimizer._get_norm_groups())
            if self.stage == 3
            else optimizer.scaled_global_norm()
        )
        return torch.as_tensor(norm, dtype=torch.float32, device=self.device)

    def optimizer_step(self) -> None:
        self.engine.step()
        if self.engine.optimizer.overflow:
            raise OpenTinkerError("DeepSpeed refused a step whose losses and gradient are finite")

    def discard_gradients(self) -> None:
        """Step with a non-finite gradient, which the engine discards."""
        self.engine.step()
        if not self.engine.optimizer.overflow:
            raise OpenTinkerError("DeepSpeed took a step that had been refused")

    def rollback_point(self) -> Callable[[], None]:
        state = self.optimizer.state
        kept = [(flat, flat.detach().clone(), {k: v.clone() for k, v in state[flat].items()}) for flat in self._shares]
        return partial(self._undo, kept)

    def _undo(self, kept: list[tuple[Tensor, Tensor, dict[str, Tensor]]]) -> None:
        with torch.no_grad():
            for flat, weights, moments in kept:
                flat.copy_(weights)
                for name, value in moments.items():
                    self.optimizer.state[flat][name].copy_(value)
        optimizer = self.engine.optimizer
        if self.stage < 3:
            optimizer.update_lp_params()
            return
        for group in range(len(self._shares)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    # --- shares and wholes --------------------------------------------------------------------------------------

    @property
    def _shares(self) -> list[Tensor]:
        """Return this rank's share of the masters: one flat tensor per group of parameters."""
        optimizer = self.engine.optimizer
        shares: list[Tensor] = (
            optimizer.fp32_partitioned_groups_flat if self.stage == 3 else optimizer.single_partition_of_fp32_groups
        )
        return shares

    def _put_moments(self, moments: dict[str, Tensor]) -> None:
        steps = max((value.item() for name, value in moments.items() if name.startswith("step/")), default=0.0)
        for flat in self._shares:
            self.optimizer.state[flat] = {
                "step": torch.tensor(steps, dtype=torch.float32, device=flat.device),
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }
        if self.stage < 3:
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.parameters.items():
            for moment in ("exp_avg", "exp_avg_sq"):
                if f"{moment}/{name}" in moments:
                    self._put(parameter, moment, moments[f"{moment}/{name}"])

    def _put(self, parameter: Any, moment: str, whole: Tensor) -> None:
        if self.stage < 3:
            safe_set_full_optimizer_state(parameter, whole, moment)
            return
        share = torch.zeros(parameter.ds_tensor.numel())
        own = whole.flatten()[share.numel() * self.process_group.rank :][
            : share.numel()
        ]  # the last share may be padded
        share[: own.numel()] = own
        safe_set_local_optimizer_state(parameter, share, moment)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield weights by name. Collective under zero3, where a tensor is whole until the next one is requested."""
        if self.stage < 3:
            yield from super().named_weights()
        elif self.spec.model.lora is not None:
            with deepspeed.zero.GatheredParameters(list(self.parameters.values())):
                adapter = [(name, tensor.clone()) for name, tensor in super().named_weights()]
            yield from adapter
        else:
            for name, tensor in self._whole:
                with deepspeed.zero.GatheredParameters([tensor] if isinstance(tensor, nn.Parameter) else []):
                    yield name, tensor.detach().to(self.dtype)

    def snapshot(self, version: WeightVersion) -> buckets.Snapshot:
        manifest = None
        if self.stage == 3 and self.spec.model.lora is None:
            dtype = str(self.dtype).removeprefix("torch.")
            shapes = [getattr(tensor, "ds_shape", tensor.shape) for _, tensor in self._whole]
            manifest = [TensorInfo(name, dtype, list(s)) for (name, _), s in zip(self._whole, shapes, strict=True)]
        made = buckets.snapshot(version, self.named_weights(), BUCKET_BYTES, manifest, self.probe())
        return replace(made, base_bytes=self.base_bytes())

    def _forward_whole(self, plan: Layout) -> Tensor:
        """Compute as the base class does; collective under zero3."""
        return self.forward(plan)[0] if self.stage == 3 else super()._forward_whole(plan)

    def collect(self) -> CheckpointTensors:
        """Gather the tensors of a checkpoint on rank 0; the other ranks take part and keep nothing."""
        weights, tensors = {}, {}
        for name, tensor in self.named_weights():
            if self.process_group.rank == 0:
                weights[name] = tensor.to("cpu", copy=True)
        for name, tensor in self._state():
            if self.process_group.rank == 0:
                tensors[name] = tensor.cpu()
        return CheckpointTensors(weights, tensors)

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that `optimizer_state` saves."""
        step = self.optimizer.state[self._shares[0]]["step"]
        for name, parameter in self.parameters.items():
            yield f"step/{name}", step.clone()
            for moment in ("exp_avg", "exp_avg_sq"):
                yield f"{moment}/{name}", safe_get_full_optimizer_state(parameter, moment)
            if self.has_masters:
                yield f"master/{name}", safe_get_full_fp32_param(parameter)
