"""Writes a folder with the users of NATS and Valkey: rights and passwords. Made once, kept.

    FOLDER/nats.conf              the shipped settings, and a line that includes nats-users.conf
    FOLDER/nats-users.conf        a user per service, with its subjects and its password; the listener for browsers
    FOLDER/valkey-users.acl       a user per service, with its keys and the hash of its password
    FOLDER/{nats,valkey}-SERVICE  the password, for that service alone
    FOLDER/nats-issuer            the seed of the nkey with which schedulers sign who else may come in
    FOLDER/operator-key           of the API, made by `deal`: elsewhere by `opentinker up` or `opentinker keys init`

Rights are those of this release (`shared/messaging/permissions.py`) and are written at every start; passwords stay. To
change one, delete its file and start again. Everything is written durably; an empty file, which a power cut may leave,
counts as missing."""

from __future__ import annotations

import hashlib
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentinker.shared.durable_files import create_durably, make_directories, replace_durably
from opentinker.shared.messaging.nats_tokens import Signer, new_seed
from opentinker.shared.messaging.permissions import (
    COMMON_RULES,
    OPERATOR,
    OPERATOR_RULES,
    SYSTEM,
    NatsRights,
    nats_rights,
    redis_rules,
    system_rights,
)
from opentinker.shared.messaging.subjects import SCHEDULER, SERVICES
from opentinker.shared.security.key_text import new_key
from opentinker.shared.settings_sources import PREFIX

SERVERS = ("nats", "valkey")
NATS_CONF, NATS_USERS, VALKEY_USERS = "nats.conf", "nats-users.conf", "valkey-users.acl"
ISSUER, OPERATOR_KEY = "nats-issuer", "operator-key"
ALL = NatsRights((">",), (">",))
CALLOUT_S = 5
"""Time that nats-server waits for a scheduler's decision about a client that is not a service."""


@dataclass(frozen=True)
class WebSocket:
    """The address of nats-server's plain-text listener for browsers: connections from other machines need a TLS proxy
    in front of it."""

    port: int
    host: str = "127.0.0.1"
    origins: tuple[str, ...] = ()
    """Pages that may; empty: all. A page can do nothing there without a credential."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ws://{host}:{self.port}"


class Access:
    """Makes what is missing in the folder. `listens` changes the listener for browsers, and writes it down."""

    def __init__(self, folder: Path, shipped_nats: Path, websocket: WebSocket | None = None) -> None:
        self.folder = folder.resolve()
        make_directories(self.folder, 0o700)
        users = (*SERVICES, OPERATOR)
        for server in SERVERS:
            for user in users:
                _once(self.password_file(server, user), secrets.token_hex(32))
        _once(self.folder / ISSUER, new_seed())
        self._write(NATS_CONF, f"{shipped_nats.read_text()}\ninclude {NATS_USERS}\n")
        self.listens(websocket)
        self._write(VALKEY_USERS, valkey_users({user: self.password("valkey", user) for user in users}))

    def listens(self, websocket: WebSocket | None) -> None:
        """Raises SpecError if the issuer's file is spoilt."""
        self.websocket = websocket
        passwords = {user: self.password("nats", user) for user in (*SERVICES, OPERATOR)}
        issuer = Signer((self.folder / ISSUER).read_text().strip()).public_key
        self._write(NATS_USERS, nats_users(passwords, websocket, issuer))

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
        """Return the environment variables with which a service connects to these servers as its user."""
        names = {"nats": "NATS_PASSWORD_FILE", "valkey": "REDIS_PASSWORD_FILE"}
        told = {PREFIX + names[server]: str(self.password_file(server, service)) for server in servers}
        if service == SCHEDULER and "nats" in servers and self.websocket is not None:
            told[PREFIX + "NATS_ISSUER_FILE"] = str(self.folder / ISSUER)
            told[PREFIX + "NATS_WEBSOCKET_URL"] = self.websocket.url
        return told

    def secrets(self, prefix: str) -> dict[str, Any]:
        """Return Kubernetes manifests for this folder, for `kubectl apply`: a Secret per service with its two passwords
        (`nats`, `valkey`; the scheduler's also has the `issuer`), and one per server with its users."""
        shares = {service: {s: self.password(s, service) for s in SERVERS} for service in SERVICES}
        shares[SCHEDULER]["issuer"] = (self.folder / ISSUER).read_text()
        shares["nats"] = {name: (self.folder / name).read_text() for name in (NATS_CONF, NATS_USERS)}
        shares["valkey"] = {VALKEY_USERS: (self.folder / VALKEY_USERS).read_text()}
        items = [
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": f"{prefix}-{name}", "labels": {"app.kubernetes.io/name": "opentinker"}},
                "type": "Opaque",
                "stringData": share,
            }
            for name, share in shares.items()
        ]
        return {"apiVersion": "v1", "kind": "List", "items": items}

    def deal(self, into: Path, key_env: str) -> list[Path]:
        """Write a separate folder for each service and server with what it needs: INTO/trainer may be given to the
        trainer, who then sees nothing of others. Recreated each time; returns the folders. The scheduler's contains an
        operator key."""
        _once(self.folder / OPERATOR_KEY, new_key(key_env))
        hands = {service: self._files(service) for service in SERVICES}
        hands[SCHEDULER].append(self.folder / OPERATOR_KEY)
        hands |= {"nats": [self.nats_conf, self.folder / NATS_USERS], "valkey": [self.valkey_users]}
        for name, files in hands.items():
            make_directories(into / name, 0o700)
            for file in files:
                _write(into / name / file.name, file.read_text())
        return [into / name for name in hands]

    def _files(self, service: str) -> list[Path]:
        told = self.environment(service)
        return [Path(told[name]) for name in told if name.endswith("_FILE")]

    def _write(self, name: str, text: str) -> None:
        _write(self.folder / name, text)


def nats_users(passwords: dict[str, str], websocket: WebSocket | None, issuer: str) -> str:
    """Return nats-server's users with their rights. Other clients are refused or, with a listener for browsers,
    admitted only by a scheduler's decision."""
    lines = ["# Made by opentinker at every start: who may connect, and what each may do."]
    if websocket is not None:
        lines += [
            "websocket {",
            f'  host: "{websocket.host}"',
            f"  port: {websocket.port}",
            "  no_tls: true",
            *([f"  allowed_origins: {_list(websocket.origins)}"] if websocket.origins else []),
            "}",
        ]
    lines += ["authorization {"]
    if websocket is not None:
        users = ", ".join(f'"{user}"' for user in (*passwords, SYSTEM))
        lines += [f"  timeout: {CALLOUT_S}", f'  auth_callout {{ issuer: "{issuer}", auth_users: [{users}] }}']
    lines += ["  users = ["]
    for user, password in passwords.items():
        lines += _user(user, password, ALL if user == OPERATOR else nats_rights(user))
    lines += ["  ]", "}"]
    if websocket is not None:
        lines += [
            "accounts {",
            "  $SYS { users = [",
            *_user(SYSTEM, passwords[SCHEDULER], system_rights()),
            "  ] }",
            "}",
        ]
    return "\n".join([*lines, ""])


def _user(name: str, password: str, rights: NatsRights) -> list[str]:
    return [
        f'    {{user: "{name}", password: "{password}", allowed_connection_types: ["STANDARD"], permissions: {{',
        f"      publish: {_list(rights.publish)}",
        f"      subscribe: {_list(rights.subscribe)}",
        "    }}",
    ]


def valkey_users(passwords: dict[str, str]) -> str:
    """For Valkey or Redis, an ACL file."""
    lines = [f"user default {COMMON_RULES}"]
    for user, password in passwords.items():
        rules = OPERATOR_RULES if user == OPERATOR else redis_rules(user)
        lines.append(f"user {user} on resetpass #{hashlib.sha256(password.encode()).hexdigest()} {rules}")
    return "\n".join([*lines, ""])


def _list(subjects: list[str] | tuple[str, ...]) -> str:
    return "[" + ", ".join(f'"{subject}"' for subject in subjects) + "]"


def _write(path: Path, text: str) -> None:
    replace_durably(path, text.encode(), 0o600)


def _once(path: Path, text: str) -> None:
    """A file for its owner alone; one that is there stays, unless it is empty."""
    with suppress(FileExistsError):
        create_durably(path, text.encode())
