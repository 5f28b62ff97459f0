"""Which processes `opentinker run` starts for a job."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.cli.run import processes_for

SHARED = {"trainer": "shared"}
ROWS = {"env-workers": 0, "rollout-workers": 0, "reference": 0}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"kind": "sft"}, ROWS),
        ({}, {"env-workers": 2, "rollout-workers": 1, "reference": 1}),
        ({"kind": "sft", "resources": SHARED}, {**ROWS, "trainers": 0, "shared-jobs": 1}),
        (
            {"policies": {"a": {}, "b": {}, "c": {}}, "resources": {**SHARED, "rollout_workers": 3}},
            {"env-workers": 2, "rollout-workers": 3, "reference": 1, "trainers": 0, "shared-jobs": 3},
        ),
    ],
)
def test_a_run_starts_what_its_job_needs(spec: dict[str, Any], expected: dict[str, int]) -> None:
    assert processes_for(spec, env_workers=2) == expected
