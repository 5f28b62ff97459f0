"""The memory that a process may use is the machine's or its container's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opentinker.shared.runtime.memory import memory_bytes

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "1073741824\n"}, GIB),  # a container
        ("0::/pod/one\n", {"pod/memory.max": str(2 * GIB), "pod/one/memory.max": "max"}, 2 * GIB),
        ("4:cpu,memory:/docker/abc\n0::/\n", {"memory/memory.limit_in_bytes": str(GIB)}, GIB),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, MACHINE),  # version 1: no limit
        ("0::/\n", {}, MACHINE),
        ("", {"memory.max": "1"}, MACHINE),
    ],
)
def test_the_lowest_limit_counts(tmp_path: Path, own: str, limits: dict[str, str], expected: int) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in limits.items():
        path = tmp_path / "cgroups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_bytes(tmp_path / "cgroups", tmp_path / "own") == expected


def test_this_process_has_memory() -> None:
    assert 0 < memory_bytes() <= MACHINE
