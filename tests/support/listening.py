"""Reads from /proc which processes run, and on which addresses a process and its descendants listen."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket that waits for connections."""
    everywhere = dict(_listeners())
    found = set()
    for one in [pid, *descendants(pid)]:
        with suppress(FileNotFoundError):  # it has just ended
            for entry in Path(f"/proc/{one}/fd").iterdir():
                with suppress(FileNotFoundError):
                    found.add(everywhere.get(os.readlink(entry)))
    return {address for address in found if address is not None}


def _listeners() -> Iterator[tuple[str, tuple[str, int]]]:
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTEN:
                address, _, port = local.partition(":")
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                yield f"socket:[{inode}]", (socket.inet_ntop(family, b"".join(words)), int(port, 16))


def runs(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits for its parent does not."""
    return pid in dict(living())


def living() -> Iterator[tuple[int, int]]:
    """Process and parent, of all that still run."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                yield int(path.parent.name), int(parent)


def descendants(pid: int) -> list[int]:
    parents = dict(living())
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]
