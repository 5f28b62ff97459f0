"""A vLLM process: its arguments, its start and end, and the calls into it. One serves a policy with all weights of its
own, or several policies that are adapters of one base, in one batch; each has a `VllmEngine`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from opentinker.services.rollout_worker.engines import vllm_startup
from opentinker.services.rollout_worker.engines.base import (
    MAX_LIKELY,
    EngineError,
    EngineLost,
    GuideRefused,
    LoraServing,
    SwapError,
)
from opentinker.shared.asyncio_tools import finish_uncancelled, sleep
from opentinker.shared.backoff import Backoff
from opentinker.shared.data.model_families import (
    VISION_FAMILIES,
    indivisible,
    unsupported_family,
    unsupported_on_cpu,
)
from opentinker.shared.data.model_files import code_in, unsafe_weights_in
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.error_text import error_sentence
from opentinker.shared.types.errors import JobFailed, OpenTinkerError

vllm_startup.prepare()

import structlog  # noqa: E402 - vLLM reads its environment when it is imported
import torch  # noqa: E402
from transformers import AutoConfig, PretrainedConfig  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.config import WeightTransferConfig  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.exceptions import VLLMClientError  # noqa: E402
from vllm.inputs.engine import tokens_input  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.model_executor.models.registry import ModelRegistry  # noqa: E402
from vllm.outputs import RequestOutput  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError  # noqa: E402

from opentinker.services.rollout_worker.engines import ended_children  # noqa: E402
from opentinker.services.rollout_worker.engines.shards import add_by_gloo, together  # noqa: E402
from opentinker.services.rollout_worker.engines.vllm_config import (  # noqa: E402
    MAX_DEFAULT_CONTEXT,
    SCORED_TOKENS,
    AdapterLimits,
    context_limit,
    cpu_kv_bytes,
    lora_arguments,
    why_separate,
)
from opentinker.services.rollout_worker.engines.vllm_vision_classes import register_classes  # noqa: E402
from opentinker.services.rollout_worker.engines.warm_engine import KeptEngine, Key, WarmEngine, files_of, let_go  # noqa: E402
from opentinker.shared.nn.models import check_window  # noqa: E402

log = structlog.get_logger()

ENGINE_DEAD = "the vLLM engine process is dead"
BATCHED_TOKENS = 4096
GPU_SHARE = 0.9
"""Share of a GPU's memory, for all engines together that use it."""
POLL_S = 0.5
"""Interval of health checks of an idle engine."""


@dataclass(frozen=True)
class Adapter:
    request: LoRARequest
    version: WeightVersion


class VllmProcess:
    def __init__(
        self,
        model: str,
        *,
        dtype: str = "float32",
        fp32_head: bool = False,
        context_length: int | None = None,
        max_concurrent: int = 256,
        stop_strings: bool = False,
        scores_prompts: bool = False,
        adapters: AdapterLimits | None = None,
        seed: int | None = None,
        one_by_one: bool = False,
        sharing: int = 1,
        tensor_parallel: int = 1,
        warm: WarmEngine | None = None,
        stays: bool = False,
        gpu_share: float = GPU_SHARE,
        sleeps: bool = False,
    ) -> None:
        """`context_length` None: the model's limit, at most 4096. `stop_strings`: requests will contain some, so a
        tokenizer is needed. `scores_prompts`: they ask for log-probabilities of long prompts. `seed`: of requests
        without one; None draws it, so that workers differ. `sharing`: engines that share `gpu_share` of the GPU's
        memory in equal parts. `sleeps`: the memory can be given back for a time. `tensor_parallel`: processes (ranks)
        that each hold a part of every layer, on a GPU each where there are GPUs.

        `one_by_one`: a request's log-probabilities do not depend on other requests. In a batch they do: the order of
        summation depends on the number of rows.

        `warm`: where the last job's engine may be. `stays`: put this one there; all its weights come from a trainer,
        for one policy."""
        self.model = model
        self.context_length = context_length or 0
        self.stop_strings, self._scores_prompts = stop_strings, scores_prompts
        self.broken = ""
        """Reason why no call can succeed: the process is dead, or its weights are half loaded."""
        self.users: Counter[int] = Counter()
        """Running requests by the number of their adapter; 0: none."""
        self.numbers = count(1)
        """Numbers for adapters: vLLM caches adapters by number, so a number is never used twice."""
        self.policies = count()
        """Numbers of the engines that share this process."""
        self.scored = count(1)
        self.adapter_root: Path | None = None
        self.merges = False
        """The one adapter is merged into the base; known when the model is loaded."""
        self.separate_because = adapters.separate_because if adapters else ""
        """Why it is not."""
        self._dtype = dtype
        self._max_concurrent = 1 if one_by_one else max_concurrent
        self._one_by_one, self._sharing, self._ranks = one_by_one, sharing, tensor_parallel
        self._gpu_share, self.sleeps = gpu_share, sleeps
        self._fp32_head = fp32_head
        self._adapters = adapters
        self._seed = secrets.randbelow(1 << 31) if seed is None else seed
        self._llm: AsyncLLM | None = None
        self._warm, self._stays, self._calls = warm, stays, 0
        limits = context_length, max_concurrent, stop_strings, scores_prompts, adapters
        self._arguments = dtype, fp32_head, *limits, one_by_one, sharing, tensor_parallel, gpu_share, sleeps
        self._key: Key | None = None
        self._has_sampled = False

    @property
    def lora(self) -> LoraServing | None:
        return None if self._adapters is None else LoraServing(self.merges, self.separate_because)

    async def start(self) -> None:
        """Raises EngineError when the model cannot be loaded, JobFailed when it could not be trained. Cancelled, it
        waits until there is an engine that `close` can end."""
        started = time.perf_counter()
        if self._warm is not None and await self._take(self._warm):
            return
        if self._adapters is not None:
            prefix = f"{vllm_startup.OWN}{os.getpid()}-"
            self.adapter_root = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=prefix))
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
        self._has_sampled = True
        vllm_startup.settle_heap()
        log.info("engine_started", model=self.model, seconds=round(time.perf_counter() - started, 2))

    async def last(
        self,
        request: str,
        prompt: Any,
        params: SamplingParams,
        adapter: Adapter | None,
        tell: Callable[[RequestOutput], None],
    ) -> RequestOutput | None:
        """The last output of a request; `tell` hears of all."""
        number = adapter.request.lora_int_id if adapter else 0
        self.users[number] += 1
        final: RequestOutput | None = None
        try:
            lora = adapter.request if adapter else None
            async for final in self.llm().generate(prompt, params, request, lora_request=lora):
                tell(final)
        except EngineDeadError as error:
            raise self.lost() from error
        except (EngineGenerateError, VLLMClientError, ValueError) as error:
            if params.structured_outputs is not None and isinstance(error, VLLMClientError | ValueError):
                raise GuideRefused(f"vLLM cannot force it: {error_sentence(str(error))}") from error
            raise EngineError(f"{type(error).__name__}: {error}") from error
        finally:
            self.users[number] -= 1
        return final

    async def watch(self) -> None:
        while not self.broken and not self.llm().errored:
            await sleep(POLL_S)
        raise self.lost()

    async def load_adapter(self, name: str, version: WeightVersion, directory: Path) -> Adapter:
        """Raises EngineError. vLLM keys cached prompts by the adapter's name and path, so two may not share both."""
        number = next(self.numbers)
        request = LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(directory))
        try:
            await self.llm().add_lora(request)
        except EngineDeadError as error:
            raise self.lost() from error
        except Exception as error:
            await self.call("weights_drop_adapter", number)  # it may be loaded in part
            raise EngineError(f"the adapter {name} cannot be loaded: {error}") from error
        return Adapter(request, version)

    @contextlib.contextmanager
    def while_open(self) -> Iterator[None]:
        """Wrap calls that a closing engine answers with a bare Exception: raise SwapError then."""
        self._calls += 1
        try:
            yield
        except Exception as error:
            if self._llm is not None:
                raise
            raise SwapError(f"the engine was closed meanwhile: {error}") from error
        finally:
            self._calls -= 1

    async def _take(self, warm: WarmEngine) -> bool:
        """Take the last job's engine, if it fits."""
        files = await asyncio.to_thread(files_of, self.model)
        if self._adapters is not None and not files:
            self._stays = False  # the base of a hub's id may be another one by then
        if self._stays:
            self._key = self.model, files, *self._arguments
        kept = await warm.take(self._key)
        if kept is None:
            return False
        self._llm, self.context_length, self.merges = kept.llm, kept.context_length, kept.merges
        self._has_sampled = True
        log.info("engine_reused", model=self.model)
        return True

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None and not await self._keep(llm):
            await end(llm)
            del llm
            vllm_startup.release_heap()
        if self.adapter_root is not None:
            await asyncio.to_thread(shutil.rmtree, self.adapter_root, ignore_errors=True)

    async def _keep(self, llm: AsyncLLM) -> bool:
        """Put the engine where the next job finds it, without requests, cached prompts and weight group; not if
        anything is still under way."""
        separate = self._adapters is not None and not self.merges
        if self._warm is None or not (self._stays and self._warm.keep_s and self._has_sampled) or separate:
            return False
        if self._calls or self.broken:
            return False
        if not await let_go(llm):
            return False
        assert self._key is not None
        self._warm.put(KeptEngine(self._key, llm, self.context_length, self.merges, self._gpu_share))
        return True

    async def _load(self) -> None:
        self._llm = await asyncio.to_thread(self._build)

    def _config(self, on_cpu: bool) -> PretrainedConfig:
        """Return the model's config. Raises JobFailed, EngineError for what this engine cannot serve."""
        if Path(self.model).is_dir():
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
            if why := code_in(Path(self.model)) or unsafe_weights_in(Path(self.model)):
                raise JobFailed(f"model {self.model!r} {why}")
        config = AutoConfig.from_pretrained(self.model, trust_remote_code=False)
        plain = config.to_dict()
        why = unsupported_family(plain, served=True) or (unsupported_on_cpu(plain) if on_cpu else "")
        if why := why or indivisible(plain, self._ranks):
            raise JobFailed(f"model {self.model!r} {why}")
        if not on_cpu and (gpus := torch.cuda.device_count()) < self._ranks:
            raise EngineError(
                f"this worker has {gpus} GPUs; rollout.tensor_parallel = {self._ranks} needs one per rank"
            )
        return config

    def _build(self) -> AsyncLLM:
        on_cpu = not torch.cuda.is_available()
        config = self._config(on_cpu)
        self.context_length = self.context_length or min(context_limit(config), MAX_DEFAULT_CONTEXT)
        check_window(self.model, config, self.context_length)
        arguments: dict[str, Any] = {
            "model": self.model,
            "dtype": self._dtype,
            "seed": self._seed,
            "trust_remote_code": False,
            "load_format": "safetensors",  # never a pickle, of a hub's model neither
            "max_model_len": self.context_length,
            "max_num_seqs": self._max_concurrent,
            "max_num_batched_tokens": max(BATCHED_TOKENS, self._max_concurrent),
            "skip_tokenizer_init": not self.stop_strings,
            "generation_config": "vllm",  # the job spec alone says how to sample
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": MAX_LIKELY,
            "disable_log_stats": True,
            "tensor_parallel_size": self._ranks,
            "distributed_executor_backend": "uni" if self._ranks == 1 else "mp",
            "weight_transfer_config": WeightTransferConfig(backend="opentinker"),
            "worker_extension_cls": "opentinker.services.rollout_worker.engines.vllm_worker_extension.WeightsExtension",
        }
        if self._scores_prompts:
            arguments["long_prefill_token_threshold"] = min(SCORED_TOKENS, self.context_length)
        if self._one_by_one:
            arguments["enable_prefix_caching"] = False  # a cached prefix makes a shorter, differently rounded prefill
        if config.model_type in VISION_FAMILIES:  # images come processed; a tokenizer is asked for all the same
            self._stays = False  # weights of what sees are never sent
            arguments |= {"skip_tokenizer_init": False, "mm_processor_cache_gb": 0, "skip_mm_profiling": on_cpu}
            arguments["mm_device_do_normalize"] = False  # ours has done it
        if self._sharing > 1 or not on_cpu:
            arguments["gpu_memory_utilization"] = self._gpu_share / self._sharing
        # vLLM's CPU build refuses sleep mode; its engine pauses all the same.
        arguments["enable_sleep_mode"] = self.sleeps and not on_cpu
        if self._fp32_head:
            arguments["hf_overrides"] = {"head_dtype": "float32"}
        if self._adapters is not None:
            self.separate_because = why_separate(self.model, config, self._adapters, self._dtype, on_cpu)
            self.merges = not self.separate_because and self._adapters.serving != "adapter"
            arguments |= {} if self.merges else lora_arguments(self._adapters, on_cpu)
        if on_cpu:
            arguments |= {
                "enforce_eager": True,
                "kv_cache_memory_bytes": cpu_kv_bytes(
                    config, self._dtype, self.context_length, self._max_concurrent, self._ranks
                ),
            }
            register_classes(ModelRegistry, config.architectures or [])
        resolved = AsyncEngineArgs(**arguments).create_engine_config()
        if not on_cpu:
            return AsyncLLM.from_vllm_config(resolved, disable_log_stats=True)
        if self._ranks > 1:
            add_by_gloo()
        vllm_startup.settle_heap()
        with vllm_startup.forked_engine():
            return AsyncLLM.from_vllm_config(resolved, disable_log_stats=True)

    async def _probe(self) -> None:
        """Sample one token: what this machine's kernels cannot do shows now, not in the first episode."""
        params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            async for _ in self.llm().generate(tokens_input([0]), params, "probe"):
                pass
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineError("vLLM failed to sample a first token; this worker's log says why") from error

    def llm(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError("the engine is not running")
        return self._llm

    def lost(self, why: str = ENGINE_DEAD) -> EngineLost:
        self.broken = self.broken or why
        return EngineLost(self.broken)

    async def in_background(self, method: str, policy: int, info: Any) -> dict[str, Any]:
        """Run a call of one policy concurrently with the engine loop and wait for its end. Returns its `seconds`, and
        what else it answers; raises SwapError."""
        answer = await self.call(method, policy, info)
        backoff = Backoff(0.002, 0.05)
        while answer is None:
            await backoff.sleep()
            answer = await self.call("weights_poll", policy)
        if "error" in answer:
            raise SwapError(answer["error"])
        return dict(answer)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the answer of all ranks together."""
        try:
            with self.while_open():
                return together(await self.llm().collective_rpc(method, args=arguments))
        except EngineDeadError as error:
            raise self.lost() from error


async def end(llm: AsyncLLM) -> None:
    """End an engine and its processes."""
    ended_children.repair()
    await asyncio.to_thread(llm.shutdown)
    if llm.output_handler is not None:
        await asyncio.wait([llm.output_handler], timeout=1.0)
