"""API keys as text: generation, recognition by checksum, and storage in files.

ot_<env>_<id>_<secret><check>    env: the deployment's name; id: public; secret: 256 bits; check: CRC-32 of the rest
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import zlib
from pathlib import Path

from opentinker.shared.durable_files import create_durably, replace_durably
from opentinker.shared.security.secrets import read_secret
from opentinker.shared.types.errors import SpecError

LETTERS = string.digits + string.ascii_letters
SECRET, CHECK, ID = 43, 6, 10
"""Characters; 43 of 62 letters are 256 bits."""
FORM = re.compile(rf"ot_([a-z0-9]{{1,16}})_([a-z0-9]{{{ID}}})_([0-9A-Za-z]{{{SECRET + CHECK}}})")
KEY_ID = re.compile(rf"[a-z0-9]{{{ID}}}")
ENV = re.compile(r"[a-z0-9]{1,16}")


def new_key(env: str, id: str = "") -> str:
    id = id or "".join(secrets.choice(string.digits + string.ascii_lowercase) for _ in range(ID))
    text = f"ot_{env}_{id}_" + "".join(secrets.choice(LETTERS) for _ in range(SECRET))
    return text + _check(text)


def parse(text: str) -> tuple[str, str] | None:
    """Return (env, id); None for text that cannot be a key, including a mistyped one."""
    match = FORM.fullmatch(text)
    if match is None or _check(text[:-CHECK]) != text[-CHECK:]:
        return None
    return match[1], match[2]


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_key(path: Path, text: str) -> None:
    """Into a new file that its owner alone can read, durably. Raises FileExistsError."""
    create_durably(path, f"{text}\n".encode())


def replace_key(path: Path, text: str) -> None:
    """Replace the key in an existing file."""
    replace_durably(path, f"{text}\n".encode(), 0o600)


def read_key(path: Path) -> str:
    """Raises SpecError."""
    text = read_secret(path, "admin_key_file")
    if parse(text) is None:
        problem = "must hold a key of ours and nothing else: `opentinker keys init FILE` writes a new one"
        raise SpecError.of("admin_key_file", str(path), problem)
    return text


def _check(text: str) -> str:
    number, digits = zlib.crc32(text.encode()), ""
    for _ in range(CHECK):
        number, digit = divmod(number, len(LETTERS))
        digits += LETTERS[digit]
    return digits
