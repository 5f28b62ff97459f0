"""The whole system as real processes on free ports, to be hurt: killed, paused, stopped, joined by others.

A process that ends is started again after RESTART_S, as the supervisor does; `stop` and `away` hold that off. When a
test fails inside the `async with`, the last log lines of every process are printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from opentinker.client import AsyncClient
from opentinker.local.embedded import nats_binary, valkey_binary
from opentinker.local.processes import free_port
from opentinker.local.server_users import Access, WebSocket
from opentinker.local.up import SERVICE_OF
from opentinker.services.trainer import checkpoint
from opentinker.shared.api_types import Job
from opentinker.shared.messaging.permissions import OPERATOR
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.state.admission import admission_of
from opentinker.shared.state.group_ledger import Ledger
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import part_id
from opentinker.shared.types.manifest import Manifest
from tests.conftest import nats_conf, until
from tests.support.cluster_process import GetForkServer, Process
from tests.support.lineage import faults
from tests.support.listening import living
from tests.support.service_forks import PYTHONPATH as PYTHONPATH  # noqa: PLC0414 - tests import these from here too
from tests.support.service_forks import ROOT as ROOT  # noqa: PLC0414
from tests.support.service_forks import WITH_TORCH, Kind, fork_server
from tests.support.toys import toy_model as toy_model  # noqa: PLC0414 - tests import it from here too

JOB_S = 240.0
"""A job of a test ends within this time on a machine that has much else to do, where importing torch takes a minute."""
TAIL, WIDTH = 25, 400
SERVERS = ("nats", "valkey")


class Cluster:
    """`heavy`: services import torch and vllm before their first job, as in production; toy jobs do without.

    `forked`: services are forks of processes that have imported them (`service_forks.py`). `torch`: those that compute
    have imported torch too.

    `nats`: values that differ from those of deploy/nats.conf. `listen`: an address beside loopback on which NATS and
    Valkey are reached too.
    """

    def __init__(
        self,
        directory: Path,
        *,
        trainers: int = 1,
        rollout_workers: int = 1,
        env_workers: int = 1,
        references: int = 0,
        heavy: bool = False,
        forked: bool = True,
        torch: bool = True,
        nats: dict[str, str] | None = None,
        listen: str = "",
        **settings: object,
    ) -> None:
        self.directory = directory
        self.data = directory / "data"
        self._forked = forked
        self._kinds: dict[str, Kind] = {service: "torch" for service in WITH_TORCH if torch}
        if heavy:
            self._kinds["rollout_worker"] = "vllm"
        self._nats = {**(nats or {}), **({"host": "0.0.0.0"} if listen else {})}
        self._binds = ["127.0.0.1", *([listen, "--protected-mode", "no"] if listen else [])]
        self.processes: dict[str, Process] = {}
        self.nats_port, self.valkey_port, self.http_port = free_port(), free_port(), free_port()
        self.redis_url = f"redis://127.0.0.1:{self.valkey_port}/0"
        self.env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": PYTHONPATH,
            "OPENTINKER_NATS_URL": f"nats://127.0.0.1:{self.nats_port}",
            "OPENTINKER_REDIS_URL": self.redis_url,
            "OPENTINKER_DATA_DIR": str(self.data),
            "OPENTINKER_HTTP_PORT": str(self.http_port),
            "OPENTINKER_ENV_MODULES": "true",
            "OPENTINKER_PRELOAD": str(heavy).lower(),
            **{f"OPENTINKER_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self._wanted = {
            "trainer": trainers,
            "rollout_worker": rollout_workers,
            "env_worker": env_workers,
            "reference_forward": references,
        }
        self.client = AsyncClient(f"http://127.0.0.1:{self.http_port}", wait_s=60.0, on_wait=lambda _: None)
        self.store: Store
        self._stack = contextlib.AsyncExitStack()
        self._keeper: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Cluster:
        self.data.mkdir(parents=True)
        for service in [service for service, count in self._wanted.items() if count and self._forked]:
            fork_server(self._kinds.get(service, "light"))  # imports while the servers start
        try:
            conf = nats_conf(self.directory, self.nats_port, **self._nats)
            self.access = Access(self.directory / "access", conf, WebSocket(free_port()))
            self._add_servers()
            self._keeper = asyncio.create_task(self._keep())
            self.store = await self._stack.enter_async_context(
                Store.connect(self.redis_url, "cluster", OPERATOR, self.access.password("valkey", OPERATOR))
            )
            self._add("scheduler", "scheduler")
            for service, count in self._wanted.items():
                for _ in range(count):
                    self.add(service)
            await self.ready()
        except BaseException:
            await self._end(failed=True)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._end(failed=kind is not None)
        refused = [
            f"{name}: {line[:WIDTH]}"
            for name, process in self.processes.items()
            for line in process.logged.splitlines()
            if any(sign in line.lower() for sign in ("permissions violation", "noperm", "no permissions"))
        ]
        assert not refused, (
            f"what a service does is not in shared/messaging/permissions.py or subjects.py: {refused[:5]}"
        )

    async def _end(self, *, failed: bool) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for process in self.processes.values():
            process.wanted = False
            process.signal(signal.SIGKILL)
        for process in self.processes.values():
            if process.popen is not None:
                await asyncio.to_thread(process.popen.wait)
                process.look()
        await self.client.close()
        await self._stack.aclose()
        if failed:
            self.show()

    def show(self) -> None:
        """The last log lines of every service, for a test that failed."""
        for name, process in self.processes.items():
            if name not in SERVERS:
                tail = [line[:WIDTH] for line in process.logged.splitlines()[-TAIL:]]
                sys.stdout.write("\n".join([f"\n===== {name}: exits {process.exits}", *tail, ""]))

    async def _keep(self) -> None:
        while True:
            for process in list(self.processes.values()):
                process.look()
            await asyncio.sleep(0.02)

    def _add_servers(self) -> None:
        self._start("nats", [str(nats_binary()), "-c", str(self.access.nats_conf)], None)
        valkey = [str(valkey_binary()), "--port", str(self.valkey_port), "--bind", *self._binds, "--save", ""]
        valkey += ["--dir", str(self.directory), "--appendonly", "yes", "--appendfsync", "always"]
        self._start("valkey", [*valkey, "--aclfile", str(self.access.valkey_users)], None)

    def add(self, service: str) -> str:
        """Start one more `trainer`, `rollout_worker`, `env_worker` or `reference_forward`; gives its name."""
        number = sum(name.rpartition("-")[0] == service for name in self.processes)
        return self._add(service, f"{service}-{number}")

    def _add(self, service: str, name: str) -> str:
        own = self.access.environment(SERVICE_OF.get(service, service))
        argv = [sys.executable, "-m", f"opentinker.services.{service}"]
        server = partial(fork_server, self._kinds.get(service, "light")) if self._forked else None
        self._start(name, argv, server, OPENTINKER_WORKER_ID=name, **own)
        return name

    def _start(self, name: str, argv: list[str], server: GetForkServer | None, **env: str) -> None:
        self.processes[name] = Process(name, argv, {**self.env, **env}, self.directory / f"{name}.log", server)
        self.processes[name].start()

    async def ready(self) -> None:
        """Every worker that should run has said so (reference-forward and env workers too)."""
        names = {name for name, p in self.processes.items() if p.wanted and name not in (*SERVERS, "scheduler")}

        async def beating() -> bool:
            workers = {w.bank or w.id: w for w in await self.store.workers()}
            return all(name in workers and workers[name].status != "loading" for name in names)

        await until(beating)
        await self.client.jobs()  # waits for the scheduler

    # --- what a test does to it ---------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """SIGKILL; it is started again."""
        self.processes[name].signal(signal.SIGKILL)

    def pause(self, name: str) -> None:
        self.processes[name].signal(signal.SIGSTOP)

    def children(self, name: str) -> list[int]:
        """Processes that it has started and that still run."""
        own = self.processes[name].popen
        return [] if own is None else [pid for pid, parent in living() if parent == own.pid]

    def resume(self, name: str) -> None:
        self.processes[name].signal(signal.SIGCONT)

    async def stop(self, name: str, number: int = signal.SIGTERM) -> int:
        """End it for good and wait for that. Returns its return code."""
        process = self.processes[name]
        process.wanted = False
        process.signal(number)
        await until(lambda: process.popen is None)
        return process.exits[-1]

    def start(self, name: str) -> None:
        """Again after `stop`."""
        self.processes[name].wanted = True

    # --- what a test asks ---------------------------------------------------------------------------------------

    async def submit(self, spec: JobSpec) -> str:
        return str((await self.client.submit(spec))["id"])

    async def wait(self, job: str, timeout_s: float = JOB_S) -> Job:
        """The job in its final state."""
        return await self.client.wait(job, timeout_s)

    async def succeeds(self, job: str, timeout_s: float = JOB_S) -> Job:
        record = await self.wait(job, timeout_s)
        assert record["state"] == "succeeded", record["reason"]
        return record

    async def run(self, spec: JobSpec, timeout_s: float = JOB_S) -> str:
        """The id of a job that has succeeded."""
        job = await self.submit(spec)
        await self.succeeds(job, timeout_s)
        return job

    async def fails(self, job: str) -> str:
        """Return why it has."""
        record = await self.wait(job)
        assert record["state"] == "failed", record["state"]
        return str(record["reason"])

    async def runs(self, job: str) -> None:
        """Wait until it does."""
        record = await until(lambda: self.client.job(job), lambda found: found["state"] not in ("queued", "starting"))
        assert record["state"] == "running", record["reason"]

    async def step(self, job: str) -> int:
        return (await self.store.job(job)).step

    async def reaches(self, job: str, step: int, timeout_s: float = JOB_S) -> None:
        async def there() -> bool:
            record = await self.store.job(job)
            assert not record.state.final or record.step >= step, f"{record.state}: {record.reason}"
            return record.step >= step

        await until(there, timeout_s=timeout_s)

    async def ledger(self, job: str, policy: str = "") -> Ledger:
        return await admission_of(self.store.redis, await self.store.job(job), policy).ledger()

    def faults(self, job: str, spec: JobSpec, policy: str = "") -> list[str]:
        """In what the surviving line of trainers trained; see `lineage.faults`."""
        own, part = spec_of(spec, policy) if policy else spec, part_id(job, policy)
        bounds = {"groups_per_batch": own.algorithm.groups_per_batch, "max_staleness": own.algorithm.max_staleness}
        return faults(self.lines(part), self.manifest(part).resumed, steps=own.train.steps, **bounds)

    async def trained(self, job: str, spec: JobSpec, policy: str = "") -> Ledger:
        """Its ledger, once nothing was lost, nothing was trained twice, and checkpoint and ledger say the same."""
        own, manifest = spec_of(spec, policy) if policy else spec, self.manifest(part_id(job, policy))
        assert (manifest.policy, manifest.step) == (policy, own.train.steps)
        found = self.faults(job, spec, policy)
        assert found == [], (found, manifest.resumed)
        ledger = await self.ledger(job, policy)
        assert ledger.balanced, ledger
        assert ledger.trained == own.train.steps * own.algorithm.groups_per_batch == manifest.ledger["trained"], ledger
        return ledger

    def lines(self, job: str, log: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """One per step (or per evaluation) of every epoch, also of steps that were rolled back."""
        path = self.data / "jobs" / job / log
        return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def episodes(self, job: str) -> list[dict[str, Any]]:
        """Those that are kept of its training, by step."""
        files = sorted((self.data / "jobs" / job / "rollouts").glob("step-*.jsonl"))
        return [orjson.loads(line) for path in files for line in path.read_bytes().splitlines()]

    def manifest(self, job: str) -> Manifest:
        """Of the newest good checkpoint."""
        found = checkpoint.find_newest(self.data / "jobs" / job / "checkpoints")
        assert found is not None, "no checkpoint"
        return found[1]

    def logs(self, name: str) -> str:
        """Over all its lives."""
        return self.processes[name].logged


Toys = tuple[Cluster, Path]
"""A light cluster, and the model directory for its jobs."""


@contextlib.asynccontextmanager
async def toy_cluster(directory: Path, **options: Any) -> AsyncIterator[Toys]:
    """A light cluster and the model directory for its jobs."""
    model = toy_model(directory / "model")
    async with Cluster(directory, torch=False, **options) as cluster:
        yield cluster, model


def shared_fixture(opens: Callable[..., AbstractAsyncContextManager[Any]], **options: Any) -> Any:
    """A fixture for all tests of a module: `opens(directory, **options)` is `Cluster` or `toy_cluster`."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def opened(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
        async with opens(tmp_path_factory.mktemp("cluster"), **options) as found:
            yield found

    return opened
