"""A reference-forward process that never comes to the end of a forward pass: it says that it is in one, and waits.

python -m tests.samples.reference_process MARKER     (MARKER is made when the first pass has begun)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentinker.services.reference_forward.scorer import Scorer
from opentinker.services.reference_forward.service import ReferenceForward
from opentinker.shared.runtime.service import Context, main
from opentinker.shared.types.core import F32
from opentinker.shared.types.trajectories import Group

ACK_WAIT_S = 1.0


class Endless(Scorer):
    def score(self, model: Any, groups: Sequence[Group], temperatures: Sequence[float]) -> list[list[F32]]:
        super().score(model, groups, temperatures)
        marker.touch()
        threading.Event().wait()
        raise AssertionError("unreachable")


async def serve(ctx: Context) -> None:
    await ReferenceForward(ctx, Endless, ACK_WAIT_S).serve()


if __name__ == "__main__":
    marker = Path(sys.argv.pop())
    main("reference-forward", serve)
