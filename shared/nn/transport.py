"""Weights on their way from the trainer to the rollout workers.

The trainer copies its tensors into a `Snapshot` (flat byte buckets, one fingerprint each) and broadcasts the buckets in
a `WeightGroup`, where it is rank 0. A receiver stages all buckets, compares the fingerprints of the `SwapCommand`, and
only then loads. A group is a separate torch process group: the default group is never touched, so a process can leave
one and join the next during its life.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from opentinker.shared.runtime.listening import listen_on, own_address
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.errors import TransportError

SLOWEST_LINK = 50e6
"""Bytes per second that a transfer and the loading after it must reach: see `allowed_s`."""
GIVEN_UP = "given-up"
"""Key of a group's store: the reason why the group has been abandoned. Waiting members poll it, because gloo does not
wake a member in the middle of a message when the connection ends."""
BACKLOG = 1024
POLL_S = 0.1
ARRIVAL_POLL_S = 0.02


def allowed_s(timeout_s: float, total: int) -> float:
    """Return the seconds that moving or loading this many bytes may take before it counts as hanging."""
    return timeout_s + total / SLOWEST_LINK


def host_store(address: str, world: int, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """The meeting point of a group: listens on a free port of `address`, which is one of this machine's. Returns it and
    the port."""
    try:
        # Given only an address, torch listens on every interface, without authentication.
        listener = listen_on(address, BACKLOG)
        port = int(listener.getsockname()[1])
        store = dist.TCPStore(
            address, port, world, is_master=True, timeout=_delta(timeout_s), wait_for_workers=False, use_libuv=True,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        raise TransportError(f"cannot listen on {address}: {first_line(error)}") from error
    return store, port


def give_up(store: dist.TCPStore, why: str) -> None:
    """Everyone who waits in the group, to join, send or receive, gets a TransportError within about LOOK_S.

    The first reason stays.
    """
    with contextlib.suppress(RuntimeError):  # who waits will see that the store does not answer
        store.compare_set(GIVEN_UP, "", why)


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
        """Blocks until all `world` members are there.

        Join a weight group. Raises TransportError: immediately if the trainer is gone or abandons the group, otherwise
        after `timeout_s`.
        """
        where = torch.device(device)
        deadline = time.monotonic() + timeout_s
        failed = f"rank {rank} could not join the weight group of {world} at {address}:{port}"
        try:
            reachable = own_address(address, port, timeout_s)
            store = store or dist.TCPStore(
                address, port, world, is_master=False, timeout=_delta(timeout_s), wait_for_workers=False
            )
            if problem := _arrive(store, rank, world, deadline):
                raise TransportError(f"{failed}: {problem}")
            prefixed = dist.PrefixStore("weights", store)
            if where.type == "cuda":
                torch.cuda.set_device(where)
                group: dist.ProcessGroup = dist.ProcessGroupNCCL(prefixed, rank, world, _nccl(timeout_s))
            else:
                group = dist.ProcessGroupGloo(prefixed, rank, world, gloo_options(reachable, timeout_s))
        except (RuntimeError, OSError) as error:
            raise TransportError(f"{failed} within {timeout_s:g} s: {first_line(error)}") from error
        return cls(store, group, rank, where, timeout_s)

    def send(self, buckets: Sequence[torch.Tensor]) -> None:
        """Rank 0: broadcast the buckets in order."""
        for _ in self._broadcast(buckets):
            pass

    def receive(self, sizes: Sequence[int], reuse: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Buckets of the given numbers of bytes, in fresh memory or in that of `reuse` if it has the same sizes.

        After a TransportError the contents of `reuse` are lost.
        """
        if reuse is not None and [bucket.numel() for bucket in reuse] == list(sizes):
            buckets = list(reuse)
        else:
            buckets = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        return list(self._broadcast(buckets))

    def receive_each(self, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield buckets of the given numbers of bytes, all in the same memory: each is lost with the next one."""
        place = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self.device)
        yield from self._broadcast([place[:size] for size in sizes])

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

    def _broadcast(self, buckets: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield each bucket when it has passed."""
        end = time.monotonic() + allowed_s(self.timeout_s, sum(bucket.numel() for bucket in buckets))
        for number, bucket in enumerate(buckets):
            # Bucket by bucket: who hangs is noticed soon, however much is still to come.
            deadline = min(end, time.monotonic() + allowed_s(self.timeout_s, bucket.numel()))
            # Raised here, where no frame holds the group: a traceback would keep its sockets open, and with them the
            # hope of the other members.
            if failure := self._one(bucket, deadline):
                self.close()
                raise TransportError(
                    f"rank {self.rank} lost the weight group in bucket {number + 1} of {len(buckets)}: {failure}"
                )
            yield bucket

    def _one(self, bucket: torch.Tensor, deadline: float) -> str:
        """Broadcast one bucket; returns what went wrong, or nothing. The others learn of a failure too."""
        group, store = self._group, self._store
        if group is None or store is None:
            return "it is closed"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = _delta(max(deadline - time.monotonic(), 0.001))
        on_gloo, why = self.device.type != "cuda", ""
        try:
            work = group.broadcast([bucket.view(-1)], options)
            while not why and not _over(work, on_gloo):
                if self._group is not group:
                    why = "it was closed"
                elif not on_gloo and time.monotonic() > deadline:
                    why = "timed out"
                else:
                    why = _given_up(store)
            if not why:
                work.wait()
            elif on_gloo:
                _outlive(group, work)
                if self.rank:  # bytes may still arrive in the memory that the work holds
                    bucket.set_(torch.empty_like(bucket))
        except RuntimeError as error:
            why = first_line(error)
        if why:
            give_up(store, f"rank {self.rank}: {why}")
        return why


def _nccl(timeout_s: float) -> dist.ProcessGroupNCCL.Options:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _delta(timeout_s)
    return options


def gloo_options(own_address: str, timeout_s: float) -> dist.ProcessGroupGloo._Options:
    """Return options of a gloo group whose members connect to this machine at `own_address`."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = _delta(timeout_s)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
    return options


def _arrive(store: dist.TCPStore, rank: int, world: int, deadline: float) -> str:
    """Wait at the store until every member has come. Returns what went wrong, or nothing."""
    store.set(f"here/{rank}", "")
    missing = list(range(world))
    while missing := [other for other in missing if not store.check([f"here/{other}"])]:
        if why := _given_up(store):
            return why
        if time.monotonic() > deadline:
            return f"rank {', '.join(map(str, missing))} did not come in time"
        time.sleep(ARRIVAL_POLL_S)
    return ""


def _given_up(store: dist.TCPStore) -> str:
    """Return the reason why the group was abandoned; empty if it was not."""
    try:
        return f"given up, {store.get(GIVEN_UP).decode()}" if store.check([GIVEN_UP]) else ""
    except RuntimeError as error:
        return f"the trainer is gone: {first_line(error)}"


def _over(work: dist.Work, on_gloo: bool) -> bool:
    """Wait for up to POLL_S. Return whether the work has ended, successfully or not."""
    if on_gloo:
        with contextlib.suppress(RuntimeError):  # not yet; or it has failed, and the next wait says so again
            work.wait(_delta(POLL_S))
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


def _delta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
