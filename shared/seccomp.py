"""The system calls that sandboxed code does not get, as a program for the kernel's filter (seccomp, classic BPF).

bubblewrap's namespaces hold without it. It closes what they and the limits leave open: memory that no limit of a
process counts (memfd, System V segments), keys that a session inherits, and doors of the kernel that nobody needs who
plays a game. A call from the list answers ENOSYS, as on a kernel that does not have it.
"""

from __future__ import annotations

import platform
import struct

DENIED = {
    "x86_64": {
        "memory": [29, 319, 447],  # shmget, memfd_create, memfd_secret
        "queues": [68],  # msgget
        "keys": [248, 249, 250],
        "kernel": [103, 163, 175, 176, 246, 298, 313, 320, 321, 323, 425],  # modules, kexec, bpf, perf, io_uring...
        "processes": [101, 310, 311],  # ptrace, process_vm_readv and _writev
        "mounts": [155, 165, 166, 167, 168, 179, 272, 304, 308, 428, 429, 430, 431, 432, 433, 442],
    },
    "aarch64": {
        "memory": [194, 279, 447],
        "queues": [186],
        "keys": [217, 218, 219],
        "kernel": [89, 104, 105, 106, 116, 241, 273, 280, 282, 294, 425],
        "processes": [117, 270, 271],
        "mounts": [39, 40, 41, 60, 97, 224, 225, 265, 268, 428, 429, 430, 431, 432, 433, 442],
    },
}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""Calls of the x32 interface have numbers from here on; nothing of ours makes them."""
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER_AT, ARCHITECTURE_AT = 0, 4
KILL, ALLOW, ENOSYS = 0x80000000, 0x7FFF0000, 0x00050026


def program(machine: str | None = None) -> bytes:
    """Of this machine's architecture. Raises KeyError for one that nobody has written the numbers down of."""
    machine = machine or platform.machine()
    denied = sorted(number for numbers in DENIED[machine].values() for number in numbers)
    steps = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, len(denied) + 1, 0, X32),
        *((EQUAL, len(denied) - place, 0, number) for place, number in enumerate(denied)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ENOSYS),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
