"""`opentinker env serve`: an environment that runs on this machine, for jobs elsewhere."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker.cli.common import PATIENCE_S, Url, client, complain, print_line, quiet, say, server_url

if TYPE_CHECKING:
    from opentinker.serve.ws_client import Serving

DRAIN_S = 20.0
FINISH_S = 30.0
"""Time for a job that is being cancelled."""


def serve(
    environment: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help="Importable from here.")],
    name: Annotated[
        str | None, typer.Option(help="Jobs name it served:NAME; default: the class's name.", show_default=False)
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Episodes at once.", min=1, max=4096)] = 64,
    job: Annotated[
        Path | None,
        typer.Option(metavar="JOB.toml", help="Submit this job with the environment, watch it, and stop after it."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Let env workers connect, as ws://HOST:PORT, instead of connecting."),
    ] = None,
    url: Url = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Serve an environment from this machine, over one outgoing connection, until Ctrl-C.

    A job plays it as served:NAME. The key is taken from OPENTINKER_API_KEY.
    """
    quiet()
    sys.path.insert(0, str(Path.cwd()))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    if listen is not None:
        if job is not None or name is not None:
            raise typer.BadParameter("--listen connects to no server: leave out --job and --name")
        _listen(environment, listen, concurrency, as_json)
        return
    from opentinker.serve.ws_client import serve_environment
    from opentinker.shared.types.spec_text import load_spec
    from opentinker.shared.types.sweeps import is_sweep

    spec = load_spec(job) if job is not None else None  # an unreadable file is reported before anything is served
    if is_sweep(spec):
        raise typer.BadParameter(f"--job {job} is a sweep of many jobs: serve without --job, and submit it by itself")
    serving = serve_environment(environment, name=name, concurrency=concurrency, url=server_url(url), on_wait=complain)
    code = 0
    try:
        if as_json:
            print_line({"serving": environment, "url": serving.url, "name": serving.environment})
        else:
            say(f"serving {environment} on {serving.url}, {concurrency} episodes at once")
        if spec is None:
            if not as_json:
                say(f'to play it: [environment] name = "{serving.environment}"')
            serving.wait()
        else:
            code = _follow(serving, spec, as_json)
    except KeyboardInterrupt:
        if serving.active:
            complain(f"finishing {serving.active} episodes; Ctrl-C again to stop at once")
    finally:
        _close(serving)
    raise typer.Exit(code)


def _close(serving: Serving) -> None:
    try:
        serving.close(drain_s=DRAIN_S)
    except KeyboardInterrupt:
        serving.close(drain_s=0.0)


def _follow(serving: Serving, spec: Any, as_json: bool) -> int:
    """Submit, watch to the end; Ctrl-C cancels the job."""
    from opentinker.cli.jobs import show

    part = spec.get("environment") if isinstance(spec, dict) else None
    part = part if isinstance(part, dict) else {}
    with client(serving.url, patience_s=PATIENCE_S) as api:
        record = api.submit({**spec, "environment": {**part, "name": serving.environment}})
        if not as_json:
            say(f"job {record['id']} plays {serving.environment}")
        try:
            return show(api, record["id"], as_json=as_json)
        except KeyboardInterrupt:
            complain("cancelling the job")
            api.cancel(record["id"])
            api.wait(record["id"], FINISH_S)
            return 4


def _listen(environment: str, address: str, concurrency: int, as_json: bool) -> None:
    from opentinker.serve.ws_server import listening

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise typer.BadParameter(f"--listen {address!r} is not HOST:PORT")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        loop.add_signal_handler(signal.SIGINT, stop.set)
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        async with listening(environment, host.strip("[]"), int(port), concurrency) as server:
            if as_json:
                print_line({"serving": environment, "url": server, "name": server})
            else:
                say(f'serving {environment} on {server}; to play it: [environment] name = "{server}"')
            sys.stdout.flush()
            await stop.wait()

    asyncio.run(run())
