"""Workers as pods, in a simulated cluster: the template, pages, ends, and an API that is busy or away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker.services.scheduler.autoscaler.autoscaler import Autoscaler, launcher_of
from opentinker.services.scheduler.autoscaler.base import LauncherFailed
from opentinker.services.scheduler.autoscaler.kubernetes import KubernetesLauncher
from opentinker.shared.config import Settings
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Pool
from tests.conftest import soon, until
from tests.support.deploy.kubernetes_api import DEPLOYMENT_UID, TOKEN, KubernetesApi, kubernetes
from tests.support.scheduling import Workers, new_job, running


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
    await new_job(store, "job-1")
    cluster.busy = 6
    loop = Autoscaler(ctx, KubernetesLauncher(cluster_settings(tmp_path, url)), poll_s=0.02)
    async with running(loop.run()):
        await until(lambda: sorted(cluster.pods) == ["rl-scheduler-rollout-0", "rl-scheduler-trainer-0"])
        await soon(workers.start("rollout-x", "trainer-x"))
