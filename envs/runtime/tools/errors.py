"""Errors raised before a tool can be called."""

from __future__ import annotations

from opentinker.shared.types.errors import OpenTinkerError


class NoTools(OpenTinkerError):
    """The tools of a job are unavailable here; the text says what to do. The episode fails, because without them it
    would be a different one."""
