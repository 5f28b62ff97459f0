"""`opentinker run` and `up` with all real processes and the toy engine: from one command to nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from opentinker.cli import app
from opentinker.cli.specs import of_length
from opentinker.local.discovery import read_state
from opentinker.shared.types.errors import SpecError
from tests.conftest import start_nats, start_valkey, until
from tests.integration.client.test_cli import ROOT, opentinker
from tests.support.cluster import toy_model
from tests.support.listening import runs

pytestmark = pytest.mark.slow

SPEC = """
name = "toy"
[model]
base = "{model}"
chat_template = "plain"
[environment]
name = "copy_digits"
[algorithm]
group_size = 4
groups_per_batch = 4
[rollout]
engine = "toy"
max_tokens = 6
[train]
learner = "simulated"
simulated_step_s = 0.02
steps = {steps}
"""


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has no key of any server: the one that `up` makes is found."""
    for name in ("OPENTINKER_API_KEY", "OPENTINKER_ADMIN_KEY_FILE"):
        monkeypatch.delenv(name)


def spec(directory: Path, model: Path, steps: int) -> Path:
    path = directory / "job.toml"
    path.write_text(SPEC.format(model=model, steps=steps))
    return path


@contextmanager
def started(*arguments: object, log: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        command = [sys.executable, "-m", "opentinker.cli", *map(str, arguments)]
        process = subprocess.Popen(command, env={**os.environ, **environ}, stdout=out, stderr=out)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def pids(data_dir: Path) -> list[int]:
    """Of `up` and all its children."""
    state = orjson.loads((data_dir / "run" / "state.json").read_bytes())
    return [state["pid"], *(child["pid"] for child in state["children"].values() if child["pid"])]


def test_a_shorter_run_has_no_longer_warm_up() -> None:
    train = {"steps": 100, "warmup_steps": 5, "lr": 0.1}
    given = {"name": "x", "model": {"base": "m"}, "environment": {"name": "copy_digits"}, "train": train}
    assert of_length(given, 3)["train"] == {"steps": 3, "warmup_steps": 3, "lr": 0.1}
    assert of_length(given, 7)["train"]["warmup_steps"] == 5
    assert given["train"] is train and train["steps"] == 100
    with pytest.raises(SpecError):
        of_length(given, 0)


def test_one_command_trains_a_job_and_leaves_nothing_running(tmp_path: Path, tiny: Path) -> None:
    """Of an environment of one's own, which `run` may import without being told."""
    data_dir, job = tmp_path / "data", spec(tmp_path, tiny, 30)
    (tmp_path / "largest.py").write_text(readme("python"))
    job.write_text(job.read_text().replace('"copy_digits"', '"largest:LargestDigit"'))
    done = opentinker("run", job, "--data-dir", data_dir, cwd=tmp_path, OPENTINKER_PRELOAD="false")
    assert done.returncode == 0, done.stdout + done.stderr
    for wanted in (
        "step 30/30",
        "reward by step, 1 to 30",
        "toy succeeded: nothing was learned",
        " at step 30/30 in ",
        "next:",
        "first reward",
        "--from-checkpoint j-",
    ):
        assert wanted in done.stdout
    assert orjson.loads(opentinker("status", "--data-dir", data_dir, "--json").stdout)["running"] is False
    children = orjson.loads((data_dir / "run" / "state.json").read_bytes())["children"]
    assert {child["state"] for child in children.values()} == {"stopped"}


def readme(language: str) -> str:
    """The block of this language that shows an environment of one's own."""
    text = (ROOT / "README.md").read_text().partition("## Your own environment")[2]
    return text.partition(f"```{language}\n")[2].partition("```")[0]


@pytest.mark.nightly
async def test_every_command_against_servers_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` beside external NATS and Valkey, then what a user types, in the directory of the README's environment."""
    data, log = tmp_path / "data", tmp_path / "up.log"
    toy_model(tmp_path / "runs" / "models" / "tiny")
    (tmp_path / "largest.py").write_text(readme("python"))
    toy = '\n[rollout]\nengine = "toy"\n[train]\nlearner = "simulated"\nsimulated_step_s = 0.02\ncheckpoint_every = 5\n'
    lines = [line for line in readme("toml").splitlines() if not line.startswith(("rollout", "train"))]
    for name, steps in (("short", 10), ("long", 100_000)):
        (tmp_path / f"{name}.toml").write_text("\n".join(lines) + f"{toy}steps = {steps}\n")

    def typed(*arguments: str, exit_status: int = 0) -> str:
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == exit_status, f"{arguments}: {done.output}{done.exception!r}"
        return done.stdout

    monkeypatch.chdir(tmp_path)
    for name in ("OPENTINKER_URL", "OPENTINKER_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    nats, valkey = start_nats(tmp_path), start_valkey(tmp_path)
    up = ["up", "--port", 0, "--nats-url", nats.url, "--redis-url", valkey.url, "--reference", 0]
    switches = {"OPENTINKER_ENV_MODULES": "1", "OPENTINKER_PRELOAD": "false"}
    try:
        with started(*up, log=log, **switches) as process:
            await until(lambda: read_state(data).get("ready") or process.poll() is not None)
            assert "env-0" in typed("status") and "nats" not in typed("status")
            job = typed("submit", "short.toml").split()[0]
            assert "step 10/10" in typed("watch", job)
            assert f"{job}  largest-digit  succeeded  10/10" in typed("jobs")
            assert '"trained": 80' in typed("job", job, "--full") and "largest:LargestDigit" in typed("job", job)
            assert " succeeded " in typed("events", job) and " model_loaded " in typed("events", job, "--follow")
            assert [line.split()[0] for line in typed("checkpoints", job).splitlines()] == ["step", "5", "10"]
            assert typed("download", job, "mine").startswith(str(tmp_path / "mine"))
            assert (tmp_path / "mine" / "manifest.json").exists()
            further = typed("submit", "short.toml", "--from-checkpoint", f"{job}@5").split()[0]
            assert "step 10/10" in typed("watch", further) and f"{job}@5" in typed("events", further)
            other = typed("submit", "long.toml").split()[0]
            await until(lambda: "running" in typed("job", other))
            assert typed("cancel", other) == f"{other}  cancelled\n"
            assert "cancelled" in typed("watch", other, exit_status=4)
            assert typed("down").startswith("stopped")
            await until(lambda: process.poll() is not None)
            assert process.returncode == 0 and not any(map(runs, pids(data)))
            typed("status", exit_status=3)
    finally:
        nats.kill()
        valkey.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)])
async def test_run_ends_with_everything_it_started(tmp_path: Path, tiny: Path, number: signal.Signals) -> None:
    data_dir, log = tmp_path / "data", tmp_path / "run.log"
    command = ("run", spec(tmp_path, tiny, 100_000), "--data-dir", data_dir)
    with started(*command, log=log, OPENTINKER_PRELOAD="false") as process:
        await until(lambda: "\nstep 1/" in log.read_text())
        running = pids(data_dir)
        assert len(running) == 8 and all(map(runs, running))
        os.kill(process.pid, number)
        await until(lambda: process.poll() is not None)
        await until(lambda: not any(map(runs, running)))
    if number == signal.SIGINT:
        assert process.returncode == 4
        said = log.read_text()
        assert "cancelled" in said and "Traceback" not in said
        (saved,) = (data_dir / "jobs").glob("j-*/checkpoints/step-*")  # what was trained is not lost
        assert f"The checkpoint of step {int(saved.name[5:])} is" in said
