"""Starts or finds the server under load: an `opentinker up` started here, or a server that already runs on this
machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from opentinker.client import AsyncClient
from opentinker.local.discovery import key_in, read_state
from opentinker.shared.login_settings import LOOPBACK_HOSTS
from tests.support.toys import toy_model

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
STOP_S = 60.0


class Target:
    """`data_dir` None: the server is somebody else's, and its processes are left alone."""

    def __init__(self, url: str, key: str | None, model: Path, data_dir: Path | None) -> None:
        self.url, self.key, self.model, self.data_dir = url, key, model, data_dir
        self.client = self.as_somebody(key)

    def as_somebody(self, key: str | None) -> AsyncClient:
        """Whoever asks for this client closes it."""
        return AsyncClient(self.url, wait_s=START_S, on_wait=lambda _: None, api_key=key)

    @property
    def pids(self) -> dict[str, int]:
        """Of our own processes by name; none of somebody else's."""
        return {name: child["pid"] for name, child in self._children().items() if child.get("pid")}

    @property
    def urls(self) -> dict[str, str]:
        """Of these, where each answers /metrics."""
        return {name: child["url"] for name, child in self._children().items() if child.get("url")}

    def _children(self) -> dict[str, Any]:
        return dict(read_state(self.data_dir).get("children", {})) if self.data_dir else {}


@contextlib.asynccontextmanager
async def target(url: str | None, **settings: object) -> AsyncIterator[Target]:
    """`settings`: options of `opentinker up` (rollout_workers...), and in capitals settings by their variables' names
    (ENV_SESSIONS...); nothing can be set for a server at `url`."""
    with tempfile.TemporaryDirectory() as directory:
        model = toy_model(Path(directory) / "model")
        if url is not None:
            if urlsplit(url).hostname not in LOOPBACK_HOSTS:
                raise SystemExit(f"--url {url}: loads are put on this machine alone (loopback)")
            found = Target(url, None, model, None)
            try:
                yield found
            finally:
                await found.client.close()
            return
        data_dir = Path(directory) / "data"
        async with _up(data_dir, settings) as state:
            found = Target(str(state["url"]), key_in(state), model, data_dir)
            try:
                yield found
            finally:
                await found.client.close()


@contextlib.asynccontextmanager
async def _up(data_dir: Path, settings: dict[str, object]) -> AsyncIterator[dict[str, object]]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if name.islower()]
    environ = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "OPENTINKER_PRELOAD": "false",
        "OPENTINKER_ENV_MODULES": "true",
        **{f"OPENTINKER_{name}": str(value) for name, value in settings.items() if name.isupper()},
    }
    log = data_dir.parent / "up.log"
    command = [sys.executable, "-m", "opentinker.cli", "up", f"--data-dir={data_dir}", "--port=0", "--reference=0"]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, *options], env=environ, stdout=file, stderr=file)  # noqa: ASYNC220
    try:
        async with asyncio.timeout(START_S):
            while not (state := read_state(data_dir)).get("ready"):
                if process.poll() is not None:
                    raise SystemExit(f"opentinker up ended:\n{log.read_text()[-2000:]}")
                await asyncio.sleep(0.05)
        yield state
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
