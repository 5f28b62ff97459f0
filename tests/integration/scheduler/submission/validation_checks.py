"""Jobs to validate, and the outcome of each check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentinker.shared.api_types import Check
from opentinker.shared.spec import JobSpec
from tests.support.factories import make_spec


def results(checks: Sequence[Check]) -> dict[str, str]:
    return {check["what"]: check["result"] for check in checks}


def spec_of(model: Path, **changes: Any) -> JobSpec:
    return make_spec(model__base=str(model), **changes)
