"""Errors raised before a tool can be called."""

from __future__ import annotations

from opentinker.shared.types.errors import OpenTinkerError


class NoTools(OpenTinkerError):
    """The tools of a job cannot be had here; the text says what to do. The episode fails, for it would be another one
    without them."""
