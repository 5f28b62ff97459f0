"""Keys in Redis by which a request is made once. Jobs and sweeps have one each, and a key makes one of either."""

from __future__ import annotations

from opentinker.shared.types.errors import Conflict

KEPT_S = 86_400


def job_key(tenant: str, idempotency: str) -> str:
    """Return the key of a hash: job that was made, and hash of its body."""
    return f"idem:{tenant}:{idempotency}"


def sweep_key(tenant: str, idempotency: str) -> str:
    """Return the key of a hash: sweep that was made, and hash of its body."""
    return f"sweeps:idem:{tenant}:{idempotency}"


def other_body(made: str) -> Conflict:
    """`made`: what the key has made, e.g. `job j-0123456789`."""
    return Conflict(f"the Idempotency-Key was used for {made} with another body; use a new key")
