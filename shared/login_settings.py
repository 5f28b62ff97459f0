"""The operator's settings for signing in to the page, part of `Settings` (config.py)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

DAY_S = 86400.0


class LoginSettings(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    session_idle_s: Annotated[float, Field(ge=60, le=30 * DAY_S)] = 8 * 3600.0
    """A session of the page ends after this time without a request; an open page asks every few seconds."""
    session_max_s: Annotated[float, Field(ge=60, le=90 * DAY_S)] = DAY_S
    """A session of the page ends after this time in any case, and its user signs in again."""
