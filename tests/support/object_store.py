"""A real S3-compatible server on this machine (moto), for tests of artifacts. It is a process of its own: what it is
made of must not be imported beside vLLM, which looks into every module that there is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from opentinker.local.processes import free_port
from tests.conftest import wait_port

ACCESS, SECRET = "an-access-key-id", "a-secret-of-the-object-store"


@contextmanager
def s3_server(host: str = "127.0.0.1") -> Iterator[str]:
    """Its URL; it begins empty."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "--host", host, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_port(port, server, host)
        yield f"http://{host}:{port}"
    finally:
        server.kill()
        server.wait()


async def make_bucket(url: str, name: str) -> None:
    async with aiohttp.ClientSession() as session, session.put(f"{url}/{name}") as response:
        assert response.status == 200


def s3_settings(url: str, bucket: str, place: Path) -> dict[str, Any]:
    """Of a scheduler that keeps artifacts there."""
    place.mkdir(parents=True, exist_ok=True)
    credentials = place / "s3-credentials"
    credentials.write_text(f"{ACCESS}\n{SECRET}\n")
    return {
        "artifacts_url": f"s3://{bucket}/some/where",
        "artifacts_s3_endpoint": url,
        "artifacts_s3_credentials_file": credentials,
    }
