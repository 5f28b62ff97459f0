"""Launcher for one machine: runs trainers and rollout workers as processes that outlive the scheduler.

Each slot has a share of the GPUs that the scheduler's process sees: GPUs over slots, trainers first. If there are fewer
GPUs than slots, several slots share one; otherwise a GPU of a running process that was started under other settings is
not shared. This module sets what each process needs: the servers, its passwords, its name, its GPUs.
`shared/runtime/launched_processes.py` describes the files that record running processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from opentinker.services.scheduler.autoscaler.base import Launched, LauncherFailed, names_of
from opentinker.services.scheduler.placement.gpu_matching import described
from opentinker.services.scheduler.placement.types import Gpus
from opentinker.shared.config import Settings
from opentinker.shared.messaging.subjects import ROLLOUT, TRAINER
from opentinker.shared.runtime import launched_processes
from opentinker.shared.runtime.gpus import ORDER, VISIBLE, pin_of, shares, visible
from opentinker.shared.security.secrets import AWS
from opentinker.shared.settings_sources import PREFIX
from opentinker.shared.types.core import Pool
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.workers import Gpu

MODULES = {Pool.TRAINER: "trainer", Pool.ROLLOUT: "rollout_worker"}
USERS = {Pool.TRAINER: TRAINER, Pool.ROLLOUT: ROLLOUT}
HANDED_ON = (
    *("nats_url", "redis_url", "data_dir", "advertise_host", "log_level", "log_format", "heartbeat_s", "worker_ttl_s"),
    *("drain_s", "cancel_grace_s", "swap_timeout_s", "preload", "warm_engine_s"),
)
"""Settings of the scheduler that are theirs too."""
EXTRA_S = 10.0
"""Beyond `drain_s`, from SIGTERM to SIGKILL."""


class ProcessLauncher:
    def __init__(self, settings: Settings) -> None:
        self.prefix = launched_processes.prefix()
        self.settings = settings
        self._folder = launched_processes.folder(settings.data_dir)
        self._logs = settings.data_dir.resolve() / "logs"
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        """Children started by this scheduler process, which only it can reap."""
        self._told: dict[str, float] = {}
        """By name, when it was told to end; monotonic."""
        most = {Pool.TRAINER: settings.launcher_trainers, Pool.ROLLOUT: settings.launcher_rollout_workers}
        self._visible = visible()
        names = [name for pool in most for name in names_of(self.prefix, pool, most[pool])]
        self._parts = shares(self._visible, names)
        self._shared = len(self._visible) < len(names)
        self._held: dict[str, set[str]] = {}
        """By name of what runs, the GPUs that it sees, as they were told to it."""
        for file in self._passwords(Pool.TRAINER) | self._passwords(Pool.ROLLOUT):
            if not Path(file).is_file():
                problem = "is not there; `opentinker access FOLDER` makes all files of a folder"
                raise SpecError.of("launcher_access", file, problem)

    async def running(self) -> list[Launched]:
        return await asyncio.to_thread(self._running)

    def gpus(self, pool: Pool, name: str) -> Gpus:
        return described(self._part(name))

    def _part(self, name: str) -> list[Gpu]:
        """Return the GPUs that the process sees if it runs; otherwise its share, without those that another process
        still sees, unless there are too few for all."""
        if (held := self._held.get(name)) is not None:
            return [gpu for gpu in self._visible if str(gpu.index) in held]
        if self._shared:
            return self._parts.get(name, [])
        others = {gpu for held in self._held.values() for gpu in held}
        return [gpu for gpu in self._parts.get(name, []) if str(gpu.index) not in others]

    async def start(self, pool: Pool, name: str) -> None:
        try:
            await asyncio.to_thread(self._start, pool, name)
        except OSError as error:
            raise LauncherFailed(f"cannot start {name}: {error}") from error

    async def end(self, name: str) -> None:
        await asyncio.to_thread(self._end, name)

    # --- blocking ------------------------------------------------------------------------------------------------

    def _running(self) -> list[Launched]:
        for child in self._children.values():
            child.poll()
        found = []
        held: dict[str, set[str]] = {}
        for path in sorted(self._folder.glob("*.json")):
            process = launched_processes.read(path)
            if process is not None:
                if process.alive:
                    held[path.stem] = {*process.gpus.split(",")}
                ended = "" if process.alive else f"its process has ended; see {self._logs / path.stem}.log"
                found.append(Launched(path.stem, Pool(process.pool), ended))
                continue
            with suppress(FileNotFoundError):
                since, pool = path.stat().st_mtime, Pool(path.stem.rsplit("-", 2)[-2])
                late = time.time() - since > self.settings.launcher_start_s
                found.append(
                    Launched(
                        path.stem, pool, "the scheduler that started it ended before it recorded that" if late else ""
                    )
                )
        self._held = held
        return found

    def _start(self, pool: Pool, name: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{name}.json"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            return
        try:
            with (self._logs / f"{name}.log").open("ab") as log:
                child = subprocess.Popen(
                    [sys.executable, "-P", "-m", f"opentinker.services.{MODULES[pool]}"],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=self._environment(pool, name), start_new_session=True,
                )  # fmt: skip
        except OSError:
            path.unlink()
            raise
        self._children[name] = child
        ticks, pin = launched_processes.ticks_of(child.pid) or 0, pin_of(self._part(name))
        launched_processes.write(
            path, launched_processes.Process(pid=child.pid, ticks=ticks, pool=pool, since=time.time(), gpus=pin)
        )

    def _environment(self, pool: Pool, name: str) -> dict[str, str]:
        """Return our environment without our settings, the user's API key and the artifact store's credentials."""
        others = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX) and key not in AWS}
        handed = {one: getattr(self.settings, one) for one in HANDED_ON}
        handed["data_dir"] = self.settings.data_dir.resolve()
        own = {"worker_id": name, "idle_exit_s": self.settings.launcher_idle_s, "health_port": 0}
        if pool == Pool.ROLLOUT:
            handed |= self._for_url_seats()
        told = {PREFIX + key.upper(): str(value) for key, value in {**handed, **own}.items()}
        pin = {VISIBLE: pin_of(self._part(name)), **ORDER} if self._visible else {}
        return {**others, **told, **pin, **{key: path for path, key in self._passwords(pool).items()}}

    def _for_url_seats(self) -> dict[str, object]:
        """Return what the scheduler checks seats with a url by, and rollout workers too."""
        keys = self.settings.model_keys_file
        return {
            "env_egress_allow": ",".join(self.settings.env_egress_allow),
            **({} if keys is None else {"model_keys_file": keys.resolve()}),
        }

    def _passwords(self, pool: Pool) -> dict[str, str]:
        """File -> variable that names it."""
        access = self.settings.launcher_access
        if access is None:
            return {}
        names = {"nats": "NATS_PASSWORD_FILE", "valkey": "REDIS_PASSWORD_FILE"}
        return {str(access.resolve() / f"{server}-{USERS[pool]}"): PREFIX + key for server, key in names.items()}

    def _end(self, name: str) -> None:
        path = self._folder / f"{name}.json"
        process = launched_processes.read(path)
        if process is not None and process.alive:
            told = self._told.setdefault(name, time.monotonic())
            late = time.monotonic() - told > self.settings.drain_s + EXTRA_S
            process.signal(signal.SIGKILL if late else signal.SIGTERM)
            return
        if process is not None:
            process.signal(signal.SIGKILL)  # what it has left behind
        self._told.pop(name, None)
        if child := self._children.pop(name, None):
            child.wait()  # it has ended, perhaps since it was looked at
        path.unlink(missing_ok=True)
