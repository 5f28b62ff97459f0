"""Metrics that a job with [policies] names: POLICY/METRIC, as its history has them, and METRIC alone in the tables of
which each policy has its own, [train] and [artifacts]. A name of the other form would never be reported."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from opentinker.shared.types.metric_names import WIN_RATE, split_policy
from opentinker.shared.types.mistakes import Mistake, mistake

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

OF_POLICIES = {"reward", "rewards", "val", "loss", "exact"}
"""First parts of names that only policies report in such a job."""


def metric_mistakes(spec: JobSpec) -> list[Mistake]:
    """Return the names of metrics in a job with [policies] by which nothing is reported."""
    found = []
    for metric, value in spec.train.target.items():
        found += _with_policy(spec, "train.target", metric, value)
    for name, policy in spec.policies.items():
        own = policy.train.target.items() - spec.train.target.items()
        for metric, value in sorted(own):
            found += _with_policy(spec, f"policies.{name}.train.target", metric, value)
    if spec.artifacts.best_metric is not None and (split := _split(spec, spec.artifacts.best_metric)) is not None:
        problem = (
            f"names policy {split[0]!r}: each policy keeps its own checkpoints, by the name without it, {split[1]!r}"
        )
        found.append(mistake("artifacts.best_metric", spec.artifacts.best_metric, problem))
    for place, entry in enumerate(spec.notify):
        if entry.target is not None:
            field = f"notify.{place}.target.metric"
            found += reported_name_mistakes(field, entry.target.metric, spec.policies)
    return found


def reported_name_mistakes(
    field: str, metric: str, policies: Collection[str], *, is_default: bool = False
) -> list[Mistake]:
    """Return a mistake if a job with these policies reports no metric of this name, as far as the name tells.
    `is_default`: nobody has written it."""
    if (split := split_policy(metric, policies)) is not None:
        right = "/".join(split)
        if right == metric:
            return []
        return [{**mistake(field, metric, f"is called {right!r} in a job with [policies]"), "suggestion": right}]
    if not policies or metric.partition("/")[0] not in OF_POLICIES:
        return []
    names = ", ".join(f"{policy}/{metric}" for policy in policies)
    if is_default:
        return [mistake(field, None, f"is needed in a job with [policies], e.g. one of {names}")]
    return [mistake(field, metric, f"is a metric of each policy: name one of {names}")]


def _with_policy(spec: JobSpec, field: str, metric: str, value: float) -> list[Mistake]:
    if (split := _split(spec, metric)) is None:
        return []
    policy, own = split
    problem = (
        f"names policy {policy!r}: a policy has targets of its own, by the names without it: [policies.{policy}.train] "
        f'target = {{ "{own}" = {value:g} }}'
    )
    return [mistake(f"{field}.{metric}", value, problem)]


def _split(spec: JobSpec, metric: str) -> tuple[str, str] | None:
    against: list[Any] = [] if spec.validation is None else spec.validation.against
    if metric.removeprefix(f"{WIN_RATE}/") in {opponent.metric_name for opponent in against}:
        return None  # a model behind a URL whose name begins with that of a policy
    return split_policy(metric, spec.policies)
