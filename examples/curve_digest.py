"""Tells whether a recorded curve is still that of its example."""

from __future__ import annotations

import hashlib
import tomllib

import orjson

LABELS = ("name", "project", "tags", "notes", "notify")
"""Settings that say nothing of what a job does."""


def digest_of(text: str) -> str:
    """Return a digest of an example's settings; comments and the order of settings do not matter."""
    spec = {name: value for name, value in tomllib.loads(text).items() if name not in LABELS}
    return hashlib.sha256(orjson.dumps(spec, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
