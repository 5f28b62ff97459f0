"""The console script `opentinker`; where only the Python client is installed, it says what to install."""

from __future__ import annotations

import sys

NEEDED = frozenset({"nats", "packaging", "prometheus_client", "pydantic", "rich", "simpy", "structlog", "typer"})
"""Modules of the extra `cli`."""


def main() -> None:
    try:
        from opentinker.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        sys.exit("opentinker: the command line needs more packages: pip install 'opentinker[cli]'")
    run()
