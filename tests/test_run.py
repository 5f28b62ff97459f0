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

from opentinker.cli.run import of_length
from opentinker.shared.errors import SpecError
from tests.conftest import until
from tests.test_cli import opentinker
from tests.test_supervisor import alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    script = Path(__file__).resolve().parent.parent / "examples" / "models" / "make_tiny.py"
    subprocess.run([sys.executable, str(script), str(directory)], check=True, capture_output=True, timeout=120)
    return directory


def spec(directory: Path, model: Path, steps: int) -> Path:
    path = directory / "job.toml"
    path.write_text(SPEC.format(model=model, steps=steps))
    return path


@contextmanager
def started(*arguments: object, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        command = [sys.executable, "-m", "opentinker.cli", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=out, stderr=out)
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


def test_one_command_trains_a_job_and_leaves_nothing_running(tmp_path: Path, model: Path) -> None:
    data_dir = tmp_path / "data"
    done = opentinker("run", spec(tmp_path, model, 30), "--data-dir", data_dir, timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for wanted in ("step 30/30", "reward by step, 1 to 30", "toy succeeded at step 30/30", "next:", "first reward"):
        assert wanted in done.stdout
    assert orjson.loads(opentinker("status", "--data-dir", data_dir, "--json").stdout)["running"] is False
    children = orjson.loads((data_dir / "run" / "state.json").read_bytes())["children"]
    assert {child["state"] for child in children.values()} == {"stopped"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_run_ends_with_everything_it_started(tmp_path: Path, model: Path, number: signal.Signals) -> None:
    data_dir, log = tmp_path / "data", tmp_path / "run.log"
    with started("run", spec(tmp_path, model, 100_000), "--data-dir", data_dir, log=log) as process:
        await until(lambda: "\nstep 1/" in log.read_text(), 120)
        running = pids(data_dir)
        assert len(running) == 8 and all(map(alive, running))
        os.kill(process.pid, number)
        await until(lambda: process.poll() is not None, 60)
        await until(lambda: not any(map(alive, running)), 30)
    if number == signal.SIGINT:
        assert process.returncode == 4
        assert "cancelled" in log.read_text() and "Traceback" not in log.read_text()
