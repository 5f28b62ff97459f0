"""Two policies in one game, in turns and in rounds, end to end: ledgers, checkpoints and downloads of their own;
and a bot beside a policy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from opentinker.client import ApiError
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.core import part_id
from opentinker.shared.types.manifest import read_manifest
from tests.conftest import until
from tests.support.cluster import Cluster, Toys
from tests.support.toys import toy_evaluation, toy_game

pytestmark = pytest.mark.asyncio(loop_scope="module")

POLICIES = ("speaker", "listener")
PENNIES = {"name": "matching_pennies", "config": {"rules": False}}
"""Both seats act at the same time."""
ROUNDS_STEPS = 6


def game(model: Path, *, steps: int = 24, step_s: float = 0.05, **changes: Any) -> JobSpec:
    """The speaker takes 4 matches a step, the listener 2 and twice as many steps."""
    parts: dict[str, Any] = {
        "algorithm": {"group_size": 2, "groups_per_batch": 4, "max_staleness": 1},
        "rollout": {"engine": "toy", "max_tokens": 4, "transcripts": 2, "toy": {"seconds_per_token": 0.005}},
        "train": {"learner": "simulated", "steps": steps, "simulated_step_s": step_s, "checkpoint_every": 5},
        "policies": {"speaker": {}, "listener": {"algorithm": {"groups_per_batch": 2}, "train": {"steps": 2 * steps}}},
        "seats": {"speaker": "speaker", "listener": "listener"},
    }
    return toy_game(model, **{**parts, **changes})


def words(episode: Any, view: int, message: int) -> Any:
    return episode["views"][view]["messages"][message]


def versions_of(view: Any) -> list[str]:
    """Return the weights that sampled a seat's words; each of its sampled tokens has one."""
    tokens = view["tokens"]
    assert sum(end - start for start, end, _ in tokens["versions"]) == sum(tokens["mask"]) > 0
    return [version for _, _, version in tokens["versions"]]


async def check(cluster: Cluster, job: str, spec: JobSpec) -> None:
    """Each policy trained every match that it took once, within its own bound, and nothing is open."""
    for policy in POLICIES:
        ledger = await cluster.trained(job, spec, policy)
        assert ledger.running == ledger.pending == 0, (policy, ledger)


async def test_two_policies_train_on_the_same_matches_and_each_can_be_taken_home(toys: Toys, tmp_path: Path) -> None:
    cluster, model = toys
    spec = game(model)
    job = await cluster.submit(spec)
    record = await cluster.succeeds(job)
    await check(cluster, job, spec)
    trained = [{seq for line in cluster.lines(part_id(job, name)) for seq in line["seqs"]} for name in POLICIES]
    assert len(trained[0] & trained[1]) > 0.9 * 96, "a match is for both"
    assert set(record["policies"]) == set(POLICIES) and record["step"] == spec.train.steps

    points = await cluster.client.metrics(job)
    for name in POLICIES:
        own = [point for point in points if point["source"] == f"trainer~{name}"]
        assert len(own) == spec_of(spec, name).train.steps
        assert all(value.startswith(f"{name}/") for point in own for value in point["values"])
        found = await cluster.client.rollouts(part_id(job, name))
        assert found["rollouts"]
        for one in found["rollouts"]:
            assert {view["seat"]: view["policy"] for view in one["views"]} == {seat: seat for seat in POLICIES}
            acts = [one["views"][view] for view, message in one["order"] if "turn" in words(one, view, message)]
            assert [view["seat"] for view in acts] == ["speaker", "listener"], "in turn order"
            (mine,) = (view for view in one["views"] if view["policy"] == name)
            assert set(one["versions"]) == set(versions_of(mine))

    async def archived() -> bool:
        return bool(await cluster.client.artifacts(job))

    await until(archived)
    for name in POLICIES:
        steps = [held["step"] for held in await cluster.client.checkpoints(part_id(job, name))]
        assert steps[-1] == spec_of(spec, name).train.steps
        target = await cluster.client.download(part_id(job, name), tmp_path / name, everything=True)
        assert read_manifest(target).policy == name
    with pytest.raises(ApiError, match="several policies, speaker, listener"):
        await cluster.client.checkpoints(job)
    with pytest.raises(ApiError, match="must be one of speaker, listener"):
        await cluster.client.download(part_id(job, "nobody"), tmp_path / "nobody")


@pytest.mark.parametrize(
    ("steps", "step_s", "kill_at"), [(6, 0.25, None), pytest.param(16, 0.4, 5, marks=pytest.mark.nightly)]
)
async def test_no_match_is_trained_whose_opponent_has_moved_too_far(
    toys: Toys, steps: int, step_s: float, kill_at: int | None
) -> None:
    """The fast policy runs ahead; what it had played with older weights is replaced for the slow one, also after a
    kill."""
    cluster, model = toys
    policies: dict[str, Any] = {"speaker": {"train": {"simulated_step_s": step_s}}, "listener": {}}
    algorithm = {"group_size": 2, "groups_per_batch": 4, "max_staleness": 3}
    spec = game(model, steps=steps, policies=policies, algorithm=algorithm, match={"max_opponent_lag": 1})
    job = await cluster.submit(spec)
    if kill_at is not None:
        await cluster.reaches(job, kill_at)
        cluster.kill("trainer-0")
    await cluster.succeeds(job)
    await check(cluster, job, spec)
    slow, fast = (cluster.lines(part_id(job, name)) for name in POLICIES)
    assert max(line["opponent_lag/max"] for line in [*slow, *fast]) <= 1.0
    assert slow[-1]["dropped/opponent_moved"] > 0
    assert (await cluster.ledger(job, "speaker")).discarded["opponent_moved"] > 0


async def test_bots_play_the_seats_that_the_job_gives_them(toys: Toys) -> None:
    """One policy against the environment's scripted player; and what names no seat is refused."""
    cluster, model = toys
    changes: dict[str, Any] = {"environment": {"name": "tictactoe"}, "policies": {}}
    spec = game(model, steps=3, seats={"second": {"bot": "random"}}, **changes)
    job = await cluster.run(spec)
    found = await cluster.client.rollouts(job)
    assert {view["seat"] for one in found["rollouts"] for view in one["views"]} == {"first"}
    played = await cluster.run(toy_evaluation(spec, seats={"second": {"bot": "random"}}))
    kept = (await cluster.client.transcripts(played))["transcripts"]
    assert len(kept) == 6 and all({view["seat"] for view in one["views"]} == {"first"} for one in kept)
    with pytest.raises(ApiError, match=r"seats\.third"):
        await cluster.submit(game(model, seats={"third": {"bot": "random"}}, **changes))
    with pytest.raises(ApiError, match="no player to 'listener'"):
        await cluster.submit(game(model, policies={"a": {}}, seats={"speaker": "a"}))


async def test_a_policy_that_moves_between_seats_meets_the_bot_in_each(toys: Toys) -> None:
    cluster, model = toys
    changes: dict[str, Any] = {
        "environment": {"name": "tictactoe", "config": {"rules": False}},
        "algorithm": {"group_size": 4, "groups_per_batch": 2},
        "policies": {"mover": {}},
        "seats": {"first": "mover", "second": {"bot": "random"}},
        "match": {"rotate": True},
    }
    spec = game(model, steps=3, **changes)
    job = part_id(await cluster.run(spec), "mover")
    seats = set()
    for one in cluster.episodes(job):
        assert {seat: len(rewards) for seat, rewards in one["group_rewards"].items()} == {"first": 2, "second": 2}
        (view,) = one["views"]
        free = sum(sign.isdigit() for sign in view["messages"][0]["content"])
        assert view["policy"] == "mover" and free == {"first": 9, "second": 8}[view["seat"]], (
            "the bot moves first there"
        )
        seats.add(view["seat"])
    assert seats == {"first", "second"}


async def test_each_policy_is_evaluated_against_bots_and_the_other_policy(toys: Toys) -> None:
    """The toy engine never names a side of the penny: it loses to the bot and draws with its like."""
    cluster, model = toys
    changes: dict[str, Any] = {
        "environment": {"name": "matching_pennies"},
        "policies": {"a": {}, "b": {}},
        "seats": {"even": "a", "odd": "b"},
        "validation": {"every": 4, "episodes": 6, "transcripts": 4, "against": [{"bot": "heads"}, {"policy": "b"}]},
    }
    job = await cluster.run(game(model, steps=8, **changes))
    for name, opponents in (("a", ("heads", "b")), ("b", ("heads",))):
        lines = cluster.lines(part_id(job, name), "validation.jsonl")
        assert [line["step"] for line in lines] == [0, 4, 8]
        for line in lines:
            assert line["val/episodes"] == 6 * len(opponents) and not line["val/failed"] and not line["val/missing"]
            found = {one: [line[f"val/{won}/{one}"] for won in ("wins", "draws", "losses")] for one in opponents}
            assert found == {one: [0, 0, 6] if one == "heads" else [0, 6, 0] for one in opponents}
            assert line["val/rating"] < -100 and line["val/rating/error"] > 0
        kept = await cluster.client.transcripts(part_id(job, name))
        assert {one["opponent"] for one in kept["transcripts"]} == set(opponents)
        for one in kept["transcripts"]:
            said = [(m.get("seat"), m.get("policy")) for m in one["messages"]]
            together = [view for view in (("even", "a"), ("odd", "b")) for _ in ("prompt", "answer")]
            assert said == ([(None, None)] * 2 if one["opponent"] == "heads" else together)
            versions = [m["versions"] for m in one["messages"] if "versions" in m]
            if one["opponent"] == "b":  # which learns at its own pace
                assert versions[0] == ["1.8"] and versions[1] in (["1.7"], ["1.8"])
    points = [point for point in await cluster.client.metrics(job) if point["source"] == "validation~a"]
    assert len(points) == 3 and "a/val/winrate/heads" in points[0]["values"]
    record = await cluster.store.job(job)
    with pytest.raises(ApiError, match="has no bot 'nobody'; its bots are: heads, random"):
        changes["validation"]["against"] = [{"bot": "nobody"}]
        await cluster.submit(game(model, **changes))
    assert record.state.final


async def test_two_policies_learn_from_rounds_that_they_play_together(toys: Toys) -> None:
    cluster, model = toys
    seats = {"even": "speaker", "odd": "listener"}
    spec = game(model, steps=ROUNDS_STEPS, environment=PENNIES, policies={name: {} for name in POLICIES}, seats=seats)
    job = await cluster.run(spec)
    await check(cluster, job, spec)
    totals = [math.fsum(line["reward/mean"] for line in cluster.lines(part_id(job, name))) for name in POLICIES]
    assert math.isclose(sum(totals), 0.0, abs_tol=1e-9), "what one wins the other loses, in every match"
    assert all(line["turns/mean"] == 1.0 for name in POLICIES for line in cluster.lines(part_id(job, name)))
