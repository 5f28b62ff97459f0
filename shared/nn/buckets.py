"""A version's weights as flat byte buckets with a fingerprint each: what a weight swap sends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import TransportError
from opentinker.shared.types.swap import Probe, TensorInfo

ALIGN = 16
"""Every tensor starts at a multiple of this many bytes in its bucket, so that it can be viewed in place."""
CHUNK = 1 << 17
"""64-bit words per partial sum of a fingerprint; part of its definition."""
STRIDE = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


@dataclass
class Snapshot:
    """A version's weights, frozen: training may go on while it is sent."""

    version: WeightVersion
    manifest: list[TensorInfo]
    buckets: list[torch.Tensor]
    """Flat uint8, at most `bucket_bytes` each; a larger tensor has a separate bucket."""
    fingerprints: list[int]
    probe: Probe | None = None
    base_bytes: int = 0
    """Bytes of the base's weights, which take time to load, if engines may merge this adapter into them."""


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TransportError(f"unknown tensor dtype {name!r}")
    return dtype


def nbytes(info: TensorInfo) -> int:
    return int(math.prod(info.shape) * dtype_of(info.dtype).itemsize)


def bucket_sizes(manifest: Sequence[TensorInfo], bucket_bytes: int) -> list[int]:
    """Bytes of each bucket: tensors in order, a new bucket when the next tensor would pass `bucket_bytes`.

    Return the sizes of the buckets; empty tensors take no place.
    """
    sizes: list[int] = []
    for info in manifest:
        size = nbytes(info)
        start = _aligned(sizes[-1]) if sizes else 0
        if sizes and not size:
            continue
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
        start = _aligned(offset) if size else 0
        if start + size > buckets[bucket].numel():
            bucket, start = bucket + 1, 0
        if bucket == len(buckets) or start + size > buckets[bucket].numel():
            raise TransportError(f"the buckets end before tensor {info.name}")
        yield info.name, buckets[bucket][start : start + size].view(dtype_of(info.dtype)).view(info.shape)
        offset = start + size if size else offset


def snapshot(
    version: WeightVersion,
    named: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    manifest: list[TensorInfo] | None = None,
    probe: Probe | None = None,
) -> Snapshot:
    """Copy tensors into buckets on their device: training continues while they travel.

    With a `manifest`, which says what will come, `named` is consumed one by one and nothing of it is kept.
    """
    if manifest is None:
        named = [(name, tensor.detach()) for name, tensor in named]
        manifest = [
            TensorInfo(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in named
        ]
    if not manifest:
        raise TransportError("there are no tensors to send")
    sizes = bucket_sizes(manifest, bucket_bytes)
    buckets: list[torch.Tensor] = []
    targets: Iterator[tuple[str, torch.Tensor]] = iter(())
    for name, tensor in named:
        if not buckets:
            buckets = [torch.empty(size, dtype=torch.uint8, device=tensor.device) for size in sizes]
            targets = unpack(manifest, buckets)
        announced, target = next(targets, ("nothing", tensor))
        if announced != name or target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise TransportError(f"tensor {name} came where {announced} was announced")
        target.copy_(tensor)
        del tensor  # it may go before the next one is made
    if (missing := next(targets, None)) is not None or not buckets:
        raise TransportError(f"tensor {missing[0] if missing else manifest[0].name} was announced and did not come")
    return Snapshot(version, manifest, buckets, [fingerprint(bucket) for bucket in buckets], probe)


def fingerprint(bucket: torch.Tensor) -> int:
    """64-bit checksum of a flat uint8 tensor; depends on the order of the bytes, the same on every device.

    Words x_i of a chunk are multiplied by odd weights w_i and summed modulo 2^64, so a change of any single word
    changes the sum; the sums of the chunks and the bytes after the last whole word are chained by Horner's rule with
    an odd factor, so it changes the result too. It starts from the length.
    """
    tail = bucket.numel() % 8
    words = bucket[: bucket.numel() - tail].view(torch.int64)
    weights = _weights(bucket.device, min(CHUNK, words.numel()))
    sums = [(words[i : i + CHUNK] * weights[: words.numel() - i]).sum() for i in range(0, words.numel(), CHUNK)]
    value: int = bucket.numel()
    for part in torch.stack(sums).tolist() if sums else []:
        value = (value * STRIDE + part) & MASK
    for byte in bucket[bucket.numel() - tail :].tolist():
        value = (value * STRIDE + byte) & MASK
    return value - (1 << 64) if value >> 63 else value  # as a signed 64-bit integer, no bit of it lost


def _weights(device: torch.device, count: int) -> torch.Tensor:
    signed = STRIDE - (1 << 64)
    return (torch.arange(count, dtype=torch.int64, device=device) * 2 + 1) * signed


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
