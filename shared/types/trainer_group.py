"""Trainer groups: trainers of one job that share its ranks, and the message with which they meet."""

from __future__ import annotations

import msgspec


class RankShare(msgspec.Struct, frozen=True):
    """The ranks of one trainer. A lease lists the shares of its group in the order of ranks: the first trainer leads,
    which is the one with rank 0."""

    worker: str
    incarnation: str
    ranks: int


class JoinRanks(msgspec.Struct, frozen=True, kw_only=True):
    """Lead trainer -> a member: start your ranks and connect each of them to me."""

    job: str
    epoch: int
    address: str
    port: int
    token: bytes
    """Shown with each connection: the lead refuses others."""


class JoinReply(msgspec.Struct, frozen=True, kw_only=True):
    """Empty `error`: the ranks are connected. `later`: the member has no such lease yet."""

    error: str = ""
    later: bool = False
