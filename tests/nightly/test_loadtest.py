"""The load test itself: arrivals that wait for nobody, what is counted, the baseline, and one scenario for real."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest

from loadtest.__main__ import compared, options, run
from loadtest.scenarios import service
from loadtest.scenarios.dashboards import dashboards, polls
from loadtest.scenarios.jobs import Options
from loadtest.scenarios.scaling import SLEEP_S, WORK, Pace, compare
from loadtest.scenarios.service import STATE_S
from loadtest.support.open_loop import Latencies, arrivals, open_loop
from loadtest.support.report import Report, lines, ratios, write
from loadtest.support.target import ROOT, target
from opentinker.shared.data.pipeline_simulation import Pools, predict


def test_arrivals_are_drawn_beforehand_and_come_at_their_rate() -> None:
    times = arrivals(100.0, 50.0, seed=3)
    assert np.all(np.diff(times) > 0) and times[0] >= 0 and times[-1] < 50
    assert len(times) == pytest.approx(5000, rel=0.06)
    assert np.array_equal(times, arrivals(100.0, 50.0, seed=3))
    assert len(arrivals(0.001, 1.0, seed=0)) == 1


async def test_a_stall_is_charged_to_everybody_who_came_meanwhile() -> None:
    stalled = asyncio.Event()
    came = 0

    async def call(number: int) -> None:
        nonlocal came
        came += 1
        if number == 7:
            raise ValueError("no")
        if number == 9:
            stalled.set()
        await stalled.wait()

    found = Latencies()
    await open_loop(np.arange(10, dtype=np.float64) * 0.05, call, found)
    assert came == 10 and found.errors == {"ValueError: no": 1}
    seconds = sorted(found.seconds, reverse=True)
    assert len(seconds) == 9 and seconds[0] >= 0.45 and seconds[4] >= 0.2
    assert found.summary()["p50"] == pytest.approx(np.median(seconds))


async def test_who_finds_no_place_waits_at_his_own_cost() -> None:
    found = Latencies()
    await open_loop(np.zeros(4), lambda _: asyncio.sleep(0.05), found, most=1)
    assert all(second > 0.045 * (index + 1) for index, second in enumerate(sorted(found.seconds)))


def report(step_s: float, rate: float) -> Report:
    made = Report("steady", {"seconds": 1.0})
    made.figure("step", step_s, "s", "less")
    made.figure("rate", rate, "1/s", "more")
    made.figure("neither", 3.0, "x")
    made.latency("reads").seconds += [0.001, 0.002, 0.003]
    made.check("it holds", True, 1)
    return made


def test_ratios_say_how_many_times_worse(tmp_path: Path) -> None:
    before, now = report(1.0, 10.0).data(), report(2.0, 5.0).data()
    worse = ratios(now, before)
    assert worse == pytest.approx({"step": 2.0, "rate": 2.0, "reads p50": 1.0, "reads p99": 1.0})
    with pytest.raises(SystemExit, match="another options"):
        ratios({**now, "options": {"seconds": 2.0}}, before)
    assert ratios(report(1.0, 0.0).data(), before)["rate"] == math.inf
    page = write(report(2.0, 5.0), tmp_path, worse).read_text()
    assert "| step | 2 s | 2.00x |" in page and "- met: it holds" in page and "steady-latency.svg" in page
    assert (tmp_path / "steady-latency.svg").read_text().startswith("<?xml")
    assert orjson.loads((tmp_path / "steady.json").read_bytes())["worse"] == pytest.approx(worse)


def test_what_is_promised_is_a_table_and_a_miss_fails() -> None:
    made = report(1.0, 10.0)
    made.aim("cancel", 3.25, 5.0, "s")
    made.aim("decisions", 50.0, 50.0, "1/s", "more")
    assert made.good and made.data()["figures"]["cancel"]["value"] == 3.25
    made.aim("restart", 3.01, 3.0, "s")
    assert not made.good
    table = [line for line in lines(made.data(), {}) if "met" in line or "MISSED" in line]
    assert table[:3] == [
        "| cancel | <= 5 s | 3.25 | met |",
        "| decisions | >= 50 1/s | 50 | met |",
        "| restart | <= 3 s | 3.01 | MISSED |",
    ]


def test_a_number_beyond_the_tolerance_is_a_miss(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--save-baseline makes it"):
        compared(report(1.0, 10.0), options(["steady", "--tolerance", "2"]), tmp_path)
    assert compared(report(1.0, 10.0), options(["steady", "--save-baseline"]), tmp_path) == {}
    slower = report(1.9, 10.0)
    compared(slower, options(["steady", "--tolerance", "2"]), tmp_path)
    assert slower.good
    compared(slower, options(["steady", "--tolerance", "1.5"]), tmp_path)
    assert not slower.good and [what for what, good, _ in slower.checks if not good] == [
        "step is at most 1.5 times as bad"
    ]


@pytest.mark.parametrize(
    ("factor", "versions", "share", "missed"),
    [
        (1.0, 0.0, 0.0, []),
        (1.2, 0.5, 0.1, []),
        (1.5, 0.0, 0.0, ["throughput"]),
        (0.7, 0.0, 0.0, ["throughput"]),
        (1.0, 1.0, -0.25, ["staleness", "share"]),
    ],
)
def test_a_wrong_prediction_is_a_miss(factor: float, versions: float, share: float, missed: list[str]) -> None:
    pools = Pools(rollout_workers=2, env_workers=1, sessions=512)
    foreseen = predict(WORK, pools)
    seen = Pace(foreseen.step_s * factor, foreseen.staleness + versions, foreseen.trainer_waits + share)
    made = Report("steady", {})
    compare(made, seen, WORK, pools, "2 rollout workers")
    assert [what.split()[0] for what, good, _ in made.checks if not good] == missed
    assert made.good == (not missed)
    assert made.figures["throughput over the prediction, 2 rollout workers"].value == pytest.approx(1 / factor)


def test_what_is_not_measured_is_said() -> None:
    made = report(1.0, 10.0)
    made.note("2 rollout workers: the server has 1")
    assert lines(made.data(), {})[-1] == "- not measured: 2 rollout workers: the server has 1"
    assert made.data()["not_measured"] == ["2 rollout workers: the server has 1"]


def test_every_page_polls_at_its_own_pace() -> None:
    due = polls(200, 20.0, 0, [2.0, 10.0, 60.0])
    assert due == sorted(due) == polls(200, 20.0, 0, [2.0, 10.0, 60.0])
    counts = [sum(number == which for _, number in due) for which in range(3)]
    assert counts[:2] == [200 * 10, 200 * 2] and 0 < counts[2] < 200
    assert sum(when < 1.0 for when, number in due if number == 0) == pytest.approx(100, abs=30)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "no such scenario: nothing"),
        (["steady", "--rate", "0"], "--rate must be above 0"),
        (["dead-worker", "--url", "http://127.0.0.1:1"], "dead-worker: it kills processes of the service"),
        (["steady", "service", "--url", "http://127.0.0.1:1"], "service: it kills processes of the service"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(arguments)
    assert words in capsys.readouterr().err


def test_the_key_of_whoever_loads_a_server_is_sent_and_no_other() -> None:
    """Importing conftest.py would put that of the tests in its place."""
    code = "import os, loadtest.__main__; print(os.environ['OPENTINKER_API_KEY'])"
    environ = os.environ | {"OPENTINKER_API_KEY": "theirs", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "theirs"


async def test_only_this_machine_is_loaded() -> None:
    with pytest.raises(SystemExit, match="this machine alone"):
        await run("smoke", options(["smoke", "--url", "http://example.com:8080"]))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["smoke", "burst"])
async def test_scenarios_run_against_a_service_of_their_own(scenario: str) -> None:
    found = await run(scenario, options([scenario, "--jobs", "3", "--seconds", "2"]))
    assert found.good, found.checks
    assert {"job: queued to starting", "job: running to first step"} <= found.stages.keys()
    assert found.latencies and not any(one.errors for one in found.latencies.values())


@pytest.mark.slow
async def test_a_server_that_runs_already_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not how fast it is. It needs no module of ours, its jobs are left cancelled, and what is left out is said."""
    async with target(None, env_workers=2, ENV_MODULES="false") as at:
        monkeypatch.setenv("OPENTINKER_API_KEY", at.key or "")
        found = {}
        for name in ("steady", "slow-env"):
            chosen = options([name, "--url", at.url, "--seconds", "3", "--rate", "5"])
            found[name] = await run(name, chosen)
        pages = Report("dashboards", {})
        await dashboards(Options(url=at.url, seconds=3.0, pages=4), pages)
        states = [job["state"] for job in await at.client.jobs()]
    assert states == ["cancelled"] * 3
    assert found["steady"].notes == ["2 rollout workers: the server has 1"]
    assert "throughput over the prediction, 1 rollout worker" in found["steady"].figures
    slow = found["slow-env"]
    assert slow.notes and "throughput over the prediction, 2 env workers" in slow.figures
    assert max(slow.stages["step: whole, 2 env workers"].seconds) > SLEEP_S  # its environment was waited for
    assert pages.notes and len(pages.latencies["polls of pages"].seconds) >= 4
    assert [what for what, good, _ in pages.checks if not good and what.startswith(("no poll", "nobody"))] == []


@pytest.mark.slow
async def test_what_is_promised_is_measured_on_a_real_service(tmp_path: Path) -> None:
    """Not how long it takes: this machine is not quiet. What must hold besides does."""
    found = Report("service", {})
    async with target(None) as at:
        site = service.Site(at, found, tmp_path)
        await service.submissions(site, 1.0, 0)
        await service.cancels(site, {name: (service.STATES[name][0], 1) for name in ("queued", "running", "inference")})
        await service.handovers(site, rounds=1)
        await service.restarts(site, rounds=1)
    assert [aim.what for aim in found.aims] == [
        "submission, p99",
        "cancel in any state, until nothing is held",
        "freed workers are another job's",
        "scheduler killed and started again, until its first correct answer",
    ]
    assert all(0 < aim.seen < STATE_S for aim in found.aims)
    assert found.figures["sessions open at the cancel, running, at most"].value > 0
    assert [what for what, good, _ in found.checks if not good and "as long" not in what] == []
