"""Describes the state of a job in one line. Its reason may contain any text of a user's code, control characters
too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def on_one_line(text: str) -> str:
    """Replace control characters and runs of blanks by one space each."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def reason_of(job: Mapping[str, Any]) -> str:
    """`job`: a job of the API. Return why it ended, or what it waits for; empty if there is nothing to say."""
    return on_one_line(job["reason"] or (f"waits for {job['waiting_for']}" if job["waiting_for"] else ""))


def state_of(job: Mapping[str, Any]) -> str:
    """`job`: a job of the API. Return `running`, or with the reason `failed: no such model`."""
    reason = reason_of(job)
    return f"{job['state']}: {reason}" if reason else str(job["state"])
