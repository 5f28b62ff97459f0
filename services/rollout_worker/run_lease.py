"""Runs a lease: loads tokenizer and engine of the job, and closes them in any case."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from opentinker.services.rollout_worker.checkpoint_weights import Beside, adapters_beside, weights_of
from opentinker.services.rollout_worker.engines.base import Engine, EngineError
from opentinker.services.rollout_worker.episode import Sessions
from opentinker.services.rollout_worker.eval_job import EvalJob
from opentinker.services.rollout_worker.inference_job import InferenceJob
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.rl_job import RolloutJob
from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.data.readable_paths import opening
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import Lease
from opentinker.shared.types.errors import JobFailed

UNTRAINED = ("inference", "eval")
"""Kinds of jobs without a trainer."""
MakeEngine = Callable[[JobSpec, Renderer, str, Sequence[Beside]], Engine]
"""The third is the model's directory or hub id; the last are the adapters that it will be given."""


async def run_lease(
    worker: LeasedWorker, lease: Lease, spec: JobSpec, make_engine: MakeEngine, sessions: Sessions
) -> None:
    """Load tokenizer and engine, then run the job. Raises JobFailed when the model cannot be served."""
    load = Renderer.load_light if spec.rollout.engine == "toy" else Renderer.load
    model = spec.model
    async with opening(worker.ctx.store, worker.ctx.settings, lease.job):
        renderer = await asyncio.to_thread(
            load, model.base, model.chat_template, model.tool_format, model.special_tokens_in_content
        )
    if spec.kind in UNTRAINED:
        await _with_given_weights(worker, lease, spec, make_engine, renderer, sessions)
        return
    engine = make_engine(spec, renderer, spec.model.base, ())
    try:
        await _start(worker, lease, engine, spec.model.base)
        await RolloutJob(worker, lease, spec, engine, renderer, sessions).run()
    finally:
        await finish_uncancelled(engine.close())  # its processes would live on


async def _with_given_weights(
    worker: LeasedWorker,
    lease: Lease,
    spec: JobSpec,
    make_engine: MakeEngine,
    renderer: Renderer,
    sessions: Sessions,
) -> None:
    """Run a job without training, with the weights of its base or of the checkpoint kept for it."""
    data_dir: Path = worker.ctx.settings.data_dir
    given = await asyncio.to_thread(weights_of, spec, data_dir, lease.job)
    version, full, adapter = given or (None, None, None)
    model = str(full or spec.model.base)
    beside = await asyncio.to_thread(adapters_beside, spec, data_dir, lease.job)
    engine = make_engine(spec, renderer, model, beside)
    try:
        await _start(worker, lease, engine, model)
        try:
            if version is not None:
                await engine.serve(version, adapter)
            for one in beside:
                await engine.add(one.name, one.version, one.place)
        except EngineError as error:
            raise JobFailed(f"{model} cannot be served: {error}") from None
        if spec.kind == "inference":
            await InferenceJob(worker, lease, spec, engine, renderer).run()
        else:
            await EvalJob(worker, lease, spec, engine, renderer, sessions).run()
    finally:
        await finish_uncancelled(engine.close())


async def _start(worker: LeasedWorker, lease: Lease, engine: Engine, model: str) -> None:
    try:
        async with opening(worker.ctx.store, worker.ctx.settings, lease.job):
            await engine.start()
    except EngineError as error:
        raise JobFailed(f"model {model!r} cannot be served: {error}") from None
