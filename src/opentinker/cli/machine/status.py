"""`opentinker status`: this machine's processes, and the cluster at a glance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from opentinker.cli.common import (
    DATA_DIR,
    AsJson,
    DataDir,
    Url,
    as_typed,
    client,
    print_json,
    print_line,
    print_table,
    say,
)
from opentinker.cli.views.lists import MOST_COUNTED
from opentinker.cli.views.refresh import refresh
from opentinker.shared.api_types import Queue, Worker
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import OpenTinkerError

NOTHING_RUNS = 3
"""Exit status."""
JOBS = 500
"""The newest ones that have not ended say what they wait for."""
ACTIVE = tuple(state.value for state in JobState if not state.final)
ORDER = ("running", "starting", "queued", "paused", "succeeded", "failed", "cancelled")


def status(
    data_dir: DataDir = DATA_DIR,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh it until Ctrl-C.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show what runs here, and the cluster at a glance. Exit status 3 if nothing runs.

    Workers by pool, jobs by state, depths of queues, and which job waits for what. With --url: of that server alone.
    """
    if watch:
        refresh(lambda: _show(data_dir, url, print_line if as_json else None))
    if not _show(data_dir, url, print_json if as_json else None):
        raise typer.Exit(NOTHING_RUNS)


def _show(data_dir: Path, url: str | None, print_found: Callable[[Any], None] | None) -> bool:
    """Print the status as text, or as `print_found` does. Return whether there is a server."""
    from opentinker.local.discovery import is_running, read_state

    running = url is None and is_running(data_dir)
    state: dict[str, Any] = {"running": running, **(read_state(data_dir) if url is None else {"url": url})}
    server = url or (state.get("url") if running else None)
    if server is not None:
        state["cluster"] = cluster(server)
    if print_found is not None:
        print_found(state)
    elif server is None and not running:
        say(f"nothing runs on {data_dir}; start it with: {as_typed('up', '--data-dir', data_dir)}")
    else:
        if running:
            _show_processes(state, data_dir)
            say("")
        if server is not None:
            _show_cluster(state["cluster"])
    return running or url is not None


def free(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="As `opentinker status` names it, e.g. rollout-0.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Cancel the job that holds a worker, of any tenant (operators only)."""
    freed = client(url).free_worker(worker)
    print_json(freed) if as_json else say(
        f"{freed['job']}  {freed['state']}; {freed['worker']} will be free in a moment"
    )


def cluster(server: str) -> dict[str, Any]:
    """`error` if the server does not answer; `workers` and `queues` are for operators alone, else None. `complete`: all
    jobs are counted, not the newest alone."""
    from opentinker.sdk.http import ApiError

    try:
        with client(server) as api:
            jobs = api.jobs(JOBS, states=ACTIVE)
            states = {one["name"]: one["jobs"] for one in api.job_groups("state")}
            workers: list[Worker] | None = None
            queues: list[Queue] | None = None
            try:
                workers, queues = api.workers(), api.queues()
            except ApiError as error:
                if error.status != 403:
                    raise
    except OpenTinkerError as error:
        return {"error": str(error)}
    waiting = [
        {"job": job["id"], "name": job["name"], "state": job["state"], "for": job["waiting_for"]}
        for job in jobs
        if job["waiting_for"]
    ]
    return {
        "error": "",
        "jobs": {state: states[state] for state in (*ORDER, *sorted(states.keys() - set(ORDER))) if state in states},
        "complete": sum(states.values()) < MOST_COUNTED,
        "waiting": waiting,
        "workers": None if workers is None else _pools(workers),
        "queues": None if queues is None else {queue["stream"]: queue["messages"] for queue in queues},
    }


def _pools(workers: list[Worker]) -> dict[str, dict[str, int]]:
    pools: dict[str, dict[str, int]] = {}
    for worker in workers:
        pool = pools.setdefault(worker["pool"], {"running": 0, "leased": 0})
        pool["running"] += 1
        pool["leased"] += worker["lease"] is not None
    return pools


def _show_processes(state: dict[str, Any], data_dir: Any) -> None:
    say(f"{state.get('url')}  (pid {state.get('pid')}, data in {state.get('data_dir')})")
    rows = [
        [name, child["state"], child["pid"] or "-", child["restarts"], child["url"], child["log"]]
        for name, child in state.get("children", {}).items()
    ]
    print_table(["name", "state", "pid", "restarts", "url", "log"], rows, empty="still starting")
    for name, child in state.get("children", {}).items():
        if child["crash_loop"]:
            say(f"{name} keeps crashing; see: {as_typed('logs', name, '--data-dir', data_dir)}")


def _show_cluster(found: dict[str, Any]) -> None:
    if found["error"]:
        say(f"no answer from the server: {found['error']}")
        return
    if found["workers"] is not None:
        said = [f"{pool} {n['running']} ({n['leased']} leased)" for pool, n in found["workers"].items()]
        say(f"workers: {', '.join(said) or 'none'}")
    newest = "" if found["complete"] else f" (of the newest {MOST_COUNTED:,})"
    say(f"jobs: {', '.join(f'{count} {state}' for state, count in found['jobs'].items()) or 'none yet'}{newest}")
    if found["queues"] is not None:
        say(f"messages: {', '.join(f'{name} {count}' for name, count in found['queues'].items())}")
    for one in found["waiting"]:
        say(f"{one['job']} ({one['name']}, {one['state']}) waits for {one['for']}")
