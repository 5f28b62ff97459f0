"""Jobs on phones through all services: trees on the page, and more episodes than there are emulated phones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from opentinker.envs.phones.chromium import PROGRAMS
from tests.support.cluster import Toys, shared_fixture, toy_cluster
from tests.support.factories import make_spec
from tests.support.lineage import undocumented
from tests.support.simulated_phone import served_phones

pytestmark = pytest.mark.asyncio(loop_scope="module")
SIZE, GROUPS, STEPS = 4, 2, 2
OWN = {"solved", "actions", "illegal"}
"""Metrics of the environments."""


toys = shared_fixture(toy_cluster, env_egress_allow="127.0.0.0/8")


async def trained(toys: Toys, algorithm: dict[str, Any], **environment: Any) -> list[dict[str, Any]]:
    """The lines of the steps of a job whose episodes have all been played."""
    cluster, model = toys
    job = await cluster.run(
        make_spec(
            model={"base": str(model), "chat_template": "plain"},
            environment=environment,
            algorithm={"group_size": SIZE, "groups_per_batch": GROUPS, **algorithm},
            rollout={"engine": "toy", "max_tokens": 64, "max_tokens_per_turn": 8, "max_turns": 8, "seed": 3},
            train={"learner": "simulated", "steps": STEPS},
        )
    )
    ledger = await cluster.ledger(job)
    assert (ledger.accepted, ledger.failed) == (GROUPS * STEPS, {})
    points = await cluster.client.metrics(job)
    names = {name for point in points for name in point["values"] if not name.startswith("task/")}
    assert undocumented(names - OWN) == []
    lines: list[dict[str, Any]] = cluster.lines(job)
    return lines


@pytest.mark.skipif(not any(map(shutil.which, PROGRAMS)), reason="no Chromium on this machine: make browser")
async def test_trees_are_sampled_on_the_page(toys: Toys) -> None:
    config = {"tasks": ["open_app"], "actions": "number", "max_steps": 3, "max_illegal": 9}
    lines = await trained(toys, {"name": "at_grpo"}, name="phone_page", config=config)
    assert [line["groups"] for line in lines] == [GROUPS] * STEPS
    for line in lines:
        assert line["trajectories"] > GROUPS * SIZE, "every turn has candidates"
        assert 0.0 <= line["solved"] <= 1.0


async def test_more_episodes_than_phones_take_turns(toys: Toys, tmp_path: Path) -> None:
    with served_phones(2, tmp_path) as phones:
        lines = await trained(toys, {}, name="android_world", config={"phones": phones, "max_steps": 3})
        assert sum(line["trajectories"] for line in lines) == SIZE * GROUPS * STEPS
    for phone in range(2):
        events = (tmp_path / str(phone)).read_text().split()[::2]
        assert events == ["begin", "end"] * (len(events) // 2), "one episode at a time"
