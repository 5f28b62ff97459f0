"""The rollout-worker process: takes one lease at a time and plays that job's episodes."""

from __future__ import annotations

import asyncio

from opentinker.shared.env_client import EnvClient

from opentinker.services.rollout_worker.engine import Engine
from opentinker.services.rollout_worker.render import Renderer
from opentinker.services.rollout_worker.toy_engine import ToyEngine
from opentinker.services.rollout_worker.worker import serve_lease
from opentinker.shared.config import Settings
from opentinker.shared.leasing import LeasedWorker
from opentinker.shared.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.types import Lease, Pool

TOY_CONTEXT = 4096


async def serve(ctx: Context) -> None:
    async def work(worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
        await serve_lease(worker, lease, spec, lambda s, r: make_engine(s, r, ctx.settings), EnvClient(ctx.bus))

    preload = asyncio.create_task(asyncio.to_thread(_preload))
    await LeasedWorker(ctx, Pool.ROLLOUT, work).serve()
    await preload


def make_engine(spec: JobSpec, renderer: Renderer, settings: Settings) -> Engine:
    if spec.rollout.engine == "toy":
        return ToyEngine(
            spec.rollout.toy,
            eos_id=min(renderer.eos_ids),
            vocab_size=renderer.vocab_size,
            context_length=spec.rollout.context_length or TOY_CONTEXT,
            echo_ids=renderer.digit_ids,
            group_timeout_s=settings.swap_timeout_s,
        )
    from opentinker.services.rollout_worker.vllm_engine import VllmEngine

    return VllmEngine(spec, settings)


def _preload() -> None:
    """Imports vllm: many seconds, so it is done before the first job comes."""
    from opentinker.services.rollout_worker.vllm_engine import preload

    preload()
