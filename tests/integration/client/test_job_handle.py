"""A job as an object: how it waits, what it returns, and how it shows itself."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from rich.console import Console
from rich.pretty import pretty_repr

from opentinker import AsyncClient, Client
from opentinker.client import ApiError, ApiNotFound
from opentinker.client.job_handle import JobHandle
from opentinker.sdk import displays
from opentinker.sdk.cards import job_card, job_progress
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import METRIC
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, part_id
from opentinker.shared.types.manifest import name_of
from tests.support.api import OPERATOR, SPEC
from tests.support.factories import make_point, make_spec


async def told(bus: Bus, job: str, values: list[float]) -> None:
    for step, value in enumerate(values, 1):
        point = make_point(job, step, {"reward/mean": value, "train/loss": 1.0})
        await bus.publish(METRIC, point, f"{job}/{step}", job=job, source="trainer")


async def test_a_job_is_started_waited_for_and_read(
    client: AsyncClient, store: Store, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(started: threading.Event, of: list[str]) -> JobHandle:
        with Client(client.url, api_key=OPERATOR) as own:
            job = own.start({**SPEC, "name": "<b>mine</b>"})
            of.append(job.id)
            assert job.state == "queued" and repr(job) == f"<job {job.id} '<b>mine</b>' queued>"
            with pytest.raises(TimeoutError, match="still queued"):
                job.wait(timeout_s=0.1, poll_s=0.05)
            started.set()
            assert job.wait(poll_s=0.05) is job and job.is_over
            rows = job.metrics(["reward/mean"], frame="rows")
            assert [(row["step"], row["reward/mean"], "train/loss" in row) for row in rows] == [
                (1, 0.25, False),
                (2, 0.75, False),
            ]
            frame = job.metrics()
            assert list(frame["reward/mean"]) == [0.25, 0.75] and list(frame["train/loss"]) == [1.0, 1.0]
            assert job.events()[0]["event"] == "queued"
            shown = job._repr_html_()
            assert "&lt;b&gt;mine" in shown and "<b>mine" not in shown and "<svg" in shown and "0.75" in shown
            assert "state='cancelled'" in pretty_repr(job)
            Console(file=io.StringIO()).print(job)
            with pytest.raises(ApiNotFound):
                own.handle("j-0000000000")
            assert own.handle(job.id).info["id"] == job.id
            return job

    started, ids = threading.Event(), list[str]()
    working = asyncio.create_task(asyncio.to_thread(work, started, ids))
    await asyncio.to_thread(started.wait, 30)
    await told(bus, ids[0], [0.25, 0.75])
    await store.update(ids[0], curve="[0.25, 0.75]")
    await store.transition(ids[0], JobState.CANCELLED)
    await working
    said = capsys.readouterr().err
    assert f"job {ids[0]} is queued" in said and f"job {ids[0]} is cancelled" in said


def keep_rollouts(ctx: Context, job: str, step: int, rewards: list[float]) -> None:
    """Write kept episodes as the trainer does."""
    folder = ctx.settings.data_dir / "jobs" / job / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [orjson.dumps({"step": step, "sample": place, "reward": one}) for place, one in enumerate(rewards)]
    (folder / f"{name_of(step)}.jsonl").write_bytes(b"\n".join(lines))


async def test_training_episodes_are_yielded_step_by_step(client: AsyncClient, ctx: Context) -> None:
    id = (await client.submit(SPEC))["id"]
    for step in (10, 2):
        keep_rollouts(ctx, id, step, [step / 10, 0.0])

    def work() -> list[list[tuple[int, float]]]:
        with Client(client.url, api_key=OPERATOR) as own:
            job = own.handle(id)
            with pytest.raises(ApiNotFound, match="no rollouts of step 3; there are: 2, 10"):
                next(job.rollouts(3))
            return [[(one["step"], one["reward"]) for one in found] for found in (job.rollouts(), job.rollouts(2))]

    every, one = await asyncio.to_thread(work)
    assert every == [(2, 0.2), (2, 0.0), (10, 1.0), (10, 0.0)], "oldest first, whole"
    assert one == [(2, 0.2), (2, 0.0)]


async def test_a_job_with_several_policies_yields_the_episodes_of_one(
    client: AsyncClient, ctx: Context, tmp_path: Path
) -> None:
    game = {"environment": {"name": "tictactoe"}, "seats": {"first": "a", "second": "b"}}
    id = (await client.submit(make_spec(**game, policies={"a": {}, "b": {}})))["id"]
    for step in (1, 2):
        keep_rollouts(ctx, part_id(id, "b"), step, [step / 10])

    def work() -> list[float]:
        with Client(client.url, api_key=OPERATOR) as own:
            job = own.handle(id)
            with pytest.raises(ApiError, match="policy"):
                next(job.rollouts())
            assert list(job.rollouts(policy="a")) == []
            with pytest.raises(ApiError, match="there are: none yet"):
                job.download(tmp_path / "model", policy="b")
            return [one["reward"] for one in job.rollouts(policy="b")]

    assert await asyncio.to_thread(work) == [0.1, 0.2]
    handle = await client.handle(id)
    assert [one["reward"] async for one in handle.rollouts(2, policy="b")] == [0.2]
    with pytest.raises(ApiError, match="there are: none yet"):
        await handle.download(tmp_path / "model", policy="b")


def test_rows_become_the_frame_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75, "val/exact": 1.0}]
    made: list[Any] = []

    def frame(kind: str) -> Any:
        def build(given: Any, **options: Any) -> str:
            made.append((given, options))
            return kind

        return SimpleNamespace(DataFrame=build, __spec__=None)

    there = {"pandas", "polars"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in there or None)
    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, frame(name))
    assert displays.framed(rows, "polars") == "polars"
    assert made == [(rows, {"infer_schema_length": None})], "a column may begin with steps that do not have it"
    assert displays.framed(rows, "auto") == displays.framed(rows, "pandas") == "pandas"
    there.remove("pandas")
    assert displays.framed(rows, "auto") == "polars"
    there.clear()
    assert displays.framed(rows, "auto") is rows is displays.framed(rows, "rows")


def test_a_card_escapes_what_others_wrote_and_needs_no_server() -> None:
    job: Any = {
        "id": "j",
        "name": "<script>",
        "state": "failed",
        "reason": "<img>",
        "waiting_for": "",
        "step": 3,
        "steps": 0,
        "kind": "sft",
        "curve": [0.0, 1.0, 0.5],
    }
    shown = job_card("j", job)
    assert "<script" not in shown and "<img" not in shown and "&lt;img&gt;" in shown
    assert "<td>loss</td>" in shown and "polyline" in shown
    job["curve"] = []
    assert "polyline" not in job_card("j", job)
    assert "does not answer" in job_card("j", None)


def test_a_notebook_and_a_terminal_show_progress_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    class Display:
        def update(self, what: object) -> None:
            shown.append(what)

    class IPython:
        display = staticmethod(lambda what, display_id: Display())

        class Shell:
            kernel = object()

        get_ipython = staticmethod(lambda: IPython.Shell())

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    monkeypatch.setitem(sys.modules, "IPython.display", IPython)
    job: Any = {"id": "j", "name": "x [y]", "state": "running", "reason": "", "waiting_for": "", "step": 3, "steps": 5}
    handle: Any = object()
    with (drawn := displays.display_of(handle)):
        for step in (3, 3, 4):
            drawn.update(job_progress(job | {"step": step}))
    assert shown == [handle, handle], "drawn again only when something changed"
    bar = displays.Bar()
    with bar:
        bar.update(job_progress(job))
    assert bar._bar.tasks[0].completed == 3 and bar._bar.tasks[0].total == 5
