"""Learning end to end: in one process with a sampler of our own, and as a job over all services.

Neither needs vLLM. The services' job has the simulated engine: its rollout worker takes every version through the
weight group, on the GPU, and checks its bytes.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from transformers import AutoModelForCausalLM

from examples.models.make_tiny import CHARACTERS, VOCABULARY, make_tiny
from loadtest.gpu._bench import Bench, Finding, Skipped, at_least, at_most, holds
from loadtest.gpu._models import VERSION, learner_of, trajectory
from opentinker.services.trainer.learners.base import BUCKET_BYTES
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.nn.buckets import snapshot, unpack
from opentinker.shared.types.trajectories import Group

WANTED = VOCABULARY.index("7")
PROMPT = [VOCABULARY.index(character) for character in "say 7 ="]
ANSWER = 4
JOB_TIMEOUT_S = 150.0


def learning(bench: Bench) -> Iterator[Finding]:
    """A model learns to say one digit: sampled on the device from published weights, trained, published again."""
    base = make_tiny(bench.place / "tiny", hidden_size=64 if bench.small else 256, layers=2 if bench.small else 4)
    steps, size = (30, 64) if bench.small else (60, 256)
    learner = learner_of(
        bench, base, model={"dtype": "float32"}, train={"lr": 3e-3, "weight_decay": 0.0},
        algorithm={"loss": "ppo", "group_size": size, "groups_per_batch": 1},
    )  # fmt: skip
    sampler = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(bench.device).eval()
    shares, gaps = [], []
    began = bench.now()
    for step in range(steps):
        publish(learner, sampler)
        group, share = played(bench, sampler, size, step)
        shares.append(share)
        gaps.append(learner.step([group], VERSION)["mismatch/mean"])
    seconds = (bench.now() - began) / steps
    yield at_most("logprobs of sampler and trainer, largest mean difference of a step", max(gaps), 1e-3, " nats")
    yield at_least(f"share of right tokens after {steps} steps", float(np.mean(shares[-5:])), 0.5)
    yield Finding("a step of sampling, training and publishing", f"{seconds * 1e3:.0f} ms")


def publish(learner: RlLearner, sampler: Any) -> None:
    """Put the learner's weights into the sampler as they travel: through buckets, in the job's dtype."""
    sent = snapshot(VERSION, list(learner.named_weights()), BUCKET_BYTES)
    own = sampler.state_dict()
    with torch.no_grad():
        for name, tensor in unpack(sent.manifest, sent.buckets):
            own[name].copy_(tensor)


def played(bench: Bench, sampler: Any, size: int, seed: int) -> tuple[Group, float]:
    """Sample answers; the reward is the share of right tokens. Return the group and the mean reward."""
    drawn = torch.Generator(bench.device).manual_seed(seed)
    ids = torch.tensor([PROMPT] * size, device=bench.device)
    logprobs = []
    with torch.no_grad():
        for _ in range(ANSWER):
            scores = sampler(input_ids=ids, use_cache=False).logits[:, -1].float().log_softmax(-1)
            chosen = torch.multinomial(scores.exp(), 1, generator=drawn)
            logprobs.append(scores.gather(-1, chosen))
            ids = torch.cat([ids, chosen], 1)
    rewards = (ids[:, len(PROMPT) :] == WANTED).float().mean(1).tolist()
    said, told = ids.tolist(), torch.cat(logprobs, 1).tolist()
    rows = [
        trajectory(said[n], len(PROMPT), rewards[n], len(CHARACTERS), n, np.array(told[n], dtype=np.float32))
        for n in range(size)
    ]
    return Group(job="gpu", seq=seed, environment="copy_digits", worker="r", trajectories=rows), float(np.mean(rewards))


def services(bench: Bench) -> Iterator[Finding]:
    """A job of `opentinker run`: servers, scheduler, trainer, rollout worker, environment and reference-forward."""
    yield from _run(bench, "services", {"engine": "toy", "toy": {"skill": 0.5}, "max_tokens": 6}, kl=0.01)


def sleeping(bench: Bench) -> Iterator[Finding]:
    """The same with an engine that sleeps during each step."""
    toy = {"engine": "toy", "toy": {"skill": 0.5}, "max_tokens": 6, "sleep": "always"}
    yield from _run(bench, "sleeping", toy, kl=0.0)


def vllm(bench: Bench) -> Iterator[Finding]:
    """The same with vLLM, on the trainer's GPU."""
    if not bench.on_gpu or importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed in this Python" if bench.on_gpu else "vLLM is checked on GPUs alone")
    yield from _run(bench, "vllm", {"engine": "vllm", "max_tokens": 6, "context_length": 256}, kl=0.0)


def _run(bench: Bench, name: str, rollout: dict[str, Any], kl: float) -> Iterator[Finding]:
    model, home = make_tiny(bench.place / "job-model"), bench.place / f"job-{name}"
    steps = 3 if bench.small else 20
    file = bench.place / f"{name}.json"
    spec = {
        "name": f"gpu-{name}",
        "model": {"base": str(model), "chat_template": "plain"},
        "environment": {"name": "copy_digits", "config": {"digits": 3}},
        "algorithm": {"group_size": 4, "groups_per_batch": 4, "max_staleness": 1, "kl_coef": kl},
        "rollout": rollout,
        "train": {"steps": steps, "lr": 1e-4},
        "resources": {
            "trainer_gpus": int(bench.on_gpu),
            # The simulated engine may not ask for a GPU; it takes versions on its worker's all the same.
            "rollout_gpus": int(bench.on_gpu and rollout["engine"] == "vllm"),
        },
    }
    file.write_bytes(orjson.dumps(spec))
    environ = dict(os.environ) | ({"OPENTINKER_REFERENCE_DEVICE": "cuda"} if bench.on_gpu else {})
    began = bench.now()
    argv = [sys.executable, "-m", "opentinker.cli", "run", str(file), "--data-dir", str(home), "--json"]
    try:
        ran = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False, timeout=JOB_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _show_logs(home)
        raise
    seconds = bench.now() - began
    if ran.returncode:
        sys.stderr.write(f"{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}\n")
        _show_logs(home)
    lines = [orjson.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    done = max((line["step"] for line in lines if "step" in line), default=0)
    ending = next((line["job"]["state"] for line in reversed(lines) if "job" in line), f"exit status {ran.returncode}")
    yield holds(f"job {name}: {steps} steps over all services", ending == "succeeded" and done == steps, ending)
    yield holds(f"job {name}: weight group", bool(group := _weight_group(home)), group or "none formed")
    if bench.on_gpu:
        yield holds(f"job {name}: weights stay on the GPU", "ipc" in group, group)
    yield Finding(f"job {name}: from nothing to its end", f"{seconds:.1f} s")


def _show_logs(home: Path) -> None:
    """Print the end of each service's log to stderr."""
    for log in sorted((home / "logs").glob("*.log")):
        sys.stderr.write(f"===== {log.name}\n{log.read_text()[-2000:]}\n")


def _weight_group(home: Path) -> str:
    """Return the transport of each rollout worker in the last group that the trainer formed, from its log."""
    found = ""
    for log in (home / "logs").glob("trainer-*.log"):
        for line in log.read_text().splitlines():
            if '"weight_group"' in line and line.startswith("{"):
                workers = orjson.loads(line)["rollout_workers"]
                found = ", ".join(f"{worker} {transport}" for worker, transport in sorted(workers.items()))
    return found
