"""Secrets do not go into logs: what looks like one, or stands under a name of one, is replaced by asterisks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "***"
_NAMES = re.compile(
    r"(?i)(^|_|-)(token|secret|password|passwd|api_?key|access_?key|authorization|credential|cookie)s?$"
)
"""Names of fields with secret text; numeric `tokens` are counts."""
_OURS = re.compile(rb"(ot_[a-z0-9]+_[a-z0-9]+_)[A-Za-z0-9]{12,}")
_LOOKS = (
    re.compile(r"(?i)(\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)"),
    re.compile(r"(\b(?:ot_[a-z0-9]+_[A-Za-z0-9]+|hf|sk|ghp|xox[a-z])[_-])[A-Za-z0-9_-]{12,}"),
    re.compile(r"(?i)(\b[\w-]*(?:token|secret|password|api_?key)[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&}]{6,}"),
)


def without_keys(text: bytes) -> bytes:
    """Remove the secrets of our own keys from the text, and nothing else."""
    return _OURS.sub(rb"\g<1>" + HIDDEN.encode(), text) if b"ot_" in text else text


def redacted(text: str, known: Sequence[str] = ()) -> str:
    """Bearer tokens, our keys and those of well-known services, passwords in URLs, `token=...` and the like; and
    what is `known` to be secret."""
    for secret in known:
        text = text.replace(secret, HIDDEN)
    for look in _LOOKS:
        text = look.sub(rf"\g<1>{HIDDEN}", text)
    return text


def without_secrets(value: Any, name: str = "", known: Sequence[str] = ()) -> Any:
    """The same value with every text in it redacted, and all text hidden that stands under a name of a secret."""
    if isinstance(value, str):
        return HIDDEN if value and _NAMES.search(name) else redacted(value, known)
    if isinstance(value, dict):
        return {key: without_secrets(inner, str(key), known) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner, name, known) for inner in value]
    return value
