"""What processes that have ended leave of their sandboxes is recognized."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from opentinker.envs.harbor.workspace import HOST, is_stale, new_place


def test_places_of_dead_processes_are_stale_even_if_another_one_has_their_number(tmp_path: Path) -> None:
    place = new_place(tmp_path).name
    host, _, rest = place.partition("~")
    pid, ticks, random = rest.split("-")
    assert (host, int(pid)) == (HOST, os.getpid())
    assert not is_stale(place)
    assert is_stale(f"{host}~{pid}-{int(ticks) - 1}-{random}"), "as after a restart in a container"
    assert is_stale(f"{host}~{pid}-{random}"), "a name of an earlier release"
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert is_stale(f"{host}~{ended.pid}-{ticks}-{random}")
    assert not is_stale(f"other-host~{ended.pid}-{ticks}-{random}"), "its machine looks for itself"
