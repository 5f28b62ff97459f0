"""Weight groups whose members share memory with the trainer, alone and next to members that do not."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog
import torch

from opentinker.shared.nn import cuda_ipc, shared_segment, slot_link
from opentinker.shared.nn.buckets import fingerprint, snapshot
from opentinker.shared.nn.shared_segment import Segment
from opentinker.shared.nn.transport import WeightGroup, host_store
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import TransportError
from opentinker.shared.types.swap import Transport
from tests.conftest import WAIT_S

LOOPBACK = "127.0.0.1"
MEMBER = """
import sys
from opentinker.shared.nn.transport import WeightGroup
port, rank, size, *transports = sys.argv[1:]
where = dict(address="127.0.0.1", port=int(port), rank=int(rank), world=1 + len(transports), device="cpu")
group = WeightGroup.join(**where, timeout_s=180, transports=transports)
print(group.transports[int(rank) - 1], flush=True)
sys.stdin.readline()
group.receive([int(size)])
"""
TRAINER = """
import os, signal, sys
from opentinker.shared.nn import shared_segment
segment = shared_segment.Segment.make(1 << 20)
print(segment.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own directory of shared memory, so that what is left there is ours."""
    monkeypatch.setattr(shared_segment, "DIRECTORY", tmp_path)
    return tmp_path


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def formed(
    pool: ThreadPoolExecutor, transports: Sequence[Transport], timeout_s: float = 2 * WAIT_S
) -> list[WeightGroup]:
    """A group in this process, the trainer first."""
    world = 1 + len(transports)
    store, port = host_store(LOOPBACK, world, timeout_s)

    def join(rank: int) -> WeightGroup:
        return WeightGroup.join(
            address=LOOPBACK, port=port, rank=rank, world=world, device="cpu", timeout_s=timeout_s,
            store=None if rank else store, transports=transports,
        )  # fmt: skip

    return list(pool.map(join, range(world)))


def assert_carries(pool: ThreadPoolExecutor, groups: list[WeightGroup]) -> None:
    """Three versions arrive at every member, bit by bit, in the memory that the one before had."""
    staged: list[list[torch.Tensor] | None] = [None] * len(groups)
    for step in range(3):
        named = [(f"layer.{n}", torch.randn(size)) for n, size in enumerate((700, 5000, 3, 1))]
        snap = snapshot(WeightVersion(0, step), named, 8192)
        sizes = [bucket.numel() for bucket in snap.buckets]
        receiving = [
            pool.submit(group.receive, sizes, before) for group, before in zip(groups[1:], staged[1:], strict=True)
        ]
        groups[0].send(snap.buckets)
        for rank, future in enumerate(receiving, 1):
            staged[rank] = future.result()
            assert [fingerprint(bucket) for bucket in staged[rank] or []] == snap.fingerprints


@pytest.mark.parametrize(
    "transports",
    [["shared"], ["shared", "shared"], ["gloo", "shared"], ["shared", "gloo", "shared", "gloo"]],
    ids="-".join,
)
def test_members_of_all_kinds_are_one_group(
    pool: ThreadPoolExecutor, segments: Path, monkeypatch: pytest.MonkeyPatch, transports: list[Transport]
) -> None:
    monkeypatch.setattr(slot_link, "HALF_BYTES", (1024,))  # a bucket passes through in many chunks
    groups = formed(pool, transports)
    assert all(group.transports == transports for group in groups)
    assert list(segments.iterdir()) == [], "the name is gone as soon as the group is there"
    assert_carries(pool, groups)
    for group in groups:
        group.close()


def test_memory_that_cannot_be_shared_makes_way_for_gloo(
    pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_segment, "DIRECTORY", tmp_path / "missing")
    with structlog.testing.capture_logs() as said:
        groups = formed(pool, ["shared", "ipc"])
    assert groups[0].transports == ["gloo", "gloo"]
    assert {"no_shared_memory", "transport_refused"} <= {line["event"] for line in said}
    assert_carries(pool, groups)


def test_little_shared_memory_is_used(segments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fallocate(file: int, start: int, size: int) -> None:
        if size > 4096:
            raise OSError(28, "No space left on device")
        os.truncate(file, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    monkeypatch.setattr(slot_link, "HALF_BYTES", (8192, 4096, 1024))
    with ThreadPoolExecutor(2) as pool:
        groups = formed(pool, ["shared"])
        assert groups[0].transports == ["shared"]
        assert_carries(pool, groups)
    assert list(segments.iterdir()) == []


def test_without_cuda_a_member_takes_shared_memory(pool: ThreadPoolExecutor, segments: Path) -> None:
    groups = formed(pool, ["ipc", "nccl"])
    assert groups[0].transports == ["shared", "shared"]
    assert_carries(pool, groups)


def test_other_memory_than_the_trainers_is_refused(
    pool: ThreadPoolExecutor, segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_link, "_stamped", lambda slot: slot)
    groups = formed(pool, ["shared"])
    assert groups[0].transports == ["gloo"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "opentinker-weights-1", "opentinker-weights-" + "g" * 32, ""])
def test_only_segments_are_opened(segments: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no name of a segment"):
        Segment.open(name, 1)


def test_memory_of_a_gpu_is_shared_by_handle(
    pool: ThreadPoolExecutor, segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but CUDA's own calls: a handle for each member, plain fields in JSON, one buffer for the life of the process.
    Memory of the CPU stands in for the GPU's."""
    shared: dict[bytes, torch.Tensor] = {}

    class Storage:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def _share_cuda_(self) -> tuple[object, ...]:
            name = b"\x00\xff" + str(len(shared)).encode()
            shared[name] = self.tensor
            return 0, name, self.tensor.numel(), 0, b"counter", len(shared), b"event", True

    def opened(handle: cuda_ipc.Handle, device: torch.device) -> torch.Tensor:
        assert handle.event_required and base64.b64decode(handle.counter) == b"counter"
        return shared[base64.b64decode(handle.handle)]

    made: list[torch.Tensor] = []

    def buffer(device: torch.device, size: int) -> torch.Tensor:
        made.append(torch.empty(size, dtype=torch.uint8))
        return made[-1]

    real = torch.Tensor.untyped_storage
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_ipc, "buffer", buffer)
    monkeypatch.setattr(cuda_ipc, "opened", opened)
    monkeypatch.setattr(slot_link, "HALF_BYTES", (1024,))
    monkeypatch.setattr(
        torch.Tensor, "untyped_storage", lambda self: Storage(self) if any(self is m for m in made) else real(self)
    )
    groups = formed(pool, ["ipc", "shared", "ipc", "gloo"])
    assert groups[0].transports == ["ipc", "shared", "ipc", "gloo"]
    assert len(made) == 1 and len(shared) == 2, "one buffer, a handle for each member"
    assert_carries(pool, groups)
    for group in groups:
        group.close()
    assert cuda_ipc._unused.pop() is made[0], "kept for the next group"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_lost_member_that_shares_memory_is_noticed(how: signal.Signals) -> None:
    store, port = host_store(LOOPBACK, 2, 2 * WAIT_S)
    argv = [sys.executable, "-c", MEMBER, str(port), "1", str(1 << 20), "shared"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    member = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        group = WeightGroup.join(
            address=LOOPBACK, port=port, rank=0, world=2, device="cpu", timeout_s=2 * WAIT_S, store=store,
            transports=["shared"],
        )  # fmt: skip
        assert member.stdout is not None and member.stdout.readline() == "shared\n"
        os.kill(member.pid, how)
        group.timeout_s = 1.0
        with pytest.raises(TransportError, match="rank 0 lost the weight group in bucket 1 of 1: rank 1: timed out"):
            group.send([torch.zeros(1 << 20, dtype=torch.uint8)])
    finally:
        member.kill()
        member.communicate()


def test_segment_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = shared_segment.DIRECTORY / killed.stdout.strip()
    deadline = time.monotonic() + WAIT_S
    living = Segment.make(4096)
    while left.exists() and time.monotonic() < deadline:  # another test process may be removing it
        time.sleep(0.01)
    assert not left.exists()
    shared_segment.remove_orphans()
    assert (shared_segment.DIRECTORY / living.name).exists(), "its maker lives"
    living.unlink()
    living.close()
    assert not (shared_segment.DIRECTORY / living.name).exists()
