"""Gives metrics of evaluations the names by which jobs report them: an opponent that was written as a published name or
as JOB@latest is called JOB@STEP there."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from opentinker.services.scheduler.jobs.check_seats import AGAINST, Found
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.seats import all_players
from opentinker.shared.types.metric_names import with_opponents

WITH_METRICS = {"train", "policies", "artifacts"}
"""Tables of a job that name metrics, and that a sweep may vary."""


def names_of_opponents(spec: JobSpec, found: Found) -> dict[str, str]:
    """Return the checkpoint that was found for each opponent of `spec`, by the name that is written there."""
    players = all_players(spec)
    return {str(players[place].frozen): one.source.name for place, one in found.items() if place.startswith(AGAINST)}


def settle_metrics(plain: dict[str, Any], names: Mapping[str, str]) -> None:
    """Settle the metrics in a valid spec, which may lack tables: of targets, of the best checkpoints, of messages."""
    for table in (plain, *plain.get("policies", {}).values()):
        if isinstance(target := table.get("train", {}).get("target"), dict):
            table["train"]["target"] = _settled_target(target, names)
    artifacts = plain.get("artifacts", {})
    if artifacts.get("best_metric") is not None:
        artifacts["best_metric"] = with_opponents(artifacts["best_metric"], names)
    for entry in plain.get("notify", []):
        if entry.get("target") is not None:
            entry["target"]["metric"] = with_opponents(entry["target"]["metric"], names)


def settled_path(path: str, names: Mapping[str, str]) -> str:
    """Return the path of a sweep's parameter, whose last part may be the metric of a target."""
    return ".".join(with_opponents(part, names) for part in path.split("."))


def settled_value(path: str, value: Any, names: Mapping[str, str]) -> Any:
    """Return a valid value of the setting `path` with such names."""
    if path.partition(".")[0] not in WITH_METRICS:
        return value
    value = copy.deepcopy(value)
    for part in reversed(path.split(".")):
        value = {part: value}
    settle_metrics(value, names)
    for part in settled_path(path, names).split("."):
        value = value[part]
    return value


def _settled_target(target: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """Of two values for the same metric the higher one stays, as both must be reached."""
    settled: dict[str, float] = {}
    for metric, value in target.items():
        name = with_opponents(metric, names)
        settled[name] = max(value, settled.get(name, value))
    return settled
