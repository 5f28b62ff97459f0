"""Weights on their way from the trainer to the rollout workers.

The trainer copies its tensors into a `Snapshot` (flat byte buckets, one fingerprint each) and sends the buckets to the
members of a `WeightGroup`, where it is rank 0. A receiver stages all buckets, compares the fingerprints of the
`SwapCommand`, and only then loads.

Each member has the transport that its place allows: `ipc` on the trainer's GPU and `shared` on its machine
(`slot_link.py`), `nccl` and `gloo` elsewhere (`collective_link.py`); a group may have all of them. A member that cannot
use what the trainer proposes takes the next one of `FALLBACKS`, before any bytes move. torch's default process group
is never touched, so a process can leave one group and join the next during its life.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence

import structlog
import torch
import torch.distributed as dist

from opentinker.shared.nn import slot_link
from opentinker.shared.nn.collective_link import CollectiveLink, delta
from opentinker.shared.nn.slot_link import Offer, SlotLink
from opentinker.shared.runtime.listening import listen_on, own_address
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.errors import TransportError
from opentinker.shared.types.swap import Transport

log = structlog.get_logger()

SLOWEST_LINK = 50e6
"""Bytes per second that a transfer and the loading after it must reach: see `allowed_s`."""
GIVEN_UP = "given-up"
"""Key of a group's store: the reason why the group has been abandoned. Waiting members poll it, because gloo does not
wake a member in the middle of a message when the connection ends."""
BACKLOG = 1024
SECRET_BYTES = 16
ARRIVAL_POLL_S = 0.02
FALLBACKS: dict[Transport, tuple[Transport, ...]] = {
    "ipc": ("ipc", "shared", "gloo"),
    "shared": ("shared", "gloo"),
    "nccl": ("nccl", "shared", "gloo"),
    "gloo": ("gloo",),
}
"""Transports that a member tries, in order. gloo always works: it needs a connection alone, which the group has."""


def allowed_s(timeout_s: float, total: int) -> float:
    """Return the seconds that moving or loading this many bytes may take before it counts as hanging."""
    return timeout_s + total / SLOWEST_LINK


def host_store(address: str, world: int, timeout_s: float, secret: str = "") -> tuple[dist.Store, int]:
    """The meeting point of a group: listens on a free port of `address`, which is one of this machine's. Returns it and
    the port. `secret`: see `known_by`."""
    try:
        # Given only an address, torch listens on every interface, without authentication.
        listener = listen_on(address, BACKLOG)
        port = int(listener.getsockname()[1])
        store = dist.TCPStore(
            address, port, world, is_master=True, timeout=delta(timeout_s), wait_for_workers=False, use_libuv=True,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        raise TransportError(f"cannot listen on {address}: {first_line(error)}") from error
    return known_by(secret, store), port


def new_secret() -> str:
    return secrets.token_hex(SECRET_BYTES)


def known_by(secret: str, store: dist.Store) -> dist.Store:
    """Return the store with `secret` before every key. torch's store has no passwords: without the secret, which
    members get through NATS, a connection can neither find nor change a key by its name."""
    return dist.PrefixStore(secret, store) if secret else store


def find_store(address: str, port: int, world: int, timeout_s: float, secret: str = "") -> dist.Store:
    """Connect to the store of `host_store`. Raises RuntimeError."""
    store = dist.TCPStore(address, port, world, is_master=False, timeout=delta(timeout_s), wait_for_workers=False)
    return known_by(secret, store)


def give_up(store: dist.Store, why: str) -> None:
    """Everyone who waits in the group, to join, send or receive, gets a TransportError within about LOOK_S.

    The first reason stays.
    """
    with contextlib.suppress(RuntimeError):  # who waits will see that the store does not answer
        store.compare_set(GIVEN_UP, "", why)


class WeightGroup:
    """The trainer (rank 0) and its rollout workers. After an error the group is useless: close it, form the next."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        device: torch.device,
        timeout_s: float,
        links: Sequence[CollectiveLink | SlotLink],
        transports: Sequence[Transport],
    ) -> None:
        self.rank = rank
        self.device = device
        """Device of received buckets."""
        self.timeout_s = timeout_s
        self.transports = list(transports)
        """In use, of ranks 1, 2, ..."""
        self._store: dist.Store | None = store
        self._links = list(links)

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
        store: dist.Store | None = None,
        transports: Sequence[Transport] = (),
        secret: str = "",
    ) -> WeightGroup:
        """Join a weight group; blocks until all `world` members are there.

        `store`, `secret`: of `host_store`; the trainer has the store. `transports`: those proposed for ranks 1, 2, ...;
        without them NCCL on GPUs and gloo elsewhere. Raises TransportError: immediately if the trainer is gone or
        abandons the group, otherwise after `timeout_s`.
        """
        where = torch.device(device)
        if where.type == "cuda" and where.index is None and torch.cuda.is_available():
            where = torch.device("cuda", torch.cuda.current_device())
        deadline = time.monotonic() + timeout_s
        failed = f"rank {rank} could not join the weight group of {world} at {address}:{port}"
        proposed = list(transports) or ["nccl" if where.type == "cuda" else "gloo"] * (world - 1)
        offer: Offer | None = None
        slot: SlotLink | None = None
        formed = False
        try:
            reachable = own_address(address, port, timeout_s)
            if store is None:
                store = find_store(address, port, world, timeout_s, secret)
            if where.type == "cuda" and torch.cuda.is_available():
                torch.cuda.set_device(where)
            if rank == 0:
                offer = Offer.make(store, proposed, where)
                _set_here(store, 0, "")
            else:
                slot, own = _accept(store, proposed[rank - 1], rank, where, deadline)
                _set_here(store, rank, own)
                if own == "gloo" or not torch.cuda.is_available():
                    where = torch.device("cpu")
            if problem := _arrive(store, world, deadline):
                raise TransportError(f"{failed}: {problem}")
            agreed: list[Transport] = [store.get(f"here/{other}").decode() for other in range(1, world)]
            links: list[CollectiveLink | SlotLink] = [] if slot is None else [slot]
            links += CollectiveLink.of(store, rank, agreed, reachable, timeout_s)
            if offer is not None:
                links += offer.links(store, agreed)
            formed = True
        except (RuntimeError, OSError) as error:
            raise TransportError(f"{failed} within {timeout_s:g} s: {first_line(error)}") from error
        finally:
            if offer is not None:
                offer.withdraw()
            if slot is not None and not formed:
                slot.close()
        return cls(store, rank, where, timeout_s, links, agreed)

    def send(self, buckets: Sequence[torch.Tensor]) -> None:
        """Rank 0: send the buckets in order to every member."""
        for _ in self._move(buckets):
            pass

    def receive(self, sizes: Sequence[int], reuse: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Buckets of the given numbers of bytes, in fresh memory or in that of `reuse` if it has the same sizes.

        After a TransportError the contents of `reuse` are lost.
        """
        fits = reuse is not None and [bucket.numel() for bucket in reuse] == list(sizes)
        if reuse is not None and fits and all(bucket.device.type == self.device.type for bucket in reuse):
            buckets = list(reuse)
        else:
            buckets = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        return list(self._move(buckets))

    def receive_each(self, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield buckets of the given numbers of bytes, all in the same memory: each is lost with the next one."""
        place = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self.device)
        yield from self._move([place[:size] for size in sizes])

    def close(self) -> None:
        """Leave: members that still wait for us get an error. Idempotent."""
        self._store = None
        links, self._links = self._links, []
        for link in links:
            link.close()

    def _move(self, buckets: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield each bucket when it has passed."""
        end = time.monotonic() + allowed_s(self.timeout_s, sum(bucket.numel() for bucket in buckets))
        for number, bucket in enumerate(buckets):
            # Bucket by bucket: who hangs is noticed soon, however much is still to come.
            deadline = min(end, time.monotonic() + allowed_s(self.timeout_s, bucket.numel()))
            # Raised here, where no frame holds the group: a traceback would keep its sockets open, and with them the
            # hope of the other members.
            if failure := self._one(bucket, deadline, last=number == len(buckets) - 1):
                self.close()
                raise TransportError(
                    f"rank {self.rank} lost the weight group in bucket {number + 1} of {len(buckets)}: {failure}"
                )
            yield bucket

    def _one(self, bucket: torch.Tensor, deadline: float, *, last: bool) -> str:
        """Move one bucket; returns what went wrong, or nothing. The others learn of a failure too."""
        store, links = self._store, self._links
        if store is None:
            return "it is closed"

        def failed() -> str:
            return "it was closed" if self._store is not store else _given_up(store)

        why = ""
        try:
            for link in links:
                why = why or link.move(bucket, deadline, failed, last=last)
        except RuntimeError as error:
            why = first_line(error)
        if why:
            give_up(store, f"rank {self.rank}: {why}")
        return why


def _accept(
    store: dist.Store, proposed: Transport, rank: int, where: torch.device, deadline: float
) -> tuple[SlotLink | None, Transport]:
    """Return the first transport that works here, with its link if it has one already."""
    for transport in FALLBACKS[proposed]:
        if transport in ("ipc", "nccl") and not torch.cuda.is_available():
            continue
        if transport in ("nccl", "gloo"):
            break
        kind: slot_link.Kind = "ipc" if transport == "ipc" else "shared"
        try:
            link = slot_link.accept(store, kind, rank, where, deadline, lambda: _given_up(store))
            return link, transport
        except (RuntimeError, OSError, ValueError) as error:
            log.warning("transport_refused", transport=transport, proposed=proposed, why=first_line(error))
    return None, transport


def _set_here(store: dist.Store, rank: int, transport: str) -> None:
    store.set(f"here/{rank}", transport)


def _arrive(store: dist.Store, world: int, deadline: float) -> str:
    """Wait at the store until every member has come. Returns what went wrong, or nothing."""
    missing = list(range(world))
    while missing := [other for other in missing if not store.check([f"here/{other}"])]:
        if why := _given_up(store):
            return why
        if time.monotonic() > deadline:
            return f"rank {', '.join(map(str, missing))} did not come in time"
        time.sleep(ARRIVAL_POLL_S)
    return ""


def _given_up(store: dist.Store) -> str:
    """Return the reason why the group was abandoned; empty if it was not."""
    try:
        return f"given up, {store.get(GIVEN_UP).decode()}" if store.check([GIVEN_UP]) else ""
    except RuntimeError as error:
        return f"the trainer is gone: {first_line(error)}"
