"""The Helm chart: rendered by helm, every object against Kubernetes' schemas, and against what our services take."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest

from opentinker.envs.runtime.sessions import LOAD, WAITING
from opentinker.local.embedded import shipped_conf
from opentinker.local.server_users import Access
from opentinker.services.scheduler.autoscaler.kubernetes import KubernetesLauncher
from opentinker.shared.config import Settings
from opentinker.shared.messaging.subjects import SERVICES
from opentinker.shared.runtime.telemetry import REGISTRY
from opentinker.shared.security.model_keys import MODEL_KEY_SERVICES
from opentinker.shared.settings_sources import PREFIX
from opentinker.shared.types.core import Pool
from tests.nightly.deploy.rendered_chart import CHART, CRDS, KUBERNETES, ROOT, Objects, environment, helm, pods, refused
from tests.support.deploy.kubernetes_api import TOKEN, kubernetes


def test_helm_finds_nothing_to_say() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("which", ["plain", "whole"])
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_one_of_kubernetes(which: str, version: str, request: pytest.FixtureRequest) -> None:
    objects: Objects = request.getfixturevalue(which)
    for (kind, _), one in objects.items():
        if kind in CRDS:
            jsonschema.validate(one, CRDS[kind])
        else:
            kubernetes_validate.validate(one, version, strict=True)
    assert ("ScaledObject", "rl-env-worker") in objects or which == "plain"


def test_a_wrong_object_would_be_found(plain: Objects) -> None:
    wrong = json.loads(json.dumps(plain["Deployment", "rl-trainer"]))
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


def test_pods_have_no_rights(plain: Objects, whole: Objects) -> None:
    given = [name for name, pod in pods(whole).items() if pod["automountServiceAccountToken"]]
    assert given == ["rl-scheduler"], "it is the launcher"
    assert not any(pod["automountServiceAccountToken"] for pod in pods(plain).values())
    for pod in [*pods(plain).values(), *pods(whole).values()]:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not any(name in pod for name in ("hostNetwork", "hostPID", "hostIPC"))
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def test_services_are_told_what_they_take(whole: Objects) -> None:
    for name, pod in pods(whole).items():
        told = {one: value for one, value in environment(pod).items() if not one.startswith("HF_")}
        assert all(one.removeprefix(PREFIX).lower() in Settings.model_fields for one in told), name
        module = pod["containers"][0]["command"][-1]
        assert (ROOT / (module.removeprefix("opentinker.").replace(".", "/")) / "__main__.py").is_file()
        assert told["OPENTINKER_SWAP_TIMEOUT_S"] == "30"
        assert told["OPENTINKER_NATS_URL"] == "nats://nats.infra:4222"
        given = {one.removeprefix(PREFIX).lower(): value for one, value in told.items() if value is not None}
        settings = Settings.model_validate(given)
        assert (settings.launcher == "kubernetes") == (name == "rl-scheduler")


def test_the_schema_refuses_what_the_chart_gives_itself() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    own = set(schema["definitions"]["settings"]["propertyNames"]["not"]["enum"])
    assert own <= set(Settings.model_fields)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"trainer": {"gpu": 1}}, "additional properties 'gpu' not allowed"),
        ({"trainer": {"replicas": -1}}, "/trainer/replicas"),
        ({"settings": {"data_dir": "/elsewhere"}}, "data_dir"),
        ({"settings": {"tenants": {"*": {}}}}, "/settings/tenants"),
        ({"nats": {"enabled": False}}, "nats.url is needed"),
        ({"nats": {"url": "nats://a:4222"}}, "nats.url is for a server of your own"),
        ({"nats": {"enabled": False, "url": "nats://a:4222"}}, "networkPolicy.serversTo"),
        ({"envWorker": {"keda": {"enabled": True}}}, "envWorker.keda.prometheus is needed"),
        ({"envWorker": {"keda": {"enabled": True, "prometheus": "http://p", "minReplicas": 30}}}, "above maxReplicas"),
        ({"data": {"size": "much"}}, "/data/size"),
        ({"artifacts": {"url": "gs://bucket"}}, "/artifacts/url"),
        ({"artifacts": {"endpoint": "http://minio:9000"}}, "are for artifacts.url"),
        ({"artifacts": {"url": "s3://b-1", "credentials": {"secret": "s"}}}, "networkPolicy.artifactsTo"),
        ({"oidc": {"secret": "login"}}, "networkPolicy.oidcTo"),
        (
            {"artifacts": {"url": "s3://b-1"}, "networkPolicy": {"artifactsTo": [{"podSelector": {}}]}},
            "artifacts.credentials.secret is needed",
        ),
        ({"settings": {"artifacts_url": "/mnt"}}, "artifacts_url"),
        ({"hub": {"endpoint": "http://hub"}}, "/hub/endpoint"),
        ({"hub": {"endpoint": "https://hub:8443"}}, "/hub/endpoint"),
        ({"hub": {"cache": {"size": "50"}}}, "/hub/cache/size"),
        ({"networkPolicy": {"hubTo": []}}, "networkPolicy.hubTo must name"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], what: str) -> None:
    assert what in refused(values)


def test_each_pod_mounts_the_passwords_of_its_service_alone(plain: Objects, tmp_path: Path) -> None:
    made = Access(tmp_path / "access", shipped_conf("nats.conf")).secrets("opentinker")
    keys = {one["metadata"]["name"]: set(one["stringData"]) for one in made["items"]}
    for one in made["items"]:
        kubernetes_validate.validate(one, KUBERNETES[-1], strict=True)
    for name, pod in pods(plain).items():
        component = name.removeprefix("rl-")
        mounted = {v["secret"]["secretName"]: v["secret"].get("items") for v in pod["volumes"] if "secret" in v}
        own = "opentinker-" + component.replace("redis", "valkey")
        assert set(mounted) == {own} | ({"opentinker-operator-key"} if component == "scheduler" else set()), name
        assert {item["key"] for item in mounted[own] or []} <= keys[own]
        if component in SERVICES:
            assert keys[own] == {"nats", "valkey"} | ({"issuer"} if component == "scheduler" else set())
            told = environment(pod)
            assert told["OPENTINKER_NATS_PASSWORD_FILE"] == "/run/opentinker/access/nats"
    assert {name.removeprefix("rl-") for name in pods(plain)} == {*SERVICES, "nats", "redis"}


DATA = "/var/lib/opentinker/data"


def test_pods_have_the_directories_that_their_service_needs(plain: Objects) -> None:
    """(mount path, path in the volume, may write)"""
    wanted = {
        "scheduler": [(DATA, "", True)],
        "trainer": [(f"{DATA}/jobs", "jobs", True)],
        "rollout-worker": [(f"{DATA}/jobs", "jobs", False)],
        "reference-forward": [(f"{DATA}/jobs", "jobs", False)],
        "env-worker": [
            (f"{DATA}/environments", "environments", False),
            (f"{DATA}/environments/venvs", "environments/venvs", True),
        ],
    }
    for service in SERVICES:
        pod = pods(plain)[f"rl-{service}"]
        mounts = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "data"]
        found = [(one["mountPath"], one.get("subPath", ""), not one.get("readOnly", False)) for one in mounts]
        assert found == wanted[service]
        made = [one["command"][2:] for one in pod.get("initContainers", [])]
        assert all(f"/data/{path}" in [*made[0], "/data/environments"] for _, path, _ in found if path)


def test_the_object_store_is_the_schedulers(whole: Objects, plain: Objects) -> None:
    for name, pod in pods(whole).items():
        told = {one: value for one, value in environment(pod).items() if one.startswith("OPENTINKER_ARTIFACTS")}
        mounted = [v["secret"]["items"] for v in pod["volumes"] if v.get("secret", {}).get("secretName") == "store"]
        if name != "rl-scheduler":
            assert (told, mounted) == ({}, [])
            continue
        file = "/run/opentinker/artifacts/credentials"
        assert told == {
            "OPENTINKER_ARTIFACTS_URL": "s3://checkpoints/rl",
            "OPENTINKER_ARTIFACTS_S3_ENDPOINT": "https://s3.infra:9000",
            "OPENTINKER_ARTIFACTS_S3_REGION": "us-east-1",
            "OPENTINKER_ARTIFACTS_S3_CREDENTIALS_FILE": file,
        }
        assert mounted == [[{"key": "both-lines", "path": file.rpartition("/")[2]}]]
        (place,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "artifacts"]
        assert place == {"name": "artifacts", "mountPath": file.rpartition("/")[0], "readOnly": True}
    rules = whole["NetworkPolicy", "rl-api"]["spec"]["egress"]
    assert {"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}]} in rules
    assert "egress" not in plain["NetworkPolicy", "rl-api"]["spec"]


def test_model_keys_are_for_scheduler_and_rollout_workers(whole: Objects, plain: Objects) -> None:
    file, readers = "/run/opentinker/models/keys", {f"rl-{service}" for service in MODEL_KEY_SERVICES}
    mount = {"name": "model-keys", "mountPath": file.rpartition("/")[0], "readOnly": True}
    launched = json.loads(whole["ConfigMap", "rl-pods"]["data"]["rollout-worker.json"])["spec"]
    for name, pod in {**pods(whole), "rl-rollout-worker launched": launched}.items():
        reads = name.removesuffix(" launched") in readers
        mounted = [v["secret"]["items"] for v in pod["volumes"] if v.get("secret", {}).get("secretName") == "keys"]
        assert mounted == ([[{"key": "lab.toml", "path": "keys"}]] if reads else []), name
        assert environment(pod).get("OPENTINKER_MODEL_KEYS_FILE") == (file if reads else None), name
        assert (mount in pod["containers"][0]["volumeMounts"]) == reads, name
    assert not any("OPENTINKER_MODEL_KEYS_FILE" in environment(pod) for pod in pods(plain).values())


def test_the_client_secret_of_sign_in_is_for_schedulers_alone(whole: Objects, plain: Objects) -> None:
    file, variable = "/run/opentinker/oidc/client-secret", "OPENTINKER_OIDC_CLIENT_SECRET_FILE"
    mount = {"name": "oidc", "mountPath": file.rpartition("/")[0], "readOnly": True}
    for name, pod in pods(whole).items():
        reads = name == "rl-scheduler"
        mounted = [v["secret"]["items"] for v in pod["volumes"] if v.get("secret", {}).get("secretName") == "login"]
        assert mounted == ([[{"key": "its-secret", "path": "client-secret"}]] if reads else []), name
        assert environment(pod).get(variable) == (file if reads else None), name
        assert (mount in pod["containers"][0]["volumeMounts"]) == reads, name
    assert {"to": [{"ipBlock": {"cidr": "10.7.0.0/16"}}]} in whole["NetworkPolicy", "rl-api"]["spec"]["egress"]
    assert not any(variable in environment(pod) for pod in pods(plain).values())


def test_the_servers_read_what_the_secrets_hold(plain: Objects, tmp_path: Path) -> None:
    made = Access(tmp_path / "access", shipped_conf("nats.conf")).secrets("opentinker")
    held = {one["metadata"]["name"]: one["stringData"] for one in made["items"]}
    for server, secret in (("nats", "nats"), ("redis", "valkey")):
        command = pods(plain)[f"rl-{server}"]["containers"][0]["command"]
        files = [part.rpartition("/")[2] for part in command if part.startswith("/run/opentinker/access/")]
        assert files and set(files) <= set(held[f"opentinker-{secret}"])
        if server == "redis":  # whoever gives no password may only ping, which it takes for unprotected
            assert command[command.index("--protected-mode") + 1] == "no"


def test_keda_scales_what_has_no_replicas_of_its_own(plain: Objects, whole: Objects) -> None:
    assert plain["Deployment", "rl-env-worker"]["spec"]["replicas"] == 2
    assert "replicas" not in whole["Deployment", "rl-env-worker"]["spec"]
    (trigger,) = whole["ScaledObject", "rl-env-worker"]["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    promql_parser.parse(query)
    (asked,) = re.findall(r'__name__=~"([^"]+)"', query)
    counted = {family.name for family in REGISTRY.collect() if re.fullmatch(asked, family.name)}
    assert counted == {LOAD._name, WAITING._name}, "the open sessions, and who waits for one"


async def test_the_launcher_starts_the_pods_of_the_chart(whole: Objects, plain: Objects, tmp_path: Path) -> None:
    assert not any("pods" in name or kind == "Role" for kind, name in plain)
    for name, text in whole["ConfigMap", "rl-pods"]["data"].items():
        (tmp_path / name).write_text(text)
    for name, text in (("token", TOKEN), ("namespace", "research")):
        (tmp_path / name).write_text(text)
    told = {one.removeprefix(PREFIX).lower(): v for one, v in environment(pods(whole)["rl-scheduler"]).items() if v}
    own = {name: value for name, value in told.items() if name.startswith("launcher")}
    async with kubernetes() as (api, url):
        own |= {"launcher_pods": str(tmp_path), "launcher_account": str(tmp_path), "launcher_api": url}
        launcher = KubernetesLauncher(Settings.model_validate(own))
        await launcher.start(Pool.TRAINER, "rl-scheduler-trainer-0")
        (pod,) = api.pods.values()
    del pod["status"]
    kubernetes_validate.validate(pod, KUBERNETES[-1], strict=True)
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "trainer", "of which policies hold for it"
    deployed = whole["Deployment", "rl-trainer"]["spec"]
    assert not set(deployed["selector"]["matchLabels"].items()) <= set(pod["metadata"]["labels"].items())
    container = pod["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert environment(pod["spec"]) == {
        **environment(pods(whole)["rl-trainer"]),
        "OPENTINKER_WORKER_ID": "rl-scheduler-trainer-0",
        "OPENTINKER_IDLE_EXIT_S": "120",
    }
    rights = {one["resources"][0]: set(one["verbs"]) for one in whole["Role", "rl-launcher"]["rules"]}
    assert rights == {"pods": {"list", "create", "delete"}, "deployments": {"get"}}
    assert {method for method, path in api.asked if path.endswith("/pods")} == {"POST"}


def test_gpus_are_limits(whole: Objects) -> None:
    assert pods(whole)["rl-trainer"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "nvidia.com/gpu" not in pods(whole)["rl-rollout-worker"]["containers"][0]["resources"]["limits"]
