"""Measures a LoRA adapter that is merged into its base against the same one in vLLM's LoRA layers.

    python -m loadtest.lora [--model DIR] [--dtype float32] [--requests 16] [--tokens 128] [--repeats 3] [--size 0.001]

Two vLLM processes with one random adapter, of which one merges it, answer the same requests one after the other in each
repeat. Prints of both the medians of tokens per second and per second of processor time, the seconds of a swap by
phase, and the mismatch: the mean absolute difference between the logprobs of sampled tokens and those that transformers
and peft compute for them in the same dtype. `--size`: deviation of the entries of B; A is as at the start of training.

Exit status 1 if merging does not make generation faster, or makes the mismatch more than a quarter larger.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import uvloop

from loadtest.support.machine import Meter, verdict
from opentinker.services.rollout_worker.engines import vllm_startup
from opentinker.services.rollout_worker.engines.base import Completion, Sampling
from opentinker.shared.runtime.reexec import below
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.core import WeightVersion

if TYPE_CHECKING:
    from opentinker.services.rollout_worker.engines.vllm import VllmEngine

LORA = LoraSpec(rank=16)
FLOOR = 1e-5
"""A mismatch below this is rounding of float32."""
EXTRA = 1.25
WAYS = {"merged": "merged", "LoRA layers": "adapter"}


async def run(options: argparse.Namespace) -> bool:
    vllm_startup.preload()
    from examples.models.make_tiny import make_tiny

    rates, spent, swaps, gaps = (defaultdict[str, list[float]](list) for _ in range(4))
    with tempfile.TemporaryDirectory() as directory:
        base = Path(options.model or make_tiny(Path(directory, "tiny")))
        model = adapted(base, options)
        model.save_pretrained(Path(directory, "adapter"))
        async with AsyncExitStack() as held:
            engines = {name: await started(held, base, way, options.dtype) for name, way in WAYS.items()}
            for repeat in range(options.repeats + 1):  # the first one warms up
                for name, engine in engines.items():
                    swap = await timed(engine, WeightVersion(0, repeat), Path(directory, "adapter"))
                    meter = Meter({str(pid): pid for pid in below(os.getpid())})
                    done = await answers(engine, options)
                    meter.stop()
                    if repeat:
                        tokens = sum(len(one.ids) for one in done)
                        rates[name].append(tokens / meter.seconds)
                        spent[name].append(tokens / sum(meter.used.values()))
                        swaps[name].append(swap)
                        gaps[name].append(await asyncio.to_thread(mismatch, model, done))
    for name in WAYS:
        print(
            f"{name}: {median(rates[name]):,.1f} tokens/s, {median(spent[name]):,.1f} tokens per CPU second, swap "
            f"{median(swaps[name]):.2f} s, mismatch {median(gaps[name]):.2g} nats"
        )
    ratio = median(spent["merged"]) / median(spent["LoRA layers"])
    good = verdict(f"merged generates faster ({ratio:.2f} times the tokens per CPU second)", ratio > 1)
    bound = max(EXTRA * median(gaps["LoRA layers"]), FLOOR)
    return verdict(f"mismatch of merged <= {bound:.2g}", median(gaps["merged"]) <= bound) and good


def adapted(base: Path, options: argparse.Namespace) -> Any:
    """Return the model with an adapter that has learnt a little."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, options.dtype))
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, options.size)
    return model.eval()


async def started(held: AsyncExitStack, base: Path, way: Any, dtype: str) -> VllmEngine:
    """Start an engine as for max_staleness = 1."""
    from opentinker.services.rollout_worker.engines.vllm import VllmEngine
    from opentinker.services.rollout_worker.engines.vllm_config import AdapterLimits
    from opentinker.services.rollout_worker.engines.vllm_process import VllmProcess

    limits = AdapterLimits(rank=LORA.rank, at_once=3, serving=way)
    process = VllmProcess(str(base), dtype=dtype, context_length=512, adapters=limits, sharing=2, seed=0)
    engine = VllmEngine(process, eos_ids=[], lora=LORA)
    held.push_async_callback(engine.close)
    await engine.start()
    return engine


async def timed(engine: VllmEngine, version: WeightVersion, adapter: Path) -> float:
    """Return the seconds in which an idle engine takes an adapter from disk."""
    began = time.perf_counter()
    await engine.load(version, adapter)
    return time.perf_counter() - began


async def answers(engine: VllmEngine, options: argparse.Namespace) -> list[Completion]:
    """Send all requests at once."""
    sampling = [Sampling(max_tokens=options.tokens, seed=number) for number in range(options.requests)]
    asked = (engine.generate(f"r{n}", prompt_of(n), one) for n, one in enumerate(sampling))
    return list(await asyncio.gather(*asked))


def prompt_of(number: int) -> list[int]:
    return [5, 6 + number % 7, 9]


def mismatch(model: Any, done: list[Completion]) -> float:
    import torch

    gaps = []
    for number, said in enumerate(done):
        prompt = prompt_of(number)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + said.ids])).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(said.ids)[:, None])[:, 0]
        gaps.append((torch.tensor(said.logprobs) - logprobs).abs())
    return float(torch.cat(gaps).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="directory of a model; without it the tiny one of the examples")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="sampled by a request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size", type=float, default=1e-3)
    sys.exit(0 if uvloop.run(run(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
