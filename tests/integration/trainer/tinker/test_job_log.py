"""The log of a server's job, which its tenant reads, and models of other tenants."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import structlog

from opentinker.services.trainer.tinker import model_commands
from opentinker.shared.types.tinker import Failed, Save, Saved
from tests.integration.trainer.tinker.conftest import JOB, Client, Server, forward_backward

OWN, OTHERS = "s:train:0", "t:train:0"


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """Lines of the trainer as the job's log receives them."""
    found: list[dict[str, Any]] = []

    def keep(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        found.append(dict(line))
        raise structlog.DropEvent

    before = structlog.get_config()["processors"]
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, keep])
    yield found
    structlog.configure(processors=before)


async def test_lines_about_models_of_other_tenants_are_not_in_the_log_of_the_servers_job(
    server: Server, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.kill()
    with structlog.contextvars.bound_contextvars(job=JOB):  # as a worker's lease does
        await server.start()
    own, others = Client(server, OWN, "owner"), Client(server, OTHERS, "acme")
    for client in (own, others):
        await client.create()
        assert isinstance(await client.call(Save(kind="weights", name="secret-name")), Saved)

    def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(model_commands, "find_loss", fail)
    for client in (own, others):
        assert isinstance(await client.call(forward_backward(0)), Failed)
    await server.stop()
    with structlog.contextvars.bound_contextvars(job=JOB):
        await server.start()
    for client in (own, others):
        assert isinstance(await client.call(forward_backward(0)), Failed)
    events = {"checkpoint_saved", "command_failed", "model_restored"}
    about = {model: [line for line in lines if model in str(line)] for model in (OWN, OTHERS)}
    assert {line["event"] for line in about[OWN]} >= events and {line["job"] for line in about[OWN]} == {JOB}
    assert {line["event"] for line in about[OTHERS]} >= events
    assert {(line["job"], line["server"]) for line in about[OTHERS]} == {(None, JOB)}
