"""The ranks that a trainer runs as a member of a trainer group, for the trainer that leads it.

    host_ranks   consumes the lead's RANKS; produces rank processes, each with a connection to the lead; waits until
                 they end, which they do with their connections

The member itself neither loads nor trains: rank 0 commands the ranks, reports, and saves.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import Sequence

import structlog

from opentinker.services.trainer.distributed.rank_connections import bound_silence, describe_exit, start_rank
from opentinker.services.trainer.distributed.rank_environment import rank_environment, threads_of
from opentinker.services.trainer.distributed.rank_protocol import Hello, frame
from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.messaging.subjects import RANKS
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.types.core import Lease
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.trainer_group import JoinRanks, JoinReply

log = structlog.get_logger()

CONNECT_S = 10.0
"""Time for a connection to the lead."""
POLL_S = 0.2


async def host_ranks(worker: LeasedWorker, lease: Lease) -> None:
    """Run this worker's share of the ranks until the lead, or the lease, is gone."""
    ranks = MemberRanks(lease)
    called, leaving = asyncio.Event(), asyncio.Event()
    answering = asyncio.Lock()

    async def answer(call: JoinRanks) -> JoinReply:
        if (call.job, call.epoch) != (lease.job, lease.epoch):
            return JoinReply(error=f"{lease.worker} works for epoch {lease.epoch} of job {lease.job}", later=True)
        async with answering:  # a repeated call waits for the first one
            if leaving.is_set():
                return JoinReply(error=f"{lease.worker} leaves job {lease.job}", later=True)
            if not called.is_set():
                if error := await asyncio.to_thread(ranks.start, call):
                    return JoinReply(error=error)
                called.set()
        return JoinReply()

    async def leave() -> None:
        """The lead may need the ranks to save what was trained; it closes the connections afterwards."""
        leaving.set()
        await subscription.unsubscribe()
        async with answering:
            await ranks.ended()

    subscription = await worker.ctx.bus.serve(RANKS, answer, worker=lease.worker)
    try:
        await called.wait()
        await worker.status("ready", job=lease.job, epoch=lease.epoch)
        log.info("ranks_started", ranks=ranks.numbers)
        await ranks.ended()
        log.info("ranks_ended", ranks=ranks.numbers)
    finally:
        await finish_uncancelled(leave())


class MemberRanks:
    def __init__(self, lease: Lease) -> None:
        shares = lease.group
        place = [share.worker for share in shares].index(lease.worker)
        first = sum(share.ranks for share in shares[:place])
        self.numbers = list(range(first, first + shares[place].ranks))
        self._thread: threading.Thread | None = None

    def start(self, call: JoinRanks) -> str:
        """Connect to the lead and start the processes; return what went wrong, or an empty string. Blocking."""
        connections: list[socket.socket] = []
        try:
            for rank in self.numbers:
                connections.append(socket.create_connection((call.address, call.port), CONNECT_S))
                bound_silence(connections[-1])
                connections[-1].sendall(frame(Hello(rank, call.token)))
                connections[-1].settimeout(None)
        except OSError as error:
            for connection in connections:
                connection.close()
            return (
                f"cannot connect to the lead trainer at {call.address}:{call.port}: {first_line(error)}; see its "
                "setting advertise_host"
            )
        started = threading.Event()
        failures: list[str] = []
        # The kernel ends the processes with the thread that starts them.
        arguments = (connections, started, failures)
        self._thread = threading.Thread(target=self._run, args=arguments, name="member-ranks", daemon=True)
        self._thread.start()
        started.wait()
        return failures[0] if failures else ""

    def _run(self, connections: Sequence[socket.socket], started: threading.Event, failures: list[str]) -> None:
        """Start the processes and wait until all have ended; the first that fails ends the others."""
        processes: dict[int, subprocess.Popen[bytes]] = {}
        threads = threads_of(len(self.numbers))
        try:
            for place, rank in enumerate(self.numbers):
                processes[rank] = start_rank(connections[place], rank, rank_environment(threads, place))
        except OSError as error:
            failures.append(f"cannot start its ranks: {error}")
        finally:
            for connection in connections:  # the process has its own copy
                connection.close()
            started.set()
        failed = bool(failures)
        while processes:
            for rank, process in list(processes.items()):
                if failed:
                    process.kill()
                try:
                    status = process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    continue
                del processes[rank]
                if status and not failed:
                    log.error("rank_lost", rank=rank, why=f"rank {rank} {describe_exit(status)}")
                failed |= bool(status)

    async def ended(self) -> None:
        """Wait until no process is left."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
