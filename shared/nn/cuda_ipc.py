"""Memory of a GPU that processes share, by CUDA's handles for inter-process communication.

A handle's fields are numbers and bytes, which travel as JSON; torch makes and opens them. torch gives shared memory
back only when each process that has opened it says so, which a killed one never does. So buffers are kept and used
again as long as this process lives: one for each weight group that it has at the same time.
"""

from __future__ import annotations

import base64
import re
from typing import Any

import msgspec
import torch

COUNTER = re.compile(r"/torch_[\w-]{1,100}")
"""Name of the shared memory in which torch counts who uses a buffer."""
COUNTERS = 10_000
"""Counters in such a memory."""
_unused: list[torch.Tensor] = []
"""Buffers of groups that have ended."""


class Handle(msgspec.Struct, frozen=True):
    """Fields that `torch.UntypedStorage._share_cuda_` returns of a buffer, for one process that opens it."""

    device: int
    handle: str
    """base64, as the other bytes."""
    size: int
    offset: int
    counter: str
    counter_offset: int
    event: str
    event_required: bool


def buffer(device: torch.device, size: int) -> torch.Tensor:
    """Return memory of the GPU, flat uint8, until `release`."""
    number = torch.cuda.current_device() if device.index is None else device.index
    for place, kept in enumerate(_unused):
        if kept.numel() == size and kept.device.index == number:
            return _unused.pop(place)
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", number))


def release(tensor: torch.Tensor) -> None:
    """Keep a buffer for the next group."""
    _unused.append(tensor)


def share(tensor: torch.Tensor) -> Handle:
    """Return a handle for one other process. Raises RuntimeError where CUDA cannot share it."""
    shared: tuple[Any, ...] = tensor.untyped_storage()._share_cuda_()
    device, handle, size, offset, counter, counter_offset, event, event_required = shared
    return Handle(
        device, _text(handle), size, offset, _text(counter), counter_offset, _text(event), bool(event_required)
    )


def opened(handle: Handle, device: torch.device) -> torch.Tensor:
    """Return the other process's memory as a flat uint8 tensor. Raises RuntimeError where that is impossible, as from
    another container without a shared IPC namespace, and in the process that has made the handle."""
    if not COUNTER.fullmatch(_bytes(handle.counter).decode("latin-1")) or not 0 <= handle.counter_offset < COUNTERS:
        raise RuntimeError("the handle names no counter of torch")
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(
        torch.cuda.current_device() if device.index is None else device.index,
        _bytes(handle.handle),
        handle.size,
        handle.offset,
        _bytes(handle.counter),
        handle.counter_offset,
        _bytes(handle.event),
        handle.event_required,
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
