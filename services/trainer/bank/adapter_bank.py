"""The bank: one frozen base, and adapters of several tenants that train on it. Not thread-safe; see `bank_loop.py`."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from opentinker.services.trainer.bank import adamw
from opentinker.services.trainer.bank.adamw import AdamSettings
from opentinker.services.trainer.bank.adapter import Adapter, AdapterShape, FullShape
from opentinker.services.trainer.bank.adapter_files import export_peft, import_peft
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.capacity import Capacity, device_memory, measure
from opentinker.services.trainer.bank.limits import BankLimits, NotFinite, Refused
from opentinker.services.trainer.bank.mixed_batch import MixedBatch, Piece, PieceResult
from opentinker.services.trainer.bank.pass_part import PassOptions, PassPart, Unit
from opentinker.services.trainer.bank.residency import Residency
from opentinker.shared.runtime.memory import memory_bytes
from opentinker.shared.spec import LoraSpec

MOST_SLOTS = 64
FULL_VECTORS = 14
"""Float32 vectors of all weights that there are at once: the base, a model's weights, moments and gradient sum, that
with the pass; and while a model is stored, the copy that is written and the bytes of its file, four each. There is one
such copy at a time: `BankLoop.copying`."""
HOST_VECTORS = 8
"""Those of them that are in host memory beside a GPU: a model's vectors on their way to its file, and the file's bytes.
"""


@dataclass(frozen=True)
class Rows:
    """Units of one command for a pass."""

    adapter: str
    units: Sequence[Unit]
    options: PassOptions
    backward: bool = True
    """False: log-probabilities and loss alone."""
    last: bool = True
    """Whether they are the command's last: its gradient then joins the adapter's sum."""

    @property
    def part(self) -> PassPart:
        return PassPart(self.units, self.options)


class StepResult(NamedTuple):
    steps: int
    """Optimizer steps of the adapter, this one included."""
    grad_norm: float
    """Before clipping."""


class AdapterBank:
    def __init__(
        self, base: BaseModel, store: Path, limits: BankLimits | None = None, *,
        slots: int | None = None, host_bytes: int = 2**30,
    ) -> None:  # fmt: skip
        """`store`: directory of adapters that fit neither into slots nor into `host_bytes` of host memory. `slots`:
        measured if left out. Raises JobFailed."""
        self.base, self.limits = base, limits or BankLimits()
        self.capacity: Capacity | None = None
        """Measurement of the slots; None if their number was given."""
        if slots is None:
            self.capacity = measure(base, self.limits, most=MOST_SLOTS)
            slots = self.capacity.slots
        self.residency = Residency(base.device, slots, host_bytes, store)
        self.trains_full = False
        """Whether it has had all weights of a model."""

    @property
    def slots(self) -> int:
        return self.residency.slots

    def create(
        self, name: str, lora: LoraSpec | None, seed: int, *, owner: str = "", deterministic: bool = False
    ) -> None:  # fmt: skip
        """Add an adapter with the weights that a LoRA job with this seed begins with; without `lora`, all weights of
        the base. `deterministic`: see `sole_adapter.py`. Raises Refused, Conflict or OSError."""
        if lora is None:
            self._require_alone()
            adapter = self.base.full_weights(name)
        else:
            self.limits.check_rank(lora.rank)
            adapter = self.base.fresh_adapter(name, lora, seed)
        adapter.deterministic = deterministic
        self._add(adapter, owner)

    def import_peft(self, name: str, directory: Path, *, owner: str = "") -> None:
        """Add an adapter from a PEFT directory. Raises Refused, Conflict or OSError."""
        self._add(import_peft(self.base, self.limits, name, directory), owner)

    def add(self, adapter: Adapter, *, owner: str = "") -> None:
        """Add this adapter. Raises Refused if it is of another model, Conflict or OSError."""
        if isinstance(adapter.shape, FullShape):
            self._require_alone()
        else:
            self.limits.check_rank(adapter.shape.rank)
        self.base.adapt_for(adapter.shape)
        self._add(adapter.copy_to(self.base.device), owner)

    def _require_alone(self) -> None:
        """Raise Refused where all weights of a model would not have the device to themselves, or do not fit on it."""
        if self.slots != 1:
            raise Refused("this trainer holds adapters beside each other; all weights need one that is for them alone")
        weights = 4 * sum(parameter.numel() for parameter in self.base.causal.parameters())
        kept = 0 if self.base.device == "cuda" else self.residency.host_bytes
        if (needed := FULL_VECTORS * weights) > (there := device_memory(self.base.device) - kept):
            raise Refused(
                f"training all weights takes {needed / 2**30:.1f} GiB, and the device has {there / 2**30:.1f} for it; "
                "train an adapter (a rank above 0), or choose a smaller base"
            )
        copied, free = HOST_VECTORS * weights, memory_bytes() - self.residency.host_bytes
        if self.base.device == "cuda" and copied > free:
            raise Refused(
                f"storing a model of all weights takes {copied / 2**30:.1f} GiB of host memory, and there are "
                f"{free / 2**30:.1f} for it; train an adapter (a rank above 0), or choose a smaller base"
            )

    def _add(self, adapter: Adapter, owner: str) -> None:
        adapter.owner = owner
        self.residency.add(adapter)
        self.trains_full |= isinstance(adapter.shape, FullShape)

    def export_peft(self, name: str, directory: Path) -> None:
        """Write an adapter as a PEFT directory, in the dtype of the base. Raises NotFound."""
        (adapter,) = self.residency.bring([name])
        export_peft(adapter, directory, self.base.dtype)

    def remove(self, name: str) -> None:
        """Raises NotFound."""
        self.residency.remove(name)

    def load(self, names: Sequence[str], changing: Container[str] = ()) -> dict[str, Exception]:
        """Bring adapters into slots, as many as there are at most; `changing`: those that will change. Returns those
        that cannot be used, and why."""
        unusable: dict[str, Exception] = {}
        for name in names:
            try:
                (adapter,) = self.residency.bring([name])
                self.base.adapt_for(adapter.shape)
                if name in changing:
                    self.residency.begin_change(name)
            except Exception as error:  # noqa: BLE001 - the command of this adapter ends with it
                self.residency.drop_partial(name)
                unusable[name] = error
        return unusable

    def run_pass(self, rows: Sequence[Rows]) -> list[PieceResult]:
        """Run one packed forward and backward pass over rows of different adapters.

        A result that is not finite is refused: the command's gradient is dropped, the adapter is as before it, and the
        others are not affected. After an exception all gradients are as before the pass.
        """
        adapters = self.residency.bring(part.adapter for part in rows)
        before = [None if one.partial is None else one.partial.clone() for one in adapters]
        try:
            results = self._run_pieces(adapters, rows)
        except BaseException:
            for adapter, partial in zip(adapters, before, strict=True):
                adapter.partial = partial
            raise
        for adapter, part, result in zip(adapters, rows, results, strict=True):
            if part.backward and (part.last or not result.is_finite):
                if result.is_finite and adapter.partial is not None:
                    adapter.gradient = adapter.partial
                adapter.partial = None
        return results

    def _run_pieces(self, adapters: Sequence[Adapter], rows: Sequence[Rows]) -> list[PieceResult]:
        pieces = []
        for adapter, part in zip(adapters, rows, strict=True):
            self.base.adapt_for(adapter.shape)
            if part.backward:
                self.residency.begin_change(adapter.name)
                if adapter.partial is None:
                    adapter.partial = adapter.gradient.clone()
            pieces.append(Piece(adapter, part.part, adapter.partial if part.backward else None))
        return MixedBatch(pieces).run(self.base)

    def drop_partial(self, name: str) -> None:
        """Forget the gradient of a command that was cancelled before its last rows."""
        self.residency.drop_partial(name)

    def optim_step(self, steps: Sequence[tuple[str, AdamSettings]]) -> list[StepResult | Exception]:
        """Step adapters in one call, at most as many as there are slots. A gradient that is not finite is dropped, and
        its step is refused. After an exception all adapters are as before."""
        adapters = self.residency.bring(name for name, _ in steps)
        for adapter in adapters:
            self.residency.begin_change(adapter.name)
        norms = adamw.gradient_norms(adapters)
        finite = norms.isfinite().tolist()
        ready = [n for n, good in enumerate(finite) if good]
        together = [n for n in ready if not adapters[n].deterministic]
        if together:
            adamw.step([adapters[n] for n in together], [steps[n][1] for n in together], norms[together])
        failed: dict[int, Exception] = {}
        for n in set(ready).difference(together):
            try:
                adamw.step_alone(adapters[n], steps[n][1], norms[n])
            except Exception as error:  # noqa: BLE001 - its answer; others have stepped
                failed[n] = error
        results: list[StepResult | Exception] = []
        for n, (adapter, norm, good) in enumerate(zip(adapters, norms.tolist(), finite, strict=True)):
            if n in failed:
                results.append(failed[n])
            elif good:
                results.append(StepResult(adapter.steps, norm))
            else:
                adapter.gradient.zero_()
                results.append(NotFinite(
                    f"the norm of the gradient is {norm}: the step is refused, the gradient dropped, and the weights "
                    "are unchanged; check the losses, or lower the scale"
                ))  # fmt: skip
        return results

    def read(self, name: str) -> Adapter:
        """Return a copy of an adapter, on the bank's device. Raises NotFound."""
        (adapter,) = self.residency.bring([name])
        return adapter.copy_to(self.base.device)

    def shape(self, name: str) -> AdapterShape | FullShape:
        """Return an adapter's shape. Raises NotFound."""
        (adapter,) = self.residency.bring([name])
        return adapter.shape

    def write(self, name: str, vectors: Mapping[str, Tensor], steps: int | None) -> None:
        """Replace vectors of an adapter, and its step count unless None; its gradient sum is dropped. Raises
        NotFound."""
        (adapter,) = self.residency.bring([name])
        self.residency.begin_change(name)
        adapter.gradient.zero_()
        adapter.steps = adapter.steps if steps is None else steps
        for key, vector in vectors.items():
            adapter.vectors[key].copy_(vector)

    def close(self) -> None:
        """Store all adapters. Raises OSError."""
        self.residency.store_all()
