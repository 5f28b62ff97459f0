"""Weights on their way from the trainer to the rollout workers.

The trainer copies its tensors into a `Snapshot` (flat byte buckets, one fingerprint each) and broadcasts the buckets in
a `WeightGroup`, where it is rank 0. A receiver stages all buckets, compares the fingerprints of the `SwapCommand`, and
only then loads. A group is one torch process group of its own: the default group is never touched, so a process can
leave one and enter the next while it lives.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from opentinker.shared.errors import OpenTinkerError
from opentinker.shared.types import TensorInfo, WeightVersion

ALIGN = 16
"""Every tensor starts at a multiple of this many bytes in its bucket, so that it can be viewed in place."""
CHUNK = 1 << 17
"""64-bit words per partial sum of a fingerprint; part of its definition."""
SLOWEST_LINK = 50e6
"""Bytes per second: a transfer may take its group's time-out plus the time that this takes."""
STRIDE = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


class TransportError(OpenTinkerError):
    """The group could not be formed, a peer is gone or too slow, or the bytes are not what was announced."""


@dataclass
class Snapshot:
    """A version's weights, frozen: training may go on while it is sent."""

    version: WeightVersion
    manifest: list[TensorInfo]
    buckets: list[torch.Tensor]
    """Flat uint8, at most `bucket_bytes` each; a tensor larger than that has a bucket of its own."""
    fingerprints: list[int]


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TransportError(f"unknown tensor dtype {name!r}")
    return dtype


def nbytes(info: TensorInfo) -> int:
    return int(math.prod(info.shape) * dtype_of(info.dtype).itemsize)


def bucket_sizes(manifest: Sequence[TensorInfo], bucket_bytes: int) -> list[int]:
    """Bytes of each bucket: tensors in order, a new bucket when the next tensor would pass `bucket_bytes`."""
    sizes: list[int] = []
    for info in manifest:
        size = nbytes(info)
        start = _aligned(sizes[-1]) if sizes else 0
        if sizes and start + size <= bucket_bytes:
            sizes[-1] = start + size
        else:
            sizes.append(size)
    return sizes


def unpack(manifest: Sequence[TensorInfo], buckets: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors; the tensors are views of the buckets."""
    bucket, offset = 0, 0
    for info in manifest:
        size = nbytes(info)
        start = _aligned(offset)
        if start + size > buckets[bucket].numel():
            bucket, start = bucket + 1, 0
        if bucket == len(buckets) or start + size > buckets[bucket].numel():
            raise TransportError(f"the buckets end before tensor {info.name}")
        yield info.name, buckets[bucket][start : start + size].view(dtype_of(info.dtype)).view(info.shape)
        offset = start + size


def snapshot(
    version: WeightVersion,
    named: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    reuse: Snapshot | None = None,
) -> Snapshot:
    """Copy tensors into buckets on their device. The memory of `reuse` is written over when the layout is the same."""
    tensors = [(name, tensor.detach()) for name, tensor in named]
    if not tensors:
        raise TransportError("there are no tensors to send")
    manifest = [
        TensorInfo(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors
    ]
    sizes = bucket_sizes(manifest, bucket_bytes)
    device = tensors[0][1].device
    buckets = _memory(sizes, device, reuse.buckets if reuse else None)
    for (_, target), (_, tensor) in zip(unpack(manifest, buckets), tensors, strict=True):
        target.copy_(tensor)
    return Snapshot(version, manifest, buckets, [fingerprint(bucket) for bucket in buckets])


def fingerprint(bucket: torch.Tensor) -> int:
    """64-bit checksum of a flat uint8 tensor; depends on the order of the bytes, the same on every device.

    Words x_i of a chunk are multiplied by odd weights w_i and summed modulo 2^64, so a change of any single word
    changes the sum; the sums of the chunks are chained by Horner's rule, and the length is mixed in.
    """
    tail = bucket.numel() % 8
    words = bucket[: bucket.numel() - tail].view(torch.int64)
    weights = _weights(bucket.device, min(CHUNK, words.numel()))
    sums = [(words[i : i + CHUNK] * weights[: words.numel() - i]).sum() for i in range(0, words.numel(), CHUNK)]
    value = bucket.numel()
    for part in torch.stack(sums).tolist() if sums else []:
        value = (value * STRIDE + part) & MASK
    for byte in bucket[bucket.numel() - tail :].tolist():
        value = (value * STRIDE + byte) & MASK
    return int(value >> 1)  # fits a signed 64-bit integer on the wire


def host_store(address: str, world: int, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """The meeting point of a group: listens on a free port of the trainer's machine. Returns it and the port."""
    try:
        store = dist.TCPStore(
            address, 0, world, is_master=True, timeout=_delta(timeout_s), wait_for_workers=False, use_libuv=True
        )
    except RuntimeError as error:
        raise TransportError(f"cannot listen for rollout workers on {address}: {_first_line(error)}") from error
    return store, store.port


class WeightGroup:
    """The trainer (rank 0) and its rollout workers. After an error the group is useless: close it, form the next."""

    def __init__(
        self, store: dist.TCPStore, group: dist.ProcessGroup, rank: int, device: torch.device, timeout_s: float
    ) -> None:
        self.rank = rank
        self.device = device
        self.timeout_s = timeout_s
        self._store: dist.TCPStore | None = store
        self._group: dist.ProcessGroup | None = group

    @classmethod
    def join(
        cls,
        *,
        address: str,
        port: int,
        rank: int,
        world: int,
        device: str,
        timeout_s: float,
        store: dist.TCPStore | None = None,
    ) -> WeightGroup:
        """Blocks until all `world` members are there. Raises TransportError after `timeout_s`."""
        where = torch.device(device)
        try:
            store = store or dist.TCPStore(address, port, world, is_master=False, timeout=_delta(timeout_s))
            prefixed = dist.PrefixStore("weights", store)
            if where.type == "cuda":
                torch.cuda.set_device(where)
                group: dist.ProcessGroup = dist.ProcessGroupNCCL(prefixed, rank, world, _nccl(timeout_s))
            else:
                group = dist.ProcessGroupGloo(prefixed, rank, world, _gloo(_own_address(address, port), timeout_s))
        except (RuntimeError, OSError) as error:
            raise TransportError(
                f"rank {rank} could not join the weight group of {world} at {address}:{port} "
                f"within {timeout_s:g} s: {_first_line(error)}"
            ) from error
        return cls(store, group, rank, where, timeout_s)

    def send(self, buckets: Sequence[torch.Tensor]) -> None:
        """Rank 0: broadcast the buckets in order."""
        self._broadcast(buckets)

    def receive(self, sizes: Sequence[int], reuse: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Buckets of the given numbers of bytes, in fresh memory or in that of `reuse` if it has the same sizes."""
        buckets = _memory(sizes, self.device, reuse)
        self._broadcast(buckets)
        return buckets

    def close(self) -> None:
        """Leave: members that still wait for us get an error. Idempotent."""
        group, self._group, self._store = self._group, None, None
        if group is None:
            return
        with contextlib.suppress(RuntimeError):  # a broken group may refuse; its sockets close with the object
            if self.device.type == "cuda":
                group.abort()
            else:
                group.shutdown()

    def _broadcast(self, buckets: Sequence[torch.Tensor]) -> None:
        if self._group is None:
            raise TransportError("the weight group is closed")
        total = sum(bucket.numel() for bucket in buckets)
        deadline = time.monotonic() + self.timeout_s + total / SLOWEST_LINK
        for number, bucket in enumerate(buckets):
            # Raised outside the except block: a traceback would keep the group's sockets open, and with them the hope
            # of the other members.
            if failure := _send_one(self._group, bucket, deadline, self.device):
                self.close()
                raise TransportError(
                    f"rank {self.rank} lost the weight group in bucket {number + 1} of {len(buckets)}: {failure}"
                )


def _nccl(timeout_s: float) -> dist.ProcessGroupNCCL.Options:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _delta(timeout_s)
    return options


def _gloo(own_address: str, timeout_s: float) -> dist.ProcessGroupGloo._Options:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = _delta(timeout_s)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
    return options


def _own_address(address: str, port: int) -> str:
    """The address of this machine that the host at `address` can reach; no packet is sent."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _send_one(group: dist.ProcessGroup, bucket: torch.Tensor, deadline: float, device: torch.device) -> str:
    """Broadcast from rank 0; returns what went wrong, or nothing."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = _delta(max(deadline - time.monotonic(), 0.001))
    try:
        work = group.broadcast([bucket], options)
        while device.type == "cuda" and not work.is_completed():  # NCCL's wait returns before the bytes are there
            if time.monotonic() > deadline:
                return "timed out"
            time.sleep(0.0005)
        work.wait()
    except RuntimeError as error:
        return _first_line(error)
    return ""


def _memory(sizes: Sequence[int], device: torch.device, reuse: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    if reuse is not None and [b.numel() for b in reuse] == list(sizes) and all(b.device == device for b in reuse):
        return list(reuse)
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]


def _weights(device: torch.device, count: int) -> torch.Tensor:
    signed = STRIDE - (1 << 64)
    return (torch.arange(count, dtype=torch.int64, device=device) * 2 + 1) * signed


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


def _delta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
