"""Sweeps of 32 jobs: beside others with a kill of the scheduler, and by somebody who knows the documentation alone."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import orjson
import pytest

from opentinker.local.discovery import read_state
from tests.conftest import Figure, until
from tests.e2e.test_run import started
from tests.e2e.test_sweeps import quick, sweep_beside_others
from tests.support.cluster import ROOT, toy_cluster, toy_model

SKILLS = [round(0.8 * place / 30, 4) for place in range(31)]
GUIDE = (ROOT / "docs/sweeps.md").read_text()
FIRST_SWEEP_S = 900.0
"""From the clone to the end of a first sweep of one's own, without what `make setup` downloads."""


async def test_a_sweep_of_32_jobs_ends_with_the_best_and_starves_nobody(tmp_path: Path, figure: Figure) -> None:
    async with toy_cluster(tmp_path) as (cluster, model):
        found = await sweep_beside_others(cluster, quick(model, [*SKILLS[:12], 1.0, *SKILLS[12:]]), others=6)
    assert found["finished"] is not None
    seconds = found["finished"] - found["created"]
    figure(f"a sweep of {found['jobs']} jobs beside 6 others: {seconds:.0f} s, best {found['best']}")


def block(heading: str, language: str) -> str:
    """Return the first block of a language below a heading of docs/sweeps.md."""
    return GUIDE.partition(f"## {heading}\n")[2].partition(f"```{language}\n")[2].partition("```")[0]


def commands(heading: str) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in block(heading, "bash").splitlines() if line.strip()]


class Stranger:
    """Types the documentation's commands in a fresh clone; only `make setup` is replaced, by this installation."""

    def __init__(self, clone: Path) -> None:
        subprocess.run(["git", "clone", "--quiet", "--local", ROOT, clone], check=True)
        (clone / ".venv").symlink_to(ROOT / ".venv")
        self.clone = clone
        unknown = ("OPENTINKER_URL", "OPENTINKER_API_KEY", "OPENTINKER_ADMIN_KEY_FILE", "OPENTINKER_DATA_DIR")
        self.environ = {name: value for name, value in os.environ.items() if name not in unknown}
        self.environ |= {"PATH": f"{clone / '.venv/bin'}:{os.environ['PATH']}"}

    def type(self, *words: str) -> str:
        done = subprocess.run(
            words, cwd=self.clone, env=self.environ, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stranger:
    made = Stranger(tmp_path / "clone")
    monkeypatch.chdir(made.clone)
    for name in set(os.environ) - set(made.environ):
        monkeypatch.delenv(name)
    return made


@pytest.mark.timeout(1800)
async def test_a_stranger_has_a_first_sweep_of_their_own_by_the_documentation(
    stranger: Stranger, tmp_path: Path, figure: Figure
) -> None:
    began = time.monotonic()
    setup, make_model, up, submit = commands("A first sweep")
    assert setup == ["make", "setup"]
    stranger.type(*make_model)
    with started(*up[1:], "--port", 0, log=tmp_path / "up.log") as process:
        await _is_ready(stranger, process)
        said = await asyncio.to_thread(stranger.type, *submit)
        assert "succeeded" in said and "10 of 10 trials" in said
        written = (stranger.clone / "examples/bandit.toml").read_text()
        short = re.sub(r"(?m)^(steps|warmup_steps|checkpoint_every) = .*", r"\1 = 2", written)
        (stranger.clone / "job.toml").write_text(f"{short}\n{block('Your own', 'toml')}")
        validate, own, *look = commands("Your own")
        assert "sweep" in stranger.type(*validate)
        id = (await asyncio.to_thread(stranger.type, *own)).split()[0]
        shown = [
            await asyncio.to_thread(stranger.type, *(id if word == "SWEEP" else word for word in line)) for line in look
        ]
        assert "6 of 6 trials" in shown[0], shown[0]
        assert id in shown[1] and shown[2].count("succeeded") == 6
        seconds = time.monotonic() - began
        assert seconds < FIRST_SWEEP_S
        figure(f"a stranger's first sweep under `opentinker up`, after `make setup`: {seconds:.0f} s")
        await _stop(stranger, process)


@pytest.mark.timeout(1200)
async def test_32_jobs_under_up_outlive_a_kill_end_with_the_best_and_let_another_job_pass(
    stranger: Stranger, tmp_path: Path, figure: Figure
) -> None:
    toy_model(stranger.clone / "runs/models/tiny")
    skills = [*SKILLS[:12], 1.0, *SKILLS[12:]]
    spec = (stranger.clone / "examples/sweep_toy.toml").read_text().partition("[sweep]")[0]
    (stranger.clone / "toy.toml").write_text(spec)
    varied = f"sweep.parameters.rollout.toy.skill={orjson.dumps(skills).decode()}"
    with started("up", "--port", 0, "--reference", 0, log=tmp_path / "up.log", OPENTINKER_PRELOAD="false") as process:
        await _is_ready(stranger, process)
        began = time.monotonic()
        made = stranger.type("opentinker", "submit", "toy.toml", "--set", varied, "--set", 'sweep.metric="exact"')
        id = made.split()[0]
        await until(lambda: _finished(stranger, id), lambda count: count >= 4, timeout_s=300)
        os.kill(_scheduler_of(process), signal.SIGKILL)
        await asyncio.to_thread(stranger.type, "opentinker", "submit", "toy.toml", "--watch")
        state = orjson.loads(stranger.type("opentinker", "sweep", id, "--json"))
        assert state["state"] == "running", "the other job waited for the whole sweep"
        await asyncio.to_thread(stranger.type, "opentinker", "sweep", id, "--watch")
        found = orjson.loads(stranger.type("opentinker", "sweep", id, "--json"))
        assert (found["state"], found["trials"]) == ("succeeded", {"finished": 32})
        assert found["best"]["settings"] == {"rollout.toy.skill": 1.0}
        assert found["jobs"] == 32, "the killed scheduler's jobs were not submitted again"
        seconds = time.monotonic() - began
        figure(f"a sweep of 32 toy jobs with a kill of the scheduler under `opentinker up`: {seconds:.0f} s")
        await _stop(stranger, process)


def _finished(stranger: Stranger, id: str) -> int:
    found = orjson.loads(stranger.type("opentinker", "sweep", id, "--json"))
    return int(found["trials"].get("finished", 0))


def _scheduler_of(process: subprocess.Popen[bytes]) -> int:
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "opentinker.services.scheduler"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(found.stdout)


async def _is_ready(stranger: Stranger, process: subprocess.Popen[bytes]) -> None:
    data = stranger.clone / "data"
    await until(lambda: read_state(data).get("ready") or process.poll() is not None, timeout_s=180)
    assert process.poll() is None


async def _stop(stranger: Stranger, process: subprocess.Popen[bytes]) -> None:
    stranger.type("opentinker", "down")
    await until(lambda: process.poll() is not None)
