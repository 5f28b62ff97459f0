"""A job whose environment stops rewarding it for a while goes back by itself, through all processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.cluster import toy_cluster
from tests.support.factories import make_spec

STEPS = 50


async def test_a_job_goes_back_to_before_the_cliff_and_ends_well(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path) as (cluster, model):
        spec = make_spec(
            model={"base": str(model)},
            environment={"name": "tests.samples.env_samples:Cliff", "config": {"first": 60, "until": 94}},
            algorithm={"group_size": 2, "groups_per_batch": 2, "max_staleness": 1},
            rollout={"engine": "toy", "max_tokens": 4, "toy": {"skill": 0.6}, "seed": 0},
            train={
                "learner": "simulated",
                "steps": STEPS,
                "checkpoint_every": 5,
                "keep_checkpoints": 10,
                "rewind_on": ["reward_cliff"],
            },
        )
        job = await cluster.run(spec)
        events: list[dict[str, Any]] = [dict(event) async for event in cluster.client.events(job)]
        (said,) = [event for event in events if event["event"] == "rewound"]
        assert said["alarm"] == "reward_cliff" and said["to"] < 30 < said["from"]
        ledger = await cluster.trained(job, spec)
        assert ledger.discarded["rewound"] == 2 * (said["from"] - said["to"])
        lines = cluster.lines(job)
        versions = [(line["epoch"], line["step"]) for line in lines]
        assert versions == sorted(set(versions)), "versions never go backwards"
        groups = [group for line in lines for group in line["seqs"]]
        assert len(groups) == len(set(groups)), "and no group is trained twice"
