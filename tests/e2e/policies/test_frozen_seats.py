"""A checkpoint plays a seat and does not learn, end to end: training and evaluation against it, and what is counted."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest

from opentinker.sdk.evaluation_spec import evaluation_of
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import part_id
from opentinker.shared.types.manifest import frozen_of, start_of
from tests.conftest import until
from tests.support.cluster import Cluster, Toys
from tests.support.toys import toy_evaluation, toy_game

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def check_counts(cluster: Cluster, job: str, spec: JobSpec, policy: str = "") -> None:
    """Every match was trained once, by the policy alone."""
    await cluster.trained(job, spec, policy)
    kept = (await cluster.client.rollouts(part_id(job, policy)))["rollouts"]
    assert kept and {view["seat"] for one in kept for view in one["views"]} == {"speaker", "listener"}, "whole matches"


async def test_a_policy_learns_against_a_checkpoint_that_stays_as_it_is(toys: Toys) -> None:
    cluster, model = toys
    seats = {"speaker": "speaker", "listener": "listener"}
    first = await cluster.run(toy_game(model, policies={"speaker": {}, "listener": {}}, seats=seats))
    old = part_id(first, "listener")
    frozen = {"listener": {"frozen": f"{old}@latest"}}

    alone = toy_game(model, seats=frozen)
    job = await cluster.submit(alone)
    kept = frozen_of(cluster.data, job, f"{old}@{alone.train.steps}")
    assert kept.is_dir()
    named = toy_game(model, policies={"speaker": {}}, seats={"speaker": "speaker", **frozen})
    among = await cluster.submit(named)
    start = {"from": f"{part_id(first, 'speaker')}@latest"}
    played = await cluster.submit(toy_evaluation(alone, start=start, seats=frozen))
    shutil.rmtree(cluster.data / "jobs" / old)

    await cluster.succeeds(job)
    await check_counts(cluster, job, alone)
    await cluster.succeeds(among)
    await check_counts(cluster, among, named, "speaker")

    record = await cluster.succeeds(played)
    assert record["result"] is not None and record["result"]["version"] == f"1.{alone.train.steps}"
    kept_episodes = (await cluster.client.transcripts(played))["transcripts"]
    assert len(kept_episodes) == 6
    assert all({view["seat"] for view in one["views"]} == {"speaker", "listener"} for one in kept_episodes)
    await until(lambda: not any(start_of(cluster.data, id).exists() for id in (job, among, played)))


@pytest.mark.nightly
async def test_a_policy_that_moves_between_seats_meets_the_checkpoint_in_each_through_kills(toys: Toys) -> None:
    cluster, model = toys
    board = {"name": "tictactoe"}
    first = await cluster.run(toy_game(model, environment=board, seats={"second": {"bot": "random"}}))
    steps = 40
    spec = toy_game(
        model,
        environment=board,
        algorithm={"group_size": 4, "groups_per_batch": 2, "max_staleness": 1},
        train={"learner": "simulated", "steps": steps, "simulated_step_s": 0.05, "checkpoint_every": 5},
        policies={"mover": {}},
        seats={"first": "mover", "second": {"frozen": f"{first}@latest"}},
        match={"rotate": True},
    )
    job = await cluster.submit(spec)
    for number, name in enumerate(("rollout_worker-0", "trainer-0", "env_worker-0", "rollout_worker-0"), 1):
        await cluster.reaches(job, min(6 * number, steps))
        cluster.kill(name)
    await cluster.succeeds(job)
    await cluster.trained(job, spec, "mover")
    views = [view for one in cluster.episodes(part_id(job, "mover")) for view in one["views"]]
    assert {view["seat"] for view in views if view["policy"] == "mover"} == {"first", "second"}


async def test_evaluations_of_a_training_job_are_played_against_the_checkpoint_too(toys: Toys) -> None:
    cluster, model = toys
    first = await cluster.run(toy_game(model, seats={}, environment={"name": "copy_digits"}))
    validation = {"every": 3, "episodes": 4, "transcripts": 4}
    job = await cluster.run(toy_game(model, seats={"listener": {"frozen": f"{first}@3"}}, validation=validation))
    found = (await cluster.client.transcripts(job))["transcripts"]
    assert [{view["seat"] for view in one["views"]} for one in found] == [{"speaker", "listener"}] * 4
    evaluated = cluster.lines(job, "validation.jsonl")
    assert [line["step"] for line in evaluated] == [0, 3, 6]


async def test_each_policy_continues_from_its_own_checkpoint(toys: Toys) -> None:
    cluster, model = toys
    seats = {"speaker": "speaker", "listener": "listener"}
    first = await cluster.run(toy_game(model, policies={"speaker": {}, "listener": {}}, seats=seats))
    starts = {name: {"start": {"from": f"{part_id(first, name)}@latest"}} for name in seats}
    spec = toy_game(model, policies=starts, seats=seats)
    job = await cluster.submit(spec)
    for name in seats:
        shutil.rmtree(cluster.data / "jobs" / part_id(first, name))
    await cluster.succeeds(job)
    for name in seats:
        await cluster.trained(job, spec, name)
    loaded = [event for event in await cluster.store.events(job) if event["event"] == "model_loaded"]
    assert sorted((event["policy"], event["from"], event["step"]) for event in loaded) == [
        (name, f"{part_id(first, name)}@6", 0) for name in sorted(seats)
    ]
    await until(lambda: not start_of(cluster.data, job).exists())


async def test_policies_are_evaluated_and_rated_against_a_checkpoint_that_plays_no_seat(toys: Toys) -> None:
    """`a` and the checkpoint name free fields; `b` has a tokenizer without digits, so it loses at its first turn."""
    cluster, model = toys
    silent = cluster.data / "silent"
    shutil.copytree(model, silent)
    written = (silent / "tokenizer.json").read_text()
    (silent / "tokenizer.json").write_text(re.sub(r'"(\d)"(?=: )', r'"<\1>"', written))
    board: dict[str, Any] = {"environment": {"name": "tictactoe", "config": {"random_stones": 4, "rules": False}}}
    board["rollout"] = {"engine": "toy", "max_tokens": 1, "transcripts": 2, "toy": {"skill": 1.0}}
    old = await cluster.run(toy_game(model, seats={"second": {"bot": "random"}}, **board))
    spec = toy_game(
        model,
        policies={"a": {}, "b": {"model": {"base": str(silent), "chat_template": "plain"}}},
        seats={"first": "a", "second": "b"},
        validation={"every": 3, "episodes": 9, "transcripts": 9, "against": [{"frozen": f"{old}@3"}, {"policy": "b"}]},
        **board,
    )
    job = await cluster.run(spec)
    results: dict[str, list[float]] = {}
    ratings: dict[str, float] = {}
    for name, seat, other in (("a", "first", "second"), ("b", "second", "first")):
        lines = cluster.lines(part_id(job, name), "validation.jsonl")
        assert [line["step"] for line in lines] == [0, 3, 6]
        results[name] = [lines[-1][f"val/{won}/{old}@3"] for won in ("wins", "draws", "losses")]
        ratings[name] = lines[-1]["val/rating"]
        kept = (await cluster.client.transcripts(part_id(job, name)))["transcripts"]
        met = [one for one in kept if one["opponent"] == f"{old}@3" and len(one["views"]) == 2]
        assert met and {view["seat"]: view["policy"] for view in met[0]["views"]} == {seat: name, other: f"{old}@3"}
        spans = {view["seat"]: view["tokens"]["versions"] for view in met[0]["views"]}
        assert {span[2] for span in spans[other]} == {"1.3"} and {span[2] for span in spans[seat]} == {"1.6"}
        trained = [view["policy"] for one in cluster.episodes(part_id(job, name)) for view in one["views"]]
        assert set(trained) == {"a", "b"}, "it plays in no match of training"
    wins, draws, losses = results["a"]
    assert wins and draws and not losses and wins + draws == 9 and results["b"] == [0, 0, 9]
    assert 0 < ratings["a"] < -ratings["b"] - 50, "the checkpoint has the rating 0, not `b`, which lost to `a` as well"


async def test_exchanged_policies_play_each_other_s_seats(toys: Toys) -> None:
    cluster, model = toys
    lengths = {"speaker": {}, "listener": {"algorithm": {"groups_per_batch": 1}, "train": {"steps": 12}}}
    seats = {"speaker": "speaker", "listener": "listener"}
    first = await cluster.run(toy_game(model, policies=lengths, seats=seats))
    record = await cluster.client.job(first)
    for swap, steps in ((False, {"speaker": 6, "listener": 12}), (True, {"speaker": 12, "listener": 6})):
        spec = evaluation_of(record, swap=swap) | {"evaluation": {"episodes": 2, "transcripts": 2}}
        job = await cluster.run(parse_spec(spec))
        kept = (await cluster.client.transcripts(job))["transcripts"]
        assert len(kept) == 2
        for one in kept:
            views = {view["seat"]: view["tokens"]["versions"] for view in one["views"]}
            assert views.keys() == steps.keys()
            assert all({span[2] for span in spans} == {f"1.{steps[seat]}"} for seat, spans in views.items())
