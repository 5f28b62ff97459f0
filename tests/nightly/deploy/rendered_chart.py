"""The Helm chart, rendered with values."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy/helm/opentinker"
KUBERNETES = ("1.27", "1.37")
CRDS = {
    kind: json.loads((ROOT / f"tests/support/deploy/crds/{kind.lower()}.json").read_text())
    for kind in ("ScaledObject", "PodMonitor")
}
EVERYTHING = {
    "nats": {"enabled": False, "url": "nats://nats.infra:4222"},
    "redis": {"enabled": False, "url": "rediss://redis.infra:6379/0"},
    "images": {"pullSecrets": ["registry"], "tag": "1.2.3"},
    "data": {"existingClaim": "shared"},
    "models": {"existingClaim": "models"},
    "hub": {
        "endpoint": "https://hub.infra",
        "cache": {"existingClaim": "hub-cache"},
        "token": {"secret": "hub", "key": "hf"},
    },
    "settings": {"log_level": "debug", "swap_timeout_s": 30},
    "podAnnotations": {"a/b": "c"},
    "trainer": {"gpus": 2, "nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    "envWorker": {
        "egress": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 443, "protocol": "TCP"}]}],
        "keda": {"enabled": True, "prometheus": "http://prometheus.monitoring:9090"},
    },
    "artifacts": {
        "url": "s3://checkpoints/rl",
        "endpoint": "https://s3.infra:9000",
        "credentials": {"secret": "store", "key": "both-lines"},
    },
    "modelKeys": {"secret": "keys", "key": "lab.toml"},
    "oidc": {"secret": "login", "key": "its-secret"},
    "scheduler": {
        "settings": {
            "public_url": "https://tinker.infra",
            "oidc_issuer": "https://id.infra",
            "oidc_client_id": "tinker",
            "oidc_groups": '{"ml": {"tenant": "ml", "role": "member"}}',
        }
    },
    "networkPolicy": {
        "serversTo": [{"namespaceSelector": {"matchLabels": {"name": "infra"}}}],
        "artifactsTo": [{"ipBlock": {"cidr": "10.9.0.0/16"}}],
        "oidcTo": [{"ipBlock": {"cidr": "10.7.0.0/16"}}],
        "hubTo": [{"ipBlock": {"cidr": "10.8.0.0/16"}}],
    },
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "launcher": {"enabled": True, "trainers": 3, "idleSeconds": 120},
}
Objects = dict[tuple[str, str], Any]


def helm(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    found = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("no helm here: make helm")
    command = [found, *arguments, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, check=False)


def rendered(values: dict[str, Any] | None = None) -> Objects:
    done = helm("template", "rl", str(CHART), "--namespace", "research", values=values)
    assert done.returncode == 0, done.stderr
    objects = [one for one in yaml.safe_load_all(done.stdout) if one]
    found = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert len(found) == len(objects)
    return found


def refused(values: dict[str, Any]) -> str:
    done = helm("template", "rl", str(CHART), values=values)
    assert done.returncode != 0
    return done.stderr


def pods(objects: Objects) -> dict[str, Any]:
    """By name, the pods of everything that runs some."""
    return {
        name: one["spec"]["template"]["spec"]
        for (kind, name), one in objects.items()
        if kind in ("Deployment", "StatefulSet")
    }


def environment(pod: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in pod["containers"][0].get("env", [])}
