"""The weights of an engine whose model is divided among several processes, the ranks.

Rank 0 is in the weight group. It writes what arrives to memory that all ranks map, so that a version travels once for
each engine and is kept once; vLLM's loaders copy from there the part of each rank. Then each sums the bits of what it
holds: together they must hold what the trainer sent.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

PAGE = 4096
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MASK = (1 << 64) - 1
Sum = list[int]
"""Number of elements, and the sum of their bits as signed integers, modulo 2^64: the same however tensors are divided,
joined or transposed."""


class SharedBuckets:
    """Buckets in memory of this process (`hold`) or of another one (`map`)."""

    def __init__(self) -> None:
        self._file = -1
        self._key: tuple[Any, ...] = ()
        self._buckets: list[torch.Tensor] = []

    @property
    def place(self) -> str:
        """Path under which other processes of this user can open the memory."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def hold(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return buckets of these numbers of bytes, the same ones if the last had the same."""
        if self._file < 0 or self._key != tuple(sizes):
            self.close()
            self._file, self._key = os.memfd_create("weights"), tuple(sizes)
            os.ftruncate(self._file, sum(map(_whole_pages, sizes)))
            self._buckets = _mapped(self._file, sizes)
        return self._buckets

    def map(self, place: str, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return the buckets that another process holds at `place`."""
        found = os.stat(place)
        key = (found.st_dev, found.st_ino, *sizes)
        if self._key != key:
            file = os.open(place, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._key, self._buckets = key, _mapped(file, sizes)
            finally:
                os.close(file)
        return self._buckets

    def close(self) -> None:
        """Let go of the memory, which is free when no tensor uses it."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._key, self._buckets = -1, (), []


def _mapped(file: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    found, start = [], 0
    for size in sizes:
        found.append(torch.frombuffer(mmap.mmap(file, _whole_pages(size), offset=start), dtype=torch.uint8)[:size])
        start += _whole_pages(size)
    return found


def _whole_pages(size: int) -> int:
    return max(-(-size // PAGE), 1) * PAGE


def bit_sum(tensors: Iterable[torch.Tensor]) -> Sum:
    elements = total = 0
    for tensor in tensors:
        elements += tensor.numel()
        total += int(tensor.view(BITS[tensor.itemsize]).sum(dtype=torch.int64))
    return [elements, total & MASK]


def sent_sum(weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Sum:
    """Sum a version, as an engine of this dtype has to hold it."""
    return bit_sum(tensor.to(dtype) for _, tensor in weights)


def held_sums(model: torch.nn.Module, sent: Mapping[str, list[int]], dtype: torch.dtype, rank: int) -> dict[str, Any]:
    """Sum the rank's parameters: `part` of those that are divided, without copies and padding, and `whole` of those
    that each rank has like the others. `sent`: shapes by name. Where a parameter has another dtype or is not known from
    `sent`, the copies on other ranks would not be told from parts: its name as `unchecked`."""
    limits = {id(tensor): rows for layer in model.modules() for tensor, rows in _own_rows(layer, rank)}
    part: list[torch.Tensor] = []
    whole: list[torch.Tensor] = []
    for name, tensor in model.named_parameters():
        shape = _undivided(name, sent, getattr(model, "packed_modules_mapping", {}))
        if tensor.dtype != dtype or shape is None:
            return {"unchecked": name}
        own = tensor.detach()[: limits.get(id(tensor), len(tensor))] if tensor.ndim else tensor.detach()
        (whole if shape == list(tensor.shape) else part).append(own)
    return {"part": bit_sum(part), "whole": bit_sum(whole)}


def _undivided(name: str, sent: Mapping[str, list[int]], packed: Mapping[str, Sequence[str]]) -> list[int] | None:
    """Return the shape of a parameter on one rank alone: as it was sent, or joined from several that were."""
    if name in sent:
        return sent[name]
    for joined, names in packed.items():
        shapes = [sent.get(name.replace(f".{joined}.", f".{one}.")) for one in names]
        if found := [shape for shape in shapes if shape is not None] if None not in shapes else []:
            return [sum(shape[0] for shape in found), *found[0][1:]]
    return None


def _own_rows(layer: torch.nn.Module, rank: int) -> Iterable[tuple[torch.nn.Parameter, int]]:
    """Return parameters of which the rank has more rows than those that count, and how many count."""
    rows = None
    if isinstance(layer, VocabParallelEmbedding):  # the vocabulary is padded
        rows = layer.shard_indices.num_org_elements
    elif isinstance(layer, QKVParallelLinear) and rank % layer.num_kv_head_replicas:  # a copy of another rank's keys
        rows = layer.num_heads * layer.head_size
    return [] if rows is None else [(tensor, rows) for tensor in layer.parameters(recurse=False)]


def add_by_gloo() -> None:
    """Have ranks on processors, which are forked from this process, exchange sums by gloo: in vLLM's shared memory they
    would wait in a loop that keeps the processor from the others, and that the death of a rank does not end."""
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False


def together(answers: Sequence[Any]) -> Any:
    """Return one answer for those of all ranks: none until each has one, the first error, or the slowest's seconds."""
    if any(answer is None for answer in answers):
        return None
    for rank, answer in enumerate(answers):
        if "error" in answer:
            return {"error": f"rank {rank}: {answer['error']}" if rank else answer["error"]}
    if problem := _not_what_was_sent(answers):
        return {"error": problem}
    parts = [answer["part"] for answer in answers if "part" in answer]
    return {**answers[0], "parts": parts, "seconds": max(answer["seconds"] for answer in answers)}


def _not_what_was_sent(answers: Sequence[dict[str, Any]]) -> str:
    """Return why the ranks do not hold the version together; empty if they do, or where `held_sums` cannot tell."""
    sent = answers[0].get("sent")
    if sent is None or not all("part" in answer for answer in answers):
        return ""
    whole = answers[0]["whole"]
    held = whole[0] + sum(answer["part"][0] for answer in answers)
    if sent[0] != held:
        return (
            f"the {len(answers)} ranks together hold {held} weights, and {sent[0]} were sent: this model cannot be "
            "checked when it is divided; use rollout_gpus = 1"
        )
    for rank, answer in enumerate(answers):
        if answer["whole"] != whole:
            return f"rank {rank} has not loaded the weights that rank 0 has loaded"
    if sent[1] != (whole[1] + sum(answer["part"][1] for answer in answers)) & MASK:
        return f"the {len(answers)} ranks together do not hold the weights that were sent"
    return ""
