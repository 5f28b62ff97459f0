"""`opentinker`: the command line. Commands import what they need when they run, so that `--help` answers at once.

A user's mistake ends in one clear message and exit status 1 or 2, never in a traceback.
"""

from __future__ import annotations

import sys

import typer

from opentinker.cli import (
    artifacts,
    audit,
    chat,
    environments,
    jobs,
    keys,
    knowing,
    logs,
    machine,
    plan,
    run,
    script,
    sink,
    specs,
    status,
)
from opentinker.shared.errors import OpenTinkerError, SpecError

app = typer.Typer(
    name="opentinker",
    help="Reinforcement learning as a service for LLM agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
machine.register(app)
jobs.register(app)
artifacts.register(app)
knowing.register(app)
status.register(app)
sink.register(app)
logs.register(app)
specs.register(app)
plan.register(app)
run.register(app)
script.register(app)
environments.register(app)
keys.register(app)
audit.register(app)
chat.register(app)


def main() -> None:
    try:
        app()
    except SpecError as error:
        specs.print_mistakes(error)
        sys.exit(2)
    except OpenTinkerError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except BrokenPipeError:  # `opentinker events JOB | head`
        sys.stderr.close()
        sys.exit(0)
