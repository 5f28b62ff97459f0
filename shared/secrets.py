"""Secrets come from files."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from opentinker.shared.errors import SpecError

_PASSWORD = re.compile(r"[!-~]{16,512}")


def read_password(path: Path, field: str) -> str:
    """Raises SpecError."""
    try:
        password = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([{"field": field, "value": str(path), "problem": str(error)}]) from None
    if not _PASSWORD.fullmatch(password):
        problem = "must hold 16 to 512 printable characters without spaces, e.g. of: openssl rand -hex 32"
        raise SpecError([{"field": field, "value": str(path), "problem": problem}])
    return password


def password_in(url: str) -> str:
    """That of a URL; empty if it has none."""
    try:
        return unquote(urlsplit(url).password or "")
    except ValueError:
        return ""
