"""Secrets come from files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from opentinker.shared.types.errors import SpecError

ACCESS = "artifacts_s3_credentials_file"
_KEY = re.compile(r"[!-~]{3,256}")
_PASSWORD = re.compile(r"[!-~]{16,512}")


def read_secret(path: Path, field: str) -> str:
    """Return the text of a file. Raises SpecError."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError.of(field, str(path), str(error)) from None


def read_password(path: Path, field: str) -> str:
    """Raises SpecError."""
    password = read_secret(path, field)
    if not _PASSWORD.fullmatch(password):
        problem = "must hold 16 to 512 printable characters without spaces, e.g. of: openssl rand -hex 32"
        raise SpecError.of(field, str(path), problem)
    return password


AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""Variables of the environment that open an object store; the scheduler's alone."""

CLIENT_SECRET = "OPENTINKER_OIDC_CLIENT_SECRET"
"""Variable of the scheduler's environment with its client secret at the identity provider."""


def read_access(path: Path | None) -> tuple[str, str]:
    """Access key id and secret of an object store: the two lines of a file, or what the environment says. Raises
    SpecError."""
    if path is None:
        pair = [os.environ.get("AWS_ACCESS_KEY_ID", ""), os.environ.get("AWS_SECRET_ACCESS_KEY", "")]
        problem = "is needed, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the scheduler's environment"
    else:
        pair = read_secret(path, ACCESS).split()
        problem = "must hold two lines: access key id, secret access key"
    if len(pair) != 2 or not all(_KEY.fullmatch(part) for part in pair):
        raise SpecError.of(ACCESS, None if path is None else str(path), problem)
    return pair[0], pair[1]


def password_in(url: str) -> str:
    """Return the password in a URL; empty if it has none."""
    try:
        return unquote(urlsplit(url).password or "")
    except ValueError:
        return ""
