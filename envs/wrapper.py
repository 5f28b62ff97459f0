"""The base of environments that wrap another one."""

from __future__ import annotations

from opentinker.envs.base import Environment
from opentinker.shared.types.core import Message


class Wrapper(Environment):
    """Answers for `environment`, which it wraps, where a subclass does not."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment.config)
        self.environment = environment
        self.seats = environment.seats
        self.wants_tokens = environment.wants_tokens

    async def close(self) -> None:
        await self.environment.close()

    def gold(self) -> str | Message | None:
        return self.environment.gold()

    def gold_of(self, seat: str) -> str | Message | None:
        return self.environment.gold_of(seat)
