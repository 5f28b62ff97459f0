"""Which way a metric is better, by its name (docs/metrics.md). The default `goal` of a sweep.

The page has the same table (dashboard/src/lib/compare/direction.ts); a test compares the two."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

MAXIMIZED = (
    r"^reward(/(mean|min|max|own|(env|team|against)/.+))?$",
    r"^task/.+/(reward|exact|accuracy|pass/\d+)$",
    r"^reward_model/.+/mean$",
    r"^(rewards/)?(accuracy|margin)$",
    r"^(exact|solved|success|rating)$",
    r"^wins(/.+)?$",
    r"^(pool/[^/]+/)?winrate(/.+)?$",
    r"^pass/\d+$",
    r"^teacher/logprob$",
    r"^(critic|value)/explained_variance$",
    r"^(trainer|rollout|serving|reference|scheduler|env)/([a-z]+_)?(tokens|episodes|groups|turns|steps|answers)_per_s$",
)
"""Patterns of names, without `val/` in front, of which larger values are better."""
MINIMIZED = (
    r"^(models/.+/)?loss$",
    r"^perplexity$",
    r"^teacher/(kl|k3)$",
    r"^((mismatch|drift)/(mean|max)|swap/mismatch)$",
    r"^(failed|missing|tool_errors|zero_variance|turns/untrainable)$",
    r"^losses(/.+)?$",
    r"^(dropped|failed|env/tool_errors)/.+$",
    r"^((step_|train_)?seconds|trainer/wait_share)$",
    r"^(trainer|swap|rollout|time|models/.+)/(seconds|[a-z_]+_seconds|[a-z_]*(?<!_per)_s)$",
    r"^env/tool_ms/.+(?<!_per_s)$",
)
"""Those of which smaller values are better."""
Goal = Literal["maximize", "minimize"]


def goal_of(metric: str, policies: Collection[str] = ()) -> Goal | None:
    """Return which values of a metric are better; None where nobody can tell, as of most metrics of an environment.

    `policies`: of the job, whose metrics are called POLICY/METRIC."""
    first, _, rest = metric.partition("/")
    name = (rest if rest and first in policies else metric).removeprefix("val/")
    name = re.sub(r"/(low|high)$", "", name)  # the ends of an interval are better where its middle is
    if any(re.search(pattern, name) for pattern in MAXIMIZED):
        return "maximize"
    return "minimize" if any(re.search(pattern, name) for pattern in MINIMIZED) else None
