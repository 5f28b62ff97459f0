"""Weight groups of two and three processes: what each transport carries arrives unchanged, and how fast."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import torch

from loadtest.gpu._bench import Bench, Finding, Skipped, holds
from opentinker.shared.nn.shared_segment import DIRECTORY, PREFIX
from opentinker.shared.nn.transport import WeightGroup, host_store
from opentinker.shared.types.errors import TransportError
from opentinker.shared.types.swap import Transport

ADDRESS = "127.0.0.1"
TIMEOUT_S = 60.0
VERSIONS = 4
"""The first one is not timed."""
MEMBER = "loadtest.gpu.weight_member"


def same_device(bench: Bench) -> Iterator[Finding]:
    """Two processes on one GPU: CUDA IPC. On a CPU, what a member without CUDA makes of that proposal."""
    yield from _carried(bench, ["ipc"], [bench.device], "ipc" if bench.on_gpu else "shared")


def shared_memory(bench: Bench) -> Iterator[Finding]:
    """Pinned memory of the machine, from the GPU into a process without one, and into one on the GPU."""
    yield from _carried(bench, ["shared"], ["cpu"], "shared")
    if bench.on_gpu:
        yield from _carried(bench, ["shared"], ["cuda"], "shared")


def several_devices(bench: Bench) -> Iterator[Finding]:
    """NCCL between GPUs."""
    if bench.on_gpu and torch.cuda.device_count() < 2:
        raise Skipped("NCCL needs a second GPU: it refuses two processes on one")
    yield from _carried(bench, ["nccl" if bench.on_gpu else "gloo"], ["cuda:1" if bench.on_gpu else "cpu"])


def mixed(bench: Bench) -> Iterator[Finding]:
    """One group of all kinds of members that the machine allows."""
    transports: list[Transport] = ["ipc", "shared", "gloo"] if bench.on_gpu else ["shared", "gloo"]
    yield from _carried(bench, transports, ["cuda", "cpu", "cpu"] if bench.on_gpu else ["cpu", "cpu"])


def lost_member(bench: Bench) -> Iterator[Finding]:
    """A killed member is noticed in time, the next group forms, and no shared memory stays behind."""
    transport: Transport = "ipc" if bench.on_gpu else "shared"
    before = {path.name for path in DIRECTORY.glob(f"{PREFIX}*")}
    for killed in (True, False):
        store, port = host_store(ADDRESS, 2, TIMEOUT_S)
        told = [str(port), "2", "4096", "1", "1", transport]
        argv = [sys.executable, "-m", MEMBER, "1", bench.device, *told]
        member = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        try:
            group = WeightGroup.join(
                address=ADDRESS, port=port, rank=0, world=2, device=bench.device, timeout_s=TIMEOUT_S, store=store,
                transports=[transport],
            )  # fmt: skip
            if killed:
                member.kill()
                member.wait()
                group.timeout_s = 1.0
            lost = ""
            try:
                for version in range(2 if killed else 1):  # it may have taken the first before it was killed
                    group.send([contents(4096, version, 0, bench.device)])
            except TransportError as error:
                lost = str(error)
            if killed:
                yield holds(f"{transport}: a killed member is noticed", "timed out" in lost, lost or "it was not")
            else:
                said = member.communicate(timeout=TIMEOUT_S)[0].strip()
                yield holds(f"{transport}: the next group carries", said == "good" and not lost, lost or said)
            group.close()
        finally:
            member.kill()
            member.communicate()
    left = {path.name for path in DIRECTORY.glob(f"{PREFIX}*")} - before
    yield holds("no shared memory is left", not left, ", ".join(sorted(left)) or "none")


def _carried(
    bench: Bench, proposed: Sequence[Transport], devices: Sequence[str], expected: str = ""
) -> Iterator[Finding]:
    """Send versions to members, each a process that checks every byte."""
    world, size, count = 1 + len(proposed), 1 << 12 if bench.small else 64 << 20, 2 if bench.small else 16
    store, port = host_store(ADDRESS, world, TIMEOUT_S)
    told = [str(port), str(world), str(size), str(count), str(VERSIONS), ",".join(proposed)]
    members = [
        subprocess.Popen(
            [sys.executable, "-m", MEMBER, str(rank), device, *told],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank, device in enumerate(devices, 1)
    ]  # fmt: skip
    try:
        group = WeightGroup.join(
            address=ADDRESS, port=port, rank=0, world=world, device=bench.device, timeout_s=TIMEOUT_S, store=store,
            transports=proposed,
        )  # fmt: skip
        used = ", ".join(group.transports)
        wanted = expected or ", ".join(proposed)
        yield holds(f"proposed {', '.join(proposed)}: in use", used == wanted, used)
        began = 0.0
        for version in range(VERSIONS):
            buckets = [contents(size, version, number, bench.device) for number in range(count)]
            began = bench.now() if version == 1 else began
            group.send(buckets)
        rate = size * count * (VERSIONS - 1) / (bench.now() - began)
        group.close()
        said = [member.communicate(timeout=TIMEOUT_S)[0].strip() for member in members]
        yield holds(
            f"{used}: {VERSIONS} versions of {size * count / 1e6:.3g} MB", said == ["good"] * len(members), said
        )
        yield Finding(f"{used}: one version, with making and checking it", f"{rate / 1e9:.2f} GB/s")
    finally:
        for member in members:
            member.kill()
            member.communicate()


def contents(size: int, version: int, number: int, device: str) -> torch.Tensor:
    """Return a bucket's bytes, which both sides can make: each differs from its neighbours, and between buckets."""
    words = torch.arange(size // 8, dtype=torch.int64, device=device)
    return ((words + 1) * (0x9E37_79B9_7F4A + 2 * (1000 * version + number))).view(torch.uint8)
