"""`opentinker run job.toml`: runs one job in a separate data directory, from an empty machine to a trained model."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker.cli.common import as_typed, client, complain, say, shown
from opentinker.cli.specs import Changes, FromCheckpoint, SpecFile, Steps, WithOptimizer, read_spec
from opentinker.sdk.job_text import state_of
from opentinker.shared.types.core import parts_of, split_part
from opentinker.shared.types.errors import OpenTinkerError

if TYPE_CHECKING:
    from opentinker.cli.views.watch import Update
    from opentinker.client import Client

START_S = 120.0
STOP_S = 120.0
NO_ROLLOUTS = {"env-workers": 0, "rollout-workers": 0, "reference": 0}
"""A job that learns from rows needs a trainer alone."""
RESTART_S = 30.0
"""How long the HTTP API may be away, while its supervisor starts it again."""


def run(
    path: SpecFile,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Default: a new one, runs/NAME-TIME.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the HTTP API; 0: a free one.", min=0, max=65535)] = 0,
    env_workers: Annotated[int, typer.Option(help="Number of processes that play environments.", min=1)] = 1,
    steps: Steps = None,
    from_checkpoint: FromCheckpoint = None,
    with_optimizer: WithOptimizer = False,
    changes: Changes = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running after the job.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines: events, steps, and at the end the job.")
    ] = False,
) -> None:
    """Start everything, train one job, stop everything.

    Exit status 0 if the job succeeded, 1 if it failed, 4 if it was cancelled (Ctrl-C).
    """
    from opentinker.cli.views.watch import watch
    from opentinker.local.discovery import key_in, read_state
    from opentinker.sdk.spec_location import located
    from opentinker.shared.spec.labels import file_name

    began = time.time()
    if from_checkpoint is not None and data_dir is None:
        raise typer.BadParameter("--from-checkpoint needs the --data-dir that holds the other job")
    spec = read_spec(path, from_checkpoint, with_optimizer, changes, steps)
    if (kind := spec.get("kind")) in ("inference", "tinker"):
        named, options = ("an inference", []) if kind == "inference" else ("a Tinker", ["--shared-jobs", "4"])
        start, then = as_typed("up", *options), as_typed("submit", path)
        raise OpenTinkerError(
            f"{named} job has no end to wait for: start {start!r}, and from another terminal {then!r}"
        )
    home = (data_dir or Path("runs") / f"{file_name(spec['name'])}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: stop the job, then the machine
    with everything(home, port, processes_for(spec, env_workers), keep=keep) as url:
        api = client(url, patience_s=RESTART_S, key=key_in(read_state(home)) or None)
        with located(path):
            record = api.submit(spec, beside=path.parent)
        if not as_json:
            say(f"job {record['id']} on {url}, data in {home}")
            say(f"from another terminal: {_bearing(home)}{as_typed('watch', record['id'], '--url', url)}\n")
        try:
            last = watch(api, record["id"], as_json=as_json)
        except KeyboardInterrupt:
            complain("cancelling; Ctrl-C again to stop at once")
            last = finish(api, record["id"])
        if not as_json:
            report(last, home, url, began, api, keep=keep)
    from opentinker.cli.jobs import STATE_EXIT

    raise typer.Exit(STATE_EXIT[last.job["state"]])


def processes_for(spec: Mapping[str, Any], env_workers: int) -> dict[str, int]:
    """Return the options of `up` for a job as it is written: how many processes of each kind it needs."""
    resources = spec.get("resources", {})
    needed = dict(NO_ROLLOUTS)
    if spec.get("kind", "rl") in ("rl", "eval"):
        workers = int(resources.get("rollout_workers", 1))
        needed = {"env-workers": env_workers, "rollout-workers": workers, "reference": 1}
    if resources.get("trainer") == "shared":
        needed |= {"trainers": 0, "shared-jobs": max(1, len(spec.get("policies", {})))}
    return needed


def _bearing(home: Path) -> str:
    """Return the prefix for commands that would not find the key of the server on `home`."""
    from opentinker.local.discovery import KEY_FILE, finds, read_state

    file = read_state(home).get(KEY_FILE)
    return "" if file is None or finds(home) else f"OPENTINKER_API_KEY_FILE={shlex.quote(file)} "


@contextmanager
def everything(home: Path, port: int, workers: dict[str, int], *, keep: bool) -> Iterator[str]:
    """Run `opentinker up` as a separate process with these `workers` by option; yields the API's URL once it answers.

    Whoever runs it is its only user, so environments may be modules of theirs, unless the setting env_modules says
    otherwise. Raises OpenTinkerError.
    """
    from opentinker.local.discovery import is_running, read_state
    from opentinker.local.processes import tail
    from opentinker.local.up import AlreadyRunning
    from opentinker.shared.runtime.parent_death import hold_command

    if is_running(home):
        with_it = as_typed("submit", "JOB.toml", "--url", read_state(home).get("url", "URL"))
        raise AlreadyRunning(f"something runs on {home} already; submit to it with: {with_it}")
    log = home / "logs" / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    counts = [word for option, count in workers.items() for word in (f"--{option}", count)]
    options = ["--data-dir", home, "--port", port, *counts]
    argv = [sys.executable, "-P", "-m", "opentinker.cli", "up", *map(str, options)]
    if not keep:  # it ends with us, even if we are killed
        argv = hold_command(argv)
    environ = with_own_modules(dict(os.environ))
    with log.open("wb") as out:
        # A separate session: Ctrl-C reaches us alone, and we stop the job before the machine.
        process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield _wait_api(home, process, log)
    except OpenTinkerError as error:
        keep = False
        if process.poll() is not None:
            raise OpenTinkerError(f"the processes have ended; last lines of {log}:\n{tail(log, 15)}") from error
        raise
    except BaseException:
        keep = False
        raise
    finally:
        if not keep and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                sys.stderr.write(f"had to kill what was still running; last lines of {log}:\n{tail(log, 10)}\n")


def with_own_modules(environ: dict[str, str]) -> dict[str, str]:
    """Enable env_modules unless it is set, in the environment or in the settings file. Raises SpecError."""
    from opentinker.shared.settings_sources import PREFIX, names

    return environ if names("env_modules", environ) else {**environ, f"{PREFIX}ENV_MODULES": "true"}


def _wait_api(home: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    from opentinker.local.discovery import read_state
    from opentinker.local.processes import http_ok, tail

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise OpenTinkerError(f"could not start:\n{tail(log, 15)}")
        state = read_state(home)
        scheduler = state.get("children", {}).get("scheduler", {})
        if scheduler.get("crash_loop"):
            raise OpenTinkerError(f"the scheduler keeps crashing:\n{tail(Path(scheduler['log']), 15)}")
        url = str(state.get("url", ""))
        if scheduler.get("state") == "running" and http_ok(int(url.rpartition(":")[2]), "/healthz"):
            return url
        time.sleep(0.05)
    raise OpenTinkerError(f"the HTTP API did not answer within {START_S:.0f} s; see {log}")


def finish(api: Client, job_id: str) -> Update:
    """Cancel, and wait until the job's workers have let go: the trainer saves what it has."""
    from opentinker.cli.views.watch import follow
    from opentinker.shared.types.errors import Conflict

    with suppress(Conflict):  # it has just ended by itself
        api.cancel(job_id)
    *_, last = follow(api, job_id)
    deadline = time.monotonic() + STOP_S
    while api.job(job_id)["workers"] and time.monotonic() < deadline:
        time.sleep(0.1)
    return last


def report(last: Update, home: Path, url: str, began: float, api: Client, *, keep: bool) -> None:
    """The curve, the figures, and what to type next. `began`: Unix seconds of the command's start."""
    from opentinker.cli.views.charts import chart
    from opentinker.cli.views.watch import TAUGHT, duration

    job, curves = last.job, last.curves
    say("")
    shown_at_the_end = (("reward", "reward/mean", None), ("exact", "exact", 0.0), ("loss", "loss", None))
    for policy, own in curves.policies.items():
        for title, name, low in (*shown_at_the_end, TAUGHT, ("validation loss", "val/loss", None)):
            values = own.series(name)
            if len(values) > 1:
                say(f"{policy} {title} by step, 1 to {own.last_step}".lstrip())
                say("\n".join(chart(values, 76, 8, low=low)) + "\n")
    plays = job["kind"] == "eval"
    unit, step = ("episode", job["step"]) if plays else ("step", curves.last_step or job["step"])
    say(f"{job['name']} {state_of(job)} at {unit} {step}/{job['steps'] or '?'} in {duration(time.time() - began)}")
    for name, value in job.get("result", {}).get("values", {}).items():
        say(f"  {name} {value:.6g}")
    for line in figures(last, began):
        say("  " + line)
    part = parts_of(job["id"], list(job.get("policies", {})))[0]
    named = ("--policy", split_part(part)[1]) if job.get("policies") else ()
    found = [] if plays else api.checkpoints(part)
    if not found:
        say(f"\nlogs are in {shown(home / 'logs')}")
        return
    step = found[-1]["step"]
    newest = home / "jobs" / part / "checkpoints" / f"step-{step:06d}"
    layout = "a PEFT adapter" if job.get("spec", {}).get("model", {}).get("lora") else "a Hugging Face model"
    whose = f" of policy {named[1]}" if named else ""
    say(f"\nThe checkpoint of step {step}{whose} is {layout}:\n  {shown(newest)}\n\nnext:")
    if not keep:
        say(f"  {as_typed('up', '--data-dir', home, '--port', url.rpartition(':')[2])}")
        say("      # the same machine again, with this job in its list; then, from another terminal:")
    key = _bearing(home)
    say(f"  {key}{as_typed('jobs', '--url', url)}")
    say(f"  {key}{as_typed('download', job['id'], 'my-model', *named, '--url', url)}")
    newest_of_job = f"{part}@{step}"
    say(f"  {key}{as_typed('submit', 'NEXT.toml', '--from-checkpoint', newest_of_job, '--url', url)}")
    say("      # another job, which begins with these weights")
    say(f"  {as_typed('spec')}")
    say("      # every setting of a job, to edit an example and run your own")


SUPERVISED = (
    ("loss", "loss"),
    ("accuracy", "accuracy"),
    ("accuracy of rewards", "rewards/accuracy"),
)


def figures(last: Update, began: float) -> list[str]:
    """Describe the measurements. `began`: Unix seconds of the command's start."""
    from opentinker.cli.views.charts import short
    from opentinker.cli.views.watch import duration, validated

    curves = last.curves
    order = sorted(curves.steps)
    if not order:
        return ["no step was trained"]
    first_s, created = curves.times[order[0]], float(last.job["created"])
    first_what = "reward" if any(own.series("reward/mean") for own in curves.policies.values()) else "loss"
    lines = [
        f"first {first_what} {duration(first_s - began)} after start ({duration(first_s - created)} after submission)"
    ]
    for policy, own in curves.policies.items():
        for label, name in (("reward", "reward/mean"), ("exact", "exact"), ("teacher kl", "teacher/kl"), *SUPERVISED):
            first, end = own.mean(name, own.having(name)[:1]), own.recent(name)
            if first is not None and end is not None:
                line = f"{policy} {label} {first:.2f} at the first step, {end:.2f} over the last 10"
                lines.append(line.lstrip())
    evaluated = sorted(curves.validations)
    for step in dict.fromkeys([*evaluated[:1], *evaluated[-1:]]):
        values = curves.validations[step]
        lines.append(f"validation at step {step}: {validated(values)}, {values['val/episodes']:.0f} episodes")
    if held := curves.series("val/loss"):
        lines.append(f"validation loss {held[0]:.2f} at first, {held[-1]:.2f} at last")
    if len(order) > 1:
        span = curves.times[order[-1]] - curves.times[order[0]]
        lines.append(f"training {duration(span)}, {short((order[-1] - order[0]) / span)} steps/s")
    for policy, own in curves.policies.items():
        for label, name in (("mismatch", "mismatch/mean"), ("staleness", "staleness/mean"), ("entropy", "entropy")):
            value = own.mean(name, order)
            if value is not None:
                lines.append(f"{policy} {label} {short(value)} on average".lstrip())
        wait = own.mean("trainer/wait_share", order)
        if wait is not None:
            whose = f"trainer of {policy}" if policy else "trainer"
            lines.append(f"the {whose} waited {wait:.0%} of its time for trajectories")
    if curves.tokens_per_s is not None:
        lines.append(f"generated {short(curves.tokens_per_s)} tokens/s")
    return lines
