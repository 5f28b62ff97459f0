"""Results of training matches: every match of every policy once, whichever trainer made its step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from opentinker.shared.types.core import part_id
from tests.samples.seat_samples import BACKER, RIVAL
from tests.support.cluster import Cluster, Toys
from tests.support.lineage import lineage
from tests.support.toys import toy_game

pytestmark = pytest.mark.asyncio(loop_scope="module")

GROUP_SIZE = 2
SEATS = {BACKER: "first", RIVAL: "second"}
Match = tuple[int, int]


def results(cluster: Cluster, part: str) -> dict[Match, dict[str, Any]]:
    """Return the results of the steps that count, which are those of the matches that the steps were made of."""
    resumed = cluster.manifest(part).resumed
    trained = [
        (seq, sample) for line in lineage(cluster.lines(part), resumed) for seq in line["seqs"] for sample in (0, 1)
    ]
    lines = lineage(cluster.lines(part, "matches.jsonl"), resumed)
    found = [(one["group"], one["sample"]) for line in lines for one in line["matches"]]
    assert Counter(found) == Counter(trained) and max(Counter(found).values()) == 1
    return {(one["group"], one["sample"]): one for line in lines for one in line["matches"]}


async def test_results_of_training_are_durable_once_for_each_match_and_policy_also_after_a_kill(toys: Toys) -> None:
    cluster, model = toys
    halves = {"algorithm": {"groups_per_batch": 2}, "train": {"steps": 24, "checkpoint_every": 4}}
    parts: dict[str, Any] = {
        "environment": {"name": "tests.samples.seat_samples:Stakes"},
        "algorithm": {"group_size": GROUP_SIZE, "groups_per_batch": 4, "max_staleness": 2},
        "rollout": {"engine": "toy", "max_turns": 2, "max_tokens": 6},
        "train": {"learner": "simulated", "steps": 12, "simulated_step_s": 0.05, "checkpoint_every": 3},
        "policies": {"first": {}, "second": halves},
        "seats": SEATS,
    }
    job = await cluster.submit(toy_game(model, **parts))
    await cluster.reaches(job, 5)
    cluster.kill("trainer-0")
    await cluster.succeeds(job)
    first, second = (results(cluster, part_id(job, name)) for name in ("first", "second"))
    for one in [*first.values(), *second.values()]:
        assert one["rewards"].keys() == SEATS.keys() and sum(one["rewards"].values()) == 0.0
    assert all(one["opponents"].keys() == {"second"} for one in first.values())
    both = first.keys() & second.keys()
    assert both
    for match in both:
        mine, theirs = first[match], second[match]
        assert mine["rewards"] == theirs["rewards"]
        assert mine["opponents"]["second"]["version"] == theirs["version"]
        assert theirs["opponents"]["first"]["version"] == mine["version"]
        won = mine["opponents"]["second"]["outcome"]
        assert won == float(mine["rewards"][BACKER] > 0) == 1.0 - theirs["opponents"]["first"]["outcome"]


async def test_results_against_a_bot_are_those_of_the_game(toys: Toys) -> None:
    """The toy engine names no side of the penny, and loses to a bot that does."""
    cluster, model = toys
    parts: dict[str, Any] = {"environment": {"name": "matching_pennies"}, "seats": {"odd": {"bot": "heads"}}}
    job = await cluster.run(toy_game(model, **parts))
    found = results(cluster, job)
    assert len(found) == 6 * 2 * GROUP_SIZE
    assert all(one["opponents"] == {"bot:heads": {"outcome": 0.0}} for one in found.values())
