"""Explains that a job has not reported the sweep's metric, by the names of those that it has."""

from __future__ import annotations

from collections.abc import Collection

from opentinker.shared.spec.matches.policies import OWN_METRICS
from opentinker.shared.types.metric_names import meant_metric

SHOWN_NAMES = 12
RESULTS = {"reward", "rewards", "val", "loss"}
"""First parts of names that sweeps are usually compared by."""
INTERNAL = OWN_METRICS - RESULTS | {
    *("clip_share", "entropy", "epochs", "ess", "grad_norm", "groups", "lr", "rollout_workers", "rows"),
    *("step_seconds", "tool_calls", "tool_errors", "train_seconds", "trajectories", "zero_variance"),
}
"""First parts of names that describe the training itself: they are listed last."""


def absent_metric(metric: str, names: Collection[str]) -> str:
    """Return the error for a job that reported only `names`."""
    problem = f"its job reported no metric {metric}"
    if not names:
        return f"{problem}, nor any other"
    near = meant_metric(metric, names)
    meant = f"; did you mean {near}?" if near else ""
    shown = ", ".join(sorted(names, key=_rank)[:SHOWN_NAMES])
    of = f"some of the {len(names)} that it reported" if len(names) > SHOWN_NAMES else "it reported"
    return f"{problem}{meant} ({of}: {shown})"


def _rank(name: str) -> tuple[int, str]:
    """The environment's own metrics come first, then rewards, evaluations and losses."""
    first = name.partition("/")[0]
    return (2 if first in INTERNAL else 1 if first in RESULTS else 0), name
