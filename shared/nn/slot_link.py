"""The part of a weight group whose members share memory with the trainer: of its GPU (`ipc`) or of its machine
(`shared`).

The memory is a slot of two halves, smaller than a bucket may be. The trainer fills one half while members empty the
other. They tell each other through the group's store:

    trainer   fill half n % 2   set KIND/sent/n     before that, for n >= 2: wait for KIND/took/n-2/RANK of every member
    member    wait for KIND/sent/n    copy    set KIND/took/n/RANK
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec
import structlog
import torch
import torch.distributed as dist

from opentinker.shared.nn import cuda_ipc
from opentinker.shared.nn.collective_link import POLL_S
from opentinker.shared.nn.shared_segment import Segment
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.swap import Transport

log = structlog.get_logger()

Kind = Literal["ipc", "shared"]
HALVES = 2
HALF_BYTES = (32 << 20, 8 << 20, 1 << 20)
"""Sizes of a half, tried in order: a container may have little shared memory."""
FIRST_PAUSE_S = 0.0001
LONGEST_PAUSE_S = 0.005
STAMP = 0x7E57_A11C
"""Stands at the beginning of the slot when a member opens it: proof that both see the same memory."""


class SegmentOffer(msgspec.Struct, frozen=True):
    """A segment of shared memory; the trainer has none if the name is empty."""

    name: str = ""
    size: int = 0


class SlotLink:
    """`readers`: ranks of the members that read the slot; `rank` is one of them, or 0 for the trainer."""

    def __init__(
        self,
        store: dist.Store,
        kind: Kind,
        slot: torch.Tensor,
        rank: int,
        readers: Sequence[int],
        release: Callable[[], None],
    ) -> None:
        """`release` is called once, when the link is closed."""
        self.kind = kind
        self._store: dist.Store | None = store
        self._rank, self._readers = rank, list(readers)
        self._halves = slot.chunk(HALVES)
        self._release: Callable[[], None] | None = release
        self._count = 0
        """Chunks moved so far; the same number in all processes."""

    def move(self, bucket: torch.Tensor, deadline: float, failed: Callable[[], str], *, last: bool) -> str:
        """Trainer: send the bucket; member: fill it. Returns what went wrong, or nothing. After the `last` bucket of a
        version the trainer waits until all have taken it."""
        for chunk in bucket.view(-1).split(self._halves[0].numel()):
            why = self._send(chunk, deadline, failed) if self._rank == 0 else self._take(chunk, deadline, failed)
            if why:
                return why
            self._count += 1
        if last and self._rank == 0:
            for number in range(max(0, self._count - HALVES), self._count):
                if why := self._taken(number, deadline, failed):
                    return why
        return ""

    def close(self) -> None:
        self._store, self._halves = None, ()
        release, self._release = self._release, None
        if release is not None:
            release()

    def _send(self, chunk: torch.Tensor, deadline: float, failed: Callable[[], str]) -> str:
        number, store, halves = self._count, self._store, self._halves
        if store is None or not halves:
            return "it is closed"
        if number >= HALVES and (why := self._taken(number - HALVES, deadline, failed)):
            return why
        halves[number % HALVES][: chunk.numel()].copy_(chunk)
        _finish_copies(chunk, halves[0])
        store.set(f"{self.kind}/sent/{number}", "")
        return ""

    def _take(self, chunk: torch.Tensor, deadline: float, failed: Callable[[], str]) -> str:
        number, store, halves = self._count, self._store, self._halves
        if store is None or not halves:
            return "it is closed"
        if why := _wait(store, f"{self.kind}/sent/{number}", deadline, failed):
            return why
        chunk.copy_(halves[number % HALVES][: chunk.numel()])
        _finish_copies(chunk, halves[0])
        store.set(f"{self.kind}/took/{number}/{self._rank}", "")
        return ""

    def _taken(self, number: int, deadline: float, failed: Callable[[], str]) -> str:
        """Wait until all members have taken the chunk, then forget its keys. Again for the same chunk: no wait."""
        store = self._store
        if store is None:
            return "it is closed"
        if not store.check([f"{self.kind}/sent/{number}"]):
            return ""
        for reader in self._readers:
            key = f"{self.kind}/took/{number}/{reader}"
            if why := _wait(store, key, deadline, failed):
                return f"rank {reader}: {why}"
            store.delete_key(key)
        store.delete_key(f"{self.kind}/sent/{number}")
        return ""


class Offer:
    """The trainer's side of a group that forms: memory for the members that may share it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[Kind, torch.Tensor] = {}
        self._releases: dict[Kind, Callable[[], None]] = {}
        self._segment: Segment | None = None

    @classmethod
    def make(cls, store: dist.Store, proposed: Sequence[Transport], device: torch.device) -> Offer:
        """Tell every member at the store what it may open. Where there is no memory to share, members get nothing, and
        take another transport."""
        offer = cls(device)
        wants_segment = any(transport != "gloo" for transport in proposed)
        store.set("offer/shared", msgspec.json.encode(offer._made_segment() if wants_segment else SegmentOffer()))
        for rank, transport in enumerate(proposed, 1):
            if transport == "ipc":
                store.set(f"offer/ipc/{rank}", offer._made_handle())
        return offer

    def links(self, store: dist.Store, agreed: Sequence[Transport]) -> list[SlotLink]:
        """Return the trainer's links to the members that have opened something; they release it."""
        found = []
        for kind, slot in self._slots.items():
            if readers := [rank for rank, transport in enumerate(agreed, 1) if transport == kind]:
                found.append(SlotLink(store, kind, slot, 0, readers, self._releases.pop(kind)))
        return found

    def withdraw(self) -> None:
        """Remove the segment's name, as everyone who takes part has opened it; release what no member uses."""
        if self._segment is not None:
            self._segment.unlink()
        for release in self._releases.values():
            release()
        self._releases.clear()
        self._slots.clear()

    def _made_segment(self) -> SegmentOffer:
        for half in HALF_BYTES:
            with contextlib.suppress(OSError):
                self._segment = segment = Segment.make(HALVES * half)
                if self._device.type == "cuda":
                    segment.pin()
                self._slots["shared"], self._releases["shared"] = _stamped(segment.tensor), segment.close
                return SegmentOffer(segment.name, segment.size)
        log.warning("no_shared_memory", hint="/dev/shm has no room: in a container, raise its shm_size")
        return SegmentOffer()

    def _made_handle(self) -> bytes:
        """Make a handle for one member: torch counts how often each is opened."""
        if not torch.cuda.is_available():
            return b"null"
        try:
            if "ipc" not in self._slots:
                self._slots["ipc"] = slot = _stamped(cuda_ipc.buffer(self._device, HALVES * HALF_BYTES[0]))
                self._releases["ipc"] = partial(cuda_ipc.release, slot)
            return msgspec.json.encode(cuda_ipc.share(self._slots["ipc"]))
        except RuntimeError as error:
            log.warning("no_cuda_ipc", why=first_line(error))
            return b"null"


def accept(
    store: dist.Store, kind: Kind, rank: int, device: torch.device, deadline: float, failed: Callable[[], str]
) -> SlotLink:
    """A member: open what the trainer offers. Raises RuntimeError, OSError or ValueError where it offers nothing, and
    where it cannot be opened or is not the trainer's memory."""
    key = "offer/shared" if kind == "shared" else f"offer/ipc/{rank}"
    if why := _wait(store, key, deadline, failed):
        raise ValueError(f"the trainer's offer: {why}")
    raw, segment = store.get(key), None
    if kind == "shared":
        found = msgspec.json.decode(raw, type=SegmentOffer)
        if not found.name:
            raise ValueError("the trainer has no shared memory")
        segment = Segment.open(found.name, found.size)
        slot = segment.tensor
    else:
        handle = msgspec.json.decode(raw, type=cuda_ipc.Handle | None)
        if handle is None:
            raise ValueError("the trainer's GPU memory cannot be shared")
        slot = cuda_ipc.opened(handle, device)
    if int(slot[:8].cpu().view(torch.int64)) != STAMP:
        raise ValueError("what was opened is not the trainer's memory")
    if segment is not None and device.type == "cuda" and torch.cuda.is_available():
        segment.pin()
    return SlotLink(store, kind, slot, rank, (), segment.close if segment is not None else _nothing)


def _nothing() -> None:
    """CUDA's mapping ends with the tensor."""


def _stamped(slot: torch.Tensor) -> torch.Tensor:
    slot[:8].copy_(torch.tensor([STAMP], dtype=torch.int64).view(torch.uint8))
    _finish_copies(slot)
    return slot


def _finish_copies(*tensors: torch.Tensor) -> None:
    """Wait until copies from and to GPUs have ended: the other process sees them then."""
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()


def _wait(store: dist.Store, key: str, deadline: float, failed: Callable[[], str]) -> str:
    """Wait for a key. Returns what went wrong, or nothing. Asks again and again: the store's own wait warns on stderr
    whenever it ends without the key."""
    pause_s, asked_at = FIRST_PAUSE_S, time.monotonic()
    while not store.check([key]):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if (now := time.monotonic()) - asked_at > POLL_S:
            asked_at = now
            if why := failed() or ("timed out" if now > deadline else ""):
                return why
    return ""
