"""`opentinker keys`: who may use a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opentinker.cli.common import say
from opentinker.shared.errors import OpenTinkerError

keys = typer.Typer(help="Keys of the API.", no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    app.add_typer(keys, name="keys")


@keys.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, which only you can read.")],
    env: Annotated[str, typer.Option(help="Name of the deployment, its setting key_env.")] = "local",
) -> None:
    """Write an operator's key for a server without `up`: its setting admin_key_file registers it."""
    from opentinker.shared.keys import ENV, new_key, write_key

    if not ENV.fullmatch(env):
        raise typer.BadParameter(f"--env {env!r}: must be up to 16 small letters and digits")
    try:
        write_key(file, new_key(env))
    except OSError as error:
        raise OpenTinkerError(f"{file}: {error.strerror}") from None
    say(str(file))
