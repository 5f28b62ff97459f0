"""A real S3-compatible server on this machine (moto), for tests of artifacts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from moto.server import ThreadedMotoServer

ACCESS, SECRET = "an-access-key-id", "a-secret-of-the-object-store"


@contextmanager
def s3_server() -> Iterator[str]:
    """Its URL; it begins empty."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


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
