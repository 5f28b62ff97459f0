"""`opentinker`: the command line. Commands import what they need when they run, so that `--help` answers immediately.

A user's mistake ends in one clear message and exit status 1 or 2, never in a traceback. With --json the message is an
object on stdout.
"""

from __future__ import annotations

import sys

import typer

from opentinker.cli import (
    artifacts,
    chat,
    environments,
    help_format,
    init_job,
    jobs,
    keys,
    logs,
    observability,
    rows,
    run,
    script,
    sink,
    specs,
    sweeps,
)
from opentinker.cli.machine import commands, status
from opentinker.cli.planning import plan, validate
from opentinker.shared.types.errors import OpenTinkerError

app = typer.Typer(
    name="opentinker",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.callback(cls=help_format.CommandGroup)(help_format.root)
PARTS = (
    commands,
    jobs,
    sweeps,
    artifacts,
    observability,
    rows,
    status,
    sink,
    logs,
    init_job,
    specs,
    plan,
    validate,
    run,
    script,
    environments,
    keys,
    chat,
)
for part in PARTS:
    part.register(app)
app.command("help")(help_format.help_)
help_format.present(app)


def main() -> None:
    command = typer.main.get_command(app)
    help_format.name_values(command)
    try:
        command()
    except OpenTinkerError as error:
        help_format.fail(error)
    except BrokenPipeError:  # `opentinker events JOB | head`
        sys.stderr.close()
        sys.exit(0)
