"""A sweep as an object: how it waits, what it returns, and how it shows itself."""

from __future__ import annotations

import asyncio
import io
import threading
from typing import Any

import pytest
from rich.console import Console
from rich.pretty import pretty_repr

from opentinker import Client
from opentinker.client import ApiError, ApiNotFound, AsyncClient
from opentinker.client.sweep_handle import SweepHandle
from opentinker.sdk.cards import sweep_card, sweep_progress
from opentinker.services.scheduler import service
from opentinker.services.scheduler.sweeps import controller
from opentinker.services.scheduler.sweeps.controller import SweepController
from opentinker.services.scheduler.sweeps.running_sweep import RunningSweep
from opentinker.shared.runtime.service import Context
from tests.support.api import OPERATOR, SPEC, Http
from tests.support.scheduling import built_with
from tests.support.sweeps import SKILL, play_all, skill


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    built_with(monkeypatch, service, SweepController, poll_s=0.05, step_s=0.05)
    built_with(monkeypatch, controller, RunningSweep, late_s=1.0)


async def test_a_sweep_is_started_waited_for_and_read(
    url: str, http: Http, ctx: Context, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(started: threading.Event, of: list[str]) -> None:
        with Client(url, api_key=OPERATOR) as own:
            sweep = own.start_sweep({**SPEC, "name": "<b>mine</b>"}, {"parameters": {SKILL: [0.1, 0.7, 0.3]}})
            of.append(sweep.id)
            assert sweep.state == "running" and not sweep.is_over and sweep.best is None
            with pytest.raises(ApiError, match="no trial"):
                sweep.best_job()
            with pytest.raises(TimeoutError, match="still running"):
                sweep.wait(timeout_s=0.1, poll_s=0.05)
            started.set()
            assert sweep.wait(poll_s=0.05) is sweep and sweep.is_over
            best = sweep.best
            assert best is not None and (best["number"], best["settings"]) == (1, {SKILL: 0.7})
            rows = sweep.trials(frame="rows")
            assert [(row["trial"], row["state"], row[SKILL]) for row in rows] == [
                (0, "finished", 0.1), (1, "finished", 0.7), (2, "finished", 0.3)
            ]  # fmt: skip
            assert rows[1]["value"] == pytest.approx(0.7) and rows[1]["jobs"] == sweep.best_job().id
            assert list(sweep.trials()[SKILL]) == [0.1, 0.7, 0.3], "a DataFrame"
            assert [job.id for job in sweep.jobs()] == [row["jobs"] for row in rows]
            assert repr(sweep).startswith(f"<sweep {sweep.id} '<b>mine</b>' succeeded, 3 of 3 trials, best reward/mean")
            assert "state='succeeded'" in pretty_repr(sweep)
            Console(file=io.StringIO()).print(sweep)
            shown = sweep._repr_html_()
            assert "&lt;b&gt;mine" in shown and "<b>mine" not in shown and shown.index("0.7") < shown.index("0.3")
            assert own.sweep_handle(sweep.id).name == "<b>mine</b>"
            with pytest.raises(ApiNotFound):
                own.sweep_handle("s-0000000000")

    started, ids = threading.Event(), list[str]()
    working = asyncio.create_task(asyncio.to_thread(work, started, ids))
    await asyncio.to_thread(started.wait, 60)
    await play_all(ctx, http, ids[0], lambda spec: [skill(spec)])
    await working
    said = capsys.readouterr().err
    assert f"sweep {ids[0]}: running, 0 of 3 trials" in said and f"sweep {ids[0]}: succeeded, 3 of 3 trials" in said


async def test_a_sweep_is_cancelled_with_its_jobs(url: str) -> None:
    def work() -> None:
        with Client(url, api_key=OPERATOR) as own:
            sweep = own.start_sweep(SPEC, {"parameters": {SKILL: [0.1, 0.2]}})
            assert sweep.cancel().info["state"] == "cancelled" and sweep.wait(progress=False).state == "cancelled"

    await asyncio.to_thread(work)


async def test_the_async_client_has_the_same_objects(url: str, http: Http, ctx: Context) -> None:
    async with AsyncClient(url, api_key=OPERATOR) as own:
        sweep = await own.start_sweep({**SPEC, "name": "<b>mine</b>"}, {"parameters": {SKILL: [0.1, 0.7, 0.3]}})
        assert sweep.state == "running" and not sweep.is_over and await sweep.best() is None
        with pytest.raises(ApiError, match="no trial"):
            await sweep.best_job()
        with pytest.raises(TimeoutError, match="still running"):
            await sweep.wait(timeout_s=0.1, poll_s=0.05)
        waiting = asyncio.create_task(sweep.wait(progress=False, poll_s=0.05))
        await play_all(ctx, http, sweep.id, lambda spec: [skill(spec)])
        assert await waiting is sweep and sweep.is_over and sweep.state == "succeeded"
        best = await sweep.best()
        assert best is not None and (best["number"], best["settings"]) == (1, {SKILL: 0.7})
        rows = await sweep.trials(frame="rows")
        assert [(row["trial"], row["state"], row[SKILL]) for row in rows] == [
            (0, "finished", 0.1), (1, "finished", 0.7), (2, "finished", 0.3)
        ]  # fmt: skip
        assert [job.id for job in await sweep.jobs()] == [row["jobs"] for row in rows]
        job = await sweep.best_job()
        assert (job.id, job.state) == (rows[1]["jobs"], "succeeded")
        assert [row["reward/mean"] for row in await job.metrics(frame="rows")] == [0.7]
        assert repr(sweep).startswith(f"<sweep {sweep.id} '<b>mine</b>' succeeded, 3 of 3 trials, best reward/mean")
        assert "&lt;b&gt;mine" in sweep._repr_html_() and "state='succeeded'" in pretty_repr(sweep)
        with pytest.raises(ApiNotFound):
            await own.sweep_handle("s-0000000000")


async def test_the_async_client_starts_a_job_as_an_object(url: str) -> None:
    async with AsyncClient(url, api_key=OPERATOR) as own:
        with pytest.raises(ApiError, match="start_sweep"):
            await own.start({**SPEC, "sweep": {"parameters": {SKILL: [0.1]}}})
        job = await own.start(SPEC)
        waiting = asyncio.create_task(job.wait(progress=False, cancel_on_interrupt=True, poll_s=0.05))
        await asyncio.sleep(0)  # it has begun
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert job.state == "cancelled" and (await own.handle(job.id)).name == SPEC["name"]
        assert (await job.events())[0]["event"] == "queued"


def test_ctrl_c_cancels_a_sweep_only_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    cancelled: list[str] = []
    client: Any = type("C", (), {"sweep_state": interrupted, "cancel_sweep": lambda self, id: cancelled.append(id)})()
    sweep = SweepHandle(client, "s-1")
    for asked in (False, True):
        with pytest.raises(KeyboardInterrupt):
            sweep.wait(progress=False, cancel_on_interrupt=asked)
        assert cancelled == (["s-1"] if asked else [])


def test_a_card_shows_the_best_trials_and_needs_no_server() -> None:
    trial = {"state": "finished", "reason": "", "jobs": []}
    trials = [{**trial, "number": n, "value": float(n), "settings": {"<x>": "<y>"}} for n in range(30)]
    stopped = {**trials[0], "state": "stopped", "number": 97, "value": -1.0}
    sweep: Any = {
        "id": "s-1", "name": "n", "state": "failed", "reason": "<img>", "metric": "loss", "goal": "minimize",
        "trials": {"finished": 30, "running": 2}, "planned": 40, "best": None, "all_trials": [stopped, *trials],
    }  # fmt: skip
    shown = sweep_card("s-1", sweep)
    assert "<img" not in shown and "<x>" not in shown and "<y>" not in shown and "and 20 more" in shown
    assert "<td>97</td>" not in shown, "only finished trials count"
    assert "<td>9</td>" in shown and "<td>10</td>" not in shown, "smaller is better"
    assert (sweep_progress(sweep).done, sweep_progress(sweep).total) == (30, 40)
    assert "does not answer" in sweep_card("s-1", None)
