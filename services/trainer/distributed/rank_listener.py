"""The lead trainer's end of the connections from the ranks that other trainers run.

accept   consumes connections to one address of this machine, produces remote ranks; waits for the next connection,
         until all are there, the time is over, or the group has failed
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Sequence

import msgspec
import structlog

from opentinker.services.trainer.distributed.rank_connections import RankLost, RemoteRank, bound_silence
from opentinker.services.trainer.distributed.rank_protocol import HEAD, Hello
from opentinker.shared.runtime.listening import listen_on
from opentinker.shared.types import codec
from opentinker.shared.types.errors import OpenTinkerError
from opentinker.shared.types.trainer_group import RankShare

log = structlog.get_logger()

POLL_S = 0.2
HELLO_S = 5.0
"""Time in which a connection must say which rank it is of."""
HELLO_BYTES = 1024
TOKEN_BYTES = 32
BACKLOG = 128


class RankListener:
    """`shares`: of the trainer group; the first one is ours. `host`: under which the others reach this machine."""

    def __init__(self, host: str, shares: Sequence[RankShare]) -> None:
        self.host, self.shares = host, shares
        self.world = sum(share.ranks for share in shares)
        self.local = shares[0].ranks
        """Ranks of this trainer."""
        self.token = secrets.token_bytes(TOKEN_BYTES)
        workers = [share.worker for share in shares for _ in range(share.ranks)]
        self._worker_of = dict(enumerate(workers))
        self._listener = listen_on(host, BACKLOG)
        self._failed: OpenTinkerError | None = None
        self._lock = threading.Lock()
        self._accepting = False

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def fail(self, why: OpenTinkerError) -> None:
        """Make `accept` raise this. The first reason stays."""
        self._failed = self._failed or why

    def close(self) -> None:
        """Accept nothing more, and drop who waits to be accepted. Idempotent."""
        self.fail(OpenTinkerError("the job was released while its ranks were starting"))
        with self._lock:
            if not self._accepting:  # else `accept` closes it
                self._listener.close()

    def accept(self, timeout_s: float) -> list[RemoteRank]:
        """Return the ranks of other trainers, in order. Raises RankLost, and what `fail` was given."""
        found: dict[int, RemoteRank] = {}
        missing = set(range(self.local, self.world))
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._accepting = self._failed is None
        with self._listener as listener:
            while missing and self._failed is None:
                listener.settimeout(POLL_S)
                if time.monotonic() > deadline:
                    rank = min(missing)
                    worker = self._worker_of[rank]
                    late = f"rank {rank} on {worker} did not connect within {timeout_s:g} s"
                    self.fail(RankLost(f"{late} to {self.host}:{self.port} (can its machine reach that?)", worker))
                    break
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                rank = self._rank_of(connection)
                if rank not in missing:
                    connection.close()
                    continue
                missing.remove(rank)
                bound_silence(connection)
                connection.settimeout(None)
                found[rank] = RemoteRank(rank, connection, self._worker_of[rank])
        if self._failed is not None:
            for remote in found.values():
                remote.socket.close()
            raise self._failed
        return [found[rank] for rank in sorted(found)]

    def _rank_of(self, connection: socket.socket) -> int:
        """Return which rank has connected; -1 for a stranger."""
        deadline = time.monotonic() + HELLO_S  # of the whole hello: it may come byte by byte
        try:
            (size,) = HEAD.unpack(_exactly(connection, HEAD.size, deadline))
            hello = codec.decode(Hello, _exactly(connection, min(size, HELLO_BYTES), deadline))
        except (OSError, EOFError, codec.WireError, msgspec.MsgspecError) as error:
            log.warning("connection_refused", why=str(error))
            return -1
        if not hmac.compare_digest(hello.token, self.token):
            log.warning("connection_refused", why="it has another token")
            return -1
        return hello.rank


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Raises TimeoutError after the deadline (monotonic seconds), EOFError if the connection ends."""
    found = bytearray()
    while len(found) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError("it was closed")
        found += part
    return bytes(found)
