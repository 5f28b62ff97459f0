"""`opentinker audit verify`: whether every line of the audit log is there, as it was written."""

from __future__ import annotations

from typing import Annotated

import typer

from opentinker.cli.common import DATA_DIR, AsJson, DataDir, print_json, print_table, say
from opentinker.shared.security import audit_log

commands = typer.Typer(help="The audit log: who did what.", no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    app.add_typer(commands, name="audit")


@commands.command()
def verify(
    data_dir: DataDir = DATA_DIR,
    first: Annotated[int, typer.Option(help="Lines before this number were taken away on purpose.", min=1)] = 1,
    expect: Annotated[str, typer.Option(help="A hash that you noted: it must be in a chain.")] = "",
    as_json: AsJson = False,
) -> None:
    """Check every line against the one before it.

    Exit status 1 if a line was changed, taken out, added or moved. Note the hash that is shown elsewhere: with --expect
    it also tells whether the end was cut off.
    """
    found, broken = [], []
    for present in audit_log.writers(audit_log.folder(data_dir)):
        try:
            verified = audit_log.verify(present, first)
            found.append({"log": present.stem, "lines": verified.lines, "last": verified.last, "hash": verified.hash})
        except audit_log.AuditBroken as error:
            broken.append(str(error))
    if expect and not broken and not _holds(data_dir, first, expect):
        broken.append(f"no line has the hash {expect}: the end of a chain was cut off, or it was made anew")
    if as_json:
        print_json({"logs": found, "broken": broken})
    else:
        rows = [[log["log"], log["lines"], log["last"], log["hash"]] for log in found]
        print_table(
            ["log", "lines", "last", "hash of the last"], rows, empty=f"no audit log in {audit_log.folder(data_dir)}"
        )
        for problem in broken:
            say(f"BROKEN {problem}")
    if broken:
        raise typer.Exit(1)


@commands.callback()
def main() -> None:
    """The audit log: who did what."""


def _holds(data_dir: DataDir, first: int, expect: str) -> bool:
    for present in audit_log.writers(audit_log.folder(data_dir)):
        try:
            audit_log.verify(present, first, expect)
            return True
        except audit_log.AuditBroken:
            continue
    return False
