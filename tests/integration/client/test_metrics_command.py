"""`opentinker metrics`, and `opentinker env list` against a server."""

from __future__ import annotations

import asyncio
import csv
import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from opentinker import AsyncClient
from opentinker.envs.registry import BUILT_IN
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import METRIC
from opentinker.shared.spec.built_in_environments import SUMMARIES
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Pool
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import until
from tests.integration.client.test_cli import environ, typed
from tests.support.api import OPERATOR, SPEC
from tests.support.factories import make_point, make_spec
from tests.unit.shared.spec.signalling_job import BASE as SIGNALLING

ROOT = Path(__file__).parents[3]


@pytest.fixture
def on(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("OPENTINKER_API_KEY", OPERATOR)
    return ["--url", client.url]


async def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(typed, *arguments)


@pytest.fixture
async def job(client: AsyncClient, bus: Bus) -> str:
    """A job of 30 steps, with an evaluation at the 30th."""
    id = (await client.submit(make_spec()))["id"]
    for step in range(1, 31):
        point = make_point(id, step, {"reward/mean": step / 30, "train/loss": 1.0 / step})
        await bus.publish(METRIC, point, f"{id}/{step}", job=id, source="trainer")
    point = make_point(id, 30, {"val/exact": 0.5}, "validation")
    await bus.publish(METRIC, point, f"{id}/val", job=id, source="validation")
    await until(lambda: client.metrics(id), lambda found: len(found) == 31)
    return id


async def test_metrics_are_summed_up_or_shown_by_step(job: str, on: list[str]) -> None:
    lines = (await run("metrics", job, *on)).stdout.splitlines()
    assert lines[0].split() == ["metric", "points", "step", "newest", "lowest", "highest"]
    assert lines[1].split() == ["reward/mean", "30", "30", "1", "0.033333", "1"]
    assert [line.split()[0] for line in lines[2:4]] == ["train/loss", "val/exact"]
    by_step = (await run("metrics", job, "reward/mean", *on)).stdout.splitlines()
    assert by_step[0].split() == ["step", "source", "reward/mean"] and by_step[1].split()[0] == "11"
    assert "the newest 20 of 30 rows" in by_step[-1] and "val/exact" not in by_step[0]
    assert len((await run("metrics", job, "reward/mean", "-n", 30, *on)).stdout.splitlines()) == 31
    assert "step  source" in (await run("metrics", job, "val/*", *on)).stdout
    assert len((await run("metrics", job, "--source", "validation", *on)).stdout.splitlines()) == 4


async def test_a_metric_that_was_not_reported_is_told_with_the_one_that_was_meant(
    client: AsyncClient, bus: Bus, store: Store, on: list[str]
) -> None:
    """Also where its policy is at another place, and where others of the names are there."""
    id = (await client.submit({**SIGNALLING}))["id"]
    point = make_point(id, 1, {"speaker/val/rating": 1.0, "speaker/val/winrate/random": 0.5}, "validation~speaker")
    await bus.publish(METRIC, point, f"{id}/val", job=id, source="validation~speaker")
    await until(lambda: client.metrics(id), lambda found: len(found) == 1)
    for name, right in (("winrate/speaker/random", "winrate/random"), ("rating/speaker", "rating")):
        unknown = await run("metrics", id, f"val/{name}", *on)
        assert unknown.returncode == 2 and f"did you mean speaker/val/{right}?" in " ".join(unknown.stderr.split())
    some = await run("metrics", id, "speaker/val/rating", "val/rating/speaker", *on)
    assert some.returncode == 0 and "no val/rating/speaker; did you mean speaker/val/rating?" in some.stderr
    await store.transition(id, JobState.CANCELLED)
    watched = await run("metrics", id, "val/rating/speaker", "--watch", *on)
    assert watched.returncode == 2 and "did you mean speaker/val/rating?" in " ".join(watched.stderr.split())


async def test_metrics_are_exported_as_csv_and_json(job: str, on: list[str]) -> None:
    rows = list(csv.DictReader(io.StringIO((await run("metrics", job, "-o", "csv", *on)).stdout)))
    assert len(rows) == 31 and float(rows[29]["reward/mean"]) == 1.0 and rows[29]["val/exact"] == ""
    assert rows[30]["source"] == "validation" and float(rows[30]["val/exact"]) == 0.5
    found = orjson.loads((await run("metrics", job, "train/*", "-n", 2, "--json", *on)).stdout)
    assert [(one["step"], list(one["values"])) for one in found] == [(29, ["train/loss"]), (30, ["train/loss"])]
    unknown = await run("metrics", job, "rewrd/mean", *on)
    assert unknown.returncode == 2 and "it has: reward/mean, train/loss, val/exact" in unknown.stderr
    assert (await run("jobs", "-o", "csv", *on)).returncode == 2, "no other command has CSV"


async def test_metrics_are_watched_until_the_job_ends(job: str, store: Store, on: list[str]) -> None:
    await store.transition(job, JobState.CANCELLED)
    shown = await run("metrics", job, "val/exact", "--watch", *on)
    assert shown.returncode == 0 and shown.stdout == "step 30  val/exact 0.5\n"
    lines = (await run("metrics", job, "--watch", "--json", *on)).stdout.splitlines()
    assert len(lines) == 31 and orjson.loads(lines[0])["values"]["train/loss"] == 1.0


async def test_the_shell_completes_what_the_server_lists(client: AsyncClient, store: Store, on: list[str]) -> None:
    mine = (await client.submit(make_spec(name="mine")))["id"]
    other = (await client.submit(make_spec(name="other: one")))["id"]
    offer = {"environments": ["bandit", "copy_digits"]}
    await store.beat(WorkerInfo(id="env-0", incarnation="i", pool=Pool.ENV, host="here", pid=1, detail=offer), 60)

    def completed(line: str) -> list[str]:
        command = [Path(sys.executable).with_name("opentinker")]
        words = {"COMP_WORDS": f"opentinker {line}", "COMP_CWORD": str(len(line.split(" ")))}
        asked = environ() | words | {"_OPENTINKER_COMPLETE": "complete_bash", "OPENTINKER_URL": client.url}
        asked |= {"OPENTINKER_API_KEY": OPERATOR}
        return subprocess.run(command, env=asked, capture_output=True, text=True, check=True).stdout.split()

    async def offered(line: str) -> list[str]:
        return await asyncio.to_thread(completed, line)

    assert sorted(await offered("job j-")) == sorted([mine, other])
    assert await offered(f"cancel {mine[:5]}") == [mine], "several jobs too"
    assert await offered(f"watch {other}") == [other]
    assert await offered("env about cop") == ["copy_digits"]
    assert await offered(f"download {mine[:5]}") == await offered(f"logs {mine[:5]}") == [mine]
    assert await offered(f"publish {mine[:5]}") == await offered(f"usage --job {mine[:5]}") == [mine]
    assert await offered("jobs --environment ban") == ["bandit"]
    assert await offered("sweep s-") == []

    await client.push_environment(ROOT / "examples/environments/parity")
    assert await offered("env show par") == await offered("env delete par") == ["parity"]


def begun(command: list[str], file: Path) -> subprocess.Popen[bytes]:
    with file.open("w") as out:
        return subprocess.Popen(command, stdout=out, env={**environ(), "OPENTINKER_API_KEY": OPERATOR})


async def test_lists_are_watched_until_interrupted(
    client: AsyncClient, store: Store, on: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "lines"
    command = [sys.executable, "-m", "opentinker.cli", "sweeps", "--watch", *on]
    process = begun(command, file)
    try:
        await until(lambda: "no sweeps yet" in file.read_text())
        made = await client.sweep(SPEC, {"parameters": {"rollout.toy.skill": [0.1, 0.2]}})
        await until(lambda: made["id"] in file.read_text())
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 60) == 130
    finally:
        process.kill()
        process.wait()


async def test_environments_are_listed_with_those_that_are_built_in(
    client: AsyncClient, store: Store, on: list[str]
) -> None:
    assert "unknown while no env worker runs" in (await run("env", "list", *on)).stdout
    offer = {"environments": sorted(BUILT_IN)}
    await store.beat(WorkerInfo(id="env-0", incarnation="i", pool=Pool.ENV, host="here", pid=1, detail=offer), 60)
    shown = (await run("env", "list", *on)).stdout
    assert "copy_digits" in shown.split() and set(BUILT_IN) <= set(shown.split()) and "none yet" in shown
    found = orjson.loads((await run("env", "list", "--json", *on)).stdout)
    assert found == {"environments": [], "built_in": sorted(BUILT_IN), "summaries": SUMMARIES}
    assert re.search(r"(?m)^gsm8k +Grade-school word problems", shown), shown
    assert await client.environments() == []
