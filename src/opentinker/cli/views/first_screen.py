"""Output of `opentinker up` on a terminal: the URL, how to sign in, what to type next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from opentinker.cli.common import as_typed, say, shown
from opentinker.local.discovery import KEY_FILE, finds, usual_data_dir

EXAMPLE = Path("examples") / "copy_digits.toml"


def show(phase: str, facts: Mapping[str, str]) -> None:
    """`facts`: as in state.json of the data directory. `phase`: starting, ready, stopping or stopped."""
    match phase:
        case "starting":
            say(f"Starting OpenTinker on {shown(Path(facts['data_dir']))} ...")
        case "ready":
            say(_ready(facts))
        case "stopping":
            say("Stopping; press Ctrl-C again to kill what is still running.")
        case "stopped":
            say("Stopped.")


def _ready(facts: Mapping[str, str]) -> str:
    data_dir = Path(facts["data_dir"])
    job = EXAMPLE if EXAMPLE.exists() else "JOB.toml"
    server = [] if data_dir == usual_data_dir().resolve() else ["--url", facts["url"]]
    if (key := facts.get(KEY_FILE)) is None:
        sign_in = "No key is needed: everyone on this machine is an operator (--no-auth)."
    else:
        sign_in = f"Sign in with the operator's key, which is in this file:\n\n  {shown(Path(key))}"
        sign_in += "" if finds(data_dir) else f"\n\n  export OPENTINKER_API_KEY_FILE={shown(Path(key))}"
    return (
        f"\nOpenTinker is ready. Open in a browser:\n\n  {facts['url']}\n\n{sign_in}\n\n"
        f"Next, in another terminal:\n\n  {as_typed('submit', job, *server)}\n\n"
        f"Logs: {as_typed('logs', '--data-dir', data_dir)}. Stop with Ctrl-C."
    )
