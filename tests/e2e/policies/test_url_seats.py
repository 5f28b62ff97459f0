"""A model behind a URL plays a seat, end to end: training and evaluation against it, failures, and its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opentinker.shared.spec import parse_spec
from tests.conftest import until
from tests.e2e.policies.test_frozen_seats import check_counts
from tests.support.cluster import Cluster, toy_cluster
from tests.support.http_server import ChatServer, serving
from tests.support.toys import toy_game

SECRET = "sk-canary-0123456789"
ALLOWED: dict[str, Any] = {"env_egress_allow": "127.0.0.0/8"}


def seat_of(server: ChatServer, **settings: Any) -> dict[str, Any]:
    return {"listener": {"url": server.url, "model": "big/model", **settings}}


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


async def players_of(cluster: Cluster, part: str) -> set[tuple[str, str]]:
    """Seat and player in the kept episodes."""
    kept = (await cluster.client.rollouts(part))["rollouts"]
    return {(view["seat"], view["policy"]) for one in kept for view in one["views"]}


async def test_a_policy_learns_against_a_model_behind_a_url_and_is_evaluated_against_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    async with serving(ChatServer()) as server:
        keys.write_text(f'[lab]\nkey = "{SECRET}"\nurl = "{server.url}"\ntenants = ["default"]\n')
        async with toy_cluster(tmp_path, model_keys_file=str(keys), **ALLOWED) as (cluster, model):
            seats = seat_of(server, key="lab")
            spec = toy_game(model, seats=seats, validation={"every": 3, "episodes": 4, "transcripts": 4})
            job = await cluster.run(spec)
            await check_counts(cluster, job, spec)
            assert await players_of(cluster, job) == {("speaker", ""), ("listener", f"big/model@{server.url}")}
            assert set(server.keys) == {f"Bearer {SECRET}"} and {body["model"] for body in server.bodies} == {
                "big/model"
            }
            episodes = spec.algorithm.group_size * spec.algorithm.groups_per_batch
            counted = {(line["trajectories"], line["tokens"]) for line in cluster.lines(job)}
            assert counted == {(episodes, episodes)}, "a speaker says one token, and nothing else is trained"
            assert [line["step"] for line in cluster.lines(job, "validation.jsonl")] == [0, 3, 6]

            asked = len(server.bodies)
            validation = {"every": 6, "episodes": 4, "against": [*seats.values()]}
            pennies: dict[str, Any] = {"environment": {"name": "matching_pennies"}, "seats": {"odd": {"bot": "heads"}}}
            rated = await cluster.run(toy_game(model, validation=validation, **pennies))
            line = cluster.lines(rated, "validation.jsonl")[-1]
            assert {"val/winrate/big/model", "val/rating"} <= line.keys() and not line["val/failed"]
            assert len(server.bodies) - asked == 2 * 4, "it is asked in the two evaluations alone"
            assert await players_of(cluster, rated) == {("even", "")}

            named = toy_game(model, policies={"speaker": {}}, seats={"speaker": "speaker", **seats})
            several = await cluster.run(named)
            await check_counts(cluster, several, named, "speaker")

            plain = spec.model_dump(mode="json")
            evaluation = {
                **{name: plain[name] for name in ("model", "environment", "seats")},
                "name": "how good",
                "kind": "eval",
                "rollout": {"engine": "toy", "max_tokens": 4},
                "start": {"from": f"{job}@latest"},
                "evaluation": {"episodes": 6, "transcripts": 6},
            }
            played = await cluster.run(parse_spec(evaluation))
            kept = (await cluster.client.transcripts(played))["transcripts"]
            assert len(kept) == 6
            url = {"speaker": "", "listener": f"big/model@{server.url}"}
            assert all({view["seat"]: view["policy"] for view in one["views"]} == url for one in kept)
            logs = "".join(cluster.logs(name) for name in cluster.processes)
        written = [path.read_bytes() for path in files_in(tmp_path) if path != keys]
    assert server.url.encode() in b"".join(written), "the seat is in the job's record"
    assert SECRET not in logs and not any(SECRET.encode() in data for data in written)


async def test_a_model_that_fails_is_counted_and_never_a_reward_of_0(tmp_path: Path) -> None:
    """It is away for a while: matches fail with that reason, are played again, and training continues."""
    async with serving(ChatServer(404)) as server, toy_cluster(tmp_path, **ALLOWED) as (cluster, model):
        rollout = {"engine": "toy", "max_tokens": 4, "retries": 0, "max_failed_share": 1.0}
        spec = toy_game(model, seats=seat_of(server), rollout=rollout)
        job = await cluster.submit(spec)
        await until(lambda: cluster.ledger(job), lambda ledger: ledger.failed.get("url_failed", 0) >= 3, 60.0)
        ledger = await cluster.ledger(job)
        assert ledger.failed.keys() == {"url_failed"} and ledger.accepted == 0 and ledger.balanced
        server.usual = "7"
        await cluster.succeeds(job)
        await cluster.trained(job, spec)

        server.usual = b"not json"
        hopeless = await cluster.submit(
            toy_game(model, seats=seat_of(server), rollout={**rollout, "max_failed_share": 0.5})
        )
        record = await cluster.wait(hopeless)
        assert record["state"] == "failed" and "url_failed" in record["reason"]
        assert "did not answer with a chat completion: not json" in record["reason"]


async def test_a_rollout_worker_without_the_key_fails_the_job_and_says_why(tmp_path: Path) -> None:
    """The operator has removed it since the job was submitted."""
    keys = tmp_path / "keys.toml"
    async with serving(ChatServer()) as server:
        keys.write_text(f'[lab]\nkey = "{SECRET}"\nurl = "{server.url}"\ntenants = ["default"]\n')
        async with toy_cluster(tmp_path, model_keys_file=str(keys), trainers=0, **ALLOWED) as (cluster, model):
            job = await cluster.submit(toy_game(model, seats=seat_of(server, key="lab")))
            keys.write_text("")
            cluster.add("trainer")
            record = await cluster.wait(job)
            assert record["state"] == "failed" and "key 'lab' of a seat with url" in record["reason"]
            assert server.bodies == []
