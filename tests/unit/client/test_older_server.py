"""Commands with a server of an earlier release, whose answers lack what was added since."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import opentinker.client
from opentinker.cli import app, environments
from opentinker.cli.shell import complete


class OlderServer:
    """In the place of a client."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> OlderServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def all_environments(self) -> dict[str, Any]:
        return {"built_in": ["bandit"], "environments": []}

    def describe_environment(self, name: str) -> dict[str, Any]:
        return {"doc": f"About {name}.", "bots": ["random"], "can_fork": True, "settings": {}, "example": ""}


def test_environments_are_listed_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "client", OlderServer)
    listed = CliRunner().invoke(app, ["env", "list"], catch_exceptions=False)
    assert listed.exit_code == 0 and "bandit" in listed.stdout
    told = CliRunner().invoke(app, ["env", "about", "bandit"], catch_exceptions=False)
    assert told.exit_code == 0 and "About bandit.\n\nscripted players: random; can fork\n" in told.stdout


def test_environments_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opentinker.client, "Client", OlderServer)
    about = typer.main.get_command(app).commands["env"].commands["about"]  # type: ignore[attr-defined]
    context = about.make_context("about", ["--url", "http://127.0.0.1:1", "ban"], resilient_parsing=True)
    assert complete.environments(context, "ban") == [("bandit", "built in")]
