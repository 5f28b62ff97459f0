"""`opentinker audit verify`: checks that no line of the audit log is missing."""

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
    first: Annotated[int, typer.Option(help="Lines before this number were removed on purpose.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Check that every line can be read and that none is missing, doubled or moved. If one is: exit status 1."""
    found, broken = [], []
    for current in audit_log.writers(audit_log.folder(data_dir)):
        try:
            verified = audit_log.verify(current, first)
            found.append({"log": current.stem, "lines": verified.lines, "last": verified.last})
        except audit_log.AuditBroken as error:
            broken.append(str(error))
    if as_json:
        print_json({"logs": found, "broken": broken})
    else:
        rows = [[log["log"], log["lines"], log["last"]] for log in found]
        print_table(["log", "lines", "last"], rows, empty=f"no audit log in {audit_log.folder(data_dir)}")
        for problem in broken:
            say(f"BROKEN {problem}")
    if broken:
        raise typer.Exit(1)


@commands.callback()
def main() -> None:
    """The audit log: who did what."""
