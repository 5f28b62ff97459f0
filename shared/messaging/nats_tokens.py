"""JWTs signed with an nkey: nats-server's authorization requests, and our answers.

    nats-server --who is this?--> nats_auth.py --a user, its rights, until when--> nats-server

The key that signs answers is an account's: its seed is a secret of the schedulers, its public half stands in the
server's configuration, which believes no other.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from typing import Any, TypeVar

import msgspec
import nkeys
import orjson

from opentinker.shared.types.errors import SpecError

T = TypeVar("T")

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}


def new_seed() -> str:
    return nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_ACCOUNT).decode()  # type: ignore[no-any-return]


class Signer:
    def __init__(self, seed: str) -> None:
        """Raises SpecError."""
        try:
            self._pair = nkeys.from_seed(bytearray(seed.encode()))
            prefix, _ = nkeys.decode_seed(bytearray(seed.encode()))
        except (nkeys.NkeysError, binascii.Error, ValueError):
            prefix = None
        if prefix != nkeys.PREFIX_BYTE_ACCOUNT:
            problem = "must hold the seed of an account's nkey, SA...: `opentinker access FOLDER` makes one"
            raise SpecError.of("nats_issuer_file", "***", problem)
        self.public_key: str = self._pair.public_key.decode()

    def sign(self, claims: dict[str, Any]) -> str:
        """Return the claims as a JWT, with issuer, time and a unique id."""
        whole = {**claims, "iss": self.public_key, "iat": int(time.time()), "jti": secrets.token_hex(16)}
        text = f"{_coded(_HEADER)}.{_coded(whole)}"
        return f"{text}.{_letters(self._pair.sign(text.encode()))}"


def claims_of(token: bytes, kind: type[T]) -> T:
    """Decode a token's claims without verifying them. Raises ValueError."""
    parts = token.split(b".")
    if len(parts) != 3:
        raise ValueError("a token has three parts")
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(parts[1] + b"=="), type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


def _coded(value: dict[str, Any]) -> str:
    return _letters(orjson.dumps(value))


def _letters(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
