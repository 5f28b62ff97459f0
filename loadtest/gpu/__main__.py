"""Checks everything of ours that runs on a GPU, on this machine, and prints one table: `make gpu-check`.

    python -m loadtest.gpu [--only SUBJECT] [--skip SUBJECT] [--budget 520]
    python -m loadtest.gpu --device cpu --small     # the suite's own logic, with tiny shapes

Exit status: 0 if everything that ran is good, 1 if something is not, 2 without a GPU. What needs something that the
machine lacks (a second GPU, vLLM, memory) is skipped, and the table says so.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from loadtest.gpu import attention, bank, job, memory, precision, reference, speed, weights
from loadtest.gpu._bench import Bench, Check, Finding, Skipped
from loadtest.gpu._watchdog import limited
from opentinker.shared.runtime.parent_death import adopt_orphans


class Subject(NamedTuple):
    """Checks of one kind."""

    limit_s: float
    """A check that takes longer on a GPU is taken to hang. None begins unless so much time is left."""
    checks: tuple[Check, ...]


SUBJECTS: dict[str, Subject] = {
    "attention": Subject(60.0, (attention.kernel, attention.model)),
    "precision": Subject(60.0, (precision.half_precision, precision.recomputed_layers, precision.masters)),
    "bank": Subject(60.0, (bank.mixed, bank.jobs)),
    "reference": Subject(60.0, (reference.logprobs, reference.speed)),
    "weights": Subject(
        weights.TIMEOUT_S + 40.0,
        (weights.same_device, weights.shared_memory, weights.several_devices, weights.mixed, weights.lost_member),
    ),
    "job": Subject(job.JOB_TIMEOUT_S + 10.0, (job.learning, job.services, job.sleeping, job.vllm)),
    "memory": Subject(60.0, (memory.all_weights, memory.layers_recomputed, memory.adapter)),
    "speed": Subject(90.0, (speed.half, speed.one_and_a_half, speed.four)),
}
"""In the order in which they run: what tells most comes first, should the time not suffice."""
BUDGET_S = 520.0
WIDTH = 78


class Table:
    """Lines by subject; printed as they come, and once more at the end."""

    def __init__(self) -> None:
        self.bad = 0
        self.skipped = 0
        self._lines: list[str] = []

    def add(self, subject: str, finding: Finding) -> None:
        self.bad += not finding.good
        self._line(subject, "ok" if finding.good else "BAD", finding.what, f"{finding.seen} {finding.wanted}".strip())

    def skip(self, subject: str, what: str, why: str) -> None:
        self.skipped += 1
        self._line(subject, "skipped", what, why)

    def _line(self, subject: str, mark: str, what: str, seen: str) -> None:
        self._lines.append(f"| {subject} | {what} | {seen} | {mark} |")
        print(f"{mark:<8}{subject:<10} {what:<{WIDTH}} {seen}", flush=True)

    def print(self, header: str, seconds: float) -> None:
        verdict = f"{self.bad} bad" if self.bad else "all good"
        print(f"\n{header}\n\n| subject | what | seen | |\n| --- | --- | --- | --- |")
        print("\n".join(self._lines))
        print(f"\n{len(self._lines)} lines, {verdict}, {self.skipped} skipped, {seconds:.0f} s", flush=True)


def run(bench: Bench, chosen: list[str], budget_s: float) -> Table:
    """Run the checks of the chosen subjects. One that raises is a bad line; so is one for which no time is left. One
    that hangs ends the process, with a bad line."""
    table, began, header = Table(), time.monotonic(), describe(bench)
    for subject in chosen:
        for check in SUBJECTS[subject].checks:
            name = check.__name__.replace("_", " ")
            left = budget_s - (time.monotonic() - began)
            limit_s = SUBJECTS[subject].limit_s if bench.on_gpu else left  # a CPU may be as slow as it likes
            if left <= 0 or left < limit_s:
                table.add(
                    subject,
                    Finding(name, f"not run: it may take {limit_s:.0f} s, and {left:.0f} s are left", good=False),
                )
                continue

            def hangs(subject: str = subject, name: str = name, limit_s: float = limit_s) -> None:
                told = f"hangs: it has not ended after {limit_s:.0f} s, and the suite ends without the rest"
                table.add(subject, Finding(name, told, good=False))
                table.print(header, time.monotonic() - began)

            with limited(limit_s, bench.place, hangs):
                for finding in outcome(check, bench, table, subject, name):
                    table.add(subject, finding)
                bench.forget()
    table.print(header, time.monotonic() - began)
    return table


def outcome(check: Check, bench: Bench, table: Table, subject: str, name: str) -> Iterator[Finding]:
    """Yield what a check finds. Whatever it raises is a finding too: the other checks run all the same."""
    began = time.monotonic()
    try:
        yield from check(bench)
    except Skipped as reason:
        table.skip(subject, name, str(reason))
    except Exception as error:  # noqa: BLE001 - the table reports it, and its trace goes to stderr
        traceback.print_exc()
        yield Finding(
            name, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}", "", False
        )
    else:
        print(f"        {subject:<10} {name}: {time.monotonic() - began:.1f} s", flush=True)


def describe(bench: Bench) -> str:
    """Return what the suite ran on."""
    software = f"torch {torch.__version__}, Python {sys.version.split()[0]}"
    if not bench.on_gpu:
        return f"CPU{', tiny shapes: no figure means anything' if bench.small else ''}; {software}"
    properties = torch.cuda.get_device_properties(0)
    count = torch.cuda.device_count()
    return (
        f"{f'{count} x ' if count > 1 else ''}{properties.name}, {properties.total_memory / 1e9:.0f} GB, compute "
        f"capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}; {software}"
    )


def missing(device: str) -> str:
    """Return what the machine lacks for this device, and what to do; empty if nothing."""
    if device == "cpu" or torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA; name a Python whose torch has it: make gpu-check "
            "GPU_PYTHON=/path/to/python"
        )
    told = os.environ.get("CUDA_VISIBLE_DEVICES", "(not set)")
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU: check the NVIDIA driver (nvidia-smi) and "
        f"CUDA_VISIBLE_DEVICES, which is {told}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes: what runs is the suite's own logic")
    parser.add_argument("--only", action="append", choices=SUBJECTS, default=[])
    parser.add_argument("--skip", action="append", choices=SUBJECTS, default=[])
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds for all: none begins that may take longer than is left"
    )
    options = parser.parse_args()
    if why := missing(options.device):
        print(f"make gpu-check: {why}", file=sys.stderr)
        sys.exit(2)
    adopt_orphans()  # to end them with the rest, should a check hang
    if options.device == "cpu":
        torch.set_num_threads(1)
    chosen = [name for name in options.only or SUBJECTS if name not in options.skip]
    with tempfile.TemporaryDirectory(prefix="opentinker-gpu-", ignore_cleanup_errors=True) as place:
        table = run(Bench(options.device, options.small, Path(place)), chosen, options.budget)
    sys.exit(1 if table.bad else 0)


if __name__ == "__main__":
    main()
