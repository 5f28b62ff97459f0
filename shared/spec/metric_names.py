"""Names that the metrics of a job begin with (docs/metrics.md). A policy cannot have them: its metrics are named
POLICY/METRIC, and `val/reward/mean` could be the reward of an evaluation, or of a policy `val`."""

from __future__ import annotations

from collections.abc import Iterable

from opentinker.shared.types.mistakes import Mistake, mistake

# fmt: off
OWN_METRICS = frozenset({
    "collapse", "critic", "drift", "dropped", "ending", "env", "failed", "histogram", "jobs", "logprobs", "loss",
    "masked", "mismatch", "opponent_lag", "pool", "queue", "ratio", "reference", "response_length", "reward",
    "reward_model", "rewards", "rollout", "scheduler", "serving", "spans", "staleness", "stop", "swap", "teacher",
    "tokens", "trainer", "turns", "val", "value", "workers",
})
# fmt: on


def taken_names(policies: Iterable[str]) -> list[Mistake]:
    """Return mistakes in the names of policies."""
    problem = "is what metrics of every job begin with; give the policy another name"
    return [mistake(f"policies.{name}", name, problem) for name in policies if name in OWN_METRICS]
