"""Bounds of a bank, and the error of a command that exceeds one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from opentinker.shared.types.errors import OpenTinkerError

NAME = re.compile(r"\w[\w.:-]{0,127}", re.ASCII)
"""Names of adapters, which are names of files too."""


class Refused(OpenTinkerError):
    """A command is refused and has changed nothing; the text says what to change."""


class NotFinite(Refused):
    """A loss, gradient or norm is NaN or infinite."""


class BankEnded(OpenTinkerError):
    """The bank has ended, and may not have carried out this command: it is the next trainer's."""


@dataclass(frozen=True)
class BankLimits:
    step_tokens: int = 8192
    """Tokens of one forward and backward pass, of all adapters in it."""
    datum_tokens: int = 4096
    """Tokens of one datum, which is never split."""
    command_tokens: int = 65_536
    """Tokens of one command; it takes as many passes as it needs."""
    waiting_tokens: int = 262_144
    """Tokens that commands of one tenant may have in the queue."""
    waiting_commands: int = 256
    """Commands of one tenant in the queue."""
    rank: int = 64
    """Largest rank of an adapter."""

    def __post_init__(self) -> None:
        if not 0 < self.datum_tokens <= self.step_tokens <= self.command_tokens <= self.waiting_tokens:
            raise ValueError("limits must rise: datum_tokens <= step_tokens <= command_tokens <= waiting_tokens")

    def check_rank(self, rank: int) -> None:
        if rank > self.rank:
            raise Refused(f"rank {rank} is above the largest rank of this bank, {self.rank}; choose a lower rank")

    def check_lengths(self, lengths: list[int]) -> None:
        for number, length in enumerate(lengths):
            if length > self.datum_tokens:
                raise Refused(
                    f"datum {number} has {length} tokens, and at most {self.datum_tokens} are allowed; shorten it"
                )
        if sum(lengths) > self.command_tokens:
            raise Refused(
                f"the data have {sum(lengths)} tokens together, and one command may have {self.command_tokens}; send "
                "them in several commands before the optimizer step: their gradients add up"
            )

    def check_waiting(self, waiting: int, added: int) -> None:
        if waiting + added > self.waiting_tokens:
            raise Refused(
                f"{waiting} tokens of yours are in the queue, and with {added} more they would exceed "
                f"{self.waiting_tokens}; wait for results before sending more"
            )

    def check_commands(self, waiting: int) -> None:
        if waiting >= self.waiting_commands:
            raise Refused(
                f"{waiting} commands of yours are in the queue, and at most {self.waiting_commands} are allowed; wait "
                "for results before sending more"
            )


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise Refused(
            f"adapter name {name!r}: use 1 to 128 letters, digits and _ . : -, beginning with a letter, a digit or _"
        )
