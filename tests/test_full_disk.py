"""Too little disk: what is said before anything starts, and what the servers and those who wait for them do then."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from opentinker.cli import doctor
from opentinker.embedded import STORE_BYTES, EmbeddedServers
from opentinker.processes import StartError
from opentinker.shared.subjects import STREAMS

Usage = namedtuple("Usage", "total used free")
Free = Callable[[int], None]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    """Says how much disk is free."""

    def say(size: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**50, 0, size))

    return say


def test_the_disk_that_is_asked_for_has_room_for_what_the_streams_set_aside() -> None:
    """nats-server takes three quarters of what is free, and makes no stream that sets more aside."""
    assert sum(max(0, stream.max_bytes or 0) for stream in STREAMS) <= STORE_BYTES * 3 // 4


def test_a_disk_too_small_for_a_new_store_is_said_before_anything_starts(tmp_path: Path, free: Free) -> None:
    free(STORE_BYTES - 1)
    servers = EmbeddedServers(tmp_path, default_ports=False)
    with pytest.raises(StartError, match=rf"699 MiB are free on the disk of {tmp_path}/nats.*700 MiB.*--data-dir"):
        servers.start()
    assert servers.children == {}
    with EmbeddedServers(tmp_path, nats=False, default_ports=False):
        pass  # an external NATS has its own disk


def test_a_store_that_is_there_starts_on_a_full_disk(tmp_path: Path, free: Free) -> None:
    with EmbeddedServers(tmp_path, redis=False, default_ports=False):
        pass
    free(0)
    with EmbeddedServers(tmp_path, redis=False, default_ports=False) as servers:
        assert servers.nats_url


@pytest.mark.parametrize(("size", "result"), [(0, "bad"), (STORE_BYTES, "note"), (2 * 2**30, "ok")])
def test_doctor_says_whether_the_disk_is_enough(tmp_path: Path, free: Free, size: int, result: str) -> None:
    free(size)
    (check,) = [check for check in doctor.examine(tmp_path) if check["what"] == "disk"]
    assert check["result"] == result and bool(check["hint"]) == (result != "ok")
