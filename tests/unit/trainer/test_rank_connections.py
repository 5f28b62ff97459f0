"""Connections of rank 0 to ranks here and on other trainers, with processes that only speak the protocol."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from types import SimpleNamespace

import msgspec
import pytest
import structlog

from opentinker.services.trainer.distributed import member_ranks, rank_connections, rank_listener, trainer_group
from opentinker.services.trainer.distributed.member_ranks import MemberRanks
from opentinker.services.trainer.distributed.rank_connections import RankLost
from opentinker.services.trainer.distributed.rank_listener import RankListener
from opentinker.services.trainer.distributed.rank_processes import RankProcesses
from opentinker.services.trainer.distributed.rank_protocol import HEAD, Done, FromRank, Gather, Hello, frame
from opentinker.shared.types.core import Lease, Pool
from opentinker.shared.types.errors import OpenTinkerError
from opentinker.shared.types.trainer_group import JoinRanks, JoinReply, RankShare

HERE, WAIT_S = "127.0.0.1", 90.0
SHARES = (RankShare("trainer-0", "a", 2), RankShare("trainer-1", "b", 1))
"""The lead is this process; rank 2 is the other trainer's."""
STUB = f"""
import socket, struct, sys
connection = socket.socket(fileno=int(sys.argv[1]))
commands = connection.makefile("rb")
while len(head := commands.read(8)) == 8:
    commands.read(struct.unpack("<Q", head)[0])
    connection.sendall(bytes.fromhex({frame(FromRank(Done())).hex()!r}))
"""
"""A rank that says `Done` to every command, and ends with its connection."""
LEASE = Lease(job="j-a", worker="trainer-1", incarnation="b", epoch=1, pool=Pool.TRAINER, group=SHARES)
COMMAND = Gather(checkpoint=False)


def stub(connection: socket.socket, rank: int, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-I", "-S", "-c", STUB, str(connection.fileno())]
    return subprocess.Popen(argv, pass_fds=[connection.fileno()])


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rank_connections, member_ranks):
        monkeypatch.setattr(module, "start_rank", stub)


@pytest.fixture
def listener() -> Iterator[RankListener]:
    with closing(RankListener(HERE, SHARES)) as listener:
        yield listener


def call(listener: RankListener) -> JoinRanks:
    return JoinRanks(job="j-a", epoch=1, address=HERE, port=listener.port, token=listener.token)


def ended(member: MemberRanks) -> bool:
    assert member._thread is not None
    member._thread.join(WAIT_S)
    return not member._thread.is_alive()


def test_ranks_here_and_there_execute_a_command_and_end_with_the_lead(listener: RankListener) -> None:
    member = MemberRanks(LEASE)
    assert member.numbers == [2] and member.start(call(listener)) == ""
    ranks = RankProcesses(3, lambda rank: {}, listener)
    assert ranks.run(COMMAND, lambda: "own") == "own"
    assert ranks.run(COMMAND, lambda: "again") == "again"
    assert len(ranks.pids) == 1
    ranks.close(lambda: None)
    assert ended(member)


def test_the_loss_of_a_remote_rank_names_its_trainer(listener: RankListener, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def remembered(*arguments: object) -> subprocess.Popen[bytes]:
        started.append(stub(*arguments))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(member_ranks, "start_rank", remembered)
    member = MemberRanks(LEASE)
    assert member.start(call(listener)) == ""
    ranks = RankProcesses(3, lambda rank: {}, listener)
    with structlog.testing.capture_logs() as said:
        os.kill(started[0].pid, signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 2 on trainer-1 has closed") as lost:
            ranks.run(COMMAND, threading.Event().wait)
        assert ended(member)
    assert lost.value.worker == "trainer-1"
    assert [line["why"] for line in said if line["event"] == "rank_lost"] == ["rank 2 was killed by signal 9"]
    ranks.close_s = 0.1
    ranks.close(lambda: None)


def test_a_released_job_drops_who_waits_to_be_accepted(listener: RankListener) -> None:
    member = MemberRanks(LEASE)
    assert member.start(call(listener)) == ""
    listener.close()
    assert ended(member)
    with pytest.raises(OpenTinkerError, match="released"):
        listener.accept(WAIT_S)


def drip(connection: socket.socket, over: threading.Event) -> None:
    """Announce a hello of 1,000 bytes and send it byte by byte, each in time."""
    with suppress(OSError):
        connection.sendall(HEAD.pack(1000))
        while not over.wait(0.05):
            connection.sendall(b"x")


def test_only_who_has_the_token_becomes_a_rank(listener: RankListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_listener, "HELLO_S", 0.2)
    others = [socket.create_connection((HERE, listener.port), WAIT_S) for _ in range(5)]
    others[0].sendall(frame(Hello(2, bytes(32))))
    others[1].sendall(frame(Hello(1, listener.token)))  # rank 1 is ours
    others[2].sendall(b"\xff" * 64)
    others[3].close()
    others[4].sendall(b"\x08")  # and nothing more
    slow, over = socket.create_connection((HERE, listener.port), WAIT_S), threading.Event()
    dripping = threading.Thread(target=drip, args=(slow, over))
    dripping.start()
    own = socket.create_connection((HERE, listener.port), WAIT_S)
    own.sendall(frame(Hello(2, listener.token)))
    with structlog.testing.capture_logs() as said:
        (rank,) = listener.accept(WAIT_S)
    assert (rank.rank, rank.worker) == (2, "trainer-1")
    assert rank.socket.getpeername() == own.getsockname()
    assert [line["event"] for line in said] == ["connection_refused"] * 5
    over.set()
    dripping.join(WAIT_S)
    for connection in (rank.socket, own, slow, *others):
        connection.close()


async def test_members_that_do_not_take_their_ranks_are_named(
    listener: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bus:
        async def request(self, _: object, __: object, ___: float, *, worker: str) -> JoinReply:
            return JoinReply(error="" if worker == "trainer-1" else "has another job", later=worker != "trainer-1")

    monkeypatch.setattr(trainer_group, "MEET_S", 0.1)
    lease = msgspec.structs.replace(LEASE, group=(*SHARES, RankShare("trainer-2", "c", 1)))
    await trainer_group.call_members(SimpleNamespace(bus=Bus()), lease, listener)  # type: ignore[arg-type]
    with pytest.raises(RankLost, match=r"did not take their ranks within 0.1 s: trainer-2;"):
        listener.accept(WAIT_S)


def test_who_does_not_come_is_named_and_a_released_job_waits_for_nobody(listener: RankListener) -> None:
    with pytest.raises(RankLost, match=r"rank 2 on trainer-1 did not connect within 0.1 s to .*can its machine reach"):
        RankListener(HERE, SHARES).accept(0.1)
    threading.Timer(0.1, listener.close).start()
    with pytest.raises(OpenTinkerError, match="released"):
        listener.accept(WAIT_S)


def test_a_member_that_cannot_reach_the_lead_says_how_to_change_that(listener: RankListener) -> None:
    unreachable = call(listener)
    listener.close()
    assert "advertise_host" in MemberRanks(LEASE).start(unreachable)
