"""`Client`, the blocking client, beside the asynchronous one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from opentinker import ApiError, AsyncClient, Client
from opentinker.sdk.client import print_change
from opentinker.shared.api_types import Job
from opentinker.shared.runtime.service import Context
from tests.conftest import WAIT_S
from tests.support.api import write_checkpoint
from tests.support.factories import make_spec

SPEC = make_spec(model__base="some/model")


async def test_sync_client_does_the_same(ctx: Context, url: str, tmp_path: Path) -> None:
    def use() -> None:
        with Client(url) as client:
            job = client.submit(SPEC)["id"]
            assert [j["id"] for j in client.jobs()] == [job]
            events = client.events(job)
            assert next(events)["event"] == "queued"
            events.close()  # type: ignore[attr-defined]
            write_checkpoint(ctx, job, 1, {"config.json": b"{}"})
            assert client.checkpoints(job)[0]["step"] == 1
            assert (client.download(job, tmp_path / "model") / "config.json").exists()
            assert client.metrics(job) == [] and client.workers() == []
            assert client.queues()[0]["stream"] == "TICKETS"
            assert client.cancel(job)["state"] == client.wait(job, WAIT_S)["state"] == "cancelled"
            assert list(client.events(job))[-1]["state"] == "cancelled"
            assert list(client.watch_metrics(job)) == []
            assert client.event_log(job)[0]["event"] == "queued"
        with pytest.raises(ApiError, match="closed"):
            client.jobs()

    await asyncio.to_thread(use)


async def test_wait_reports_every_change_in_the_callers_thread(url: str) -> None:
    def use() -> None:
        with Client(url) as client:
            job = client.submit(SPEC)["id"]
            told: list[str] = []

            def cancel_at_once(now: Job) -> None:
                told.append(now["state"])
                client.cancel(job) if now["state"] == "queued" else None

            assert client.wait(job, WAIT_S, on_change=cancel_at_once)["state"] == "cancelled"
            assert told == ["queued", "cancelled"]

    await asyncio.to_thread(use)


def test_only_terminals_show_wait_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job: Any = {"id": "j-1", "state": "queued", "waiting_for": "a free trainer", "reason": ""}
    print_change(job)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    print_change(job)
    print_change(job | {"state": "failed", "reason": "two\nlines \x1b[31min red"})
    told = "job j-1 is queued: waits for a free trainer\njob j-1 is failed: two lines [31min red\n"
    assert capsys.readouterr().err == told


def test_both_clients_offer_the_same_calls_all_of_them_documented() -> None:
    blocking, asynchronous = ({name for name in dir(kind) if name[0] != "_"} for kind in (Client, AsyncClient))
    assert blocking == asynchronous
    assert not [name for name in blocking if not getattr(Client, name).__doc__]
    assert not [name for name in asynchronous if not getattr(AsyncClient, name).__doc__]


def test_a_client_says_where_it_points() -> None:
    with Client("http://127.0.0.1:9", api_key="secret") as client:
        assert repr(client) == "Client('http://127.0.0.1:9')"
    assert repr(client) == "Client('http://127.0.0.1:9', closed)"


async def test_forgotten_client_ends_with_the_program_and_loads_nothing_heavy(url: str) -> None:
    code = (
        "import sys, opentinker; c = opentinker.Client(sys.argv[1]); print(len(c.jobs()))\n"
        "assert not {'torch', 'vllm', 'transformers'} & sys.modules.keys()"
    )
    argv = [sys.executable, "-W", "error", "-c", code, url]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"0\n", b"")


def test_ctrl_c_in_the_blocking_client_cancels_only_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Client, coroutine: Coroutine[Any, Any, Any]) -> None:
        coroutine.close()
        raise KeyboardInterrupt

    cancelled: list[str] = []
    with Client("http://127.0.0.1:9", api_key="k") as client:
        monkeypatch.setattr(Client, "_call", interrupted)
        monkeypatch.setattr(Client, "cancel", lambda _, id: cancelled.append(id))
        for asked in (False, True):
            with pytest.raises(KeyboardInterrupt):
                client.wait("j-0123456789", cancel_on_interrupt=asked)
        monkeypatch.undo()
    assert cancelled == ["j-0123456789"]
