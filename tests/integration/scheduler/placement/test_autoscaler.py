"""Workers on demand: what is started for which queue, and by what; it is known, ends, and is not doubled."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker.local.embedded import shipped_conf
from opentinker.local.server_users import Access
from opentinker.services.scheduler.autoscaler.autoscaler import Autoscaler, launcher_of, workers_to_start
from opentinker.services.scheduler.autoscaler.base import Launched, LauncherFailed
from opentinker.services.scheduler.autoscaler.kubernetes import KubernetesLauncher
from opentinker.services.scheduler.autoscaler.process import ProcessLauncher
from opentinker.services.scheduler.placement.types import (
    NO_GPUS,
    UNKNOWN,
    ClusterView,
    Gpus,
    Held,
    Need,
    PlannedJob,
    Slot,
)
from opentinker.shared.config import Settings
from opentinker.shared.runtime import launched_processes
from opentinker.shared.runtime.gpus import pin_of
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.egress import LOOPBACK, VARIABLE
from opentinker.shared.security.secrets import AWS
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.tenant_limits import TenantLimits
from opentinker.shared.types.core import Gpu, JobState, Pool, WorkerInfo
from opentinker.shared.types.errors import SpecError
from tests.conftest import NewContext, soon, until
from tests.e2e.test_kills import check, toy_spec
from tests.support.cluster import toy_cluster
from tests.support.deploy.kubernetes_api import DEPLOYMENT_UID, TOKEN, KubernetesApi, kubernetes
from tests.support.scheduling import Workers, new_job, running
from tests.unit.shared.test_gpus import fake_nvml, install

HERE = launched_processes.prefix()

RL = {Pool.TRAINER: 1, Pool.ROLLOUT: 1}
THERE = {Pool.TRAINER: ["t"], Pool.ROLLOUT: ["r"]}


def room(gpus: Mapping[str, Gpus] | None = None) -> dict[str, Slot]:
    slots = [(pool, n) for pool, most in ((Pool.TRAINER, 2), (Pool.ROLLOUT, 4)) for n in range(most)]
    return {f"{pool}-{n}": Slot(pool, (gpus or {}).get(f"{pool}-{n}", NO_GPUS)) for pool, n in slots}


def lacked(view: ClusterView, room: dict[str, Slot]) -> Counter[Pool]:
    return Counter(room[name].pool for name in workers_to_start(view, room))


def queued(id: str, needs: dict[Pool, int] = RL, **changes: Any) -> PlannedJob:
    return PlannedJob(id=id, tenant="default", priority=0, created=1.0, needs=needs, **({"most": 1} | changes))


def view(*jobs: PlannedJob, **changes: Any) -> ClusterView:
    return ClusterView(now=100.0, jobs=jobs, **({"free": {}, "alive": {}} | changes))


# --- workers to start -----------------------------------------------------------------------------------------------


def test_what_a_job_lacks_is_what_is_started() -> None:
    assert lacked(view(queued("a")), room()) == {Pool.TRAINER: 1, Pool.ROLLOUT: 1}
    there = {Pool.ROLLOUT: ["r"]}
    assert lacked(view(queued("a"), free=there, alive=there), room()) == {Pool.TRAINER: 1}


def test_a_job_gets_as_many_rollout_workers_as_it_may_have() -> None:
    assert lacked(view(queued("a", most=3)), room()) == {Pool.TRAINER: 1, Pool.ROLLOUT: 3}
    assert lacked(view(queued("a", most=9)), room()) == {Pool.TRAINER: 1, Pool.ROLLOUT: 4}


def test_nothing_is_started_for_a_job_that_could_not_start_then() -> None:
    assert not lacked(view(queued("a", absent="env worker")), room())
    assert not lacked(view(queued("a", retry_at=200.0)), room())
    assert not lacked(view(queued("a", {Pool.TRAINER: 1, Pool.ROLLOUT: 5})), room())
    assert not lacked(view(queued("a"), limits={"*": TenantLimits(workers=1)}), room())
    assert not lacked(view(queued("a")), {})


def test_what_comes_anyway_is_not_started_again() -> None:
    assert not lacked(view(queued("a"), coming=THERE, alive=THERE), room())
    assert lacked(view(queued("a"), queued("b"), coming=THERE, alive=THERE), room()) == RL


def test_a_job_that_lost_its_trainer_gets_another() -> None:
    running = queued("a", held=True, lost_at=99.0)
    kept, there = [Held("r", "a", Pool.ROLLOUT)], {Pool.ROLLOUT: ["r"]}
    assert lacked(view(running, leases=kept, alive=there), room()) == {Pool.TRAINER: 1}


def test_what_has_the_gpus_that_a_job_needs_is_started_for_it() -> None:
    two, one = Gpus((80, 80)), Gpus((80,))
    gpus = {"trainer-1": two, "rollout-2": one}
    wants = queued("a", gpus={Pool.TRAINER: Need(2), Pool.ROLLOUT: Need(1)})
    assert workers_to_start(view(wants), room(gpus)) == ["trainer-1", "rollout-2"]
    assert workers_to_start(view(queued("a")), room(gpus)) == ["trainer-0", "rollout-0"]
    assert not workers_to_start(view(queued("a", gpus={Pool.TRAINER: Need(3)})), room(gpus))


# --- the loop ---------------------------------------------------------------------------------------------------------


class FakeLauncher:
    """What it starts is there at once, and beats when the test lets it."""

    prefix = "fake"

    def __init__(self) -> None:
        self.all: dict[str, Launched] = {}
        self.ended: list[str] = []

    async def running(self) -> list[Launched]:
        return list(self.all.values())

    def gpus(self, pool: Pool, name: str) -> Gpus:
        return NO_GPUS

    async def start(self, pool: Pool, name: str) -> None:
        assert name not in self.all
        self.all[name] = Launched(name, pool)

    async def end(self, name: str) -> None:
        self.ended.append(name)
        del self.all[name]

    def counts(self) -> Counter[Pool]:
        return Counter(one.pool for one in self.all.values())


@pytest.fixture
async def ctx(new_context: NewContext) -> AsyncIterator[Context]:
    settings = {"launcher_trainers": 2, "launcher_rollout_workers": 3, "launcher_start_s": 1000.0}
    async with new_context("scheduler", **settings) as ctx:
        yield ctx


@pytest.fixture
async def workers(store: Store) -> AsyncIterator[Workers]:
    workers = Workers(store)
    yield workers
    await workers.stop()


async def needed(ctx: Context, workers: Workers) -> tuple[FakeLauncher, Autoscaler]:
    """A job waits for workers."""
    await workers.start("env-0")
    await new_job(ctx.store, "job-1")
    launcher = FakeLauncher()
    return launcher, Autoscaler(ctx, launcher)


async def test_jobs_get_workers_once_up_to_the_limit(ctx: Context, store: Store, workers: Workers) -> None:
    await workers.start("env-0")
    launcher = FakeLauncher()
    loop = Autoscaler(ctx, launcher)
    await loop.reconcile()
    assert not launcher.all
    await new_job(store, "job-1")
    await loop.reconcile()
    assert launcher.counts() == RL and Counter(slot.pool for slot in loop.starting.values()) == RL
    await loop.reconcile()
    assert launcher.counts() == RL, "they are on their way"
    for n in range(2, 9):
        await new_job(store, f"job-{n}")
    await loop.reconcile()
    assert launcher.counts() == {Pool.TRAINER: 2, Pool.ROLLOUT: 2}
    await Autoscaler(ctx, launcher).reconcile()
    assert launcher.counts() == {Pool.TRAINER: 2, Pool.ROLLOUT: 2}, "the next scheduler knows them"


async def test_a_job_of_a_live_policy_gets_workers_after_it(ctx: Context, store: Store, workers: Workers) -> None:
    await workers.start("env-0")
    spec = {"name": "live", "kind": "inference", "model": {"base": "model"}, "rollout": {"engine": "toy"}}
    served = parse_spec({**spec, "start": {"from": "j-0000000000@live"}}).model_dump(mode="json")
    await store.create_job(id="j-1111111111", spec=served, tenant="default")
    launcher = FakeLauncher()
    loop = Autoscaler(ctx, launcher)
    await loop.reconcile()
    assert not launcher.all, "what it would serve has no workers"
    await new_job(store, "j-0000000000", JobState.STARTING)
    await loop.reconcile()
    assert launcher.counts()[Pool.ROLLOUT] > 0


async def test_a_worker_that_never_starts_is_retried_later(ctx: Context, store: Store, workers: Workers) -> None:
    launcher, loop = await needed(ctx, workers)
    await loop.reconcile()
    (trainer,) = (one for one in launcher.all.values() if one.pool == Pool.TRAINER)
    launcher.all[trainer.name] = Launched(trainer.name, Pool.TRAINER, "its process has ended")
    await loop.reconcile()
    assert launcher.ended == [trainer.name]
    await loop.reconcile()
    assert launcher.counts() == {Pool.ROLLOUT: 1}, "not at once"
    loop._failures[Pool.TRAINER].again_at = 0.0
    await loop.reconcile()
    assert launcher.counts() == RL
    assert loop._failures[Pool.TRAINER].count == 1


async def test_memory_is_learned_from_the_first_worker(ctx: Context, store: Store, workers: Workers) -> None:
    """Else every worker that may be is started for a job that none of them does for, again and again."""

    class Unknowing(FakeLauncher):
        def gpus(self, pool: Pool, name: str) -> Gpus:
            return Gpus((UNKNOWN,)) if pool == Pool.TRAINER else NO_GPUS

    await workers.start("env-0")
    job = await new_job(store, "job-1", resources__trainer_gpus=1, resources__gpu_memory_gb=80, train__learner="torch")
    launcher = Unknowing()
    loop = Autoscaler(ctx, launcher)
    await loop.reconcile()
    assert launcher.counts() == RL, "it may be enough"
    (name,) = (one.name for one in launcher.all.values() if one.pool == Pool.TRAINER)
    info = WorkerInfo(
        id=name, incarnation="a", pool=Pool.TRAINER, host="here", pid=1, status="idle",
        gpus=[Gpu(index=0, uuid="0", model="X", memory=40 * 10**9)],
    )  # fmt: skip
    await store.beat(info, 600.0)
    await loop.reconcile()
    assert launcher.counts() == RL, "another would have no more"
    await store.redis.delete(f"worker:{name}")
    await launcher.end(name)
    await loop.reconcile()
    assert launcher.counts() == {Pool.ROLLOUT: 1}
    await store.transition(job, JobState.CANCELLED, epoch=0)
    await new_job(store, "job-2", resources__trainer_gpus=1, resources__gpu_memory_gb=40, train__learner="torch")
    await loop.reconcile()
    assert launcher.counts()[Pool.TRAINER] == 1, "this is what they have"


async def test_silence_is_ended(ctx: Context, store: Store, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, loop = await needed(ctx, workers)
    await loop.reconcile()
    names = sorted(launcher.all)
    loop._known = {name: since - 2000.0 for name, since in loop._known.items()}
    await loop.reconcile()
    assert sorted(launcher.ended) == names and not loop.starting


async def test_workers_that_beat_are_not_on_their_way(ctx: Context, store: Store, workers: Workers) -> None:
    launcher, loop = await needed(ctx, workers)
    launcher.all["trainer-0"] = Launched("trainer-0", Pool.TRAINER)
    await workers.start("trainer-0")
    await loop.reconcile()
    assert [slot.pool for slot in loop.starting.values()] == [Pool.ROLLOUT]


# --- processes --------------------------------------------------------------------------------------------------------


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

    more = alone.model_copy(update={"launcher_trainers": 3, "launcher_rollout_workers": 1})
    after = ProcessLauncher(more)  # GPUs 0, 1, 2 would be those of its trainers now
    await after.running()
    names = [f"{HERE}-trainer-0", f"{HERE}-trainer-1", f"{HERE}-trainer-2", f"{HERE}-rollout-0"]
    seen = {name: pin_of(after._part(name)) for name in names}
    assert seen == dict(zip(names, ["0,1", "", "2", ""], strict=True)), "what still runs keeps what it has"
    await after.start(Pool.TRAINER, f"{HERE}-trainer-1")
    second = launched_processes.read(launched_processes.folder(alone.data_dir) / f"{HERE}-trainer-1.json")
    assert second is not None and (await environment_of(second.pid))["CUDA_VISIBLE_DEVICES"] == ""
    for child in (*launcher._children.values(), *after._children.values()):
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


# --- pods -------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def api() -> AsyncIterator[tuple[KubernetesApi, str]]:
    async with kubernetes() as found:
        yield found


def cluster_settings(tmp_path: Path, url: str, **changes: Any) -> Settings:
    for name in ("account", "pods"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "account/token").write_text(TOKEN + "\n")
    (tmp_path / "account/namespace").write_text("research")
    for service in ("trainer", "rollout-worker"):
        pod = {
            "metadata": {"labels": {"app": service}},
            "spec": {
                "containers": [{"name": service, "image": "opentinker/cpu", "env": [{"name": "A", "value": "b"}]}]
            },
        }
        (tmp_path / f"pods/{service}.json").write_bytes(orjson.dumps(pod))
    given = {
        "launcher": "kubernetes",
        "launcher_pods": tmp_path / "pods",
        "launcher_api": url,
        "launcher_account": tmp_path / "account",
        "launcher_owner": "rl-scheduler",
        "launcher_idle_s": 60.0,
    }
    return Settings.model_validate({**given, **changes})


async def test_a_pod_follows_the_template_and_its_owner(api: tuple[KubernetesApi, str], tmp_path: Path) -> None:
    cluster, url = api
    launcher = launcher_of(cluster_settings(tmp_path, url))
    assert isinstance(launcher, KubernetesLauncher)
    await launcher.start(Pool.ROLLOUT, "rl-scheduler-rollout-0")
    await launcher.start(Pool.ROLLOUT, "rl-scheduler-rollout-0")
    (pod,) = cluster.pods.values()
    (owner,) = pod["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "rl-scheduler", "uid": DEPLOYMENT_UID}
    assert pod["metadata"]["labels"]["app"] == "rollout-worker"
    assert pod["spec"]["restartPolicy"] == "Never"
    told = {one["name"]: one["value"] for one in pod["spec"]["containers"][0]["env"]}
    assert told == {"A": "b", "OPENTINKER_WORKER_ID": "rl-scheduler-rollout-0", "OPENTINKER_IDLE_EXIT_S": "60"}
    (one,) = await launcher.running()
    assert (one.name, one.pool, one.ended) == ("rl-scheduler-rollout-0", Pool.ROLLOUT, "")


async def test_pods_are_listed_by_page_and_label(api: tuple[KubernetesApi, str], tmp_path: Path) -> None:
    cluster, url = api
    launcher = KubernetesLauncher(cluster_settings(tmp_path, url))
    for n in range(5):
        await launcher.start(Pool.TRAINER, f"rl-scheduler-trainer-{n}")
    cluster.pods["other"] = {"metadata": {"name": "other", "labels": {"app": "x"}}}
    assert len(await launcher.running()) == 5
    assert len(await KubernetesLauncher(cluster_settings(tmp_path, url)).running()) == 5


async def test_pods_that_ended_say_why_and_are_deleted_once(api: tuple[KubernetesApi, str], tmp_path: Path) -> None:
    cluster, url = api
    launcher = KubernetesLauncher(cluster_settings(tmp_path, url))
    await launcher.start(Pool.TRAINER, "rl-scheduler-trainer-0")
    cluster.finish("rl-scheduler-trainer-0", "Failed", reason="Evicted", message="the node was low on memory")
    (one,) = await launcher.running()
    assert one.ended == "its pod has failed Evicted the node was low on memory"
    cluster.lingers = True
    await launcher.end(one.name)
    await launcher.end(one.name)
    cluster.lingers = False
    await launcher.end(one.name)
    await launcher.end(one.name)
    assert await launcher.running() == []


async def test_a_busy_api_is_asked_again_and_a_refusal_is_said(api: tuple[KubernetesApi, str], tmp_path: Path) -> None:
    cluster, url = api
    launcher = KubernetesLauncher(cluster_settings(tmp_path, url))
    cluster.busy = 2
    await launcher.start(Pool.TRAINER, "rl-scheduler-trainer-0")
    assert len(cluster.pods) == 1
    cluster.busy = 1000
    with pytest.raises(LauncherFailed, match="429: too many requests"):
        await launcher.running()
    cluster.busy = 0
    cluster.refuses = "exceeded quota: gpus"
    with pytest.raises(LauncherFailed, match="403: exceeded quota: gpus"):
        await launcher.start(Pool.TRAINER, "rl-scheduler-trainer-1")


async def test_the_token_may_change_and_the_api_may_be_away(api: tuple[KubernetesApi, str], tmp_path: Path) -> None:
    _, url = api
    launcher = KubernetesLauncher(cluster_settings(tmp_path, url))
    (tmp_path / "account/token").write_text("one that is over")
    with pytest.raises(LauncherFailed, match="401"):
        await launcher.running()
    (tmp_path / "account/token").write_text(TOKEN)
    assert await launcher.running() == []
    with pytest.raises(LauncherFailed):
        await KubernetesLauncher(cluster_settings(tmp_path, "http://127.0.0.1:9")).running()


async def test_the_loop_starts_pods_for_a_queue_and_outlives_an_api_that_is_away(
    api: tuple[KubernetesApi, str], ctx: Context, store: Store, workers: Workers, tmp_path: Path
) -> None:
    cluster, url = api
    await workers.start("env-0")
    await new_job(store, "job-1")
    cluster.busy = 6
    loop = Autoscaler(ctx, KubernetesLauncher(cluster_settings(tmp_path, url)), poll_s=0.02)
    async with running(loop.run()):
        await until(lambda: sorted(cluster.pods) == ["rl-scheduler-rollout-0", "rl-scheduler-trainer-0"])
        await soon(workers.start("rollout-x", "trainer-x"))


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({"LAUNCHER": "docker"}, "launcher"),
        ({"LAUNCHER": "kubernetes"}, "needs launcher_pods"),
        ({"LAUNCHER_PODS": "/pods"}, "launcher_pods is for launcher = kubernetes"),
        ({"LAUNCHER": "process", "LAUNCHER_OWNER": "x"}, "launcher_owner is for launcher = kubernetes"),
        ({"LAUNCHER_ACCESS": "/access"}, "launcher_access is for launcher = process"),
        ({"LAUNCHER_TRAINERS": "-1"}, "launcher_trainers"),
        ({"IDLE_EXIT_S": "0"}, "idle_exit_s"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(environ: dict[str, str], what: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_settings(None, {f"OPENTINKER_{name}": value for name, value in environ.items()})
    assert what in str(caught.value.mistakes)


def test_what_is_to_be_started_must_be_there(tmp_path: Path) -> None:
    for settings, field in (
        (Settings(launcher="process", launcher_access=tmp_path), "launcher_access"),
        (Settings(launcher="kubernetes", launcher_pods=tmp_path), "launcher_pods"),
    ):
        with pytest.raises(SpecError) as caught:
            launcher_of(settings)
        assert [mistake["field"] for mistake in caught.value.mistakes] == [field]
    assert launcher_of(Settings()) is None


# --- all of it --------------------------------------------------------------------------------------------------------


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
