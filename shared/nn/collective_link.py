"""The part of a weight group that torch.distributed carries: one process group of the trainer and the members that NCCL
reaches, one of those that gloo does."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from opentinker.shared.runtime.listening import interface_of
from opentinker.shared.types.swap import Transport

NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
POLL_S = 0.1
KINDS: tuple[Literal["nccl", "gloo"], ...] = ("nccl", "gloo")


class CollectiveLink:
    """Broadcasts from the trainer, which has place 0."""

    def __init__(self, group: dist.ProcessGroup, place: int, kind: Literal["nccl", "gloo"]) -> None:
        self.kind = kind
        self._place = place
        self._group: dist.ProcessGroup | None = group

    @classmethod
    def of(
        cls, store: dist.Store, rank: int, transports: Sequence[Transport], own_address: str, timeout_s: float
    ) -> list[CollectiveLink]:
        """Blocking: form the process groups that this rank belongs to."""
        found = []
        for kind in KINDS:
            ranks = [0, *(number for number, transport in enumerate(transports, 1) if transport == kind)]
            if rank not in ranks or len(ranks) == 1:
                continue
            prefixed, place = dist.PrefixStore(f"weights-{kind}", store), ranks.index(rank)
            if kind == "nccl":
                name_interface(own_address)
                group: dist.ProcessGroup = dist.ProcessGroupNCCL(prefixed, place, len(ranks), _nccl(timeout_s))
            else:
                group = dist.ProcessGroupGloo(prefixed, place, len(ranks), gloo_options(own_address, timeout_s))
            found.append(cls(group, place, kind))
        return found

    def move(self, bucket: torch.Tensor, deadline: float, failed: Callable[[], str], *, last: bool) -> str:
        """Broadcast one bucket; returns what went wrong, or nothing. `failed`: whether to wait no longer, and why."""
        group, on_gloo, why = self._group, self.kind == "gloo", ""
        if group is None:
            return "it is closed"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = delta(max(deadline - time.monotonic(), 0.001))
        sent = bucket.cpu() if on_gloo and bucket.is_cuda else bucket
        work = group.broadcast([sent.view(-1)], options)
        while not why and not _over(work, on_gloo):
            late = not on_gloo and time.monotonic() > deadline
            why = "timed out" if late else failed()
        if not why:
            work.wait()
        elif on_gloo:
            _outlive(group, work)
            if self._place:  # bytes may still arrive in the memory that the work holds
                bucket.set_(torch.empty_like(bucket))
        return why

    def close(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        with contextlib.suppress(RuntimeError):  # a broken group may refuse; its sockets close with the object
            if self.kind == "nccl":
                group.abort()
            else:
                group.shutdown()


def _nccl(timeout_s: float) -> dist.ProcessGroupNCCL.Options:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = delta(timeout_s)
    return options


def name_interface(own_address: str) -> None:
    """Have NCCL connect and listen on the interface of this address, unless the operator has named one. For the life of
    the process: NCCL reads it once, with its first collective."""
    if name := interface_of(own_address):
        os.environ.setdefault(NCCL_INTERFACE, f"={name}")


def gloo_options(own_address: str, timeout_s: float) -> dist.ProcessGroupGloo._Options:
    """Return options of a gloo group whose members connect to this machine at `own_address`."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = delta(timeout_s)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
    return options


def _over(work: dist.Work, on_gloo: bool) -> bool:
    """Wait for up to POLL_S. Return whether the work has ended, successfully or not."""
    if on_gloo:
        with contextlib.suppress(RuntimeError):  # not yet; or it has failed, and the next wait says so again
            work.wait(delta(POLL_S))
        return bool(work.is_completed())
    end = time.monotonic() + POLL_S
    while (
        not (over := work.is_completed()) and time.monotonic() < end
    ):  # NCCL's wait returns before the bytes are there
        time.sleep(0.0005)
    return bool(over)


def _outlive(group: dist.ProcessGroup, work: dist.Work) -> None:
    """Keep a group until its last operation has timed out: gloo cannot abort it, and the group's end waits for it.

    The process waits for the thread before it ends: one that is left waiting in torch would make it abort.
    """

    def wait(_: dist.ProcessGroup) -> None:
        with contextlib.suppress(RuntimeError):
            work.wait()

    threading.Thread(target=wait, args=(group,), name="weights-lost").start()


def delta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
