"""Generation by vLLM: continuous batching, token ids in and out, weights swapped while requests are in flight.

Path of a version: stage through the weight group while generation runs -> compare fingerprints -> pause (requests kept,
their KV cache dropped) -> load in place -> set the version -> resume. A LoRA job gets a new adapter per version
instead: new requests use it, running ones keep theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentinker.services.rollout_worker.engines import vllm_startup
from opentinker.services.rollout_worker.engines.base import (
    Completion,
    EngineError,
    EngineLost,
    Likely,
    Progress,
    Sampling,
    Scores,
    Shown,
    SwapError,
)
from opentinker.shared.asyncio_tools import finish_uncancelled, sleep
from opentinker.shared.backoff import Backoff
from opentinker.shared.data.model_families import VISION_FAMILIES, unsupported_family, unsupported_on_cpu
from opentinker.shared.data.model_files import code_in, unsafe_weights_in
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.core import SIMULATED, StopReason, SwapCommand, WeightVersion
from opentinker.shared.types.error_text import error_sentence
from opentinker.shared.types.errors import JobFailed, OpenTinkerError
from opentinker.shared.types.trajectories import Span

vllm_startup.prepare()

import structlog  # noqa: E402 - vLLM reads its environment when it is imported
import torch  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.config import WeightTransferConfig  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.exceptions import VLLMClientError  # noqa: E402
from vllm.inputs.engine import tokens_input  # noqa: E402
from vllm.logprobs import FlatLogprobs  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.model_executor.models.registry import ModelRegistry  # noqa: E402
from vllm.outputs import CompletionOutput, RequestOutput  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError  # noqa: E402

from opentinker.services.rollout_worker.engines.vllm_config import (  # noqa: E402
    EMPTY_SLOTS_ON_CPU,
    MAX_DEFAULT_CONTEXT,
    context_limit,
    cpu_kv_bytes,
    lora_arguments,
    write_adapter_config,
)
from opentinker.services.rollout_worker.engines.vllm_images import engine_input  # noqa: E402
from opentinker.shared.nn.models import check_window  # noqa: E402

log = structlog.get_logger()

ENGINE_DEAD = "the vLLM engine process is dead"
BATCHED_TOKENS = 4096
GPU_SHARE = 0.9
"""Of a GPU's memory, for all engines together that share it."""
POLL_S = 0.5
"""Interval of health checks of an idle engine."""


@dataclass(frozen=True)
class Adapter:
    request: LoRARequest
    version: WeightVersion


class VllmEngine:
    def __init__(
        self,
        model: str,
        *,
        eos_ids: Collection[int],
        dtype: str = "float32",
        fp32_head: bool = False,
        context_length: int | None = None,
        max_concurrent: int = 256,
        stop_strings: bool = False,
        lora: LoraSpec | None = None,
        max_adapters: int = 4,
        beside_rank: int = 0,
        group_timeout_s: float = 10.0,
        seed: int | None = None,
        one_by_one: bool = False,
        sharing: int = 1,
    ) -> None:
        """`eos_ids` end a completion and are part of it. `context_length` None: the model's limit, at most 4096.
        `stop_strings`: requests will contain some, so a tokenizer is needed. `seed`: of requests without one; None
        draws it, so that workers differ. `max_adapters`: of a LoRA job, versions in use by running requests at the same
        time; a request with another version waits. `beside_rank`: not 0 if adapters will be added to the model, as many
        as `max_adapters`, the largest of this rank. `sharing`: engines that share the GPU's memory in equal parts.

        `one_by_one`: a request's log-probabilities do not depend on other requests. In a batch they do: the order of
        summation depends on the number of rows."""
        self.version: WeightVersion | None = None
        self.context_length = context_length or 0
        self._model = model
        self._dtype = dtype
        self._max_concurrent = 1 if one_by_one else max_concurrent
        self._one_by_one, self._sharing = one_by_one, sharing
        self._fp32_head = fp32_head
        self._stop_strings = stop_strings
        self._lora = lora
        self._max_adapters = max_adapters
        self._beside_rank = beside_rank
        self._beside: dict[str, Adapter] = {}
        self._group_timeout_s = group_timeout_s
        self._seed = secrets.randbelow(1 << 31) if seed is None else seed
        self._llm: AsyncLLM | None = None
        self._eos_ids = sorted(eos_ids)
        self._generation = -1
        self._simulated = False
        self._scored = 0
        self._swapping = asyncio.Lock()
        self._broken = ""
        """Reason why no call can succeed: the process is dead, or its weights are half loaded."""
        self._adapters: dict[int, Adapter] = {}
        self._users: Counter[int] = Counter()
        self._adapter_root: Path | None = None

    async def start(self) -> None:
        """Raises EngineError when the model cannot be loaded, JobFailed when it could not be trained. Cancelled, it
        waits until there is an engine that `close` can end."""
        started = time.perf_counter()
        if self._lora is not None:
            prefix = f"{vllm_startup.OWN}{os.getpid()}-"
            self._adapter_root = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=prefix))
        try:
            await finish_uncancelled(self._load())
        except OpenTinkerError:
            raise
        except ImportError as error:
            lacking = f"vLLM's class for it needs the Python module {error.name!r}, which this worker does not have"
            raise EngineError(lacking if error.name else f"vLLM's class for it cannot be imported: {error}") from error
        except Exception as error:
            raise EngineError(f"vLLM says: {error_sentence(str(error)) or type(error).__name__}") from error
        await self._probe()
        vllm_startup.settle_heap()
        log.info("engine_started", model=self._model, seconds=round(time.perf_counter() - started, 2))

    async def generate(
        self,
        request: str,
        prompt_ids: list[int],
        sampling: Sampling,
        progress: Progress | None = None,
        shown: Sequence[Shown] = (),
    ) -> Completion:
        room = self.context_length - len(prompt_ids)
        if self._broken:
            raise EngineLost(self._broken)
        if self.version is None:
            raise EngineError("the engine has no weights yet")
        if room <= 0 or not prompt_ids:
            raise EngineError(f"the prompt has {len(prompt_ids)} tokens, the context holds {self.context_length}")
        adapter = self._chosen(sampling)
        told = 0

        def tell(output: RequestOutput) -> None:
            nonlocal told
            if progress is not None:
                told = _tell(progress, told, output.outputs[0], sampling)

        params = self._params(sampling, room, whole=progress is None)
        final = await self._last(request, engine_input(prompt_ids, shown), params, adapter, tell)
        return self._completion(request, final, sampling, adapter)

    async def score(self, ids: list[int]) -> Scores:
        """Beside what is being generated: it takes its turn."""
        self._scored += 1
        request, sampling = f"score-{self._scored}", Sampling(temperature=0.0, max_tokens=1)
        adapter = self._chosen(sampling)
        params = self._params(sampling, self.context_length - len(ids), whole=True)
        params.prompt_logprobs = 0  # those of the tokens themselves
        final = await self._last(request, engine_input(ids, ()), params, adapter, lambda _: None)
        done = self._completion(request, final, sampling, adapter)
        found = None if final is None else final.prompt_logprobs
        if not isinstance(found, FlatLogprobs) or len(found) != len(ids):
            raise EngineError(f"request {request} came without a logprob for every token of its prompt")
        logprobs, _ = _logprobs(found, slice(1, len(ids)))
        return Scores(done.spans[-1].version if done.spans else None, logprobs)

    async def _last(
        self,
        request: str,
        prompt: Any,
        params: SamplingParams,
        adapter: Adapter | None,
        tell: Callable[[RequestOutput], None],
    ) -> RequestOutput | None:
        """The last output of a request; `tell` hears of all."""
        number = adapter.request.lora_int_id if adapter else 0
        self._users[number] += 1
        final: RequestOutput | None = None
        try:
            lora = adapter.request if adapter else None
            async for final in self._engine().generate(prompt, params, request, lora_request=lora):
                tell(final)
        except EngineDeadError as error:
            raise self._lost() from error
        except (EngineGenerateError, VLLMClientError, ValueError) as error:
            raise EngineError(f"{type(error).__name__}: {error}") from error
        finally:
            self._users[number] -= 1
        return final

    async def abort(self, request: str) -> None:
        await self._engine().abort(request)

    async def watch(self) -> None:
        while not self._broken and not self._engine().errored:
            await sleep(POLL_S)
        raise self._lost()

    async def serve(self, version: WeightVersion, adapter: Path | None = None) -> None:
        if adapter is not None:  # vLLM knows an adapter by its number, and gives the old one for a number that it has
            number = max(self._adapters, default=0) + 1
            self._adapters[number] = await self._loaded(str(version), number, version, adapter)
        await self._engine().engine_core.set_weight_version_async(str(version))
        self.version = version

    async def load(self, version: WeightVersion, directory: Path) -> None:
        async with self._swapping:
            if self._broken:
                raise EngineLost(self._broken)
            if self._lora is None:
                await self._in_background("weights_read", {"directory": str(directory)})
                await self._swap(version)
                return
            await self.serve(version, directory)
            for old in [n for n in self._adapters if n != max(self._adapters) and not self._users[n]]:
                await self._call("weights_drop_adapter", old)
                del self._adapters[old]

    async def add(self, name: str, version: WeightVersion, adapter: Path) -> None:
        """vLLM keys cached prompts by the name and the path, which no other adapter has."""
        self._beside[name] = await self._loaded(name, len(self._beside) + 1, version, adapter)

    async def _loaded(self, name: str, number: int, version: WeightVersion, directory: Path) -> Adapter:
        request = LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(directory))
        try:
            await self._engine().add_lora(request)
        except EngineDeadError as error:
            raise self._lost() from error
        except Exception as error:
            raise EngineError(f"the adapter {name} cannot be loaded: {error}") from error
        return Adapter(request, version)

    @contextlib.contextmanager
    def _while_open(self) -> Iterator[None]:
        """For calls that a closing engine answers with a bare Exception: then it raises SwapError."""
        try:
            yield
        except Exception as error:
            if self._llm is not None:
                raise
            raise SwapError(f"the engine was closed meanwhile: {error}") from error

    async def join(self, command: SwapCommand) -> None:
        async with self._swapping:
            if self._broken:
                raise EngineLost(self._broken)
            self._generation = -1
            self._simulated = command.device == SIMULATED
            if self._simulated:
                await self._call("weights_leave")
            else:
                info = {
                    "address": command.address,
                    "port": command.port,
                    "rank": command.rank,
                    "world": command.world,
                    "device": command.device,
                    "timeout_s": self._group_timeout_s,
                }
                await self._in_background("weights_join", info)
            self._generation = command.generation

    async def receive(self, command: SwapCommand) -> dict[str, float]:
        version = command.version
        if version is None:
            raise SwapError("a receive must name its version")
        async with self._swapping:
            if self._broken:
                raise EngineLost(self._broken)
            if command.generation != self._generation:
                raise SwapError(f"this engine is in group {self._generation}, not {command.generation}")
            transfer = 0.0
            if not self._simulated:
                manifest = [[info.name, info.dtype, info.shape] for info in command.manifest]
                info = {
                    "manifest": manifest,
                    "fingerprints": command.fingerprints,
                    "bucket_bytes": command.bucket_bytes,
                }
                transfer = await self._in_background("weights_stage", info)
            apply = self._swap(version) if self._lora is None or self._simulated else self._adapt(version, command)
            # Shielded: once begun it must reach its end, or weights and version would disagree.
            return {"transfer": transfer, **await asyncio.shield(asyncio.ensure_future(apply))}

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
            if llm.output_handler is not None:
                await asyncio.wait([llm.output_handler], timeout=1.0)
            del llm
            vllm_startup.release_heap()
        if self._adapter_root is not None:
            await asyncio.to_thread(shutil.rmtree, self._adapter_root, ignore_errors=True)

    # --- start ---------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        self._llm = await asyncio.to_thread(self._build)

    def _build(self) -> AsyncLLM:
        on_cpu = not torch.cuda.is_available()
        if Path(self._model).is_dir():
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
            if why := code_in(Path(self._model)) or unsafe_weights_in(Path(self._model)):
                raise JobFailed(f"model {self._model!r} {why}")
        config = AutoConfig.from_pretrained(self._model, trust_remote_code=False)
        plain = config.to_dict()
        if why := unsupported_family(plain, served=True) or (unsupported_on_cpu(plain) if on_cpu else ""):
            raise JobFailed(f"model {self._model!r} {why}")
        self.context_length = self.context_length or min(context_limit(config), MAX_DEFAULT_CONTEXT)
        check_window(self._model, config, self.context_length)
        arguments: dict[str, Any] = {
            "model": self._model,
            "dtype": self._dtype,
            "seed": self._seed,
            "trust_remote_code": False,
            "load_format": "safetensors",  # never a pickle, of a hub's model neither
            "max_model_len": self.context_length,
            "max_num_seqs": self._max_concurrent,
            "max_num_batched_tokens": max(BATCHED_TOKENS, self._max_concurrent),
            "skip_tokenizer_init": not self._stop_strings,
            "generation_config": "vllm",  # the job spec alone says how to sample
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "distributed_executor_backend": "uni",
            "weight_transfer_config": WeightTransferConfig(backend="opentinker"),
            "worker_extension_cls": "opentinker.services.rollout_worker.engines.vllm_worker_extension.WeightsExtension",
        }
        if self._one_by_one:
            arguments["enable_prefix_caching"] = False  # a cached prefix makes a shorter, differently rounded prefill
        if config.model_type in VISION_FAMILIES:  # images come processed; a tokenizer is asked for all the same
            arguments |= {"skip_tokenizer_init": False, "mm_processor_cache_gb": 0, "skip_mm_profiling": on_cpu}
        if self._sharing > 1:
            arguments["gpu_memory_utilization"] = GPU_SHARE / self._sharing
        if self._fp32_head:
            arguments["hf_overrides"] = {"head_dtype": "float32"}
        if self._lora is not None:
            arguments |= lora_arguments(self._lora.rank, self._max_adapters, 2 * self._max_adapters)
        elif self._beside_rank:
            slots = self._max_adapters + (EMPTY_SLOTS_ON_CPU if on_cpu else 0)
            arguments |= lora_arguments(self._beside_rank, slots, slots)
        if on_cpu:
            arguments |= {
                "enforce_eager": True,
                "kv_cache_memory_bytes": cpu_kv_bytes(config, self._dtype, self.context_length, self._max_concurrent),
            }
            _register_here(config.architectures or [])
        resolved = AsyncEngineArgs(**arguments).create_engine_config()
        if not on_cpu:
            return AsyncLLM.from_vllm_config(resolved, disable_log_stats=True)
        vllm_startup.settle_heap()
        with vllm_startup.forked_engine():
            return AsyncLLM.from_vllm_config(resolved, disable_log_stats=True)

    async def _probe(self) -> None:
        """Sample one token: what this machine's kernels cannot do shows now, not in the first episode."""
        params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            async for _ in self._engine().generate(tokens_input([0]), params, "probe"):
                pass
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineError("vLLM failed to sample a first token; this worker's log says why") from error

    # --- generation ----------------------------------------------------------------------------------------------

    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError("the engine is not running")
        return self._llm

    def _lost(self, why: str = ENGINE_DEAD) -> EngineLost:
        self._broken = self._broken or why
        return EngineLost(self._broken)

    def _chosen(self, sampling: Sampling) -> Adapter | None:
        """The one that it names, or the newest version."""
        if not sampling.adapter:
            return self._adapters[max(self._adapters)] if self._adapters else None
        if sampling.adapter not in self._beside:
            raise EngineError(f"there is no adapter {sampling.adapter!r}")
        return self._beside[sampling.adapter]

    def _params(self, sampling: Sampling, room: int, *, whole: bool) -> SamplingParams:
        if sampling.stop and not self._stop_strings:
            raise EngineError("this engine was started without a tokenizer, so it cannot find stop strings")
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=min(sampling.max_tokens, room),
            seed=sampling.seed,
            stop=sampling.stop or None,
            stop_token_ids=self._eos_ids,
            ignore_eos=True,  # the tokenizer's idea of it; stop_token_ids has the model's
            logprobs=min(sampling.likely, self._engine().model_config.get_vocab_size()),
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.CUMULATIVE,
        )

    def _completion(
        self, request: str, final: RequestOutput | None, sampling: Sampling, adapter: Adapter | None
    ) -> Completion:
        output = final.outputs[0] if final is not None else None
        if output is None or output.finish_reason not in ("stop", "length"):
            raise EngineError(f"request {request} ended with {output.finish_reason if output else 'nothing'}")
        ids = list(output.token_ids)
        if not isinstance(output.logprobs, FlatLogprobs) or len(output.logprobs) != len(ids):
            raise EngineError(f"request {request} came without a logprob for every token")
        logprobs, likely = _logprobs(output.logprobs, slice(0, len(ids)))
        if adapter is not None:
            spans = [Span(0, len(ids), adapter.version)]
        else:
            spans = [Span(s.start, s.end, WeightVersion.parse(s.version)) for s in output.weight_versions or []]
        if output.finish_reason == "length":
            stop = StopReason.LENGTH if len(ids) == sampling.max_tokens else StopReason.CONTEXT
        else:
            stop = StopReason.STOP if isinstance(output.stop_reason, str) else StopReason.EOS
        return Completion(ids=ids, logprobs=logprobs, spans=spans, stop=stop, likely=likely if sampling.likely else [])

    # --- weights -------------------------------------------------------------------------------------------------

    async def _swap(self, version: WeightVersion) -> dict[str, float]:
        with self._while_open():
            return await self._swap_paused(version)

    async def _swap_paused(self, version: WeightVersion) -> dict[str, float]:
        core = self._engine().engine_core
        marks, whole = [time.perf_counter()], True
        try:
            # Not AsyncLLM.pause_generation: that sleeps 20 ms more for the order of outputs, which we do not need.
            await core.pause_scheduler_async(mode="keep", clear_cache=True)
            try:
                marks.append(time.perf_counter())
                if not self._simulated:
                    whole = False
                    answer = await self._call("weights_load")
                    if "error" in answer:
                        raise self._lost(f"loading {version} failed half way: {answer['error']}")
                    whole = True
                await core.set_weight_version_async(str(version))
                self.version = version
                marks.append(time.perf_counter())
            finally:
                if whole:
                    await core.resume_scheduler_async()
                else:  # half-loaded weights must not sample another token
                    self._lost(f"loading {version} did not come to its end")
        except EngineDeadError as error:
            raise self._lost() from error
        marks.append(time.perf_counter())
        return {"pause": marks[1] - marks[0], "load": marks[2] - marks[1], "resume": marks[3] - marks[2]}

    async def _adapt(self, version: WeightVersion, command: SwapCommand) -> dict[str, float]:
        """New adapter, new directory, new name: nothing cached for an older one can be taken for it."""
        assert self._lora is not None and self._adapter_root is not None
        started = time.perf_counter()
        number = max(self._adapters, default=0) + 1
        name = f"{command.job}-{version}-{number}"
        directory = self._adapter_root / name
        await asyncio.to_thread(write_adapter_config, directory, self._model, self._lora, command.manifest)
        answer = await self._call("weights_add_adapter", name, number, str(directory))
        if "error" in answer:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            raise SwapError(f"the adapter of {version} cannot be loaded: {answer['error']}")
        request = LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(directory))
        self._adapters[number] = Adapter(request, version)
        self.version = version
        for old in [n for n in self._adapters if n != number and not self._users[n]]:
            await self._call("weights_drop_adapter", old)
            await asyncio.to_thread(shutil.rmtree, self._adapters.pop(old).request.lora_path, ignore_errors=True)
        return {"pause": 0.0, "load": time.perf_counter() - started, "resume": 0.0}

    async def _in_background(self, method: str, info: dict[str, Any]) -> float:
        """Run a call concurrently with the engine loop and wait for its end. Returns its seconds; raises SwapError."""
        answer = await self._call(method, info)
        backoff = Backoff(0.002, 0.05)
        while answer is None:
            await backoff.sleep()
            answer = await self._call("weights_poll")
        if "error" in answer:
            raise SwapError(answer["error"])
        return float(answer["seconds"])

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            with self._while_open():
                return (await self._engine().collective_rpc(method, args=arguments))[0]
        except EngineDeadError as error:
            raise self._lost() from error


def _tell(progress: Progress, told: int, output: CompletionOutput, sampling: Sampling) -> int:
    """Report the tokens beyond the first `told` ones; return the new count. vLLM's lists grow in place."""
    ids = output.token_ids
    if isinstance(output.logprobs, FlatLogprobs) and len(ids) > told:
        logprobs, likely = _logprobs(output.logprobs, slice(told, len(ids)))
        progress(list(ids[told:]), logprobs, likely if sampling.likely else [])
    return len(ids)


def _logprobs(found: FlatLogprobs, places: slice) -> tuple[list[float], list[Likely]]:
    """Return log-probabilities of the sampled tokens at these places, and of the likeliest there: vLLM lists the
    sampled one first, and again where it is among the likeliest, which follow in order."""
    ranges = list(zip(found.start_indices[places], found.end_indices[places], strict=True))
    likely = [
        [(found.token_ids[at], found.logprobs[at]) for at in range(start + 1, end) if found.logprobs[at] > -math.inf]
        for start, end in ranges
    ]
    return [found.logprobs[start] for start, _ in ranges], likely


def _register_here(architectures: list[str]) -> None:
    """Tell vLLM the model's class, which it would else find out with a subprocess that imports everything again."""
    for name in architectures:
        known = ModelRegistry.models.get(name)
        if known is not None:
            ModelRegistry.register_model(name, known.load_model_cls())
