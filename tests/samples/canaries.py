"""Where no secret may be: logs, command lines, environments of children, what users are told, what jobs leave."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.cluster import Cluster


def _texts(cluster: Cluster) -> Iterator[tuple[str, bytes]]:
    for name, process in cluster.processes.items():
        yield f"log of {name}", process.log.read_bytes()
        for child in cluster.children(name):  # a service's own environment names files; those of its children nothing
            yield f"environment of a child of {name}", _read(Path(f"/proc/{child}/environ"))
        if process.popen is not None:
            yield f"environment of {name}", _read(Path(f"/proc/{process.pid}/environ"))
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            yield f"command line of {entry.name}", _read(Path(entry.path, "cmdline"))
    for folder, _, names in os.walk(cluster.data):  # what is swept meanwhile is left out
        for path in (Path(folder, name) for name in names):
            if path.is_file():
                yield str(path), _read(path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ProcessLookupError):  # it has ended or was swept
        return b""


def found(cluster: Cluster, secrets: Iterable[str], told: Iterable[tuple[str, str]]) -> tuple[list[str], int]:
    """Return the places of a secret, and the number of places searched. `told`: texts of answers."""
    texts = [*_texts(cluster), *((place, text.encode()) for place, text in told)]
    canaries = [secret.encode() for secret in secrets]
    return [place for place, text in texts if any(canary in text for canary in canaries)], len(texts)
