"""The numbers of a game server, asked for by its clients."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote

import orjson


class GameStatsClient:
    """Every method returns None, or False, without a server (`game_server_url` None) or when it is not reached:
    training does not depend on it."""

    def __init__(self, game_server_url: str | None, job_id: str = "default", timeout: float = 5.0) -> None:
        self.url, self.job_id, self.timeout = (game_server_url or "").rstrip("/"), job_id, timeout

    def health_check(self) -> bool:
        return self._ask("GET", "/health") is not None

    def get_step_stats(self) -> dict[str, float] | None:
        return self._ask("GET", "/stats/step")

    def get_cumulative_stats(self) -> dict[str, float] | None:
        return self._ask("GET", "/stats/cumulative")

    def get_all_stats(self) -> dict[str, float] | None:
        return self._ask("GET", "/stats")

    def reset_step(self) -> dict[str, float] | None:
        return self._ask("POST", "/stats/reset")

    def reset_all(self) -> bool:
        return self._ask("POST", "/stats/reset_all") is not None

    def list_jobs(self) -> list[str]:
        return list((self._ask("GET", "/stats/jobs") or {}).get("jobs", []))

    def _ask(self, method: str, path: str) -> dict[str, Any] | None:
        if not self.url:
            return None
        request = urllib.request.Request(f"{self.url}{path}?job_id={quote(self.job_id)}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                answer = orjson.loads(response.read())
        except (OSError, ValueError):
            return None
        return answer if isinstance(answer, dict) else {}
