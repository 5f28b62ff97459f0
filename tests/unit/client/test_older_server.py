"""Commands with a server of an earlier release, whose answers lack what was added since."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import opentinker.client
from opentinker.cli import app, environments, jobs
from opentinker.cli.shell import complete
from opentinker.client import ApiError, AsyncClient
from opentinker.shared.spec import EvaluationSpec
from tests.support.factories import make_spec


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
    command: Any = typer.main.get_command(app)
    about = command.commands["env"].commands["about"]
    context = about.make_context("about", ["--url", "http://127.0.0.1:1", "ban"], resilient_parsing=True)
    assert complete.environments(context, "ban") == [("bandit", "built in")]


class OlderGames(OlderServer):
    """Its spec has neither evaluation.team nor evaluation.opponents."""

    def job(self, id: str) -> dict[str, Any]:
        together = {"algorithm": {"team": {"us": ["x", "y"]}}}
        spec = make_spec(
            policies={"a": together, "b": together},
            seats={"x": {"policy": "a"}, "y": {"policy": "b"}, "z": {"bot": "random"}},
            train={"learner": "torch", "steps": 3},
        )
        return {"id": id, "kind": "rl", "spec": spec.model_dump(mode="json")}

    def submit(self, spec: dict[str, Any]) -> dict[str, Any]:
        mistakes = [
            {"field": f"evaluation.{name}", "value": value, "problem": "unknown setting"}
            for name, value in spec["evaluation"].items()
            if name not in EvaluationSpec.model_fields
        ]
        if spec["evaluation"].get("episodes", 1) > 1000:
            mistakes.append({"field": "evaluation.episodes", "value": 2000, "problem": "must be at most 1000"})
        if mistakes:
            title = {"title": "the spec has mistakes", "errors": mistakes}
            raise ApiError("the spec has mistakes\n  evaluation.team: unknown setting", 422, title)
        return {"id": "j-9876543210", "state": "queued", "name": spec["name"], "kind": "eval"}

    def sweep(self, spec: dict[str, Any]) -> dict[str, Any]:
        return self.submit(spec)


@pytest.mark.parametrize("steps", [[], ["--at", "3", "--at", "6"]])
def test_an_evaluation_of_a_game_that_it_cannot_count_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    monkeypatch.setattr(jobs, "client", OlderGames)
    refused = CliRunner().invoke(app, ["eval", "j-0123456789", *steps])
    told = str(refused.exception)
    assert isinstance(refused.exception, ApiError) and refused.exception.status == 422
    assert told.startswith("the server is of an earlier release") and "Upgrade the server" in told
    assert "evaluation.opponents and evaluation.team" in told and "unknown setting" not in told
    both = CliRunner().invoke(app, ["eval", "j-0123456789", *steps, "--set", "evaluation.episodes=2000"])
    assert str(both.exception).endswith("\n  evaluation.episodes = 2000: must be at most 1000")


def test_other_refusals_of_an_evaluation_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object, __: dict[str, Any]) -> dict[str, Any]:
        raise ApiError("no", 422, {"errors": [{"field": "evaluation.team", "value": 1, "problem": "must be a table"}]})

    monkeypatch.setattr(OlderGames, "submit", refuse)
    monkeypatch.setattr(jobs, "client", OlderGames)
    assert str(CliRunner().invoke(app, ["eval", "j-0123456789"]).exception) == "no"


async def test_metrics_with_commas_in_their_names_are_found() -> None:
    """It reads the first `names` alone, as a list with commas."""
    stored: list[dict[str, Any]] = [
        {"cursor": 1, "values": {"reward/mean": 0.5, "task/algebra, level 1/reward": 0.25, "other": 1.0}},
        {"cursor": 2, "values": {"other": 2.0}},
    ]

    class Http:
        async def pages(self, _: str, __: str, ___: int, query: dict[str, Any]) -> list[dict[str, Any]]:
            wanted = query["names"][0].split(",") if "names" in query else list(stored[0]["values"])
            points = [{**one, "values": {k: v for k, v in one["values"].items() if k in wanted}} for one in stored]
            return [one for one in points if one["values"]]

    client: Any = SimpleNamespace(_http=Http())
    for names in (["task/algebra, level 1/reward"], ["reward/mean", "task/algebra, level 1/reward"]):
        (found,) = await AsyncClient.metrics(client, "j-0123456789", names=names)
        assert found["values"].keys() == set(names)
    assert len(await AsyncClient.metrics(client, "j-0123456789", names=["other"])) == 2
    (listed,) = await AsyncClient.metrics(client, "j-0123456789", names=["absent,reward/mean"])
    assert listed["values"] == {"reward/mean": 0.5}, "a list, as clients wrote it before"
    assert await AsyncClient.metrics(client, "j-0123456789", names=["absent"]) == []
