"""Summaries of a job and of a cluster in words, and JSON of every command."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import typer

from opentinker import AsyncClient
from opentinker.cli import app
from opentinker.cli.views.charts import Curves
from opentinker.cli.views.job_summary import doing, next_commands
from opentinker.cli.views.watch import JsonView, Update
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from tests.support.api import SPEC

NOW = 1000.0


def job_of(**changes: Any) -> dict[str, Any]:
    ledger = {"running": 3, "pending": 2, "trained": 40, "discarded": {"stale": 1}, "failed": {}}
    job = {
        "id": "j-0123456789", "kind": "rl", "state": "running", "step": 10, "steps": 20, "created": NOW - 600,
        "reason": "", "waiting_for": "", "restarts": 0, "ledger": ledger, "metrics": {}, "workers": [],
    }  # fmt: skip
    return job | changes


def trainer(share: float, at: float = NOW) -> dict[str, Any]:
    return {"trainer": {"step": 10, "time": at, "values": {"trainer/wait_share": share}}}


def said(**changes: Any) -> str:
    return " ".join(doing(job_of(**changes), NOW))


def test_a_running_job_says_what_limits_it() -> None:
    words = said(metrics=trainer(0.8))
    assert "step 10 of 20" in words and "3 groups are being generated, 2 wait to be trained" in words
    assert "1 group discarded or failed, and replaced: 1 stale." in words
    assert "waits 80% of its time for trajectories: more rollout workers would help" in words
    idle = job_of()["ledger"] | {"running": 0}
    assert "max_staleness lets no group begin" in said(metrics=trainer(0.02), ledger=idle)
    assert "the last step was 8 min ago" in said(metrics=trainer(0.5, NOW - 500))
    assert "no step yet" in said()


def test_who_waits_says_for_what() -> None:
    assert "in the queue, for 10 min now. It waits for a free trainer." in said(
        state="queued", step=0, waiting_for="a free trainer"
    )
    assert "continues from its last checkpoint (it was at step 10)" in said(state="queued")
    worker = {"id": "rollout-0", "host": "here", "status": "loading"}
    assert "rollout-0 on here loads the model." in said(state="starting", workers=[worker])
    assert said(state="failed", reason="no room") == "It failed after 10 of 20 steps: no room."
    assert ("logs", "j-0123456789", "--level", "warning") in next_commands(job_of(state="failed"))
    for state in JobState:
        assert doing(job_of(state=state.value), NOW) and next_commands(job_of(state=state.value))


async def test_a_queued_job_of_a_real_server_can_be_put_into_words(client: AsyncClient, store: Store) -> None:
    job = (await client.submit(SPEC))["id"]
    assert "in the queue" in doing(await client.job(job))[0]
    await store.transition(job, JobState.RUNNING, epoch=1)
    assert any("0 groups are being generated" in sentence for sentence in doing(await client.job(job)))


def commands(of: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    """Each with its options."""
    for name, command in of.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*above, name))
        else:
            yield " ".join((*above, name)), {option for parameter in command.params for option in parameter.opts}


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"completion", "help", "script"}))
def test_every_command_speaks_json(name: str) -> None:
    assert "--json" in COMMANDS[name]


def test_the_table_of_commands_is_whole() -> None:
    assert {"up", "status", "logs", "usage", "env push", "validate"} <= COMMANDS.keys()


def test_watching_as_json_is_a_line_for_each_thing() -> None:
    curves, out = Curves(), io.StringIO()
    point = {"source": "trainer", "step": 1, "time": 1.0, "values": {"loss": 0.5}}
    changed = curves.add([point])
    JsonView(out).show(Update(job={"state": "succeeded"}, curves=curves, changed=changed, events=[{"event": "queued"}]))
    lines = [orjson.loads(line) for line in out.getvalue().splitlines()]
    assert lines == [{"event": "queued"}, {"step": 1, "values": {"loss": 0.5}}, {"job": {"state": "succeeded"}}]
