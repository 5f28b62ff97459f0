"""The system calls that sandboxed code does not get, as a program for the kernel's filter (seccomp, classic BPF).

bubblewrap's namespaces hold without it. It closes what they and the limits leave open: memory that no limit of a
process counts (memfd, System V segments, anonymous memory that is shared: pages of it stay when nobody has them mapped
any more), keys that a session inherits, and doors of the kernel that nobody needs who plays a game. A call from the
list answers ENOSYS, as on a kernel that does not have it; a mapping of the wrong kind EPERM.
"""

from __future__ import annotations

import platform
import struct

DENIED = {
    "x86_64": {
        "memory": [29, 30, 31, 67, 319, 447],  # shmget, shmat, shmctl, shmdt, memfd_create, memfd_secret
        "semaphores": [64, 65, 66, 220],  # semget, semop, semctl, semtimedop
        "queues": [68, 69, 70, 71, 240],  # msgget, msgsnd, msgrcv, msgctl, mq_open
        "keys": [248, 249, 250],
        "kernel": [103, 163, 175, 176, 246, 298, 313, 320, 321, 323, 425],  # modules, kexec, bpf, perf, io_uring...
        "processes": [101, 310, 311],  # ptrace, process_vm_readv and _writev
        "mounts": [155, 165, 166, 167, 168, 179, 272, 304, 308, 428, 429, 430, 431, 432, 433, 442],
    },
    "aarch64": {
        "memory": [194, 195, 196, 197, 279, 447],
        "semaphores": [190, 191, 192, 193],
        "queues": [180, 186, 187, 188, 189],
        "keys": [217, 218, 219],
        "kernel": [89, 104, 105, 106, 116, 241, 273, 280, 282, 294, 425],
        "processes": [117, 270, 271],
        "mounts": [39, 40, 41, 60, 97, 224, 225, 265, 268, 428, 429, 430, 431, 432, 433, 442],
    },
}
MMAP = {"x86_64": 9, "aarch64": 222}
MAP_PRIVATE, MAP_TYPE, MAP_ANONYMOUS, MAP_HUGETLB = 0x2, 0xF, 0x20, 0x40000
"""Of both architectures. Huge pages are a pool of the machine, and of no process's memory."""
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""Calls of the x32 interface have numbers from here on; nothing of ours makes them."""
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, FLAGS_AT = 0, 4, 40
"""Of struct seccomp_data; the last: of the fourth argument, its lower half."""
KILL, ALLOW, EPERM, ENOSYS = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026


def program(machine: str | None = None) -> bytes:
    """Of this machine's architecture. Raises KeyError for one that nobody has written the numbers down of."""
    machine = machine or platform.machine()
    denied = sorted(number for numbers in DENIED[machine].values() for number in numbers)
    mapping = [
        (EQUAL, 0, 5, MMAP[machine]),  # another call: allowed
        (LOAD, 0, 0, FLAGS_AT),
        (ANY_BIT, 5, 0, MAP_HUGETLB),
        (ANY_BIT, 0, 2, MAP_ANONYMOUS),
        (AND, 0, 0, MAP_TYPE),
        (EQUAL, 0, 2, MAP_PRIVATE),
    ]
    steps = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, len(denied) + len(mapping) + 1, 0, X32),
        *((EQUAL, len(denied) - place + len(mapping), 0, number) for place, number in enumerate(denied)),
        *mapping,
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ENOSYS),
        (RETURN, 0, 0, EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
