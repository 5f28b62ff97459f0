"""The rollout-worker process: takes one lease at a time and plays that job's episodes."""

from __future__ import annotations

import asyncio
import glob
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from opentinker.services.rollout_worker.checkpoint_weights import ServedAdapter
from opentinker.services.rollout_worker.engines import vllm_startup
from opentinker.services.rollout_worker.engines.base import Engine
from opentinker.services.rollout_worker.engines.gpu_split import GpuSplit
from opentinker.services.rollout_worker.engines.toy import ToyEngine
from opentinker.services.rollout_worker.engines.warm_engine import WarmEngine
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.run_lease import run_lease
from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.config import Settings
from opentinker.shared.data.readable_paths import readable_by
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.engines import EnginePolicy, adapter_serving, adapters_at_once
from opentinker.shared.spec.train import engine_ranks
from opentinker.shared.types.core import Lease, Pool
from opentinker.shared.types.env_protocol import owner_of
from opentinker.shared.types.errors import JobFailed

if TYPE_CHECKING:
    from opentinker.services.rollout_worker.engines.vllm_config import AdapterLimits

ENGINE = "opentinker.services.rollout_worker.engines.vllm"
AGENTS = ("agent_program", "verifiers")

TOY_CONTEXT = 4096
MAX_SEQUENCES = 256
"""Requests that vLLM works on at the same time; more wait inside it."""


async def serve(ctx: Context) -> None:
    warm = WarmEngine(ctx.settings.warm_engine_s, end_engine)

    async def work(worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
        worker.leftovers.append(f"{glob.escape(tempfile.gettempdir())}/{vllm_startup.OWN}{os.getpid()}-*")
        await import_engine(spec)
        owner = owner_of(worker.info.id, worker.info.incarnation)
        record = await ctx.store.job(lease.job)
        readable = await readable_by(ctx.store, ctx.settings, record.tenant, record.spec)
        sessions = EnvClient(ctx.bus, tenant=record.tenant, owner=owner, own_jobs=readable.own)
        make = partial(make_engine, settings=ctx.settings, warm=warm)
        await run_lease(worker, lease, spec, make, sessions, kept=warm.share)

    if ctx.settings.preload and vllm_startup.is_installed():
        # Before the first heartbeat: imports hold the interpreter for seconds, and a silent worker counts as dead.
        await asyncio.to_thread(vllm_startup.preload)
    with tempfile.TemporaryDirectory(prefix=f"{vllm_startup.OWN}{os.getpid()}-", ignore_cleanup_errors=True) as place:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", place)  # its sockets: of an engine that is killed they are left
        try:
            await LeasedWorker(ctx, Pool.ROLLOUT, work).serve()
        finally:
            await warm.close()


async def import_engine(spec: JobSpec) -> None:
    """Import the job's engine if needed: in a thread, because heartbeats must continue. Raises JobFailed."""
    if spec.rollout.toy is None and ENGINE not in sys.modules:
        if not vllm_startup.is_installed():
            raise JobFailed(
                "this rollout worker has no vLLM: install opentinker[rollout] where it runs, or take rollout.engine = "
                "'toy', which simulates one"
            )
        await finish_uncancelled(asyncio.to_thread(vllm_startup.preload))


def make_engine(
    spec: JobSpec,
    renderer: Renderer,
    model: str,
    adapters: Sequence[ServedAdapter],
    policies: Sequence[EnginePolicy],
    sharing: int,
    memory: GpuSplit,
    settings: Settings,
    warm: WarmEngine | None = None,
) -> Engine:
    """Return an engine for the first of `policies`, with room for all. `spec`: with the first one's settings;
    `model`: directory or hub id of the initial weights; `adapters`: those that will be added; `sharing`: engines of
    this worker, which share `memory`; `warm`: where the last job's may be. One that shares its GPU is not kept: the
    next job's trainer needs the room."""
    if spec.rollout.toy is not None:
        return ToyEngine(
            spec.rollout.toy,
            eos_id=min(renderer.eos_ids),
            vocab_size=renderer.vocab_size,
            context_length=spec.rollout.context_length or TOY_CONTEXT,
            echo_ids=renderer.digit_ids,
            group_timeout_s=settings.swap_timeout_s,
            sleeps=spec.rollout.sleep == "always",
        )
    from opentinker.services.rollout_worker.engines.vllm import VllmEngine
    from opentinker.services.rollout_worker.engines.vllm_process import VllmProcess

    serves = spec.kind in ("inference", "tinker")
    process = VllmProcess(
        model,
        dtype=spec.model.dtype,
        fp32_head=spec.model.fp32_head,
        context_length=spec.rollout.context_length,
        max_concurrent=min(_most_requests(spec, len(policies)), MAX_SEQUENCES),
        stop_strings=serves or bool(spec.rollout.stop) or may_name_stops(spec.environment.name),
        adapters=_adapter_limits(spec, adapters, policies),
        scores_prompts=spec.kind == "tinker",
        one_by_one=spec.train.deterministic,
        sharing=sharing,
        tensor_parallel=engine_ranks(spec),
        warm=warm,
        stays=all_from_trainer(spec)
        and len(policies) == sharing == 1
        and not (spec.train.deterministic or memory.sleeps or memory.is_shared),
        gpu_share=memory.share,
        sleeps=memory.sleeps,
    )
    return VllmEngine(process, eos_ids=renderer.eos_ids, lora=spec.model.lora, group_timeout_s=settings.swap_timeout_s)


def _most_requests(spec: JobSpec, policies: int) -> int:
    """Return how many requests a job's clients or episodes make at the same time."""
    if spec.kind == "tinker":
        return spec.tinker.max_concurrent
    if spec.kind == "inference":
        return spec.serving.max_concurrent
    episodes = 1 if spec.kind == "eval" else spec.algorithm.group_size + spec.rollout.oversample
    return spec.rollout.max_concurrent_groups * episodes * policies


def _adapter_limits(
    spec: JobSpec, adapters: Sequence[ServedAdapter], policies: Sequence[EnginePolicy]
) -> AdapterLimits | None:
    from opentinker.services.rollout_worker.engines.vllm_config import AdapterLimits

    if spec.kind == "tinker":
        if spec.tinker.full_weights:
            return None
        why = "each request names its adapter"
        return AdapterLimits(
            rank=spec.tinker.max_rank,
            at_once=spec.tinker.max_adapters,
            beside_base=True,
            separate_because=why,
        )
    if adapters:
        return AdapterLimits(rank=max(adapter.rank for adapter in adapters), at_once=len(adapters), beside_base=True)
    ranks = [policy.model.lora.rank for policy in policies if policy.model and policy.model.lora]
    if not ranks:
        return None
    serving, why = adapter_serving(spec, policies)
    return AdapterLimits(rank=max(ranks), at_once=adapters_at_once(policies), serving=serving, separate_because=why)


def all_from_trainer(spec: JobSpec) -> bool:
    """Return whether a trainer sends the weights before anything is sampled; a simulated one sends none."""
    return spec.kind == "rl" and spec.train.learner == "torch"


async def end_engine(llm: Any) -> None:
    from opentinker.services.rollout_worker.engines.vllm_process import end

    await end(llm)


def may_name_stops(environment: str) -> bool:
    """Return whether turns of this environment may end at strings that it names: agents, and user code. Other built-in
    environments name none."""
    return ":" in environment or environment in AGENTS
