"""`opentinker failures` says that it shows the newest only."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from opentinker.cli import app, jobs


class Server:
    """In the place of a client; three groups have failed."""

    def __init__(self, _: object) -> None:
        pass

    def failures(self, _: str, limit: int) -> dict[str, Any]:
        newest = [{"group": group, "reason": "env_error", "time": 0.0, "error": ""} for group in (3, 2, 1)]
        return {"failures": newest[:limit], "counts": {}}


@pytest.mark.parametrize(
    ("limit", "most", "said"),
    [
        (2, 3, "the newest 2 failures; -n for more\n"),
        (2, 2, "the newest 2 failures; older ones, if any, are not listed\n"),
        (4, 4, ""),
    ],
)
def test_a_cut_list_is_of_the_newest(monkeypatch: pytest.MonkeyPatch, limit: int, most: int, said: str) -> None:
    monkeypatch.setattr(jobs, "client", Server)
    monkeypatch.setattr(jobs, "MOST_FAILURES", most)
    shown = CliRunner().invoke(app, ["failures", "j-0123456789", "-n", str(limit)], catch_exceptions=False)
    assert (shown.exit_code, shown.stderr) == (0, said)
