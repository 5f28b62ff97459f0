"""`opentinker completion SHELL`."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

PROGRAM = "opentinker"
Shell = Literal["bash", "zsh", "fish", "powershell"]


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish|powershell", help="The shell that it is for.")],
) -> None:
    """Print the completion script of a shell: commands, options, jobs, sweeps, environments.

    bash, in ~/.bashrc: source <(opentinker completion bash)

    zsh, in ~/.zshrc after compinit: source <(opentinker completion zsh)

    fish: opentinker completion fish > ~/.config/fish/completions/opentinker.fish
    """
    from typer._completion_shared import get_completion_script

    script = get_completion_script(prog_name=PROGRAM, complete_var=f"_{PROGRAM.upper()}_COMPLETE", shell=shell)
    sys.stdout.write(script + "\n")
