"""Workers as child processes: each is known to the next scheduler, sees its own GPUs, and ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from opentinker.local.embedded import shipped_conf
from opentinker.local.server_users import Access
from opentinker.services.scheduler.autoscaler.process import ProcessLauncher
from opentinker.shared.config import Settings
from opentinker.shared.runtime import launched_processes
from opentinker.shared.runtime.gpus import pin_of
from opentinker.shared.security.egress import LOOPBACK, VARIABLE
from opentinker.shared.security.secrets import AWS
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.types.core import Pool
from tests.conftest import until
from tests.e2e.test_kills import check, toy_spec
from tests.support.cluster import toy_cluster
from tests.unit.shared.test_gpus import fake_nvml, install

HERE = launched_processes.prefix()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Settings]:
    """Of a machine whose servers are not there: what is started waits for them."""
    access = Access(tmp_path / "access", shipped_conf("nats.conf"))
    yield Settings(
        launcher="process",
        launcher_access=access.folder,
        data_dir=tmp_path / "data",
        nats_url="nats://127.0.0.1:9",
        redis_url="redis://127.0.0.1:9/0",
        preload=False,
    )
    launched_processes.end_all(tmp_path / "data", 0.0)


def the_only_one(settings: Settings) -> launched_processes.Process:
    (file,) = launched_processes.folder(settings.data_dir).iterdir()
    process = launched_processes.read(file)
    assert process is not None
    return process


async def environment_of(pid: int) -> dict[str, str]:
    """It is empty for a moment after the process has begun."""

    def told() -> dict[str, str]:
        lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
        return dict(line.split("=", 1) for line in lines if line)

    await until(told)
    return told()


def test_rollout_workers_get_what_models_behind_urls_are_checked_by(alone: Settings, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    settings = alone.model_copy(update={"env_egress_allow": list(LOOPBACK), "model_keys_file": keys})
    launcher = ProcessLauncher(settings)
    told = {pool: launcher._environment(pool, "x") for pool in (Pool.ROLLOUT, Pool.TRAINER)}
    found = load_settings(None, {VARIABLE: told[Pool.ROLLOUT][VARIABLE]})
    assert found.env_egress_allow == list(LOOPBACK)
    assert told[Pool.ROLLOUT]["OPENTINKER_MODEL_KEYS_FILE"] == str(keys)
    assert not {VARIABLE, "OPENTINKER_MODEL_KEYS_FILE"} & told[Pool.TRAINER].keys()


async def test_a_process_is_known_to_the_next_scheduler(alone: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in AWS:
        monkeypatch.setenv(name, "of-the-artifact-store")
    launcher = ProcessLauncher(alone)
    await launcher.start(Pool.ROLLOUT, f"{HERE}-rollout-0")
    await launcher.start(Pool.ROLLOUT, f"{HERE}-rollout-0")
    process = the_only_one(alone)
    assert process.alive and os.getsid(process.pid) == process.pid
    told = await environment_of(process.pid)
    assert told["OPENTINKER_WORKER_ID"] == f"{HERE}-rollout-0"
    assert told["OPENTINKER_IDLE_EXIT_S"] == "300.0"
    assert told["OPENTINKER_NATS_PASSWORD_FILE"].endswith("/access/nats-rollout-worker")
    assert not any(name in told for name in ("OPENTINKER_API_KEY", "OPENTINKER_ADMIN_KEY_FILE", *AWS))

    after = ProcessLauncher(alone)
    (one,) = await after.running()
    assert (one.name, one.pool, one.ended) == (f"{HERE}-rollout-0", Pool.ROLLOUT, "")

    async def gone() -> bool:
        await after.end(f"{HERE}-rollout-0")
        return not await after.running()

    await until(gone)
    await asyncio.to_thread(launcher._children[f"{HERE}-rollout-0"].wait)
    assert not process.alive and not list(launched_processes.folder(alone.data_dir).iterdir())


async def test_each_process_sees_its_own_gpus_alone(alone: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_nvml(3, linked=((0, 1),)))
    settings = alone.model_copy(update={"launcher_trainers": 1, "launcher_rollout_workers": 1})
    launcher = ProcessLauncher(settings)
    assert [launcher.gpus(Pool.TRAINER, f"{HERE}-trainer-0").linked, len(launcher.gpus(Pool.ROLLOUT, "x").memory)] == [
        2,
        0,
    ]
    await launcher.start(Pool.TRAINER, f"{HERE}-trainer-0")
    process = the_only_one(alone)
    assert process.gpus == "0,1"
    told = await environment_of(process.pid)
    assert (told["CUDA_VISIBLE_DEVICES"], told["CUDA_DEVICE_ORDER"]) == ("0,1", "PCI_BUS_ID")

    more = alone.model_copy(update={"launcher_trainers": 3, "launcher_rollout_workers": 0})
    after = ProcessLauncher(more)  # GPUs 0, 1, 2 would be those of its trainers now
    await after.running()
    names = [f"{HERE}-trainer-0", f"{HERE}-trainer-1", f"{HERE}-trainer-2"]
    seen = {name: pin_of(after._part(name)) for name in names}
    assert seen == dict(zip(names, ["0,1", "", "2"], strict=True)), "what still runs keeps what it has"
    await after.start(Pool.TRAINER, f"{HERE}-trainer-1")
    second = launched_processes.read(launched_processes.folder(alone.data_dir) / f"{HERE}-trainer-1.json")
    assert second is not None and (await environment_of(second.pid))["CUDA_VISIBLE_DEVICES"] == ""
    for child in (*launcher._children.values(), *after._children.values()):
        child.kill()
        child.wait()


async def test_one_gpu_is_for_all(alone: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_nvml(1))
    launcher = ProcessLauncher(alone.model_copy(update={"launcher_trainers": 1, "launcher_rollout_workers": 2}))
    await launcher.start(Pool.TRAINER, f"{HERE}-trainer-0")
    await launcher.running()
    names = [f"{HERE}-trainer-0", f"{HERE}-rollout-0", f"{HERE}-rollout-1"]
    assert [pin_of(launcher._part(name)) for name in names] == ["0", "0", "0"]
    for child in launcher._children.values():
        child.kill()
        child.wait()


async def test_a_process_that_was_killed_has_ended(alone: Settings) -> None:
    launcher = ProcessLauncher(alone)
    await launcher.start(Pool.TRAINER, f"{HERE}-trainer-0")
    os.kill(the_only_one(alone).pid, signal.SIGKILL)
    await until(launcher.running, lambda found: [f"{HERE}-trainer-0.log" in one.ended for one in found] == [True])
    await launcher.end(f"{HERE}-trainer-0")
    assert await launcher.running() == []


def test_a_number_that_another_process_has_is_left_alone(alone: Settings) -> None:
    other = launched_processes.Process(pid=os.getpid(), ticks=1, pool="trainer", since=0.0)
    assert not other.alive
    other.signal(signal.SIGTERM)
    other.signal(signal.SIGKILL)
    folder = launched_processes.folder(alone.data_dir)
    folder.mkdir(parents=True)
    launched_processes.write(folder / f"{HERE}-trainer-0.json", other)
    assert launched_processes.end_all(alone.data_dir, 0.0) == []


async def test_a_start_that_was_never_ended_gives_its_name_back(alone: Settings) -> None:
    launcher = ProcessLauncher(alone)
    folder = launched_processes.folder(alone.data_dir)
    folder.mkdir(parents=True)
    path = folder / f"{HERE}-trainer-0.json"
    path.touch()
    (one,) = await launcher.running()
    assert not one.ended
    os.utime(path, (0, 0))
    (one,) = await launcher.running()
    assert one.ended
    await launcher.end(one.name)
    assert await launcher.running() == []


@pytest.mark.nightly
@pytest.mark.slow
async def test_a_job_gets_its_workers_as_processes_which_outlive_the_scheduler_and_end(tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "launcher": "process",
        "heartbeat_s": 0.5,
        "launcher_access": tmp_path / "access",
        "launcher_idle_s": 3,
        "worker_ttl_s": 2,
    }
    async with toy_cluster(tmp_path, trainers=0, rollout_workers=0, **settings) as (cluster, model):
        try:
            spec = toy_spec(model, steps=40)
            job = await cluster.submit(spec)
            await cluster.reaches(job, 5)
            before = processes(cluster.data)
            assert sorted(before) == [f"{HERE}-rollout-0", f"{HERE}-trainer-0"]
            cluster.kill("scheduler")
            os.kill(before[f"{HERE}-rollout-0"], signal.SIGKILL)
            await cluster.succeeds(job)
            await check(cluster, job, spec)
            assert processes(cluster.data).get(f"{HERE}-trainer-0") in (before[f"{HERE}-trainer-0"], None)
            log = (cluster.data / f"logs/{HERE}-trainer-0.log").read_text()
            assert log.count('"lease_taken"') == 1, "it never noticed"
            await until(lambda: not processes(cluster.data))
            assert "idle_exit" in (cluster.data / f"logs/{HERE}-trainer-0.log").read_text()
            await until(lambda: not list(launched_processes.folder(cluster.data).iterdir()))
        finally:
            launched_processes.end_all(cluster.data, 0.0)


def processes(data_dir: Path) -> dict[str, int]:
    """By name, the launched ones that run."""
    found = {path.stem: launched_processes.read(path) for path in launched_processes.folder(data_dir).glob("*.json")}
    return {name: process.pid for name, process in found.items() if process is not None and process.alive}
