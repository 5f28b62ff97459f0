"""The base of environments that wrap another one."""

from __future__ import annotations

from opentinker.envs.base import Environment, Opening
from opentinker.shared.types.core import Message


class Wrapper(Environment):
    """Answers for `environment`, which it wraps, where a subclass does not."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment.config)
        self.environment = environment
        self.seats = environment.seats
        self.wants_tokens = environment.wants_tokens

    async def opening(self, row: int, seed: int) -> Opening:
        """Open the wrapped environment; plain messages are for its first seat."""
        opened = await self.environment.open(row, seed)
        return opened if isinstance(opened, Opening) else Opening(messages=opened, seat=self.environment.seats[0])

    async def close(self) -> None:
        await self.environment.close()

    def gold(self) -> str | Message | None:
        return self.environment.gold()

    def gold_of(self, seat: str) -> str | Message | None:
        return self.environment.gold_of(seat)
