"""Measures a round of several seats against the same seats in turn, with an engine of a given duration; and how many
tokens a second two policies get from one vLLM engine.

    python -m loadtest.rounds [--only rounds] [--seats 4] [--engine-ms 100] [--rounds 40] [--episodes 4]
    python -m loadtest.rounds --only policies [--model DIR] [--requests 8] [--tokens 64] [--repeats 11]

Rounds: starts nats-server and a Redis-compatible server on free ports and one env worker, and plays episodes in this
process with the simulated engine, one after the other. Prints the time from one round's beginning to the next (p50),
the same of a game whose seats act in turn, and the hand-over of both (p50): from the engine's last answer of a round or
turn to its next request, which is the environment's step over NATS and all that surrounds it.

Policies: the same requests to the engine of one LoRA policy, to one engine that two policies share, and to two engines,
one of each. Three vLLM processes, asked one setup after the other in each repeat; medians. Without a GPU rates are per
second of processor time, in which what else runs on the machine has no part.

Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from loadtest.env_plane import serving
from loadtest.support.environments import PROMPT
from loadtest.support.machine import Meter, met
from opentinker.services.rollout_worker.engines import vllm_startup
from opentinker.services.rollout_worker.engines.base import Completion, Sampling
from opentinker.services.rollout_worker.engines.toy import ToyEngine
from opentinker.services.rollout_worker.episode import Episode
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.seat_map import SeatMap
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.runtime.reexec import below
from opentinker.shared.spec import LoraSpec, ToySpec, parse_spec
from opentinker.shared.types.core import Ticket, WeightVersion
from tests.support.toys import toy_model

if TYPE_CHECKING:
    from opentinker.services.rollout_worker.engines.vllm import VllmEngine

LORA = LoraSpec(rank=16)
SHARE = 0.9
TOKENS = len(PROMPT)
"""The simulated engine repeats the digits and ends its turn."""
OVERHEAD = 1.15
"""A round may take so much longer than the engine."""
HAND_OVER_MS = 3.0


class Timed(ToyEngine):
    """Remembers when every request came and was answered."""

    calls: list[tuple[float, float]]

    async def generate(self, *args: Any, **options: Any) -> Completion:
        began = time.perf_counter()
        completion = await super().generate(*args, **options)
        self.calls.append((began, time.perf_counter()))
        return completion


async def play(bus: Bus, model: Path, options: argparse.Namespace, *, together: bool) -> tuple[float, float, int]:
    """Return the medians of a round's seconds and of a hand-over's, and the number of rounds, or of turns."""
    toy = {"seconds_per_token": options.engine_ms / 1000 / TOKENS, "skill": 1.0}
    spec = parse_spec(
        {
            "name": "rounds",
            "model": {"base": str(model)},
            "environment": {
                "name": "loadtest.support.environments:Table",
                "config": {"seats": options.seats, "together": together},
            },
            "algorithm": {"group_size": 2, "groups_per_batch": 1},
            "rollout": {
                "engine": "toy",
                "toy": toy,
                "max_tokens": TOKENS * options.rounds,
                "max_tokens_per_turn": TOKENS,
                "max_turns": options.rounds,
            },
            "train": {"learner": "simulated", "steps": 1},
        }
    )
    renderer = Renderer.load_light(str(model), spec.model.chat_template)
    engine = Timed(ToySpec(**toy), eos_id=0, vocab_size=48, context_length=100_000, echo_ids=frozenset(range(2, 12)))
    engine.version = WeightVersion(1, 0)
    together_size = options.seats if together else 1
    rounds_s: list[float] = []
    hand_over_s: list[float] = []
    count = 0
    for number in range(options.episodes):
        engine.calls = []
        ticket = Ticket(job="load", seq=number, row=0, seed=0, group_size=1)
        await Episode(spec, ticket, 0, SeatMap.single(spec, engine, renderer), EnvClient(bus)).run()
        calls = sorted(engine.calls)
        turns = [calls[at : at + together_size] for at in range(0, len(calls), together_size)]
        count += len(turns)
        for turn, following in pairwise(turns[1:]):  # the first warms up
            hand_over_s.append(min(began for began, _ in following) - max(ended for _, ended in turn))
        begins = [turn[0][0] for turn in turns[1:]][:: 1 if together else options.seats]
        rounds_s += [later - earlier for earlier, later in pairwise(begins)]
    return float(np.median(rounds_s)), float(np.median(hand_over_s)), count


async def run(options: argparse.Namespace, url: str, pids: dict[str, int]) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        model = toy_model(Path(directory, "model"))
        async with Bus.connect(url, "load", "rollout-worker") as bus:  # whom env workers may answer
            await play(bus, model, argparse.Namespace(**vars(options) | {"episodes": 1, "rounds": 4}), together=True)
            meter = Meter(pids)
            round_s, hand_over_s, rounds = await play(bus, model, options, together=True)
            meter.stop()
            turn_meter = Meter(pids)
            turns_s, turn_over_s, turns = await play(bus, model, options, together=False)
            turn_meter.stop()
    engine_s = options.engine_ms / 1000
    print(f"{options.seats} seats, engine {options.engine_ms:g} ms: a round p50 {1e3 * round_s:.1f} ms together, "
          f"{1e3 * turns_s:.1f} ms in turn; hand-over p50 {1e3 * hand_over_s:.2f} ms of a round, "
          f"{1e3 * turn_over_s:.2f} ms of a turn")  # fmt: skip
    for what, one, acts in (("round", meter, rounds), ("turn", turn_meter, turns)):
        used = ", ".join(f"{name} {1e3 * seconds / acts:.2f}" for name, seconds in one.used.items())
        print(f"CPU-ms per {what}: {used}; cores used by others meanwhile: {one.foreign:.2f}")
    found = [met("rounds/s", 1 / round_s, 1 / (OVERHEAD * engine_s), meter.foreign)]
    for what, seconds, one in (("round", hand_over_s, meter), ("turn", turn_over_s, turn_meter)):
        found.append(met(f"hand-overs/s of a {what}", 1 / seconds, 1e3 / HAND_OVER_MS, one.foreign))
    return all(found)


async def two_policies(options: argparse.Namespace) -> bool:
    """Compare tokens per second of one policy and of two that share an engine."""
    vllm_startup.preload()
    from examples.models.make_tiny import make_tiny

    with tempfile.TemporaryDirectory() as directory:
        model = Path(options.model or make_tiny(Path(directory, "tiny")))
        first, second = (random_adapter(model, Path(directory, f"adapter-{seed}"), seed) for seed in (1, 2))
        async with AsyncExitStack() as held:
            alone = await started(held, model, first, policies=1)
            other = await started(held, model, second, policies=1)
            shared = await started(held, model, first, policies=2)
            sibling = shared.sibling([], LORA)
            await sibling.serve(WeightVersion(0, 1), second)
            setups = {"one policy": [alone], "two on one engine": [shared, sibling], "two on two": [alone, other]}
            for engines in setups.values():
                await tokens_per_s(engines, options)
            rates = defaultdict[str, list[float]](list)
            for _ in range(options.repeats):
                for name, engines in setups.items():
                    rates[name].append(await tokens_per_s(engines, options))
    found = {name: median(seen) for name, seen in rates.items()}
    print(", ".join(f"{name}: {rate:,.1f} tokens/s" for name, rate in found.items()))
    ratio = found["two on one engine"] / found["one policy"]
    print(f"two policies on one engine: {ratio:.2f} of one policy's: {'met' if ratio >= SHARE else 'MISSED'}")
    return ratio >= SHARE


def random_adapter(model: Path, place: Path, seed: int) -> Path:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(place)
    return place


async def started(held: AsyncExitStack, model: Path, adapter: Path, policies: int) -> VllmEngine:
    """Start an engine with room for three versions of each policy, as with max_staleness = 1."""
    from opentinker.services.rollout_worker.engines.vllm import VllmEngine
    from opentinker.services.rollout_worker.engines.vllm_config import AdapterLimits
    from opentinker.services.rollout_worker.engines.vllm_process import VllmProcess

    limits = AdapterLimits(rank=LORA.rank, at_once=3 * policies)
    process = VllmProcess(str(model), context_length=512, adapters=limits, sharing=3)
    engine = VllmEngine(process, eos_ids=[], lora=LORA)
    held.push_async_callback(engine.close)
    await engine.start()
    await engine.serve(WeightVersion(0, 1), adapter)
    return engine


async def tokens_per_s(engines: Sequence[VllmEngine], options: argparse.Namespace) -> float:
    """Send all requests at once, to the engines in turn."""
    import torch

    meter = Meter({str(pid): pid for pid in (os.getpid(), *below(os.getpid()))})
    sampling = [Sampling(max_tokens=options.tokens, seed=number) for number in range(options.requests)]
    await asyncio.gather(
        *(engines[n % len(engines)].generate(f"r{n}", [5, 6 + n % 7, 9], one) for n, one in enumerate(sampling))
    )
    meter.stop()
    seconds = meter.seconds if torch.cuda.is_available() else sum(meter.used.values())
    return float(options.requests * options.tokens / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("rounds", "policies"))
    parser.add_argument("--model", default="", help="directory of a model; without it the tiny one of the examples")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="sampled by a request")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--seats", type=int, default=4)
    parser.add_argument("--engine-ms", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--episodes", type=int, default=4)
    options = parser.parse_args()
    good = True
    if options.only != "policies":
        with serving() as (url, pids):
            good = uvloop.run(run(options, url, pids | {"client": os.getpid()}))
    if options.only != "rounds":
        good = uvloop.run(two_policies(options)) and good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
