"""Two hosts on this machine: network namespaces with a veth link between them, and nothing else that they share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import PYTHONPATH

FIRST, SECOND = "10.203.77.1", "10.203.77.2"
"""Nobody outside of the two namespaces sees these."""


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str, str]]:
    """Namespaces of the first and the second, and the first one's end of the link, which is up."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces are made by root alone")
    if shutil.which("ip") is None:
        pytest.skip("no `ip` here: package iproute2")
    mark = uuid.uuid4().hex[:8]
    first, second, link, far = (f"{name}{mark}" for name in ("ot-a-", "ot-b-", "ota", "otb"))
    if (made := ip("netns", "add", first)).returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        assert ip("netns", "add", second).returncode == 0
        linked = ip("link", "add", link, "netns", first, "type", "veth", "peer", "name", far, "netns", second)
        if linked.returncode:
            pytest.skip(f"no veth links here: {linked.stderr.strip()}")
        for namespace, device, address in ((first, link, FIRST), (second, far, SECOND)):
            for command in (
                ("addr", "add", f"{address}/30", "dev", device),
                ("link", "set", device, "up"),
                ("link", "set", "lo", "up"),
            ):
                done = ip("-n", namespace, *command)
                assert done.returncode == 0, done.stderr
        yield first, second, link
    finally:
        for namespace in (first, second):
            ip("netns", "del", namespace)


def on_the_first(hosts: tuple[str, str, str], what: str, directory: Path) -> str:
    first, second, link = hosts
    argv = [sys.executable, "-m", "tests.support.deploy.two_hosts", what, str(directory), second, link, FIRST, SECOND]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        ["ip", "netns", "exec", first, *argv], capture_output=True, text=True, env=environ, timeout=500, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.slow
def test_a_job_on_two_hosts_survives_ten_seconds_apart(hosts: tuple[str, str, str], tmp_path: Path) -> None:
    said = on_the_first(hosts, "job", tmp_path)
    sys.stdout.write(said)
    assert "succeeded at step 300" in said


@pytest.mark.slow
def test_weights_travel_from_host_to_host(hosts: tuple[str, str, str], tmp_path: Path) -> None:
    assert "4194304 bytes came over the link" in on_the_first(hosts, "weights", tmp_path)


@pytest.mark.slow
def test_the_ranks_of_a_job_on_two_hosts_survive_a_cut(hosts: tuple[str, str, str], tmp_path: Path) -> None:
    said = on_the_first(hosts, "ranks", tmp_path)
    sys.stdout.write(said)
    assert "ranks succeeded at step 40" in said
