"""The load test itself: arrivals that wait for nobody, what is counted, the baseline, and one scenario for real."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import orjson
import pytest

from loadtest import _service
from loadtest.__main__ import compared, options, run
from loadtest._open_loop import Latencies, arrivals, open_loop
from loadtest._report import Report, lines, ratios, write
from loadtest._service import STATE_S
from loadtest._target import target


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


def test_a_number_beyond_the_tolerance_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.__main__.BASELINES", tmp_path)
    with pytest.raises(SystemExit, match="--save-baseline makes it"):
        compared(report(1.0, 10.0), options(["steady", "--tolerance", "2"]))
    assert compared(report(1.0, 10.0), options(["steady", "--save-baseline"])) == {}
    slower = report(1.9, 10.0)
    compared(slower, options(["steady", "--tolerance", "2"]))
    assert slower.good
    compared(slower, options(["steady", "--tolerance", "1.5"]))
    assert not slower.good and [what for what, good, _ in slower.checks if not good] == [
        "step is at most 1.5 times as bad"
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "no such scenario: nothing"),
        (["steady", "--rate", "0"], "--rate must be above 0"),
        (["dead-worker", "--url", "http://127.0.0.1:1"], "starts and ends processes"),
    ],
)
def test_options_that_cannot_be_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options(arguments)
    assert words in capsys.readouterr().err


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
async def test_what_is_promised_is_measured_on_a_real_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not how long it takes: this machine is not quiet. What must hold besides does."""
    monkeypatch.setattr(_service, "ROUNDS", 1)
    found = Report("service", {})
    async with target(None) as at:
        site = _service.Site(at, found, tmp_path)
        await _service.submissions(site, 1.0, 0)
        await _service.cancels(site, {"queued": (_service.queued, 1), "inference": (_service.serving, 1)})
        await _service.handovers(site)
        await _service.restarts(site)
    assert [aim.what for aim in found.aims] == [
        "submission, p99",
        "cancel in any state, until nothing is held",
        "freed workers are another job's",
        "scheduler killed and started again, until its first correct answer",
    ]
    assert all(0 < aim.seen < STATE_S for aim in found.aims)
    assert [what for what, good, _ in found.checks if not good and "as long" not in what] == []
