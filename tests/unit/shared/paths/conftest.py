"""Two tenants' jobs with directories."""

from __future__ import annotations

import orjson
import pytest

from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from tests.support.api import SPEC
from tests.unit.shared.paths.named_paths import OTHER, OWN, ROW


@pytest.fixture
async def jobs(store: Store, ctx: Context) -> list[str]:
    """One of red's and one of blue's, with directories."""
    for id, tenant in ((OWN, "red"), (OTHER, "blue")):
        await store.create_job(id=id, spec=SPEC, tenant=tenant)
        home = ctx.settings.data_dir / "jobs" / id
        (home / "checkpoints").mkdir(parents=True)
        (home / "metrics.jsonl").write_bytes(orjson.dumps(ROW) + b"\n")
    return [OWN, OTHER]
