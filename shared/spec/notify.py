"""The table [[notify]]: recipients of messages about a job, and the occasions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from opentinker.shared.spec.base import SpecPart
from opentinker.shared.types.mistakes import mistake

MAX_NOTIFY = 5
Occasion = Literal["succeeded", "failed", "cancelled", "alarm", "target"]
Bound = Annotated[float, Field(ge=-1e30, le=1e30)]
ALARMS = ("mismatch_alarm", "collapse_alarm", "environment_down")
"""Events of a job that are told as `alarm`."""
OF_JOBS = "sweep.notify_jobs = true tells of its jobs' alarms and targets too"
EMAIL = r"^[A-Za-z0-9_%+-]+(\.[A-Za-z0-9_%+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*$"
"""Addresses without quotes and comments: what a header takes as it is."""


class TargetSpec(SpecPart):
    metric: Annotated[str, Field(min_length=1, max_length=200)]
    """Name of a metric, e.g. "val/reward/mean"."""
    above: Bound | None = None
    """Reached with a value of at least this."""
    below: Bound | None = None
    """Reached with a value of at most this."""

    @classmethod
    def written(cls, data: dict[str, Any]) -> list[dict[str, Any]]:
        given = [name for name in ("above", "below") if data.get(name) is not None]
        if len(given) == 1:
            return []
        return [{"field": "above", "value": data.get("above"), "problem": "needs one of above and below"}]

    def reached(self, value: float) -> bool:
        return (self.above is not None and value >= self.above) or (self.below is not None and value <= self.below)


class NotifySpec(SpecPart):
    url: Annotated[str, Field(pattern=r"^https?://[^\s#@]+$", max_length=2000)] | None = None
    """Webhook: gets a signed POST with JSON. Whoever may read the job reads the URL."""
    format: Literal["json", "slack"] = "json"
    """Format of the webhook's body: `json`, see docs/notifications.md; `slack`: a text for Slack and compatible
    services."""
    email: Annotated[str, Field(pattern=EMAIL, max_length=254)] | None = None
    """Address; the operator's mail server must be set, and its domain allowed."""
    on: Annotated[list[Occasion], Field(min_length=1, max_length=5)] = ["succeeded", "failed", "alarm"]
    """Occasions. `alarm`: a collapse or mismatch alarm, or an environment that is down. `target` needs a target."""
    target: TargetSpec | None = None
    """Tells once that a metric has reached a value; of a sweep, that its best trial has."""

    @classmethod
    def written(cls, data: dict[str, Any]) -> list[dict[str, Any]]:
        found = []
        if (data.get("url") is None) == (data.get("email") is None):
            found.append({"field": "url", "value": data.get("url"), "problem": "needs one of url and email"})
        if data.get("email") is not None and data.get("format") == "slack":
            found.append({"field": "format", "value": data["format"], "problem": "is for url, not for email"})
        on = data.get("on")
        if isinstance(on, list) and "target" in on and data.get("target") is None:
            found.append({"field": "target", "value": None, "problem": 'is needed for on = ["target"]'})
        return found

    def wants(self, occasion: str) -> bool:
        return occasion in self.on or (occasion == "target" and self.target is not None)


def sweep_mistakes(entries: Any, metric: str, goal: str | None) -> list[dict[str, Any]]:
    """Return mistakes for entries that ask for more than a sweep tells of, its end and its metric's target: alarms
    alone, targets of other metrics, and those that its best trial only moves away from, where the goal is known."""
    found = []
    for place, entry in enumerate(entries if isinstance(entries, list) else []):
        if not isinstance(entry, dict):
            continue
        on, target = entry.get("on"), entry.get("target")
        if isinstance(on, list) and on and not {"succeeded", "failed", "cancelled", "target"} & {*map(str, on)}:
            problem = f"a sweep tells of its end and of its target alone; {OF_JOBS}"
            found.append(mistake(f"notify.{place}.on", on, problem))
        if not isinstance(target, dict):
            continue
        if isinstance(other := target.get("metric"), str) and other != metric:
            problem = f"a sweep tells of targets of its own metric, {metric}; {OF_JOBS}"
            found.append(mistake(f"notify.{place}.target.metric", other, problem))
        wrong, right = ("below", "above") if goal == "maximize" else ("above", "below")
        if goal is not None and target.get(wrong) is not None:
            problem = f"does not suit a sweep with goal = {goal!r}, whose best value only moves away: use {right}"
            found.append(mistake(f"notify.{place}.target.{wrong}", target[wrong], problem))
    return found
