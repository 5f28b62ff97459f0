"""The filter of system calls for sandboxes: what the kernel makes of each call, on both architectures."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from pathlib import Path

import pytest

from opentinker.shared.sandbox import seccomp


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Return the kernel's verdict on a call, by running the filter's program. The upper half of every argument is
    set."""
    audited = seccomp.AUDIT_ARCH[machine] if architecture is None else architecture
    given = [0xFFFFFFFF00000000 | argument for argument in (*arguments, *[0] * (6 - len(arguments)))]
    data = struct.pack("=IIQ6Q", number, audited, 0, *given)
    steps = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    at = held = 0
    while True:
        code, then, otherwise, value = steps[at]
        at += 1
        if code == seccomp.LOAD:
            (held,) = struct.unpack_from("=I", data, value)
        elif code == seccomp.AND:
            held &= value
        elif code == seccomp.RETURN:
            return int(value)
        elif code == seccomp.JUMP:
            at += value
        else:
            tests = {seccomp.EQUAL: held == value, seccomp.AT_LEAST: held >= value}
            at += then if tests.get(code, bool(held & value)) else otherwise


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_refuses_what_it_lists_and_allows_the_rest(machine: str) -> None:
    denied = [number for group in seccomp.DENIED[machine].values() for number in group]
    assert len(set(denied)) == len(denied)
    assert {verdict(machine, number) for number in denied} == {seccomp.ENOSYS}
    judged = {seccomp.MMAP[machine], seccomp.SOCKET[machine], seccomp.SOCKETPAIR[machine]}
    others = set(range(500)) - {*denied, *judged}
    assert {verdict(machine, number) for number in others} == {seccomp.ALLOW}
    assert verdict(machine, 1, architecture=0x40000003) == seccomp.KILL
    assert verdict(machine, seccomp.X32) == verdict(machine, seccomp.X32 + 29) == seccomp.ENOSYS


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_memory_is_mapped_as_a_process_s_own_or_from_files(machine: str) -> None:
    shared, private, validated, anonymous, huge = 0x1, 0x2, 0x3, 0x20, 0x40000
    for flags, allowed in (
        (private | anonymous, True),
        (private | anonymous | 0x20000, True),  # MAP_STACK
        (private, True),
        (shared, True),
        (shared | anonymous, False),
        (validated | anonymous, False),
        (anonymous, False),
        (private | anonymous | huge, False),
        (shared | huge, False),
    ):
        expected = seccomp.ALLOW if allowed else seccomp.EPERM
        assert verdict(machine, seccomp.MMAP[machine], 0, 0, 0, flags) == expected, hex(flags)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_sockets_have_three_families_and_buffers_of_one_size(machine: str) -> None:
    for call in (seccomp.SOCKET[machine], seccomp.SOCKETPAIR[machine]):
        allowed = {family for family in range(64) if verdict(machine, call, family) == seccomp.ALLOW}
        assert allowed == {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}
        assert verdict(machine, call, 40) == seccomp.EAFNOSUPPORT  # AF_VSOCK
    options = {n for n in range(100) if verdict(machine, seccomp.SETSOCKOPT[machine], 3, 1, n) == seccomp.EPERM}
    assert options == {socket.SO_SNDBUF, socket.SO_RCVBUF, socket.SO_RCVLOWAT, 32, 33}
    assert verdict(machine, seccomp.SETSOCKOPT[machine], 3, socket.IPPROTO_TCP, 7) == seccomp.ALLOW
    assert verdict(machine, seccomp.FCNTL[machine], 3, fcntl.F_SETPIPE_SZ) == seccomp.EPERM
    assert verdict(machine, seccomp.FCNTL[machine], 3, fcntl.F_SETFL) == seccomp.ALLOW


HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), "__NR_"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), "__NR(?:3264)?_"),
}
NAMES = (
    *("shmget", "shmat", "shmctl", "shmdt", "semget", "semop", "semctl", "semtimedop", "msgget", "msgsnd", "msgrcv"),
    *("msgctl", "mq_open", "memfd_create", "memfd_secret", "ptrace", "keyctl", "add_key", "bpf", "mount", "vmsplice"),
    "io_uring_setup",
)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header, prefix = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    numbers = {name: int(n) for name, n in re.findall(rf"#define {prefix}(\w+)\s+([0-9]+)", header.read_text())}
    denied = {number for group in seccomp.DENIED[machine].values() for number in group}
    assert {name for name in NAMES if numbers[name] not in denied} == set()
    for name in ("mmap", "socket", "socketpair", "setsockopt", "fcntl"):
        assert getattr(seccomp, name.upper())[machine] == numbers[name]


def test_a_machine_whose_numbers_nobody_has_written_down_has_no_filter() -> None:
    with pytest.raises(KeyError):
        seccomp.program("vax")
