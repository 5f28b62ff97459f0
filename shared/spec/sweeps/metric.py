"""What is wrong with the metric by which a sweep compares its trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentinker.shared.spec.matches.policy_metrics import reported_name_mistakes
from opentinker.shared.spec.sweeps.table import SweepTable
from opentinker.shared.types.mistakes import Mistake, mistake
from opentinker.shared.types.sweeps import TABLE


def policies_of(base: Mapping[str, Any]) -> list[str]:
    """Return the names of the policies in a spec as it was written."""
    policies = base.get("policies")
    return [name for name in policies if isinstance(name, str)] if isinstance(policies, dict) else []


def metric_mistakes(table: SweepTable, full: SweepTable, policies: list[str]) -> list[Mistake]:
    """Return a mistake if jobs with these policies report the metric by another name, or if nobody knows which of its
    values are better. `full`: with the defaults."""
    metric = str(full.metric)
    if found := reported_name_mistakes(f"{TABLE}.metric", metric, policies, is_default=table.metric is None):
        return found
    if full.goal is not None:
        return []
    problem = (
        f"is needed, 'maximize' or 'minimize': whether larger or smaller values of {metric} are better is not known; "
        "known metrics are in docs/sweeps.md"
    )
    return [mistake(f"{TABLE}.goal", None, problem)]
