"""Generation by vLLM: continuous batching, token ids in and out, weights swapped while requests are in flight.

Path of a version: stage through the weight group while generation runs -> compare fingerprints -> pause (requests kept,
their KV cache dropped) -> load in place -> set the version -> resume. An adapter that has the process for itself goes
the same way, and is merged into the base when it is loaded (`merged_adapter.py`). Otherwise a LoRA job gets a new
adapter per version: new requests use it, running ones keep theirs; so policies that are adapters of one base share a
process.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from opentinker.services.rollout_worker.engines import vllm_startup
from opentinker.services.rollout_worker.engines.base import (
    Completion,
    EngineError,
    EngineLost,
    LoraServing,
    Progress,
    Sampling,
    Scores,
    Shown,
    SwapError,
)
from opentinker.shared.spec import LoraSpec
from opentinker.shared.time_limit import Stopwatch
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.swap import SIMULATED, SwapCommand

vllm_startup.prepare()

import structlog  # noqa: E402 - vLLM reads its environment when it is imported
from vllm import SamplingParams  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.outputs import RequestOutput  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError  # noqa: E402

from opentinker.services.rollout_worker.engines.vllm_config import adapter_scale, write_adapter_config  # noqa: E402
from opentinker.services.rollout_worker.engines.vllm_images import engine_input  # noqa: E402
from opentinker.services.rollout_worker.engines.vllm_process import Adapter, VllmProcess  # noqa: E402
from opentinker.services.rollout_worker.engines.vllm_sampling import (  # noqa: E402
    completion_of,
    tell_progress,
    vllm_params,
)

log = structlog.get_logger()


class VllmEngine:
    """One policy in a vLLM process."""

    def __init__(
        self,
        process: VllmProcess,
        *,
        eos_ids: Collection[int],
        lora: LoraSpec | None = None,
        group_timeout_s: float = 10.0,
    ) -> None:
        """`eos_ids` end a completion and are part of it."""
        self.version: WeightVersion | None = None
        self._process = process
        self._policy = next(process.policies)
        self._eos_ids = sorted(eos_ids)
        self._lora = lora
        self._group_timeout_s = group_timeout_s
        self._generation = -1
        self._simulated = False
        self._swapping = asyncio.Lock()
        self._asleep = False
        self._standing = Stopwatch()
        self._adapters: dict[int, Adapter] = {}
        self._beside: dict[str, Adapter] = {}

    @property
    def context_length(self) -> int:
        return self._process.context_length

    @property
    def vocab_size(self) -> int:
        return int(self._process.llm().model_config.get_vocab_size())

    @property
    def lora(self) -> LoraServing | None:
        return self._process.lora

    @property
    def sleeps(self) -> bool:
        return self._process.sleeps

    @property
    def asleep_s(self) -> float:
        return self._standing.seconds

    async def start(self) -> None:
        await self._process.start()

    def sibling(self, eos_ids: Collection[int], lora: LoraSpec) -> VllmEngine:
        return VllmEngine(self._process, eos_ids=eos_ids, lora=lora, group_timeout_s=self._group_timeout_s)

    async def generate(
        self,
        request: str,
        prompt_ids: list[int],
        sampling: Sampling,
        progress: Progress | None = None,
        shown: Sequence[Shown] = (),
    ) -> Completion:
        room = self.context_length - len(prompt_ids)
        if self._process.broken:
            raise EngineLost(self._process.broken)
        if self.version is None:
            raise EngineError("the engine has no weights yet")
        if room <= 0 or not prompt_ids:
            raise EngineError(f"the prompt has {len(prompt_ids)} tokens, the context holds {self.context_length}")
        adapter = self._chosen(sampling)
        told = 0

        def tell(output: RequestOutput) -> None:
            nonlocal told
            if progress is not None:
                told = tell_progress(progress, told, output.outputs[0], sampling)

        params = self._params(sampling, room, whole=progress is None)
        final = await self._process.last(request, engine_input(prompt_ids, shown), params, adapter, tell)
        return completion_of(request, final, sampling, adapter)

    async def score(self, ids: list[int]) -> Scores:
        """Beside what is being generated: it takes its turn."""
        request = f"score-{next(self._process.scored)}"
        sampling = Sampling(temperature=0.0, max_tokens=1, likely_prompt=0)
        adapter = self._chosen(sampling)
        params = self._params(sampling, self.context_length - len(ids), whole=True)
        final = await self._process.last(request, engine_input(ids, ()), params, adapter, lambda _: None)
        done = completion_of(request, final, sampling, adapter)
        return Scores(done.spans[-1].version if done.spans else None, done.prompt_logprobs)

    async def abort(self, request: str) -> None:
        await self._process.llm().abort(request)

    async def watch(self) -> None:
        await self._process.watch()

    async def serve(self, version: WeightVersion, adapter: Path | None = None) -> None:
        if adapter is None:
            await self._process.llm().engine_core.set_weight_version_async(str(version))
        elif self._process.merges:
            scale = await asyncio.to_thread(adapter_scale, adapter)
            try:
                await self._load(version, adapter, scale)
            except SwapError as error:
                raise EngineError(f"the adapter {adapter} cannot be loaded: {error}") from error
        else:
            loaded = await self._process.load_adapter(str(version), version, adapter)
            self._adapters[loaded.request.lora_int_id] = loaded
        self.version = version

    async def load(self, version: WeightVersion, directory: Path) -> None:
        async with self._swapping:
            if self._process.broken:
                raise EngineLost(self._process.broken)
            if self._lora is None:
                await self._load(version, directory, None)
                return
            await self.serve(version, directory)
            for old in [n for n in self._adapters if n != max(self._adapters) and not self._process.users[n]]:
                await self._process.call("weights_drop_adapter", old)
                del self._adapters[old]

    async def _load(self, version: WeightVersion, directory: Path, scale: float | None) -> None:
        info = {"directory": str(directory), "scale": scale}
        await self._process.in_background("weights_read", self._policy, info)
        await self._swap(version, "")

    async def add(self, name: str, version: WeightVersion, adapter: Path) -> None:
        self._beside[name] = await self._process.load_adapter(name, version, adapter)

    async def drop(self, name: str) -> None:
        adapter = self._beside.pop(name)
        await self._process.call("weights_drop_adapter", adapter.request.lora_int_id)

    async def sleep(self) -> None:
        """Offload the weights, drop the KV cache and the copy of the last version. Requests wait and are computed again
        after `wake`."""
        async with self._swapping:
            if self._process.broken:
                raise EngineLost(self._process.broken)
            if self._asleep:
                return
            self._standing.start()
            try:
                await self._process.call("weights_release")
                with self._process.while_open():
                    await self._process.llm().engine_core.sleep_async(level=1, mode="keep")
                self._asleep = True
            except EngineDeadError as error:
                raise self._process.lost() from error
            finally:
                if not self._asleep:
                    self._standing.stop()

    async def wake(self) -> None:
        async with self._swapping:
            if not self._asleep:
                return
            try:
                with self._process.while_open():
                    awake = await self._process.llm().engine_core.wake_up_async()
            except EngineDeadError as error:
                raise self._process.lost() from error
            if not awake:
                raise self._process.lost("vLLM did not get its memory back after a step of the trainer")
            self._asleep = False
            self._standing.stop()

    async def join(self, command: SwapCommand) -> None:
        async with self._swapping:
            if self._process.broken:
                raise EngineLost(self._process.broken)
            self._generation = -1
            self._simulated = command.device == SIMULATED
            if self._simulated:
                await self._process.call("weights_leave", self._policy)
            else:
                info = {**command.member, "timeout_s": self._group_timeout_s}
                await self._process.in_background("weights_join", self._policy, info)
            self._generation = command.generation

    async def receive(self, command: SwapCommand) -> dict[str, float]:
        version = command.version
        if version is None:
            raise SwapError("a receive must name its version")
        async with self._swapping:
            if self._process.broken:
                raise EngineLost(self._process.broken)
            if command.generation != self._generation:
                raise SwapError(f"this engine is in group {self._generation}, not {command.generation}")
            staged: dict[str, Any] = {}
            if not self._simulated:
                manifest = [[info.name, info.dtype, info.shape] for info in command.manifest]
                info = {
                    "manifest": manifest,
                    "fingerprints": command.fingerprints,
                    "bucket_bytes": command.bucket_bytes,
                    "scale": self._lora.alpha / self._lora.rank if self._lora and self._process.merges else None,
                }
                staged = await self._process.in_background("weights_stage", self._policy, info)
            is_adapter = self._lora is not None and not self._process.merges
            if is_adapter and not self._simulated:
                apply = self._adapt(version, command)
            else:
                apply = self._swap(version, staged.get("place", ""))
            # Shielded: once begun it must reach its end, or weights and version would disagree.
            return {"transfer": staged.get("seconds", 0.0), **await asyncio.shield(asyncio.ensure_future(apply))}

    async def close(self) -> None:
        await self._process.close()

    # --- generation ----------------------------------------------------------------------------------------------

    def _chosen(self, sampling: Sampling) -> Adapter | None:
        """The one that it names, or the newest version."""
        if not sampling.adapter:
            return self._adapters[max(self._adapters)] if self._adapters else None
        if sampling.adapter not in self._beside:
            raise EngineError(f"there is no adapter {sampling.adapter!r}")
        return self._beside[sampling.adapter]

    def _params(self, sampling: Sampling, room: int, *, whole: bool) -> SamplingParams:
        if (sampling.stop or sampling.structure) and not self._process.stop_strings:
            cannot = "find stop strings" if sampling.stop else "force a text"
            raise EngineError(f"this engine was started without a tokenizer, so it cannot {cannot}")
        return vllm_params(sampling, room, self._eos_ids, self.vocab_size, whole=whole)

    # --- weights -------------------------------------------------------------------------------------------------

    async def _swap(self, version: WeightVersion, place: str) -> dict[str, float]:
        with self._process.while_open():
            return await self._swap_paused(version, place)

    async def _swap_paused(self, version: WeightVersion, place: str) -> dict[str, float]:
        core = self._process.llm().engine_core
        marks, whole = [time.perf_counter()], True
        try:
            # Not AsyncLLM.pause_generation: that sleeps 20 ms more for the order of outputs, which we do not need.
            await core.pause_scheduler_async(mode="keep", clear_cache=True)
            try:
                marks.append(time.perf_counter())
                if not self._simulated:
                    whole = False
                    answer = await self._process.call("weights_load", self._policy, place)
                    if "error" in answer:
                        raise self._process.lost(f"loading {version} failed half way: {answer['error']}")
                    log.debug("weights_loaded", version=str(version), rank_sums=answer["parts"])
                    if "unchecked" in answer:
                        log.info("rank_sums_unchecked", version=str(version), parameter=answer["unchecked"])
                    whole = True
                await core.set_weight_version_async(str(version))
                self.version = version
                marks.append(time.perf_counter())
            finally:
                if whole:
                    await core.resume_scheduler_async()
                else:  # half-loaded weights must not sample another token
                    self._process.lost(f"loading {version} did not come to its end")
        except EngineDeadError as error:
            raise self._process.lost() from error
        marks.append(time.perf_counter())
        return {"pause": marks[1] - marks[0], "load": marks[2] - marks[1], "resume": marks[3] - marks[2]}

    async def _adapt(self, version: WeightVersion, command: SwapCommand) -> dict[str, float]:
        """New adapter, new directory, new name: nothing cached for an older one can be taken for it."""
        root = self._process.adapter_root
        assert self._lora is not None and root is not None
        started = time.perf_counter()
        number = next(self._process.numbers)
        name = f"{command.job}-{version}-{number}"
        directory = root / name
        await asyncio.to_thread(write_adapter_config, directory, self._process.model, self._lora, command.manifest)
        try:
            await self._process.in_background("weights_write", self._policy, str(directory))
            answer = await self._process.call("weights_add_adapter", name, number, str(directory))
            if "error" in answer:
                raise SwapError(answer["error"])
        except SwapError as error:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            raise SwapError(f"the adapter of {version} cannot be loaded: {error}") from error
        request = LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(directory))
        self._adapters[number] = Adapter(request, version)
        self.version = version
        for old in [n for n in self._adapters if n != number and not self._process.users[n]]:
            await self._process.call("weights_drop_adapter", old)
            await asyncio.to_thread(shutil.rmtree, self._adapters.pop(old).request.lora_path, ignore_errors=True)
        return {"pause": 0.0, "load": time.perf_counter() - started, "resume": 0.0}
