"""Runs a lease: loads tokenizer and engine of the job, or of each of its policies, frozen checkpoints and pools,
connects the models behind URLs, and closes them in any case."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from opentinker.services.rollout_worker.checkpoint_weights import (
    Beside,
    FixedWeights,
    adapters_beside,
    frozen_weights,
    weights_of,
)
from opentinker.services.rollout_worker.engines.base import Engine, EngineError
from opentinker.services.rollout_worker.episode import Sessions
from opentinker.services.rollout_worker.eval_job import EvalJob
from opentinker.services.rollout_worker.inference_job import InferenceJob
from opentinker.services.rollout_worker.policies import LoadedPolicy
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.rl_job import RolloutJob
from opentinker.services.rollout_worker.url_player import UrlPlayer
from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.data.readable_paths import opening
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.security.egress import Egress
from opentinker.shared.security.model_keys import key_problem, read_model_keys
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.policies import frozen_in, frozen_spec_of, pool_spec_of, spec_of
from opentinker.shared.spec.pools import pool_player
from opentinker.shared.spec.url_seats import urls_in
from opentinker.shared.types.core import Lease
from opentinker.shared.types.errors import JobFailed, SpecError

MakeEngine = Callable[[JobSpec, Renderer, str, Sequence[Beside]], Engine]
"""The third is the model's directory or hub id; the last are the adapters that it will be given."""


async def run_lease(
    worker: LeasedWorker, lease: Lease, spec: JobSpec, make_engine: MakeEngine, sessions: Sessions
) -> None:
    """Load tokenizer and engine, then run the job. Raises JobFailed when the model cannot be served."""
    async with AsyncExitStack() as held:
        load = Loader(worker, lease, spec, make_engine, held)
        if spec.kind == "inference":
            policy = await load.with_given_weights()
            await InferenceJob(worker, lease, spec, policy.engine, policy.renderer).run()
        elif spec.kind == "eval":
            policies = [await load.with_given_weights(), *await load.frozen()]
            await EvalJob(worker, lease, spec, policies, sessions, await load.urls(policies[0])).run()
        else:
            trained = [await load.to_train(name) for name in spec.policies or ("",)]
            policies = [*trained, *await load.frozen(), *await load.pools()]
            await RolloutJob(worker, lease, spec, policies, sessions, await load.urls(trained[0])).run()


class Loader:
    """Loads the policies of a lease. `held` closes their engines."""

    def __init__(
        self, worker: LeasedWorker, lease: Lease, spec: JobSpec, make_engine: MakeEngine, held: AsyncExitStack
    ) -> None:
        self._worker, self._lease, self._spec, self._make_engine, self._held = worker, lease, spec, make_engine, held
        self._data_dir: Path = worker.ctx.settings.data_dir

    async def to_train(self, name: str) -> LoadedPolicy:
        """Load a policy whose weights its trainer will send."""
        own = spec_of(self._spec, name)
        return await self._started(LoadedPolicy, name, own, own.model.base)

    async def with_given_weights(self) -> LoadedPolicy:
        """Load the policy of a job without training, with the weights of its base or of the checkpoint kept for it."""
        given = await asyncio.to_thread(weights_of, self._spec, self._data_dir, self._lease.job)
        beside = await asyncio.to_thread(adapters_beside, self._spec, self._data_dir, self._lease.job)
        model = self._spec.model.base if given is None or given.full is None else str(given.full)
        policy = await self._started(LoadedPolicy, "", self._spec, model, beside)
        await _serve(policy, model, given, beside)
        return policy

    async def frozen(self) -> list[LoadedPolicy]:
        """Load the checkpoints that play seats of the job."""
        return [await self._frozen(checkpoint) for checkpoint in frozen_in(self._spec.seats)]

    async def pools(self) -> list[LoadedPolicy]:
        """Load the model of each pool of the job; `opponents.py` gives it the weights of its members."""
        found = []
        for name in self._spec.pools:
            own = pool_spec_of(self._spec, name)
            made = partial(LoadedPolicy, is_frozen=True)
            found.append(await self._started(made, pool_player(name), own, own.model.base))
        return found

    async def _frozen(self, checkpoint: str) -> LoadedPolicy:
        own = frozen_spec_of(self._spec, checkpoint)
        given = await asyncio.to_thread(frozen_weights, self._data_dir, self._lease.job, checkpoint)
        model = own.model.base if given.full is None else str(given.full)
        policy = await self._started(partial(LoadedPolicy, is_frozen=True), checkpoint, own, model)
        await _serve(policy, model, given)
        return policy

    async def urls(self, first: LoadedPolicy) -> list[UrlPlayer]:
        """Return the models behind URLs that play seats of the job. Raises JobFailed without the key of one."""
        seats = urls_in(self._spec.seats)
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

    async def _started(
        self,
        made: Callable[[str, JobSpec, Engine, Renderer], LoadedPolicy],
        name: str,
        own: JobSpec,
        model: str,
        beside: Sequence[Beside] = (),
    ) -> LoadedPolicy:
        """`own`: the spec with the policy's settings; `model`: directory or hub id of the weights to begin with."""
        renderer = await self._renderer(own)
        engine = self._make_engine(own, renderer, model, beside)
        self._held.push_async_callback(_close, engine)
        await _start(self._worker, self._lease, engine, model)
        return made(name, own, engine, renderer)

    async def _renderer(self, own: JobSpec) -> Renderer:
        load = Renderer.load_light if own.rollout.engine == "toy" else Renderer.load
        model = own.model
        async with opening(self._worker.ctx.store, self._worker.ctx.settings, self._lease.job):
            return await asyncio.to_thread(
                load, model.base, model.chat_template, model.tool_format, model.special_tokens_in_content
            )


async def _close(engine: Engine) -> None:
    """Not cancellable: its processes would live on."""
    await finish_uncancelled(engine.close())


async def _serve(policy: LoadedPolicy, model: str, given: FixedWeights | None, beside: Sequence[Beside] = ()) -> None:
    """Give an engine the version of its weights, and its adapters. Raises JobFailed."""
    try:
        if given is not None:
            await policy.engine.serve(given.version, given.adapter)
        for one in beside:
            await policy.engine.add(one.name, one.version, one.place)
    except EngineError as error:
        raise JobFailed(f"{model} cannot be served: {error}") from None


async def _start(worker: LeasedWorker, lease: Lease, engine: Engine, model: str) -> None:
    try:
        async with opening(worker.ctx.store, worker.ctx.settings, lease.job):
            await engine.start()
    except EngineError as error:
        raise JobFailed(f"model {model!r} cannot be served: {error}") from None
