"""The Helm chart's network policies: who talks to whom, who reaches the model hub, and where browsers may connect."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import yaml

from opentinker.shared.messaging.subjects import SERVICES
from tests.nightly.deploy.rendered_chart import CRDS, KUBERNETES, Objects, environment, pods, rendered


def may(objects: Objects, source: str, target: str, port: int) -> bool:
    """Return whether policies let pods of one component open a connection to another: some rule of each side must allow
    it."""
    return _allows(objects, source, target, port, "egress") and _allows(objects, target, source, port, "ingress")


def _allows(objects: Objects, of: str, other: str, port: int, way: str) -> bool:
    ours = [
        p["spec"] for (kind, _), p in objects.items() if kind == "NetworkPolicy" and _is(p["spec"]["podSelector"], of)
    ]
    ours = [spec for spec in ours if way.capitalize() in spec["policyTypes"]]
    assert ours, "what no policy selects is open to all"
    peer = "to" if way == "egress" else "from"
    return any(
        any("namespaceSelector" not in one and _is(one.get("podSelector"), other) for one in rule.get(peer, []))
        and any(ports["port"] <= port <= ports.get("endPort", ports["port"]) for ports in rule["ports"])
        for spec in ours
        for rule in spec.get(way, [])
    )


def _is(selector: dict[str, Any] | None, component: str) -> bool:
    if selector is None:
        return False
    labels = {
        "app.kubernetes.io/name": "opentinker",
        "app.kubernetes.io/instance": "rl",
        "app.kubernetes.io/component": component,
    }
    exact = all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
    return exact and all(labels[one["key"]] in one["values"] for one in selector.get("matchExpressions", []))


def test_who_talks_to_whom(plain: Objects) -> None:
    components = [*SERVICES, "nats", "redis"]
    ports = {4222: "nats", 6379: "redis"}
    computing = {"trainer", "rollout-worker"}
    for source in components:
        for target in components:
            for port, server in ports.items():
                assert may(plain, source, target, port) == (
                    (source in SERVICES and target == server) or {source, target} <= computing
                ), (source, target, port)
            assert may(plain, source, target, 30000) == ({source, target} <= computing), (source, target)
            in_namespace = _allows(plain, target, source, 8080, "ingress")
            assert in_namespace == (target == "scheduler" or {source, target} <= computing), (source, target)


def test_without_peers_nobody_reaches_the_api() -> None:
    objects = rendered({"networkPolicy": {"apiFrom": [], "metricsFrom": []}})
    assert not _allows(objects, "scheduler", "anybody", 8080, "ingress")
    for one in objects.values():
        if one["kind"] == "NetworkPolicy":
            kubernetes_validate.validate(one, KUBERNETES[-1], strict=True)


def test_browsers_reach_nats_only_where_that_is_asked_for(plain: Objects) -> None:
    open_ = rendered({"nats": {"websocketUrl": "wss://live.example.org:443"}})
    for objects, reached in ((plain, False), (open_, True)):
        for _, one in objects.items():
            if one["kind"] not in CRDS:
                kubernetes_validate.validate(one, KUBERNETES[-1], strict=True)
        assert _allows(objects, "nats", "env-worker", 9222, "ingress") == reached
        assert ("OPENTINKER_NATS_ISSUER_FILE" in environment(pods(objects)["rl-scheduler"])) == reached
        assert len(objects["Service", "rl-nats"]["spec"]["ports"]) == 1 + reached


COMPUTING = ("trainer", "rollout-worker", "reference-forward")


CACHE = "/var/cache/huggingface"


def to_the_hub(objects: Objects) -> tuple[set[str], list[Any]]:
    """Who may, and where to."""
    found = objects.get(("NetworkPolicy", "rl-hub"))
    if found is None:
        return set(), []
    return {one for one in SERVICES if _is(found["spec"]["podSelector"], one)}, found["spec"]["egress"]


def test_what_computes_downloads_models_by_default(plain: Objects) -> None:
    who, (rule,) = to_the_hub(plain)
    assert who == set(COMPUTING) and rule["ports"] == [{"protocol": "TCP", "port": 443}]
    assert all({"10.0.0.0/8", "169.254.0.0/16"} <= set(to["ipBlock"]["except"]) for to in rule["to"][:1])
    for service in SERVICES:
        pod = pods(plain)[f"rl-{service}"]
        told = {name: value for name, value in environment(pod).items() if name.startswith("HF_")}
        places = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
        volumes = {one["name"]: one for one in pod["volumes"]}
        if service in COMPUTING:
            assert told == {"HF_HOME": CACHE} and places["hub"] == CACHE
            assert volumes["hub"]["emptyDir"] == {"sizeLimit": "50Gi"} and "hub-token" not in volumes
        else:
            assert told == {} and "hub" not in volumes


def test_a_hub_of_ones_own_with_a_token_and_a_shared_cache(whole: Objects) -> None:
    who, (rule,) = to_the_hub(whole)
    assert who == set(COMPUTING) and rule["to"] == [{"ipBlock": {"cidr": "10.8.0.0/16"}}]
    pod_templates = [yaml.safe_load(text)["spec"] for text in whole["ConfigMap", "rl-pods"]["data"].values()]
    for pod in [*(pods(whole)[f"rl-{service}"] for service in COMPUTING), *pod_templates]:
        told = environment(pod)
        assert (told["HF_ENDPOINT"], told["HF_HOME"]) == ("https://hub.infra", CACHE)
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert volumes["hub"]["persistentVolumeClaim"] == {"claimName": "hub-cache"}
        assert volumes["hub-token"]["secret"]["items"] == [{"key": "hf", "path": "token"}]
        (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "hub-token"]
        assert mount["readOnly"] and told["HF_TOKEN_PATH"] == f"{mount['mountPath']}/token"
    for service in ("scheduler", "env-worker"):
        assert "hub-token" not in {one["name"] for one in pods(whole)[f"rl-{service}"]["volumes"]}


def test_without_a_hub_nothing_is_tried() -> None:
    objects = rendered({"hub": {"enabled": False}})
    assert to_the_hub(objects) == (set(), [])
    for service in COMPUTING:
        assert environment(pods(objects)[f"rl-{service}"])["HF_HUB_OFFLINE"] == "1"
