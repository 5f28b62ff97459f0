"""`opentinker script SCRIPT`: runs a script that was written for the published client, from its own checkout."""

from __future__ import annotations

from typing import Annotated

import typer

PASSED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Settings of the command: options after the script are the script's."""


def script(
    script: Annotated[str, typer.Argument(help="A Python file.", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own.", metavar="ARGUMENTS")] = None,
) -> None:
    """Run a script of the published client's layout: `utils` and `opentinker` are this package's."""
    from opentinker.client.script import run_script

    run_script(script, arguments or [])
