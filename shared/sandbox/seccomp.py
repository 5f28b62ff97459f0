"""The system calls that sandboxed code does not get, as a program for the kernel's filter (seccomp, classic BPF).

bubblewrap's namespaces hold without it. It closes what they and the limits leave open: memory that no limit of a
process counts (memfd, System V segments, shared anonymous memory, pages given to a pipe, enlarged pipes and socket
buffers), sockets that a network namespace does not confine (vsock) or that open rarely tested code of the kernel, keys
that a session inherits, and calls that no game needs. A call of `DENIED` answers ENOSYS, as on a kernel that does not
have it; a socket of another family EAFNOSUPPORT; a mapping of the wrong kind and an enlargement EPERM.
"""

from __future__ import annotations

import platform
import struct

DENIED = {
    "x86_64": {
        "memory": [29, 30, 31, 67, 278, 319, 447],  # shmget, shmat, shmctl, shmdt, vmsplice, memfd_create, memfd_secret
        "semaphores": [64, 65, 66, 220],  # semget, semop, semctl, semtimedop
        "queues": [68, 69, 70, 71, 240],  # msgget, msgsnd, msgrcv, msgctl, mq_open
        "keys": [248, 249, 250],  # add_key, request_key, keyctl
        "kernel": [103, 163, 175, 176, 246, 298, 313, 320, 321, 323, 425],  # modules, kexec, bpf, perf, io_uring...
        "processes": [101, 310, 311],  # ptrace, process_vm_readv and _writev
        "mounts": [155, 165, 166, 167, 168, 179, 272, 304, 308, 428, 429, 430, 431, 432, 433, 442],
    },
    "aarch64": {
        "memory": [75, 194, 195, 196, 197, 279, 447],
        "semaphores": [190, 191, 192, 193],
        "queues": [180, 186, 187, 188, 189],
        "keys": [217, 218, 219],
        "kernel": [89, 104, 105, 106, 116, 241, 273, 280, 282, 294, 425],
        "processes": [117, 270, 271],
        "mounts": [39, 40, 41, 60, 97, 224, 225, 265, 268, 428, 429, 430, 431, 432, 433, 442],
    },
}
MMAP = {"x86_64": 9, "aarch64": 222}
FCNTL = {"x86_64": 72, "aarch64": 25}
SOCKET = {"x86_64": 41, "aarch64": 198}
SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
SETSOCKOPT = {"x86_64": 54, "aarch64": 208}
MAP_PRIVATE, MAP_TYPE, MAP_ANONYMOUS, MAP_HUGETLB = 0x2, 0xF, 0x20, 0x40000
"""The same on both architectures. Huge pages are a pool of the machine and are not charged to a process."""
F_SETPIPE_SZ = 1031
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
SOL_SOCKET = 1
BUFFER_OPTIONS = (7, 8, 18, 32, 33)
"""SO_SNDBUF, SO_RCVBUF, SO_RCVLOWAT (which enlarges the buffer of a TCP socket), SO_SNDBUFFORCE, SO_RCVBUFFORCE."""
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""Calls of the x32 interface have numbers from here on; nothing of ours makes them."""
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, JUMP, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x05, 0x06
NUMBER_AT, ARCHITECTURE_AT = 0, 4
"""Offsets in struct seccomp_data."""
KILL, ALLOW, EPERM, ENOSYS, EAFNOSUPPORT = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026, 0x00050061
Step = tuple[int, int, int, int]


def program(machine: str | None = None) -> bytes:
    """Return the filter for this machine's architecture. Raises KeyError for an unsupported one."""
    machine = machine or platform.machine()
    denied = sorted(number for numbers in DENIED[machine].values() for number in numbers)
    steps = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, len(denied) + 1, 0, X32),
        *((EQUAL, len(denied) - place, 0, number) for place, number in enumerate(denied)),
        (JUMP, 0, 0, 1),
        (RETURN, 0, 0, ENOSYS),
        *_when(MMAP[machine], _mapping()),
        *_when(SOCKET[machine], _family()),
        *_when(SOCKETPAIR[machine], _family()),
        *_when(SETSOCKOPT[machine], _option()),
        *_when(FCNTL[machine], _pipe_size()),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", code, then, other, value) for code, then, other, value in steps)


def _when(number: int, steps: list[Step]) -> list[Step]:
    """Steps for one system call; they return."""
    return [(EQUAL, 0, len(steps), number), *steps]


def _argument(place: int) -> Step:
    """Loads its lower half: all that the kernel takes of an int."""
    return (LOAD, 0, 0, 16 + 8 * place)


def _mapping() -> list[Step]:
    return [
        _argument(3),
        (ANY_BIT, 4, 0, MAP_HUGETLB),
        (ANY_BIT, 0, 2, MAP_ANONYMOUS),
        (AND, 0, 0, MAP_TYPE),
        (EQUAL, 0, 1, MAP_PRIVATE),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, EPERM),
    ]


def _family() -> list[Step]:
    return [_argument(0), *_one_of(FAMILIES, ALLOW, EAFNOSUPPORT)]


def _option() -> list[Step]:
    return [
        _argument(1),
        (EQUAL, 1, 0, SOL_SOCKET),
        (RETURN, 0, 0, ALLOW),
        _argument(2),
        *_one_of(BUFFER_OPTIONS, EPERM, ALLOW),
    ]


def _pipe_size() -> list[Step]:
    return [_argument(1), *_one_of((F_SETPIPE_SZ,), EPERM, ALLOW)]


def _one_of(values: tuple[int, ...], verdict: int, otherwise: int) -> list[Step]:
    tests = [(EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [*tests, (RETURN, 0, 0, otherwise), (RETURN, 0, 0, verdict)]
