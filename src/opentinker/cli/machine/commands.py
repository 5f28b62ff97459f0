"""Commands about this machine: up, down, doctor, access, audit."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer

from opentinker.cli.common import DATA_DIR, AsJson, DataDir, as_typed, print_json, print_table, quiet, say
from opentinker.shared.security import audit_log
from opentinker.shared.types.errors import OpenTinkerError

DOWN_S = 90.0
audit = typer.Typer(help="The audit log: who did what.", no_args_is_help=True, rich_markup_mode=None)


def up(
    data_dir: DataDir = DATA_DIR,
    port: Annotated[
        int | None, typer.Option(help="Port of the HTTP API; default: 8080, or a free one.", min=0, max=65535)
    ] = None,
    host: Annotated[str, typer.Option(help="Address the HTTP API listens on.")] = "127.0.0.1",
    rollout_workers: Annotated[int, typer.Option(help="Number of processes that generate.", min=0)] = 1,
    trainers: Annotated[
        int, typer.Option(help="Number of processes that train; each trains one job at a time.", min=0)
    ] = 1,
    shared_jobs: Annotated[
        int,
        typer.Option(
            help="Start one more trainer, in which this many LoRA jobs of one base train at a time; for jobs with "
            "resources.trainer = 'shared'.",
            min=0,
            max=64,
        ),
    ] = 0,
    env_workers: Annotated[int, typer.Option(help="Number of processes that play environments.", min=0)] = 1,
    reference: Annotated[int, typer.Option(help="Number of processes with frozen models.", min=0)] = 1,
    nats_url: Annotated[str | None, typer.Option(help="Use this NATS instead of starting one.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Use this Redis or Valkey instead of starting one.")] = None,
    auth: Annotated[
        bool,
        typer.Option("--auth/--no-auth", help="Whether the API asks for keys; --no-auth works on this machine only."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the log as JSON lines on stdout.")] = False,
) -> None:
    """Start everything here; Ctrl-C stops it.

    On a terminal it prints where to go next; otherwise it prints a log to stderr, or with --json to stdout.
    """
    import asyncio

    from opentinker.cli.views.first_screen import show
    from opentinker.local.up import Plan, serve

    on_terminal = sys.stdout.isatty() and not as_json
    configure_logging(as_json=as_json)
    plan = Plan(
        data_dir=data_dir.resolve(),
        host=host,
        port=port,
        rollout_workers=rollout_workers,
        trainers=trainers,
        shared_jobs=shared_jobs,
        references=reference,
        env_workers=env_workers,
        nats_url=nats_url,
        redis_url=redis_url,
        auth=auth,
    )
    asyncio.run(serve(plan, show) if on_terminal else serve(plan))


def configure_logging(*, as_json: bool = False) -> None:
    """A terminal gets warnings alone: the rest is for files."""
    import logging

    import structlog

    from opentinker.shared.runtime.telemetry import Tolerant

    on_terminal = sys.stderr.isatty() and sys.stdout.isatty() and not as_json
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING if on_terminal else logging.INFO),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.processors.JSONRenderer(default=str)
            if as_json
            else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=14),
        ],
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Tolerant(sys.stdout if as_json else sys.stderr))),
    )


def down(
    data_dir: DataDir = DATA_DIR,
    force: Annotated[bool, typer.Option("--force", help="Kill instead of waiting for a clean stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop the `opentinker up` that runs on a data directory."""
    from opentinker.local.discovery import is_running, read_state

    if not is_running(data_dir):
        print_json({"stopped": None}) if as_json else say(f"nothing runs on {data_dir}")
        return
    pid = read_state(data_dir).get("pid")
    if pid is None:
        raise OpenTinkerError(f"the server on {data_dir} is still starting; try again in a moment")
    os.kill(pid, signal.SIGKILL if force else signal.SIGTERM)
    deadline = time.monotonic() + DOWN_S
    kill = as_typed("down", "--force", "--data-dir", data_dir)
    while is_running(data_dir):
        if time.monotonic() > deadline:
            raise OpenTinkerError(f"pid {pid} has not ended after {DOWN_S:.0f} s; {kill} kills it")
        time.sleep(0.05)
    print_json({"stopped": pid}) if as_json else say(f"stopped (pid {pid})")


def access(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to write to; created if missing. Existing passwords are kept.")
    ],
    websocket_port: Annotated[
        int | None,
        typer.Option(help="Port on which NATS accepts browsers; default: none.", min=1, max=65535, show_default=False),
    ] = None,
    websocket_host: Annotated[
        str, typer.Option(help="Address on which NATS accepts browsers, with --websocket-port.")
    ] = "127.0.0.1",
    secrets: Annotated[
        str | None, typer.Option(help="Print Kubernetes Secrets with this name prefix, for `kubectl apply -f -`.")
    ] = None,
    deal: Annotated[
        Path | None,
        typer.Option(metavar="INTO", help="Copy each service's own credentials to INTO/SERVICE."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write users, permissions and passwords for your own NATS and Valkey (or Redis) servers.

    For its own servers `opentinker up` does this itself, in DATA_DIR/run/access. --deal also writes INTO/nats,
    INTO/valkey, and an operator key, INTO/scheduler/operator-key, for the setting admin_key_file.
    """
    from opentinker.local.embedded import shipped_conf
    from opentinker.local.server_users import Access, WebSocket
    from opentinker.shared.settings_sources import load_settings

    origins = load_settings().stream_origins
    websocket = None if websocket_port is None else WebSocket(websocket_port, websocket_host, origins)
    made = Access(folder, shipped_conf("nats.conf"), websocket)
    if secrets is not None:
        print_json(made.secrets(secrets))
        return
    if deal is not None:
        dealt = made.deal(deal, load_settings().key_env)
        print_json({"dealt": dealt}) if as_json else say("\n".join(map(str, dealt)))
        return
    if as_json:
        print_json(
            {"nats_conf": made.nats_conf, "valkey_conf": shipped_conf("valkey.conf"), "users": made.valkey_users}
        )
        return
    say(f"nats-server -c {made.nats_conf}")
    say(f"valkey-server {shipped_conf('valkey.conf')} --aclfile {made.valkey_users}")
    say("settings for each service, for example the scheduler:")
    for name, value in made.environment("scheduler").items():
        say(f"{name}={value}")


def doctor(data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Check what this machine has and lacks.

    Binaries, ports, disk, memory, packages. Exit status 1 if something needed is missing.
    """
    from opentinker.cli.machine.doctor import examine

    quiet()
    checks = examine(data_dir)
    if as_json:
        print_json(checks)
    else:
        marks: dict[str, Any] = {"ok": "ok", "note": "note", "bad": "BAD"}
        rows = [[marks[check["result"]], check["what"], check["found"], check["hint"]] for check in checks]
        print_table(["", "what", "found", "what to do"], rows, empty="")
    if any(check["result"] == "bad" for check in checks):
        raise typer.Exit(1)


@audit.command()
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


@audit.callback()
def main() -> None:
    """The audit log: who did what."""
