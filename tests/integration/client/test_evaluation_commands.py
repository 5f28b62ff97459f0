"""Evaluations over HTTP and on the command line: results by category, transcripts by outcome and opponent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from opentinker import AsyncClient
from opentinker.cli.artifacts import games_won
from opentinker.client import ApiError, answers
from opentinker.services.scheduler.http.transcripts import by_outcome
from opentinker.shared.api_types import Category
from opentinker.shared.evaluation.records import transcript_of
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.spec import EvaluationSpec, parse_spec
from opentinker.shared.state.admission import Admission
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Ending, WeightVersion, part_id
from opentinker.shared.types.evaluation import EvalResult
from opentinker.shared.types.pools import PoolRecord
from tests.conftest import until
from tests.integration.client.test_job_commands import on, run
from tests.support.api import fits, write_checkpoint
from tests.support.factories import make_spec
from tests.support.registry import evaluated, kept, trained

__all__ = ["on"]
VALUES = {
    "val/reward/mean": 0.5,
    "val/task/number theory/episodes": 4.0,
    "val/task/number theory/reward": 0.75,
    "val/task/number theory/reward/low": 0.5,
    "val/task/number theory/reward/high": 1.0,
    "val/task/number theory/pass/1": 0.25,
    "val/task/number theory/pass/1/low": 0.0456,
    "val/task/number theory/pass/1/high": 0.699,
    "val/task/a/b/episodes": 1.0,
    "val/task/a/b/reward": 0.0,
    "val/task/a/b/pass/1": 0.0,
    "val/task/old/episodes": 3.0,
    "val/task/old/reward": 1.0,
}


def line(index: int, reward: float, **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": f"episode {index}"}]
    return {"index": index, "reward": reward, "metrics": {}, "ending": "env_done", "messages": said, **more}


async def test_a_result_has_its_categories(client: AsyncClient, store: Store, on: list[str]) -> None:
    spec = {"name": "look", "kind": "eval", "model": {"base": "m"}, "environment": {"name": "bandit"}}
    trained = (await client.submit(make_spec()))["id"]
    evaluated = {**parse_spec(spec).model_dump(mode="json"), "start": {"from": f"{trained}@4"}}
    job = "j-0123456789"
    await store.create_job(id=job, spec=evaluated, tenant="default")
    result = {"version": "1.4", "step": 4, "values": VALUES}
    await store.update(job, result=orjson.dumps(result).decode())
    theory: Category = {
        "name": "number theory",
        "episodes": 4,
        "reward": {"value": 0.75, "low": 0.5, "high": 1.0},
        "solved": {"value": 0.25, "low": 0.0456, "high": 0.699},
    }
    found = (await client.job(job))["result"]["categories"]
    assert [one["name"] for one in found] == ["a/b", "number theory"], "old results have no solved share"
    assert found[1] == theory and found[0]["solved"] == {"value": 0.0, "low": None, "high": None}
    (evaluation,) = await client.evaluations(trained)
    assert evaluation["categories"] == found
    assert orjson.loads((await run("job", job, "--json", *on)).stdout)["result"]["categories"] == found
    shown = (await run("job", job, *on)).stdout
    assert "number theory  4         0.75 (0.5 to 1)  0.25 (0.0456 to 0.699)" in shown


async def test_transcripts_are_read_by_outcome_and_opponent(client: AsyncClient, ctx: Context, on: list[str]) -> None:
    job = (await client.submit(make_spec(validation={"every": 5, "solved_at": 0.5})))["id"]
    won, drawn, lost = ({"outcome": outcome} for outcome in (1.0, 0.5, 0.0))
    lines = [
        line(0, 1.0, opponent="weak", **won),
        line(1, 0.5, opponent="weak", **drawn),
        line(2, 0.0, opponent="weak", **lost),
        line(3, -1.0, opponent="strong", **lost),
    ]
    write(ctx.settings.data_dir / "jobs" / job, lines)
    every = await client.transcripts(job)
    assert every["outcomes"] == {"solved": 2, "unsolved": 2, "won": 1, "drawn": 1, "lost": 2}
    assert every["opponents"] == {
        "weak": {"won": 1, "drawn": 1, "lost": 1},
        "strong": {"won": 0, "drawn": 0, "lost": 1},
    }
    wanted = {"solved": [0, 1], "unsolved": [2, 3], "won": [0], "drawn": [1], "lost": [2, 3]}
    for outcome, indices in wanted.items():
        found = await client.transcripts(job, outcome=outcome)
        assert [one["index"] for one in found["transcripts"]] == indices, outcome
        assert found["outcomes"] == every["outcomes"], "counts are of all"
    both = await client.transcripts(job, outcome="lost", opponent="strong")
    assert [(one["index"], one["solved"]) for one in both["transcripts"]] == [(3, False)]
    with pytest.raises(ApiError, match="outcome"):
        await client.transcripts(job, outcome="broken")

    shown = (await run("transcripts", job, "--outcome", "lost", "--against", "weak", *on)).stdout
    assert "kept episodes: 2 solved, 2 unsolved, 1 won, 1 drawn, 2 lost" in shown
    assert "against strong: 0 won, 0 drawn, 1 lost" in shown
    assert "--- episode 2, lost against weak" in shown and "episode 3" not in shown
    none = (await run("transcripts", job, "--outcome", "won", "--against", "strong", *on)).stdout
    assert none.endswith("no kept episode was won against strong\n")
    none = (await run("transcripts", job, "--against", "nobody", *on)).stdout
    assert none.endswith("no kept episode was played against nobody\n")
    printed = orjson.loads((await run("transcripts", job, "--outcome", "drawn", "--json", *on)).stdout)
    assert [one["index"] for one in printed["transcripts"]] == [1]
    assert (await run("transcripts", job, "--outcome", "broken", *on)).returncode == 2


async def test_transcripts_say_which_seat_and_policy_said_a_message(
    client: AsyncClient, ctx: Context, on: list[str]
) -> None:
    job = (await client.submit(make_spec(validation={"every": 5})))["id"]
    white = {"seat": "white", "stream": "plan", "policy": "a"}
    messages = [
        {"role": "user", "content": "your move", **white},
        {"role": "assistant", "content": "b2", **white, "turn": 0, "tokens": [2, 3], "versions": ["1.4", "1.5"]},
        {"role": "user", "content": "b2 is taken", "seat": "black", "stream": "", "policy": ""},
    ]
    write(ctx.settings.data_dir / "jobs" / job, [line(0, 1.0) | {"messages": messages}, line(1, 1.0)])
    shown = (await run("transcripts", job, *on)).stdout
    assert "[to white plan, user] your move\n[white plan by a 1.4, 1.5] b2\n[to black, user] b2 is taken\n" in shown
    assert "[user] episode 1" in shown, "of one seat"


async def test_a_job_shows_the_games_of_its_policies(client: AsyncClient, bus: Bus, on: list[str]) -> None:
    game = {"environment": {"name": "tictactoe"}, "seats": {"first": "a", "second": "b"}}
    job = (await client.submit(make_spec(**game, policies={"a": {}, "b": {}})))["id"]
    bounds = {"a/val/winrate/random/low": 0.5, "a/val/winrate/random/high": 0.9}
    rated = {"a/val/winrate/random": 0.75, "a/val/winrate/b": 0.125, "a/val/rating": 190.8, "a/val/rating/error": 41.2}
    for policy, values in (("a", bounds | rated), ("b", {"b/val/winrate/random": 0.5})):
        await MetricSource(bus, job, part_id("validation", policy)).emit(8, values)

    async def measured() -> bool:
        return len((await client.job(job))["metrics"]) == 2

    await until(measured)
    shown = (await run("job", job, *on)).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[-3:] == ["policy step against random against b rating", "a 8 75% 12% 191 ± 41", "b 8 50% - -"]


async def test_a_job_shows_its_results_against_the_members_of_a_pool(
    client: AsyncClient, store: Store, on: list[str]
) -> None:
    pools = {"past": {"every": 2}, "new": {"every": 1}}
    seats = {"second": {"pool": "past"}, "third": {"pool": "new"}}
    job = (await client.submit(make_spec(environment={"name": "tictactoe"}, seats=seats, pools=pools)))["id"]
    assert (await client.job(job))["pools"] == {}, "no trainer has told of them yet"
    outcomes, recent = {"0.0": (1500, 0, 500), "1.2": (0, 0, 0)}, {"0.0": (75.0, 0.0, 25.0), "1.2": (0.0, 0.0, 0.0)}
    record = PoolRecord(members=["0.0", "1.2"], win_rates={"0.0": 0.75, "1.2": 0.5}, outcomes=outcomes, recent=recent)
    record = msgspec.structs.replace(record, ratings={"0.0": (-164.4, 21.5)})
    await Admission(store.redis, job, 1).set_pools({"past": record})
    found = await client.job(job)
    fits(found, answers.Job)
    assert found["pools"].keys() == {"past"}
    shown = (await run("job", job, *on)).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
    new, old = lines[-2:]
    assert lines[-3] == "version games won drawn lost win rate rating" and new == "1.2 0 0 0 0 - -"
    assert re.fullmatch(r"0\.0 2,000 1,500 0 500 75% -164 ± 22", old), old


async def test_checkpoints_of_a_job_stand_with_all_their_evaluations(
    client: AsyncClient, ctx: Context, store: Store, on: list[str]
) -> None:
    job = await trained(store, id="j-aaaaaaaaaa")
    checkpoint = await kept(store, job, 20, 2000.0, exact=0.75)
    write_checkpoint(ctx, job, 20, {"model.safetensors": b"weights"})
    later = await evaluated(store, checkpoint, 0.625)
    (found,) = orjson.loads((await run("checkpoints", job, "--json", *on)).stdout)
    assert sorted((one["during_training"], one["job"]) for one in found["evaluations"]) == [(False, later), (True, job)]
    shown = (await run("checkpoints", job, *on)).stdout
    assert "exact 0.75 on" in shown and "during training" in shown and "exact 0.625 (0.525 to 0.725) on" in shown


def test_games_stand_for_an_evaluation_by_how_often_they_were_won() -> None:
    rates = {"val/winrate/b": 0.0, "val/winrate/random": 0.754, "val/winrate/random/low": 0.6, "val/pass/1": 0.25}
    assert games_won(rates) == "won 0% against b, 75% against random"
    assert (
        games_won({"val/winrate": 0.5, "val/winrate/low": 0.4}) == "won 50%" and games_won({"val/pass/1": 0.25}) == ""
    )


def write(home: Path, lines: list[dict[str, Any]]) -> None:
    (home / "transcripts").mkdir(parents=True)
    (home / "transcripts" / "step-000004.jsonl").write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in lines))


@pytest.mark.parametrize(
    ("seats", "policy", "opponent"),
    [
        ({"O": {"bot": "perfect"}}, "", "perfect"),
        ({"a": {"policy": "alice"}, "b": {"policy": "bob"}}, "bob", "alice"),
        ({"a": {"frozen": "j-0123456789@4"}, "b": {"url": "https://x/v1", "model": "big"}}, "", "big, j-0123456789@4"),
        ({"a": {"pool": "past"}, "b": {"policy": None, "bot": None, "frozen": "best"}}, "", "best, past"),
        ({}, "", ""),
    ],
)
def test_opponents_are_those_who_play_the_other_seats(seats: dict[str, Any], policy: str, opponent: str) -> None:
    found = {"transcripts": [line(0, 1.0, outcome=1.0), line(1, 0.0)]}
    judged = by_outcome(found, {"evaluation": {"solved_at": 1.0}, "seats": seats}, policy, "all", "")
    assert list(judged["opponents"]) == [opponent]
    assert [one.get("opponent", "") for one in judged["transcripts"]] == [opponent, ""], "the second is no game"


@pytest.mark.parametrize("samples", [1, 2])
def test_episodes_of_an_earlier_release_have_their_start_states(samples: int) -> None:
    """The page pairs episodes of two runs by start state, sample and opponent."""
    plan = EvaluationSpec(episodes=3, samples=samples, temperature=1.0)
    results = [
        EvalResult(job="j", version=WeightVersion(1, 5), index=index, worker="w", ending=Ending.ENV_DONE, reward=1.0)
        for index in range(2 * plan.total)
    ]
    newer = [transcript_of(result, plan, ["weak", "strong"]) for result in results]
    older = [{name: value for name, value in one.items() if name not in ("state", "sample")} for one in newer]
    spec = {"validation": plan.model_dump(mode="json"), "seats": {"O": {"bot": "weak"}}}
    for stored in (older, newer):
        read = by_outcome({"transcripts": [dict(one) for one in stored]}, spec, "", "all", "")["transcripts"]
        found = [(one["state"], one["sample"], one["opponent"]) for one in read]
        assert found == [
            (state, sample, opponent)
            for opponent in ("weak", "strong")
            for state in range(3)
            for sample in range(samples)
        ]
    alone = {"transcripts": [line(1, 1.0)]}
    assert "state" not in by_outcome(alone, {"validation": plan.model_dump()}, "", "all", "")["transcripts"][0]


def test_episodes_without_other_players_are_solved_or_not() -> None:
    judged = by_outcome({"transcripts": [line(0, 1.0), line(1, 0.5)]}, {"validation": None}, "", "all", "")
    assert (judged["outcomes"], judged["opponents"]) == ({"solved": 1, "unsolved": 1}, {})
