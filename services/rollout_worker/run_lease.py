"""Runs a lease: loads tokenizer and engine of the job, or of its policies, frozen checkpoints and pools, of which
adapters of one base share an engine; connects the models behind URLs, and closes them in any case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack

from opentinker.services.rollout_worker.checkpoint_weights import (
    FixedWeights,
    ServedAdapter,
    frozen_weights,
    served_adapters,
    weights_of,
)
from opentinker.services.rollout_worker.engines.base import Engine, EngineError
from opentinker.services.rollout_worker.engines.gpu_split import GpuSplit, gpu_split
from opentinker.services.rollout_worker.episode_protocol import Sessions
from opentinker.services.rollout_worker.eval_job import EvalJob
from opentinker.services.rollout_worker.inference_job import InferenceJob
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.rl_job import RolloutJob
from opentinker.services.rollout_worker.seat_map import LoadedPolicy
from opentinker.services.rollout_worker.tinker.tinker_job import TinkerJob
from opentinker.services.rollout_worker.url_player import UrlPlayer
from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.data.readable_paths import opening
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.security.egress import Egress
from opentinker.shared.security.model_keys import key_problem, read_model_keys
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.engines import EnginePolicy, engine_policies, engines
from opentinker.shared.spec.matches.policies import frozen_spec_of, pool_spec_of, spec_of
from opentinker.shared.spec.matches.seats import all_players, urls_in
from opentinker.shared.types.core import Lease
from opentinker.shared.types.errors import JobFailed, SpecError

MakeEngine = Callable[[JobSpec, Renderer, str, Sequence[ServedAdapter], Sequence[EnginePolicy], int, GpuSplit], Engine]
"""See `service.make_engine`."""


async def run_lease(
    worker: LeasedWorker,
    lease: Lease,
    spec: JobSpec,
    make_engine: MakeEngine,
    sessions: Sessions,
    *,
    kept: float = 0.0,
) -> None:
    """Load tokenizer and engine, then run the job. `kept`: share of the GPU that the last job's engine still has.
    Raises JobFailed when the model cannot be served."""
    async with AsyncExitStack() as held:
        load = Loader(worker, lease, spec, make_engine, held, kept=kept)
        policies = await load.policies()
        if spec.kind == "inference":
            await InferenceJob(worker, lease, spec, policies[0].engine, policies[0].renderer).run()
        elif spec.kind == "tinker":
            await TinkerJob(worker, lease, spec, policies[0].engine).run()
        elif spec.kind == "eval":
            await EvalJob(worker, lease, spec, policies, sessions, await load.urls(policies[0])).run()
        else:
            await RolloutJob(worker, lease, spec, policies, sessions, await load.urls(policies[0])).run()


class Loader:
    """Loads the policies of a lease. `held` closes their engines."""

    def __init__(
        self,
        worker: LeasedWorker,
        lease: Lease,
        spec: JobSpec,
        make_engine: MakeEngine,
        held: AsyncExitStack,
        *,
        kept: float,
    ) -> None:
        self._worker, self._lease, self._spec, self._make_engine, self._held = worker, lease, spec, make_engine, held
        self._engines = engines(spec)
        self._kept = kept
        self._memory: GpuSplit | None = None
        """Split for all engines, measured before the first of them is loaded."""

    async def policies(self) -> list[LoadedPolicy]:
        """Load the policies of the job, then frozen checkpoints and pools that play in it. `opponents.py` gives a
        pool the weights of its members."""
        loaded: dict[str, LoadedPolicy] = {}
        for policies in self._engines:
            async for one in self._on_one_engine(policies):
                loaded[one.name] = one
        return [loaded[policy.name] for policy in engine_policies(self._spec)]

    async def _on_one_engine(self, policies: Sequence[EnginePolicy]) -> AsyncIterator[LoadedPolicy]:
        engine: Engine | None = None
        for policy in policies:
            own = self._spec_of(policy)
            given, adapters = await asyncio.to_thread(self._weights, policy)
            model = own.model.base if given is None or given.full is None else str(given.full)
            renderer = await self._renderer(own)
            if engine is None:
                memory = await self._split(model)
                engine = view = self._make_engine(own, renderer, model, adapters, policies, len(self._engines), memory)
                self._held.push_async_callback(_close, engine)
                await _start(self._worker, self._lease, engine, model)
                await self._say_lora(engine)
            else:
                assert own.model.lora is not None, "only adapters share an engine"
                view = engine.sibling(renderer.eos_ids, own.model.lora)
            loaded = LoadedPolicy(policy.name, own, view, renderer, policy.is_frozen or bool(policy.pool))
            await _serve(loaded, model, given, adapters)
            yield loaded

    async def _split(self, model: str) -> GpuSplit:
        if self._memory is None:
            frozen = sum(all(one.is_frozen or one.pool for one in policies) for policies in self._engines)
            self._memory = await gpu_split(
                self._worker,
                self._lease,
                self._spec,
                model,
                len(self._engines),
                kept=self._kept,
                frozen=frozen,
            )
        return self._memory

    async def _say_lora(self, engine: Engine) -> None:
        """Report in the job's events how the engine serves adapters."""
        if engine.lora is not None:
            detail = {**engine.lora._asdict(), "worker": self._worker.info.id}
            await self._worker.ctx.store.update(self._lease.job, event="lora_served", detail=detail)

    def _spec_of(self, policy: EnginePolicy) -> JobSpec:
        if policy.pool:
            return pool_spec_of(self._spec, policy.pool)
        return frozen_spec_of(self._spec, policy.name) if policy.is_frozen else spec_of(self._spec, policy.name)

    def _weights(self, policy: EnginePolicy) -> tuple[FixedWeights | None, Sequence[ServedAdapter]]:
        """Return the weights that no trainer sends, and the adapters served with them. Blocking."""
        data_dir, job = self._worker.ctx.settings.data_dir, self._lease.job
        if policy.is_frozen:
            return frozen_weights(data_dir, job, policy.name), ()
        if self._spec.kind == "rl":
            return None, ()
        return weights_of(self._spec, data_dir, job), served_adapters(self._spec, data_dir, job)

    async def urls(self, first: LoadedPolicy) -> list[UrlPlayer]:
        """Return the models behind URLs that play in the job. Raises JobFailed without the key of one."""
        seats = urls_in(all_players(self._spec))
        if not seats:
            return []
        settings = self._worker.ctx.settings
        path = settings.model_keys_file if any(seat.key is not None for seat in seats) else None
        try:
            keys = await asyncio.to_thread(read_model_keys, path)
        except SpecError as error:
            raise JobFailed(f"rollout worker: {error}") from None
        tenant = (await self._worker.ctx.store.job(self._lease.job)).tenant
        http = await self._held.enter_async_context(Egress(tuple(settings.env_egress_allow)).session(limit=0))
        found = []
        for seat in seats:
            assert seat.url is not None
            if seat.key is not None and (problem := key_problem(keys, seat.key, seat.url, tenant)):
                raise JobFailed(f"key {seat.key!r} of a seat with url {seat.url} {problem}")
            secret = "" if seat.key is None else keys[seat.key].key
            found.append(UrlPlayer(seat, secret, http, first.renderer, first.context))
        return found

    async def _renderer(self, own: JobSpec) -> Renderer:
        load = Renderer.load_light if own.rollout.engine == "toy" else Renderer.load
        model = own.model
        template = "plain" if own.kind == "tinker" else model.chat_template  # clients render their prompts themselves
        async with opening(self._worker.ctx.store, self._worker.ctx.settings, self._lease.job):
            return await asyncio.to_thread(
                load, model.base, template, model.tool_format, model.special_tokens_in_content
            )


async def _close(engine: Engine) -> None:
    """Close without being cancellable: the processes would survive otherwise."""
    await finish_uncancelled(engine.close())


async def _serve(
    policy: LoadedPolicy, model: str, given: FixedWeights | None, adapters: Sequence[ServedAdapter]
) -> None:
    """Give an engine the version of its weights, and its adapters. Raises JobFailed."""
    try:
        if given is not None:
            await policy.engine.serve(given.version, given.adapter)
        for adapter in adapters:
            await policy.engine.add(adapter.name, adapter.version, adapter.place)
    except EngineError as error:
        raise JobFailed(f"{model} cannot be served: {error}") from None


async def _start(worker: LeasedWorker, lease: Lease, engine: Engine, model: str) -> None:
    try:
        async with opening(worker.ctx.store, worker.ctx.settings, lease.job):
            await engine.start()
    except EngineError as error:
        raise JobFailed(f"model {model!r} cannot be served: {error}") from None
