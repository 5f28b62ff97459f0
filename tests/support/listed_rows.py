"""Rows of a data set for tests of the API and the page: an env worker's answers, and a trainer's counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from opentinker.envs.runtime.data_rows import list_rows
from opentinker.shared.data.row_log import RowLog, RowPlays, RowStep
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import ENV_ROWS
from opentinker.shared.types.env_protocol import EnvRows, EnvRowsReply


@asynccontextmanager
async def rows_listed(bus: Bus, **options: int) -> AsyncIterator[list[EnvRows]]:
    """Answer as an env worker does, in this process, with these options of `list_rows`. Gives the requests."""
    requests: list[EnvRows] = []

    async def listed(request: EnvRows) -> EnvRowsReply:
        requests.append(request)
        return await asyncio.to_thread(list_rows, request.name, request, modules=True, **options)

    serving = await bus.serve(ENV_ROWS, listed, "env")
    yield requests
    await serving.unsubscribe()


def count_rows(home: Path) -> None:
    """Write the counts of a trainer after 41 steps: row 0 is always solved, row 2 at times in the second half, row 9
    was played once. Episodes of the steps 1 and 40 can be read."""
    log = RowLog(home)
    for step in range(1, 41):
        rows = [RowPlays(0, 4, 4, 4.0, True), RowPlays(2, 4, 1 if step > 20 else 0, step / 40)]
        log.add(RowStep(epoch=1, step=step, rows=rows))
    log.add(RowStep(epoch=1, step=41, rows=[RowPlays(9, 2, 1, 1.0)]))
    (home / "rollouts").mkdir()
    for step in (1, 40):
        (home / "rollouts" / f"step-{step:06d}.jsonl").touch()
