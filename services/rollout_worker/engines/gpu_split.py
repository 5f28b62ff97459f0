"""Divides the memory of a GPU between the engines of a rollout worker and what else is on it: the job's trainer and
frozen models, other rollout workers, and the trainers of other jobs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.data.gpu_memory import (
    CONTEXT_BYTES,
    ModelSize,
    TrainingMemory,
    bank_bytes,
    model_size,
    training_bytes,
)
from opentinker.shared.data.model_files import parameters_in
from opentinker.shared.runtime.gpus import used_bytes
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.spec import JobSpec, read_stored
from opentinker.shared.spec.engines import bank_of
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.spec.train import engine_ranks
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Lease, Pool
from opentinker.shared.types.errors import JobFailed, SpecError
from opentinker.shared.types.workers import Gpu, WorkerInfo

ALONE = 0.9
"""Share of a GPU's memory for the engines of a rollout worker that has it for itself."""
SPARE = 0.04
"""Share that stays free on a GPU with several processes: plans are not exact, and allocators leave gaps."""
KV_SHARE = 0.1
"""An engine whose KV cache has less of the GPU's memory counts as one without room."""
TRAINER_S = 30.0
"""Time that a trainer has to start again, before a rollout worker plans without it."""
STEP_S = 60.0
"""Time in which a step of the trainer may end that takes more memory than is planned for the time between steps."""
POLL_S = 0.5
GB = 1e9
UNPLANNED = "the trainer is on this rollout worker's GPU, and there is no plan of its memory for the model"
INSTEAD = (
    "set rollout.gpu_memory_utilization to the share of the GPU that the engines may take, or give the worker another"
)
NO_PLAN = f"another job's trainer is on this rollout worker's GPU, and there is no plan of its memory here; {INSTEAD}"


class Unplanned(JobFailed):
    """There is no plan of the memory of the job's own trainer."""


class GpuSplit(NamedTuple):
    """GPU memory that the engines of a rollout worker may use."""

    share: float = ALONE
    """Share of the GPU's memory for all engines together."""
    sleeps: bool = False
    """They give it to the trainer during each optimizer step."""
    why: str = ""
    is_shared: bool = False
    """Another trainer, rollout worker or reference worker sees the GPU, of this job or not."""


class Neighbours(NamedTuple):
    """Bytes of the other processes on the GPU."""

    step: int
    """At the peak of an optimizer step."""
    rest: int
    """Between steps of the job's own trainer. Those of other jobs may take theirs then."""
    used: int
    """Measured now, by all processes; some may still be loading."""
    rollout_workers: int = 1
    """Rollout workers on the GPU, this one included: they have equal parts."""
    loaded: int = 0
    """Those of them whose engines are in `used` already."""
    other_jobs: int = 0
    """Other jobs that train on the GPU."""


def split(
    total: int,
    engine: int,
    near: Neighbours,
    *,
    sleep: Literal["auto", "always", "never"],
    may_sleep: bool,
    staged: int = 0,
) -> GpuSplit:
    """Divide `total` bytes. `engine`: bytes of the weights that the engines load; `staged`: of versions that they have
    received and not loaded yet, outside their share. Raises JobFailed if there is no room.

    Engines next to the step, if their KV cache keeps `KV_SHARE` of the GPU; otherwise engines that sleep during it.
    """
    needed = engine + int(KV_SHARE * total / near.rollout_workers)
    if not near.step and near.rollout_workers == 1:
        return _alone(total, engine, needed, near, staged)._replace(sleeps=sleep == "always")
    told = f"{total / GB:.0f} GB: {near.step / GB:.1f} for a step of the trainer and frozen models"
    if near.other_jobs:
        told += f", and for steps of {near.other_jobs} other job{'s' if near.other_jobs > 1 else ''}"
    told += f", {staged / GB:.1f} for a version that arrives" if staged else ""
    beside = _share(total, near.step, near, staged)
    if beside * total >= needed and sleep != "always":
        return GpuSplit(beside, False, f"{told}, {beside * total / GB:.1f} for this worker's engines")
    between = _share(total, near.rest, near, staged)
    if may_sleep and sleep != "never" and between * total >= needed:
        held = f"{near.rest / GB:.1f} between steps"
        return GpuSplit(between, True, f"{told} ({held}), so the engines sleep during steps")
    if beside * total > engine and sleep != "always":
        return GpuSplit(beside, False, f"{told}, which leaves {beside * total / GB:.1f}: a small KV cache")
    raise JobFailed(
        f"the trainer and a rollout worker share a GPU of {told}; {near.used / GB:.1f} are in use; the engines need "
        f"{needed / GB:.1f}, and {max(beside, between) * total / GB:.1f} are left. Set train.gradient_checkpointing, a "
        "smaller train.tokens_per_micro_batch or model.lora, or give the rollout worker another GPU"
    )


def _alone(total: int, engine: int, needed: int, near: Neighbours, staged: int) -> GpuSplit:
    """Return the share of engines that have the GPU for themselves, as far as we know."""
    share = _share(total, 0, near, staged)
    if share * total < needed:  # the trainer's version may come by the machine's memory
        share = _share(total, 0, near, 0)
    if share == ALONE:
        return GpuSplit()
    told = f"{total / GB:.0f} GB: {near.used / GB:.1f} in use by other processes"
    if share * total <= engine:
        raise JobFailed(
            f"a rollout worker's GPU has {told}; the engines need {needed / GB:.1f}, and {share * total / GB:.1f} are "
            "left. End the processes that `nvidia-smi` lists, or give the rollout worker another GPU"
        )
    return GpuSplit(
        share, False, f"{told}, {staged / GB:.1f} for a version that arrives, {share * total / GB:.1f} left"
    )


def _share(total: int, taken: int, near: Neighbours, staged: int) -> float:
    """Return this worker's part of the GPU: an equal one of what `taken` leaves by plan, and no more than an equal one
    of what is free now, among those that have not loaded."""
    planned = (1.0 - SPARE - taken / total) / near.rollout_workers
    free = (1.0 - SPARE - near.used / total) / max(1, near.rollout_workers - near.loaded)
    return max(0.0, min(ALONE / near.rollout_workers, min(planned, free) - staged / total))


async def gpu_split(
    worker: LeasedWorker,
    lease: Lease,
    spec: JobSpec,
    model: str,
    engines: int = 1,
    *,
    kept: float = 0.0,
    frozen: int = 0,
) -> GpuSplit:
    """Return what the engines of this worker may take, and report it in the job's events where the GPU is shared or
    the spec says how much. Before one of them is loaded. `model`: what each of them loads; `kept`: share of the
    GPU that the engine of the worker's last job still has; it serves this one, or ends first; `frozen`:
    engines that no trainer sends versions to."""
    sleeps = spec.rollout.sleep == "always"
    if spec.rollout.toy is not None or not worker.info.gpus:
        return GpuSplit(sleeps=sleeps)
    ranks, workers = engine_ranks(spec), await _workers(worker.ctx.store, spec, lease.job)
    if (share := spec.rollout.gpu_memory_utilization) is not None:
        found = GpuSplit(share, sleeps, "rollout.gpu_memory_utilization")
    else:
        weights = await asyncio.to_thread(weight_bytes, model, spec.model.dtype)
        engine, staged = engines * weights // ranks, 0
        if ranks == 1 and _stages(spec):
            staged = (engines - frozen) * weights
        how: dict[str, Any] = {"sleep": spec.rollout.sleep, "may_sleep": len(spec.policies) < 2, "staged": staged}
        gpus, splits = worker.info.gpus[:ranks], list[GpuSplit]()
        deadline = time.monotonic() + STEP_S
        while len(splits) < len(gpus):  # vLLM takes the same share of each
            gpu = gpus[len(splits)]
            used = max(0, (await asyncio.to_thread(used_bytes, gpu.uuid) or 0) - int(kept * gpu.memory))
            try:
                near = await _neighbours(worker.ctx.store, spec, lease.job, gpu, gpus, workers, used)
                splits.append(split(gpu.memory, engine, near, **how))
            except JobFailed as error:  # a step, or the other job, may end
                if isinstance(error, Unplanned) or time.monotonic() >= deadline:
                    raise
                await sleep(POLL_S)
        found = min(splits, key=lambda one: one.share)._replace(sleeps=any(one.sleeps for one in splits))
        if found.share * min(gpu.memory for gpu in gpus) < engine:
            raise JobFailed(
                f"vLLM takes the same share of each GPU of this rollout worker, {found.share:.0%}, which one of them "
                f"limits, and the engine needs {engine / GB:.1f} GB of each. Give the worker GPUs with equal room"
            )
        if kept and abs(found.share - kept) < SPARE / 2:  # no engine takes its share to the byte
            found = found._replace(share=kept)
    found = found._replace(is_shared=is_shared(worker.info, ranks, workers))
    if found.why:
        detail = {**found._asdict(), "worker": worker.info.id}
        await worker.ctx.store.update(lease.job, event="engine_memory", detail=detail)
    return found


async def _neighbours(
    store: Store, spec: JobSpec, job: str, gpu: Gpu, gpus: Iterable[Gpu], workers: Iterable[WorkerInfo], used: int
) -> Neighbours:
    """Return the neighbours on a GPU, with the trainers that have a job there now. `gpus`: all of this worker."""
    leases = await _leases(store, gpus, workers)
    jobs = await _other_jobs(store, job, leases)
    return await asyncio.to_thread(neighbours, spec, job, gpu, _placed(workers, leases), used, jobs, leases)


async def _workers(store: Store, spec: JobSpec, job: str) -> list[WorkerInfo]:
    """Return all workers; before that wait a little for the job's trainer, which may be starting again."""
    deadline = time.monotonic() + TRAINER_S
    while True:
        found = await store.workers()
        if spec.kind not in ("rl", "tinker") or not spec.resources.trainer_gpus or time.monotonic() >= deadline:
            return found
        if any(w.pool == Pool.TRAINER and w.job in (job, None) for w in found):
            return found
        await sleep(POLL_S)


async def _leases(store: Store, gpus: Iterable[Gpu], workers: Iterable[WorkerInfo]) -> list[Lease]:
    """Return the leases of the trainers on these GPUs."""
    ours = {gpu.uuid for gpu in gpus}
    there = [w.id for w in workers if w.pool == Pool.TRAINER and any(gpu.uuid in ours for gpu in w.gpus)]
    return [lease for id in there if (lease := await store.lease(id)) is not None]


def _placed(workers: Iterable[WorkerInfo], leases: Iterable[Lease]) -> list[WorkerInfo]:
    """Return the workers, each with the job of its lease, if it has not taken it yet."""
    job_of = {one.worker: one.job for one in leases}
    return [msgspec.structs.replace(w, job=w.job or job_of.get(w.id)) for w in workers]


async def _other_jobs(store: Store, job: str, leases: Iterable[Lease]) -> dict[str, JobSpec]:
    """Return the specs of the other jobs that have one of these leases, by id. Raises JobFailed, without its settings,
    where one cannot be read here."""
    records = await store.jobs(sorted({one.job for one in leases} - {job}))
    try:
        return {record.id: read_stored(record.spec) for record in records}
    except SpecError:  # of another release
        raise JobFailed(NO_PLAN) from None


def is_shared(own: WorkerInfo, ranks: int, workers: Iterable[WorkerInfo]) -> bool:
    """Return whether another worker, of any job or none, sees one of the GPUs that this one uses."""
    ours = {gpu.uuid for gpu in own.gpus[:ranks]}
    return any(one.id != own.id and ours & {gpu.uuid for gpu in one.gpus} for one in workers)


def _stages(spec: JobSpec) -> bool:
    """Return whether all weights of a version arrive in memory of the GPU before they are loaded; adapters are
    small."""
    if spec.model.lora is not None:
        return False
    if spec.kind == "rl":
        return bool(spec.resources.trainer_gpus) and spec.train.learner == "torch"
    return spec.start is not None and spec.start.live


def neighbours(
    spec: JobSpec,
    job: str,
    gpu: Gpu,
    workers: Sequence[WorkerInfo],
    used: int,
    jobs: Mapping[str, JobSpec],
    leases: Sequence[Lease] = (),
) -> Neighbours:
    """Return what other processes on the GPU take or will take: an idle trainer may be about to begin. `jobs`: specs of
    those that other trainers have, by id. Blocking: reads configurations. Raises Unplanned where it cannot
    plan the job's own trainer, and JobFailed for another's."""
    here = [w for w in workers if any(own.uuid == gpu.uuid for own in w.gpus)]
    rollout = [w for w in here if w.pool == Pool.ROLLOUT]
    loaded = min(sum(w.status in ("ready", "draining") for w in rollout), max(0, len(rollout) - 1))
    trainers = [w for w in here if w.pool == Pool.TRAINER and not w.bank]
    step = rest = 0
    if not _is_shared(spec) and any(w.job in (job, None) for w in trainers):
        step, rest = _trainer(spec, job, trainers, leases)
    there = {w.job for w in trainers}
    taken = [_other_trainer(its, other, trainers, leases) for other, its in jobs.items() if other in there]
    banks = [w for w in here if w.pool == Pool.TRAINER and w.bank]
    in_banks = [other for other, its in jobs.items() if _is_shared(its) and other in {w.job for w in banks}]
    other_jobs = sum(map(bool, taken)) + len(in_banks)
    taken += [_bank(spec, job, [w for w in banks if w.bank == process], jobs) for process in {w.bank for w in banks}]
    step, rest = step + sum(taken), rest + sum(taken)  # their steps come at any time, and no engine here sleeps then
    if any(w.pool == Pool.REFERENCE for w in here):
        owns = [spec_of(spec, name) for name in spec.policies or ("",)]
        frozen = [(base, dtype) for base, dtype, *_ in {_reference(own) for own in owns if own.algorithm.kl_coef > 0}]
        for models in ({own.teacher for own in owns}, {own.value_model for own in owns}):
            frozen += [(one.base, one.dtype) for one in models if one is not None]
        frozen += [(one.base, one.dtype) for one in spec.reward_models]
        held = sum(weight_bytes(*model) for model in frozen) + CONTEXT_BYTES if frozen else 0
        step, rest = step + held, rest + held
    return Neighbours(max(step, rest), rest, used, max(1, len(rollout)), loaded, other_jobs)


def _reference(spec: JobSpec) -> tuple[str, str, bool, str]:
    """Return the identity of a policy's reference model, as reference-forward has it: base, dtype, fp32_head, and the
    checkpoint that the policy starts from, whose weights have the size of the base."""
    start = "" if spec.start is None else spec.start.checkpoint
    return spec.model.base, spec.model.dtype, spec.model.fp32_head, start


def weight_bytes(base: str, dtype: str) -> int:
    """Return the size of a model's weights; 0 if they are not on this machine."""
    return int(parameters_in(Path(base).expanduser()) or 0) * (2 if dtype == "bfloat16" else 4)


def _trainer(
    spec: JobSpec, job: str, trainers: Iterable[WorkerInfo], leases: Iterable[Lease], *, by_files: bool = False
) -> tuple[int, int]:
    """Return the bytes of the job's trainer on a GPU of these trainers, at the peak of a step and between steps."""
    if not spec.resources.trainer_gpus:
        return 0, 0
    held = [one for one in leases if one.job == job and one.pool == Pool.TRAINER]
    group = next((one.group for one in held if one.group), ())
    ranks = sum(share.ranks for share in group) or spec.resources.ranks
    if not held:  # it may get fewer than it asks for
        ranks = spec.resources.min_trainer_ranks or ranks
    leads = not group or any(one.id == group[0].worker for one in trainers)
    found = planned(spec, None if len(spec.policies) > 1 else ranks, leads=leads, by_files=by_files)
    return sum(one.total for one in found) + CONTEXT_BYTES, sum(one.rest for one in found) + CONTEXT_BYTES


def _is_shared(spec: JobSpec) -> bool:
    """Return whether the job trains in a process with others, on its GPU."""
    return bool(spec.resources.trainer == "shared" and spec.resources.trainer_gpus)


def _bank(spec: JobSpec, job: str, places: Sequence[WorkerInfo], jobs: Mapping[str, JobSpec]) -> int:
    """Return the bytes of a process whose jobs share a base, at the peak of a pass. It may be about to get this job."""
    there = {w.job for w in places}
    found = {other: its for other, its in jobs.items() if other in there and _is_shared(its)}
    bases = {bank_of(other.model_dump()) for other in found.values()}
    if _is_shared(spec) and there & {job, None} and bases <= {bank_of(spec.model_dump())}:
        found[job] = spec
    if not found:
        return 0
    owns = [spec_of(one, name) for one in found.values() for name in one.policies or ("",)]
    tokens = max(w.bank_tokens for w in places)
    if job in found:
        return bank_bytes(owns, _size_of(spec.model.base, by_files=False), tokens) + CONTEXT_BYTES
    try:
        return bank_bytes(owns, _size_of(owns[0].model.base, by_files=True), tokens) + CONTEXT_BYTES
    except Unplanned:
        raise JobFailed(NO_PLAN) from None


def _other_trainer(spec: JobSpec, job: str, trainers: Iterable[WorkerInfo], leases: Iterable[Lease]) -> int:
    """Return the bytes of another job's trainer at the peak of a step. Raises JobFailed, without naming its model,
    where its files are not here."""
    try:
        return _trainer(spec, job, trainers, leases, by_files=True)[0]
    except Unplanned:
        raise JobFailed(NO_PLAN) from None


def planned(
    spec: JobSpec, ranks: int | None = None, *, leads: bool = True, by_files: bool = False
) -> list[TrainingMemory]:
    """Return the memory plan of each policy's trainer, see `training_bytes`. Raises Unplanned for models of unknown
    dimensions; `by_files`: plans those by the size of their files, without activations and logits."""
    owns = [spec_of(spec, name) for name in spec.policies or ("",)]
    return [training_bytes(own, _size_of(own.model.base, by_files), ranks, leads=leads) for own in owns]


def _size_of(base: str, by_files: bool) -> ModelSize:
    """Raises Unplanned."""
    directory = Path(base).expanduser()
    try:
        counted = int(parameters_in(directory))
        size = model_size(json.loads((directory / "config.json").read_text()), counted)
    except (OSError, ValueError) as error:
        raise Unplanned(f"{UNPLANNED} {base!r}: its config.json cannot be read here ({error}); {INSTEAD}") from error
    if size is None and by_files and counted:
        return ModelSize(0, 0, 0, 0, 0, 0, tied=True, counted=counted)
    if size is None:
        raise Unplanned(
            f"{UNPLANNED} {base!r}: its config.json lacks dimensions of a decoder, or, of a model with experts, its "
            f"*.safetensors are not here; {INSTEAD}"
        )
    return size
