"""Tree sampling against players that do not learn, through all services: a model behind a URL and a pool of past
versions have one candidate per turn, and the policy has all of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import part_id
from tests.e2e.policies.test_trees import GROUPS, SIZE, STEPS, climb
from tests.support.cluster import Cluster, toy_cluster
from tests.support.http_server import ChatServer, serving

OWN_TURNS = 2
"""Of the four turns of an episode; the opponent has the others."""
TRAJECTORIES = GROUPS * (1 + OWN_TURNS * (SIZE - 1))
"""Of a step: the episode of the group as the policy's seat saw it, and the other candidates of its turns."""


def against(model: Path, seats: dict[str, Any], **changes: Any) -> JobSpec:
    parts: dict[str, Any] = {
        "algorithm": {"name": "at_grpo", "group_size": SIZE, "groups_per_batch": GROUPS},
        "train": {"learner": "simulated", "steps": STEPS},
        "seats": seats,
    }
    return climb(model, **parts, **changes)


async def check(cluster: Cluster, job: str, policy: str = "") -> set[str]:
    """Check that the policy was trained on its own candidates alone. Return who played the other seat."""
    part = part_id(job, policy)
    assert [line["trajectories"] for line in cluster.lines(part)] == [TRAJECTORIES] * STEPS
    ledger = await cluster.ledger(job, policy)
    assert ledger.balanced and (ledger.trained, ledger.failed) == (GROUPS * STEPS, {})
    kept = (await cluster.client.rollouts(part))["rollouts"]
    assert kept and all(episode["turns"] == OWN_TURNS for episode in kept), [e["turns"] for e in kept]
    return {view["policy"] for episode in kept for view in episode["views"] if view["seat"] == "right"}


async def test_opponents_that_do_not_learn_have_one_candidate_per_turn(tmp_path: Path) -> None:
    loopback = {"env_egress_allow": "127.0.0.0/8"}
    async with serving(ChatServer("7")) as server, toy_cluster(tmp_path, **loopback) as (cluster, model):
        job = await cluster.run(against(model, {"right": {"url": server.url, "model": "big"}}))
        assert await check(cluster, job) == {f"big@{server.url}"}
        ledger = await cluster.ledger(job)
        assert ledger.trained <= len(server.bodies) / OWN_TURNS <= ledger.issued

        pool = {"policy": "climber", "every": 1, "latest": 1.0}
        seats = {"left": "climber", "right": {"pool": "past"}}
        spec = against(model, seats, policies={"climber": {}}, pools={"past": pool})
        job = await cluster.run(spec)
        players = await check(cluster, job, "climber")
        members = cluster.manifest(part_id(job, "climber")).pools["past"]
    assert [str(member.version) for member in members] == ["0.0", *(f"1.{step}" for step in range(1, STEPS))]
    assert "past@0.0" in players <= {f"past@{member.version}" for member in members}
    assert sum(sum(member.outcomes) for member in members) == GROUPS * STEPS, "an episode is one result"
