"""`opentinker keys`: access to a server. A secret is written to standard output or into a file, once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from opentinker.cli.common import AsJson, JobIds, Url, ago, client, complain, print_found, print_json, say, server_url
from opentinker.shared.types.errors import OpenTinkerError

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
keys = typer.Typer(help="API keys: who may use a server.", no_args_is_help=True, rich_markup_mode=None)

KeyId = Annotated[str, typer.Argument(metavar="ID", help="See `opentinker keys list`; it is the third part of a key.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the key to this new file, which only you can read.")
]


def whoami(url: Url = None, as_json: AsJson = False) -> None:
    """Show which key is used here: its tenant, role and scopes."""
    found = client(url).whoami()
    if as_json:
        print_json(found)
        return
    if found["key"] is None:
        say(f"{server_url(url)} requires no key: everyone is an {found['role']} of tenant {found['tenant']}")
        return
    named = f", {found['name']!r}" if found["name"] else ""
    until = f"expires: {_when(found['expires'])}"
    say(f"key {found['key']}{named}, {found['role']} of tenant {found['tenant']}, {until}")
    say(f"scopes: {', '.join(found['scopes'])}")


def webhook_secret(
    renew: Annotated[bool, typer.Option("--renew", help="Replace the secret; the old one is no longer used.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the secret that your webhooks are signed with; see docs/notifications.md."""
    secret = client(url).webhook_secret(renew=renew)
    print_json({"secret": secret}) if as_json else say(secret)


def share(
    job_ids: JobIds,
    expires: Annotated[str, typer.Option(help="For example 12h or 30d; 90d at most.")] = "7d",
    name: Annotated[str, typer.Option(help="A note: who it is for.")] = "",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Make a link that shows jobs, and nothing else, to everyone who has it. `keys list` shows it, `keys revoke` ends
    it."""
    link = client(url).share(*job_ids, expires_in_s=seconds(expires, "--expires"), name=name)
    print_json({"url": link}) if as_json else say(link)


@keys.command()
def create(
    role: Annotated[str, typer.Option(help="viewer, member, admin or operator; see docs/keys.md.")] = "member",
    tenant: Annotated[
        str | None, typer.Option(help="Default: yours. Operators may name any tenant, also a new one.")
    ] = None,
    name: Annotated[str, typer.Option(help="A note: whose key it is, or what it is for.")] = "",
    scopes: Annotated[
        str | None, typer.Option(help="For example jobs:read,checkpoints:read; default: all scopes of the role.")
    ] = None,
    expires: Annotated[str | None, typer.Option(help="For example 12h or 90d; default: never.")] = None,
    out: Out = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Create a key. It is shown only once."""
    _refuse_existing(out)
    named = [scope.strip() for scope in scopes.split(",")] if scopes is not None else None
    expires_in_s = None if expires is None else seconds(expires, "--expires")
    made = client(url).create_key(role, tenant=tenant, name=name, scopes=named, expires_in_s=expires_in_s)
    _hand_out(made, out, as_json)


@keys.command("list")
def list_(
    tenant: Annotated[str | None, typer.Option(help="For operators: keys of another tenant.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show keys, oldest first, without their secrets."""
    found = client(url).keys(tenant)
    rows = [
        [
            *(key["id"], key["name"] or "-", key["tenant"], "link" if key["jobs"] else key["role"], key["state"]),
            _when(key["expires"]),
            ago(key["last_used"]) if key["last_used"] else "never",
        ]
        for key in found
    ]
    columns = ["id", "name", "tenant", "role", "state", "expires", "last used"]
    print_found(found, as_json, columns, rows, empty="no keys")


@keys.command()
def rotate(
    key_id: KeyId,
    grace: Annotated[str, typer.Option(help="How long the old secret stays valid, e.g. 0s or 2d.")] = "1d",
    out: Out = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Give a key a new secret, which is shown only once.

    The operator's key of the server in this directory is replaced in its file.
    """
    from opentinker.local.discovery import key_file_for
    from opentinker.shared.security.key_text import parse, replace_key

    _refuse_existing(out)
    made = client(url).rotate_key(key_id, grace_s=seconds(grace, "--grace"))
    file = key_file_for(server_url(url))
    if file is not None and (parse(file.read_text().strip()) or ("", ""))[1] == key_id:
        replace_key(file, made["key"])
        complain(f"written to {file}")
    _hand_out(made, out, as_json)


@keys.command()
def revoke(key_id: KeyId, url: Url = None, as_json: AsJson = False) -> None:
    """Revoke a key and close its open connections, within a second."""
    gone = client(url).revoke_key(key_id)
    print_json(gone) if as_json else say(f"{gone['id']}  {gone['state']}")


@keys.command()
def sessions(
    tenant: Annotated[str | None, typer.Option(help="For operators: sessions of another tenant.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show who is signed in to the page; `keys sign-out` ends a session."""
    found = client(url).sessions(tenant)
    rows = [
        [one["id"], one["user"] or f"key {one['key']}", one["role"], ago(one["last_used"]), _when(one["expires"])]
        for one in found
    ]
    print_found(found, as_json, ["id", "who", "role", "last used", "ends"], rows, empty="no sessions")


@keys.command("sign-out")
def sign_out(
    session_id: Annotated[str, typer.Argument(metavar="ID", help="See `opentinker keys sessions`.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """End a session of the page and close its open connections, within a second."""
    client(url).end_session(session_id)
    print_json({"session": session_id}) if as_json else say(f"{session_id}  ended")


@keys.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, which only you can read.")],
    env: Annotated[str, typer.Option(help="Name of the deployment, its setting key_env.")] = "local",
    as_json: AsJson = False,
) -> None:
    """Write an operator's key for a server without `up`: its setting admin_key_file registers it."""
    from opentinker.shared.security.key_text import ENV, new_key

    if not ENV.fullmatch(env):
        raise typer.BadParameter(f"--env {env!r}: must be up to 16 small letters and digits")
    _refuse_existing(file)
    _write(file, new_key(env))
    print_json({"file": file}) if as_json else say(str(file))


def seconds(text: str, option: str) -> float:
    """Parse a duration such as `90`, `30s`, `15m`, `12h`, `90d`."""
    match = re.fullmatch(r"(\d{1,9})([smhd]?)", text)
    if match is None:
        raise typer.BadParameter(f"{option} {text!r} is not a duration, such as 30s, 15m, 12h or 90d")
    return float(match[1]) * UNITS_S[match[2] or "s"]


def _hand_out(made: Mapping[str, Any], out: Path | None, as_json: bool) -> None:
    key = made["key"]
    if out is not None:
        _write(out, key)
        made = {name: value for name, value in made.items() if name != "key"} | {"file": str(out)}
    if as_json:
        print_json(made)
        return
    complain(f"{made['role']} of tenant {made['tenant']}, id {made['id']}, expires: {_when(made['expires'])}")
    say(key if out is None else str(out))


def _refuse_existing(file: Path | None) -> None:
    """Refuse a file that exists, before a key is made that could not be written."""
    if file is not None and os.path.lexists(file):
        raise OpenTinkerError(f"{file} exists already")


def _write(file: Path, key: str) -> None:
    from opentinker.shared.security.key_text import write_key

    try:
        write_key(file, key)
    except OSError as error:
        raise OpenTinkerError(f"{file}: {error.strerror}") from None


def _when(unix_s: float | None) -> str:
    import time

    return "never" if unix_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))
