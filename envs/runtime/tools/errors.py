"""What goes wrong before a tool can be called at all."""

from __future__ import annotations

from opentinker.shared.types.errors import OpenTinkerError


class NoTools(OpenTinkerError):
    """The tools of a job cannot be had here; the text says what to do. The episode fails, for it would be another one
    without them."""
