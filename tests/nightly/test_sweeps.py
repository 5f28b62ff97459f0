"""A sweep of 32 jobs beside others, with a kill of its scheduler."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Figure
from tests.e2e.test_sweeps import quick, sweep_beside_others
from tests.support.cluster import toy_cluster

SKILLS = [round(0.8 * place / 30, 4) for place in range(31)]


async def test_a_sweep_of_32_jobs_ends_with_the_best_and_starves_nobody(tmp_path: Path, figure: Figure) -> None:
    async with toy_cluster(tmp_path) as (cluster, model):
        found = await sweep_beside_others(cluster, quick(model, [*SKILLS[:12], 1.0, *SKILLS[12:]]), others=6)
    assert found["finished"] is not None
    seconds = found["finished"] - found["created"]
    figure(f"a sweep of {found['jobs']} jobs beside 6 others: {seconds:.0f} s, best {found['best']}")
