"""A job's metrics in other tools, read back by these tools' own libraries."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from uv import find_uv_bin

from opentinker import AsyncClient, Client, sinks
from opentinker.cli.sink import send, tagged
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import OpenTinkerError
from opentinker.sinks import KINDS, open_sink
from tests.conftest import until
from tests.support.api import SPEC

JOB = {"id": "j-0123456789", "name": "toy", "spec": {"train": {"lr": 0.1}, "model": {"base": "some/model"}}}


class Kept:
    """What a sink was given."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.state = ""

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        assert time > 0
        self.points.append((step, dict(values)))

    def close(self, state: str) -> None:
        self.state = state


async def test_points_are_sent_as_they_come_until_the_job_ends(client: AsyncClient, ctx: Context, store: Store) -> None:
    job = (await client.submit(SPEC))["id"]
    trainer, rollout = MetricSource(ctx.bus, job, "trainer"), MetricSource(ctx.bus, job, "rollout-0")
    await trainer.emit(1, {"lr": 0.1})
    await rollout.emit(1, {"tokens": 5.0})
    kept = Kept()

    def sending() -> dict[str, Any]:
        with Client(client.url) as api:
            return send(api, job, kept)

    task = asyncio.create_task(asyncio.to_thread(sending))
    await until(lambda: len(kept.points) == 2)
    await trainer.emit(2, {"lr": 0.2})
    await until(lambda: len(kept.points) == 3)
    await store.transition(job, JobState.CANCELLED)
    sent = await task
    assert kept.points == [(1, {"lr": 0.1}), (1, {"rollout-0/tokens": 5.0}), (2, {"lr": 0.2})]
    assert (sent["points"], sent["state"], kept.state) == (3, "cancelled", "cancelled")
    again = Kept()

    def going_on() -> dict[str, Any]:
        with Client(client.url) as api:
            return send(api, job, again, sent["cursor"])

    assert (await asyncio.to_thread(going_on))["points"] == 0 and again.points == []


def test_what_is_no_sink_is_answered_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("tensorboard", "tensorboard:", "csv:x", ""):
        with pytest.raises(OpenTinkerError, match=r"is not one of: tensorboard:a directory.*trackio"):
            open_sink(wrong, JOB)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(OpenTinkerError, match=r"trackio is not installed here: pip install 'opentinker\[trackio\]'"):
        open_sink("trackio:toys", JOB)
    assert tagged({"source": "env-0", "values": {"env/steps": 1.0}}) == {"env-0/env/steps": 1.0}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    sink = open_sink(f"tensorboard:{tmp_path}", JOB)
    sink.log(1, {"reward/mean": 0.25, "loss": 2.0}, 100.0)
    sink.log(2, {"reward/mean": 0.5}, 101.0)
    sink.close("succeeded")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "toy-j-0123456789"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"reward/mean", "loss"}
    assert [(p.step, p.value, p.wall_time) for p in found.Scalars("reward/mean")] == [(1, 0.25, 100.0), (2, 0.5, 101.0)]


MLFLOW = """
import importlib.util, json, sys
from mlflow.tracking import MlflowClient
spec = importlib.util.spec_from_file_location("to_mlflow", sys.argv[1])
sink = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sink)
job, where = json.loads(sys.argv[2]), sys.argv[3]
first = sink.open_sink(where, job)
first.log(1, {"reward/mean": 0.25}, 100.0)
second = sink.open_sink(where, job)
second.log(2, {"reward/mean": 0.5}, 101.0)
second.close("failed")
client = MlflowClient(where.partition("#")[0])
runs = client.search_runs([client.get_experiment_by_name("toys").experiment_id])
history = client.get_metric_history(runs[0].info.run_id, "reward/mean")
print(json.dumps({
    "runs": len(runs), "status": runs[0].info.status, "params": runs[0].data.params,
    "points": sorted([m.step, m.value, m.timestamp] for m in history),
}))
"""


@pytest.mark.slow
def test_mlflow_reads_what_was_written_from_one_run(tmp_path: Path) -> None:
    """In a virtual environment of its own: MLflow pins older libraries than ours."""
    venv = tmp_path / "venv"
    for command in (
        ["venv", "--quiet", "--no-project", "--python", sys.executable, str(venv)],
        ["pip", "install", "--quiet", "--python", str(venv), "mlflow-skinny>=3,<4"],
    ):
        subprocess.run([find_uv_bin(), *command], check=True, timeout=500)
    source = Path(str(sinks.__file__)).parent / "to_mlflow.py"
    argv = [venv / "bin" / "python", "-c", MLFLOW, source, orjson.dumps(JOB).decode(), f"file://{tmp_path}/runs#toys"]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run([*map(str, argv)], env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert orjson.loads(done.stdout.splitlines()[-1]) == {
        "runs": 1, "status": "FAILED", "params": {"train.lr": "0.1", "model.base": "some/model"},
        "points": [[1, 0.25, 100_000], [2, 0.5, 101_000]],
    }  # fmt: skip


class Stand(types.ModuleType):
    """In the place of a library that sends to a service: what it was called with."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def called(*given: Any, **named: Any) -> Stand:
            self.calls.append((name, given, named))
            return self

        return called


@pytest.mark.parametrize(("kind", "where"), [("wandb", "team/toys"), ("trackio", "toys")])
def test_other_tools_are_called_with_steps_and_values(kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(kind)
    monkeypatch.setitem(sys.modules, kind, stand)
    monkeypatch.delitem(sys.modules, f"opentinker.sinks.to_{kind}", raising=False)
    sink = open_sink(f"{kind}:{where}", JOB)
    sink.log(7, {"loss": 2.0}, 100.0)
    sink.close("failed")
    monkeypatch.delitem(sys.modules, f"opentinker.sinks.to_{kind}")
    calls = {name: (given, named) for name, given, named in stand.calls}
    assert calls["init"][1]["project"] == "toys" and calls["init"][1]["config"] == JOB["spec"]
    given, named = calls["log"]
    assert given[0]["loss"] == 2.0 and named.get("step", given[0].get("step")) == 7
    assert "finish" in calls


def test_every_kind_has_its_file() -> None:
    home = Path(str(sinks.__file__)).parent
    assert {path.stem for path in home.glob("to_*.py")} == {f"to_{kind}" for kind in KINDS}
