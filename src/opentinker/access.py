"""A folder with who may connect to NATS and Valkey: users, their rights, their passwords. Made once, kept.

    FOLDER/nats.conf              the shipped settings, and a line that includes nats-users.conf
    FOLDER/nats-users.conf        a user per service, with its subjects and its password
    FOLDER/valkey-users.acl       a user per service, with its keys and the hash of its password
    FOLDER/{nats,valkey}-SERVICE  the password, for that service alone

Rights are of this release (`shared/rights.py`) and written anew at every start; passwords stay. To change one, delete
its file and start again.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

from opentinker.shared.config import PREFIX
from opentinker.shared.rights import ANYBODY_RULES, OPERATOR, OPERATOR_RULES, nats_rights, redis_rules
from opentinker.shared.subjects import SERVICES

SERVERS = ("nats", "valkey")
NATS_CONF, NATS_USERS, VALKEY_USERS = "nats.conf", "nats-users.conf", "valkey-users.acl"


class Access:
    """Makes what is missing in the folder."""

    def __init__(self, folder: Path, shipped_nats: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        users = (*SERVICES, OPERATOR)
        for server in SERVERS:
            for user in users:
                _once(self.password_file(server, user), secrets.token_hex(32))
        self._write(NATS_CONF, f"{shipped_nats.read_text()}\ninclude {NATS_USERS}\n")
        self._write(NATS_USERS, nats_users({user: self.password("nats", user) for user in users}))
        self._write(VALKEY_USERS, valkey_users({user: self.password("valkey", user) for user in users}))

    @property
    def nats_conf(self) -> Path:
        return self.folder / NATS_CONF

    @property
    def valkey_users(self) -> Path:
        return self.folder / VALKEY_USERS

    def password_file(self, server: str, user: str) -> Path:
        """`server`: nats | valkey."""
        return self.folder / f"{server}-{user}"

    def password(self, server: str, user: str) -> str:
        return self.password_file(server, user).read_text().strip()

    def environment(self, service: str, servers: tuple[str, ...] = SERVERS) -> dict[str, str]:
        """What a service's process must be told to connect to these servers as itself."""
        names = {"nats": "NATS_PASSWORD_FILE", "valkey": "REDIS_PASSWORD_FILE"}
        return {PREFIX + names[server]: str(self.password_file(server, service)) for server in servers}

    def _write(self, name: str, text: str) -> None:
        temporary = self.folder / f"{name}.tmp"
        temporary.unlink(missing_ok=True)
        _once(temporary, text)
        temporary.replace(self.folder / name)


def nats_users(passwords: dict[str, str]) -> str:
    """For nats-server: users with their rights. Whoever is none of them is not let in."""
    lines = [
        "# Made by opentinker at every start: who may connect, and what each may do.",
        "authorization {",
        "  users = [",
    ]
    for user, password in passwords.items():
        publish, subscribe = _list([">"]), _list([">"])
        if user != OPERATOR:
            rights = nats_rights(user)
            publish, subscribe = _list(rights.publish), _list(rights.subscribe)
        lines += [
            f'    {{user: "{user}", password: "{password}", permissions: {{',
            f"      publish: {publish}",
            f"      subscribe: {subscribe}",
            "    }}",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def valkey_users(passwords: dict[str, str]) -> str:
    """For Valkey or Redis, an ACL file."""
    lines = [f"user default {ANYBODY_RULES}"]
    for user, password in passwords.items():
        rules = OPERATOR_RULES if user == OPERATOR else redis_rules(user)
        lines.append(f"user {user} on resetpass #{hashlib.sha256(password.encode()).hexdigest()} {rules}")
    return "\n".join([*lines, ""])


def _list(subjects: list[str] | tuple[str, ...]) -> str:
    return "[" + ", ".join(f'"{subject}"' for subject in subjects) + "]"


def _once(path: Path, text: str) -> None:
    """A file for its owner alone; one that is there stays."""
    with suppress(FileExistsError), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
