"""Weight groups of threads and processes over gloo."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import structlog
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed import Store, TCPStore

from opentinker.shared.nn.buckets import Snapshot, bucket_sizes, fingerprint, snapshot, unpack
from opentinker.shared.nn.transport import GIVEN_UP, WeightGroup, give_up, host_store, new_secret
from opentinker.shared.runtime.listening import listen_on
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import TransportError
from tests.conftest import WAIT_S, free_port

LOOPBACK = "127.0.0.1"
V1 = WeightVersion(0, 1)

MEMBER = """
import sys, torch
from opentinker.shared.nn.transport import WeightGroup
port, rank, world, size = map(int, sys.argv[1:])
group = WeightGroup.join(address="127.0.0.1", port=port, rank=rank, world=world, device="cpu", timeout_s=180)
print("joined", flush=True)
sys.stdin.readline()
group.receive([size])
"""


def named(sizes: list[int]) -> list[tuple[str, torch.Tensor]]:
    return [(f"layer.{n}", torch.randn(size)) for n, size in enumerate(sizes)]


def sizes_of(snap: Snapshot) -> list[int]:
    return [bucket.numel() for bucket in snap.buckets]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def form(
    pool: ThreadPoolExecutor,
    members: int,
    world: int,
    timeout_s: float = 2 * WAIT_S,
    late: Callable[[int], None] | None = None,
) -> list[WeightGroup]:
    """Ranks 0..members-1 of a group of `world`, in this process; `late` starts the others, given the port."""
    store, port = host_store(LOOPBACK, world, timeout_s)
    joining = join(pool, members, world, store, port, timeout_s)
    if late is not None:
        late(port)
    return [future.result() for future in joining]


def join(
    pool: ThreadPoolExecutor, members: int, world: int, store: Store, port: int, timeout_s: float = 2 * WAIT_S
) -> list[Future[WeightGroup]]:
    where: dict[str, Any] = {"address": LOOPBACK, "port": port, "world": world, "device": "cpu", "timeout_s": timeout_s}
    return [pool.submit(WeightGroup.join, **where, rank=rank, store=None if rank else store) for rank in range(members)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(64, 2048))
@example([28, 0, 17], 64)
@example([0, 0, 5, 0], 64)
def test_every_layout_of_tensors_survives_packing(sizes: list[int], bucket_bytes: int) -> None:
    tensors = named(sizes)
    snap = snapshot(V1, tensors, bucket_bytes)
    assert sizes_of(snap) == bucket_sizes(snap.manifest, bucket_bytes)
    largest = max(4 * size for size in sizes)
    assert all(size <= max(bucket_bytes, largest) for size in sizes_of(snap))
    for (name, expected), (seen_name, seen) in zip(tensors, unpack(snap.manifest, snap.buckets), strict=True):
        assert name == seen_name and torch.equal(expected, seen)


def test_mixed_dtypes_keep_their_bits() -> None:
    tensors = [
        ("a", torch.randn(3)),
        ("b", torch.randn(5, 3).bfloat16()),
        ("c", torch.arange(7)),
        ("d", torch.randn(())),
    ]
    snap = snapshot(V1, tensors, 1 << 20)
    assert len(snap.buckets) == 1
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tensors, unpack(snap.manifest, snap.buckets), strict=True))


def test_a_snapshot_of_what_was_announced_keeps_nothing_of_what_comes() -> None:
    tensors = named([40, 7, 0, 90])
    whole = snapshot(V1, tensors, 64)
    alive: list[weakref.ref[torch.Tensor]] = []

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            assert all(ref() is None for ref in alive), "the one before is still held"
            made = tensor.clone()
            alive.append(weakref.ref(made))
            yield name, made
            del made

    lazy = snapshot(V1, one_by_one(), 64, whole.manifest)
    assert lazy.fingerprints == whole.fingerprints and lazy.manifest == whole.manifest
    for wrong in (tensors[:3], tensors[1:], [*tensors, ("more", torch.zeros(1))], []):
        with pytest.raises(TransportError, match="announced"):
            snapshot(V1, wrong, 64, whole.manifest)


def test_buckets_arrive_one_by_one_in_the_same_memory(pool: ThreadPoolExecutor) -> None:
    snap = snapshot(V1, named([40, 7, 90]), 200)
    sender, receiver = form(pool, 2, 2)
    sending = pool.submit(sender.send, snap.buckets)
    seen, places = [], set()
    for bucket in receiver.receive_each(sizes_of(snap)):
        seen.append(fingerprint(bucket))
        places.add(bucket.data_ptr())
    sending.result()
    assert seen == snap.fingerprints and len(seen) > 1 and len(places) == 1


def test_a_snapshot_does_not_follow_the_training_weights() -> None:
    weight = torch.ones(100)
    snap = snapshot(V1, [("w", weight)], 1 << 20)
    weight.zero_()
    assert dict(unpack(snap.manifest, snap.buckets))["w"].sum() == 100


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.data())
def test_a_fingerprint_notices_one_changed_byte_and_a_changed_order(size: int, data: st.DataObject) -> None:
    bucket = torch.randint(0, 256, (size,), dtype=torch.uint8)
    place = data.draw(st.integers(0, size - 1))
    changed = bucket.clone()
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(changed) != fingerprint(bucket)
    assert fingerprint(bucket.clone()) == fingerprint(bucket)
    rolled = bucket.roll(8)
    assert torch.equal(rolled, bucket) or fingerprint(rolled) != fingerprint(bucket)


def test_a_fingerprint_notices_every_single_bit() -> None:
    for size in (1, 7, 8, 9, 16, 31):
        bucket = torch.randint(0, 256, (size,), dtype=torch.uint8)
        mark = fingerprint(bucket)
        assert -(1 << 63) <= mark < 1 << 63
        for place, bit in itertools.product(range(size), range(8)):
            changed = bucket.clone()
            changed[place] ^= 1 << bit
            assert fingerprint(changed) != mark


def test_a_fingerprint_covers_more_than_one_chunk() -> None:
    bucket = torch.zeros((1 << 20) * 2 + 24, dtype=torch.uint8)
    marks = set()
    for place in (0, 1 << 20, (1 << 20) * 2 + 23):
        changed = bucket.clone()
        changed[place] = 1
        marks.add(fingerprint(changed))
    assert len(marks) == 3


def test_all_receivers_get_the_same_bytes_version_after_version(pool: ThreadPoolExecutor) -> None:
    groups = form(pool, 3, 3)
    staged: list[list[torch.Tensor] | None] = [None, None, None]
    for step in range(3):
        snap = snapshot(WeightVersion(0, step), named([1000, 2000, 3000]), 8192)
        receiving = {rank: pool.submit(groups[rank].receive, sizes_of(snap), staged[rank]) for rank in (1, 2)}
        groups[0].send(snap.buckets)
        for rank, future in receiving.items():
            staged[rank] = future.result()
            assert [fingerprint(bucket) for bucket in staged[rank] or []] == snap.fingerprints
    for group in groups:
        group.close()


def test_a_second_group_forms_beside_the_first(pool: ThreadPoolExecutor) -> None:
    old, new = form(pool, 2, 2), form(pool, 3, 3)
    for group in old:
        group.close()
    snap = snapshot(V1, named([10]), 1024)
    receiving = [pool.submit(group.receive, sizes_of(snap)) for group in new[1:]]
    new[0].send(snap.buckets)
    assert all(torch.equal(future.result()[0], snap.buckets[0]) for future in receiving)


def test_a_group_that_stays_incomplete_fails_in_time(pool: ThreadPoolExecutor) -> None:
    with pytest.raises(TransportError, match="could not join the weight group of 2"):
        form(pool, 1, 2, timeout_s=0.5)


def test_a_closed_group_says_so() -> None:
    with ThreadPoolExecutor(2) as pool:
        group = form(pool, 2, 2)[0]
    group.close()
    group.close()
    with pytest.raises(TransportError, match="closed"):
        group.send([torch.zeros(1, dtype=torch.uint8)])


def test_nobody_waits_for_a_group_that_is_given_up(pool: ThreadPoolExecutor) -> None:
    store, port = host_store(LOOPBACK, 3, 2 * WAIT_S)
    joining = join(pool, 2, 3, store, port)
    while not store.check(["here/0", "here/1"]):
        time.sleep(0.01)
    give_up(store, "rank 2 is dead")
    give_up(store, "a later reason")
    for future in joining:
        with pytest.raises(TransportError, match="given up, rank 2 is dead"):
            future.result(WAIT_S)


def test_a_stranger_at_the_store_neither_finds_nor_changes_a_key_by_its_name(pool: ThreadPoolExecutor) -> None:
    secret = new_secret()
    store, port = host_store(LOOPBACK, 2, 2 * WAIT_S, secret)
    stranger = TCPStore(LOOPBACK, port, 2, is_master=False, wait_for_workers=False)
    stranger.set(GIVEN_UP, "you")
    where: dict[str, Any] = {"address": LOOPBACK, "port": port, "world": 2, "device": "cpu", "timeout_s": 2 * WAIT_S}
    leads = pool.submit(WeightGroup.join, **where, rank=0, store=store, secret=secret)
    follows = pool.submit(WeightGroup.join, **where, rank=1, secret=secret)
    groups = [leads.result(WAIT_S), follows.result(WAIT_S)]
    assert store.check(["here/0", "here/1"]) and not stranger.check(["here/0"]) and not stranger.check(["here/1"])
    bucket = torch.arange(100, dtype=torch.uint8)
    sending = pool.submit(groups[0].send, [bucket])
    (received,) = groups[1].receive([100])
    sending.result(WAIT_S)
    assert torch.equal(received, bucket)
    for group in groups:
        group.close()


def test_a_group_whose_trainer_is_gone_is_not_waited_for() -> None:
    started = time.monotonic()
    with pytest.raises(TransportError, match="could not join"):
        WeightGroup.join(address=LOOPBACK, port=free_port(), rank=1, world=2, device="cpu", timeout_s=2 * WAIT_S)
    assert time.monotonic() - started < WAIT_S


SIZE, COUNT = 32 << 20, 6
"""Bytes of a bucket, more than sockets buffer, and buckets of a version."""


@pytest.fixture
def trio(pool: ThreadPoolExecutor) -> Iterator[tuple[list[WeightGroup], subprocess.Popen[str]]]:
    """Ranks 0 and 1 here, rank 2 a process; nobody waits less than 2 * WAIT_S by default."""
    members: list[subprocess.Popen[str]] = []

    def start(port: int) -> None:
        members.append(
            subprocess.Popen(
                [sys.executable, "-c", MEMBER, str(port), "2", "3", str(SIZE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        )

    groups = form(pool, 2, 3, late=start)
    (member,) = members
    try:
        assert member.stdout is not None and member.stdout.readline() == "joined\n"
        yield groups, member
    finally:
        member.kill()
        member.communicate()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_lost_receiver_is_noticed_by_the_trainer_and_by_survivors(
    pool: ThreadPoolExecutor, trio: tuple[list[WeightGroup], subprocess.Popen[str]], how: signal.Signals
) -> None:
    groups, victim = trio
    if how == signal.SIGSTOP:
        for group in groups:
            group.timeout_s = 1.0  # and 0.7 s per bucket
    os.kill(victim.pid, how)
    if how == signal.SIGKILL:
        victim.wait()
    survivor = pool.submit(groups[1].receive, [SIZE] * COUNT)
    with pytest.raises(TransportError, match="rank 0 lost the weight group in bucket 1 of 6"):
        groups[0].send([torch.zeros(SIZE, dtype=torch.uint8)] * COUNT)
    assert isinstance(survivor.exception(WAIT_S), TransportError)


def test_aborted_transfers_end(pool: ThreadPoolExecutor, trio: tuple[list[WeightGroup], subprocess.Popen[str]]) -> None:
    groups, victim = trio
    os.kill(victim.pid, signal.SIGSTOP)
    staged = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)]
    memory = [bucket.data_ptr() for bucket in staged]
    store = groups[0]._store
    assert store is not None
    sending = pool.submit(groups[0].send, [torch.ones(SIZE, dtype=torch.uint8)] * 2)
    receiving = pool.submit(groups[1].receive, [SIZE] * 2, staged)
    while staged[0][-1] == 0:  # the first bucket has come, the second cannot
        time.sleep(0.01)
    give_up(store, "rank 2 hangs")
    for future in (sending, receiving):
        assert "given up, rank 2 hangs" in str(future.exception(WAIT_S))
    assert staged[1].data_ptr() != memory[1]
    left = [thread for thread in threading.enumerate() if thread.name == "weights-lost"]
    assert not any(thread.daemon for thread in left)  # a process that ends before such a thread does would abort


def test_the_meeting_point_listens_on_the_address_it_is_told_and_no_other() -> None:
    store, port = host_store(LOOPBACK, 1, WAIT_S)
    socket.create_connection((LOOPBACK, port), WAIT_S).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), WAIT_S)
    store.set("still", "there")


def test_an_address_that_is_not_of_this_machine_is_listened_for_on_all() -> None:
    """Behind an address translation: others, and the store itself, come back to this machine by it."""
    with structlog.testing.capture_logs() as said, listen_on("192.0.2.1", 1) as listener:
        socket.create_connection(("127.0.0.2", listener.getsockname()[1]), WAIT_S).close()
    assert [line["event"] for line in said] == ["listening_on_all_addresses"]


@pytest.mark.parametrize(
    ("known_as", "reached"),
    [
        (["127.0.1.1"], ["127.0.0.2", "127.0.1.1"]),  # as Debian names itself
        (["127.0.0.2", "127.0.0.3"], ["127.0.0.2", "127.0.0.3"]),  # a container in two networks
    ],
)
def test_ambiguous_names_bind_to_all(monkeypatch: pytest.MonkeyPatch, known_as: list[str], reached: list[str]) -> None:
    def getaddrinfo(host: str, port: int, type: int) -> list[object]:
        assert (host, port, type) == ("here", 0, socket.SOCK_STREAM)
        return [(socket.AF_INET, type, 6, "", (address, 0)) for address in known_as]

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", getaddrinfo)
        listener = listen_on("here", 1)
    with listener:
        for address in reached:
            socket.create_connection((address, listener.getsockname()[1]), WAIT_S).close()


def test_localhost_is_this_machine_alone() -> None:
    with listen_on("localhost", 1) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")


def test_a_name_that_nobody_knows_is_a_clear_error() -> None:
    with pytest.raises(TransportError, match="cannot listen on no-such-host"):
        host_store("no-such-host.invalid", 1, WAIT_S)
