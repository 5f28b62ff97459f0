"""Programs run by a server of the published sandbox.

POST /run_code {code} -> run_result {stdout, stderr, return_code}
"""

from __future__ import annotations

import time
from urllib.parse import urlsplit

from opentinker.environment.game_server import post
from opentinker.envs.tools import Outcome

NO_OUTPUT = "(no output)"
ROUND_TRIP_S = 10.0
"""Beyond the time that the program itself may take."""


class SandboxClient:
    """Runs each program in a fresh process. The server ends one that takes longer than it allows."""

    def __init__(self, url: str, timeout: float) -> None:
        """Raises ValueError for what is no URL of a server."""
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ValueError(f"sandbox_url = {url!r:.200}: must be a URL such as http://127.0.0.1:8000/run_code")
        self._url, self._timeout = url, timeout

    def run(self, code: str) -> Outcome:
        """Raises GameServerError where the server is away: that is no fault of the program."""
        began = time.monotonic()
        answer = post(self._url, "", {"code": code}, self._timeout + ROUND_TRIP_S)
        result = answer.get("run_result") or {}
        text = f"{result.get('stdout', '')}{result.get('stderr', '')}".strip()
        failed = bool(result.get("return_code"))
        return Outcome(text=text or NO_OUTPUT, failed=failed, seconds=time.monotonic() - began)

    def close(self) -> None:
        """Do nothing: nothing is kept between programs."""
