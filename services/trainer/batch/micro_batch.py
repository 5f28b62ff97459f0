"""From groups to tensors: the micro-batches of a batch's optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opentinker.services.trainer.algorithm import losses
from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.services.trainer.algorithm.credit_assignment import Credit
from opentinker.services.trainer.algorithm.seats import seat_plays
from opentinker.services.trainer.distributed.process_group import ProcessGroup
from opentinker.shared.nn.layout import I64, Layout, layout, with_ends
from opentinker.shared.nn.packing import passes_by_rank
from opentinker.shared.nn.vision import mark_image_tokens
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Group, Trajectory


@dataclass
class Ends:
    """A forward pass that returns, besides the values before sampled tokens, those of end states."""

    plan: Layout
    """The micro-batch's layout with an additional token at the end of each truncated trajectory."""
    added: Tensor
    """bool [M + truncated trajectories]: which of its mask-1 tokens these are."""
    places: Tensor
    """int64: of the truncated ones among the members."""


@dataclass
class MicroBatch:
    """Input of one forward pass. M: mask-1 tokens, trajectory by trajectory."""

    members: list[int]
    """Indices of its trajectories in the batch. Empty: nothing is learned from it, see `_idle`."""
    plan: Layout
    behaviour_M: Tensor
    reference_M: Tensor | None
    """With KL in the loss."""
    current_M: Tensor
    """bool: sampled by exactly the weights that the trainer holds now."""
    lag_M: Tensor
    """float: versions that the weights which sampled the token lag behind the trainer's."""
    sequence_M: Tensor
    """int64: place in `members` of the trajectory that a token belongs to."""
    tokens: int
    """All tokens of its trajectories, prompts and observations included."""
    batch_tokens: int
    """Sampled tokens of its whole optimizer step."""
    scale_M: Tensor
    """Weight of the token in the loss of its optimizer step."""
    advantages_M: Tensor
    """0 until `give_credit`."""
    start_M: Tensor | None = None
    """Log-probabilities under the weights before the batch, unless the update's own forward pass computes them."""
    values_M: Tensor | None = None
    """The critic's values before the batch."""
    ends: Ends | None = None
    """End states of truncated trajectories, if a critic is trained."""
    end_values_S: Tensor | None = None
    """The critic's values of the end states of the `members`; 0 for those that were not truncated."""
    returns_M: Tensor | None = None
    """Targets of the critic."""

    def move_columns(self, device: torch.device | str) -> None:
        """Move all but the layouts to the device on which losses are computed."""
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), Tensor):
                setattr(self, field.name, value.to(device))

    @property
    def counts(self) -> list[int]:
        return torch.bincount(self.sequence_M, minlength=len(self.members)).tolist()  # type: ignore[no-any-return]


def micro_batches(
    groups: Sequence[Group],
    version: WeightVersion,
    spec: JobSpec,
    device: torch.device,
    process_group: ProcessGroup | None = None,
) -> list[list[MicroBatch]]:
    """A batch -> the micro-batches of each optimizer step; with a process group, this rank's.

    Siblings stay together with their shared prompts: ranks get consecutive trajectories, about equally many tokens
    each, and a rank may get none.
    """
    size = len(groups) // spec.algorithm.updates_per_batch
    updates, first = [], 0
    for start in range(0, len(groups), size):
        part = groups[start : start + size]
        updates.append(_update(part, first, version, spec, device, process_group or ProcessGroup()))
        first += sum(len(group.trajectories) for group in part)
    return updates


def _update(
    groups: Sequence[Group],
    first: int,
    version: WeightVersion,
    spec: JobSpec,
    device: torch.device,
    process_group: ProcessGroup,
) -> list[MicroBatch]:
    part = [t for group in groups for t in group.trajectories]
    images = {digest: data for group in groups for digest, data in group.images.items()}
    plays = [play for play in seat_plays(groups) if play.tokens]
    wholes = {place: play.tokens for play in plays for place in play.places}
    sampled = [i for i, t in enumerate(part) if t.mask.any()]
    if not sampled:
        raise JobFailed("a whole batch came without one sampled token: do the prompts fill the context window?")
    tokens = sum(int(np.count_nonzero(part[i].mask)) for i in sampled)
    lengths = [len(part[i].mask_T) for i in sampled]
    passes_R = passes_by_rank(lengths, spec.train.tokens_per_micro_batch, process_group.world)
    micros = []
    for places in passes_R[process_group.rank]:
        members = [sampled[place] for place in places]
        micro = _micro_batch([part[i] for i in members], version, spec, device, tokens, images)
        micro.scale_M = _scale(micro, [wholes[i] for i in members], len(plays), spec)
        micro.members = [first + i for i in members]
        micros.append(micro)
    if spec.train.parallel != "data":
        missing = max(map(len, passes_R)) - len(micros)
        micros += [_idle(part[sampled[0]], version, spec, device) for _ in range(missing)]
    return micros


def _idle(trajectory: Trajectory, version: WeightVersion, spec: JobSpec, device: torch.device) -> MicroBatch:
    """Return the smallest possible pass, for a rank that has fewer than the others: ranks that share weights or
    gradients must run the same number of passes."""
    first = int(np.flatnonzero(trajectory.mask)[0])
    short = msgspec.structs.replace(
        trajectory,
        ids_T=trajectory.ids[first - 1 : first + 1].tobytes(),
        mask_T=trajectory.mask[first - 1 : first + 1].tobytes(),
        logprobs_T=trajectory.logprobs[first - 1 : first + 1].tobytes(),
        ref_logprobs_T=trajectory.logprobs[first - 1 : first + 1].tobytes(),
        pictures=[],
    )
    return _micro_batch([short], version, spec, device, 1, {})


def _micro_batch(
    trajectories: list[Trajectory],
    version: WeightVersion,
    spec: JobSpec,
    device: torch.device,
    batch_tokens: int,
    images: Mapping[str, bytes],
) -> MicroBatch:
    rows, shown = mark_image_tokens(trajectories, images)
    masks = [t.mask.astype(bool) for t in trajectories]
    counts = torch.tensor([int(mask.sum()) for mask in masks], device=device)
    reference = None
    if spec.algorithm.kl_in == "loss":
        reference = _tensor([_reference(t)[m] for t, m in zip(trajectories, masks, strict=True)], np.float32, device)
    behaviour = _tensor([t.logprobs[m] for t, m in zip(trajectories, masks, strict=True)], np.float32, device)
    return MicroBatch(
        members=[],
        plan=layout(rows, masks, shown=shown).to(device),
        ends=_ends(rows, trajectories, device) if trains_critic(spec) else None,
        behaviour_M=behaviour,
        reference_M=reference,
        current_M=_tensor([_current(t, version)[m] for t, m in zip(trajectories, masks, strict=True)], bool, device),
        lag_M=_tensor([_lags(t, version)[m] for t, m in zip(trajectories, masks, strict=True)], np.float32, device),
        sequence_M=torch.arange(len(trajectories), device=device).repeat_interleave(counts),
        tokens=sum(len(m) for m in masks),
        batch_tokens=batch_tokens,
        scale_M=torch.zeros_like(behaviour),
        advantages_M=torch.zeros_like(behaviour),
    )


def trains_critic(spec: JobSpec) -> bool:
    return spec.algorithm.advantage == "gae" and spec.value_model is None


def _ends(rows: list[I64], trajectories: list[Trajectory], device: torch.device) -> Ends | None:
    places = [place for place, t in enumerate(trajectories) if t.truncated]
    if not places:
        return None
    plan = layout(*with_ends(rows, [t.mask for t in trajectories], [t.truncated for t in trajectories]))
    added = [[False] * int(t.mask.sum()) + [True] * t.truncated for t in trajectories]
    return Ends(
        plan=plan.to(device),
        added=_tensor([np.array(part) for part in added], bool, device),
        places=torch.tensor(places, device=device),
    )


def give_credit(micros: Sequence[MicroBatch], credit: Credit) -> None:
    """Attach the advantages of the batch, and the critic's targets, to the tokens of the micro-batches."""
    for micro in micros:
        if not micro.members:
            continue
        device = micro.behaviour_M.device
        micro.advantages_M = _tensor([credit.advantages_S[i] for i in micro.members], np.float32, device)
        if credit.returns_S is not None:
            micro.returns_M = _tensor([credit.returns_S[i] for i in micro.members], np.float32, device)


def values_of(micros: Sequence[MicroBatch], counts_S: Sequence[int], process_group: ProcessGroup) -> list[F64]:
    """Return the critic's values, trajectory by trajectory of the whole batch; `counts_S`: their sampled tokens."""
    ends = np.cumsum(counts_S)
    values = torch.zeros(int(ends[-1]), device=process_group.device)
    for micro in micros:
        assert micro.values_M is not None
        for member, part in zip(micro.members, micro.values_M.split(micro.counts), strict=True):
            values[ends[member] - len(part) : ends[member]] = part
    return np.split(process_group.sum(values).double().cpu().numpy(), ends[:-1])


def end_values_of(micros: Sequence[MicroBatch], count: int, process_group: ProcessGroup) -> F64:
    """Return the critic's values of the end states of the `count` trajectories of the whole batch; 0 for those that
    were not truncated."""
    values = torch.zeros(count, device=process_group.device)
    for micro in micros:
        if micro.end_values_S is not None and micro.members:
            values[micro.members] = micro.end_values_S
    found: F64 = process_group.sum(values).double().cpu().numpy()
    return found


def sizes(micros: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Return token counts of this rank, one number each."""
    micros = [micro for micro in micros if micro.members]
    return {
        "tokens": torch.tensor([sum(len(micro.behaviour_M) for micro in micros)]),
        "tokens/total": torch.tensor([sum(micro.tokens for micro in micros)]),
        "tokens/computed": torch.tensor([sum(len(micro.plan.ids_N) for micro in micros)]),
    }


def size_metrics(columns: Mapping[str, F64]) -> dict[str, float]:
    """tokens, tokens/total, tokens/computed of all ranks; trainer/rank_imbalance: tokens that the busiest rank computed
    as a multiple of the mean, so that 1 is perfect (absent for a single rank)."""
    metrics = {name: float(columns[name].sum()) for name in ("tokens", "tokens/total", "tokens/computed")}
    computed = columns["tokens/computed"]
    if len(computed) > 1:
        metrics["trainer/rank_imbalance"] = float(computed.max() / computed.mean())
    return metrics


def _scale(micro: MicroBatch, wholes: list[int], plays: int, spec: JobSpec) -> Tensor:
    """Return the loss weights [M]. A sequence is the output of one seat in one sample: `wholes` are the token counts of
    the sequences that the members belong to, `plays` the number of sequences in the optimizer step."""
    counts_S = torch.bincount(micro.sequence_M)
    match spec.algorithm.aggregation:
        case "sequence_mean":
            return losses.sequence_mean(counts_S, plays, torch.tensor(wholes, device=counts_S.device))
        case "constant":
            return losses.constant(counts_S, plays, spec.rollout.max_tokens)
        case _:
            return losses.token_mean(counts_S, micro.batch_tokens)


def _reference(trajectory: Trajectory) -> npt.NDArray[np.float32]:
    reference = trajectory.ref_logprobs
    if reference is None:
        raise JobFailed(f"kl_coef > 0 but trajectory {trajectory.attempt} came without reference logprobs")
    return reference


def _current(trajectory: Trajectory, version: WeightVersion) -> npt.NDArray[np.bool_]:
    current = np.zeros(len(trajectory.mask_T), dtype=bool)
    for span in trajectory.spans:
        if span.version == version:
            current[span.start : span.end] = True
    return current


def _lags(trajectory: Trajectory, version: WeightVersion) -> npt.NDArray[np.int64]:
    """Return lags in steps, regardless of epochs: after a resume the trainer continues from steps of earlier epochs."""
    lags = np.zeros(len(trajectory.mask_T), dtype=np.int64)
    for span in trajectory.spans:
        lags[span.start : span.end] = version.step - span.version.step
    return lags


def _tensor(parts: list[Any], dtype: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(dtype, copy=False)).to(device)
