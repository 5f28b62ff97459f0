"""Two policies of different speed under each schedule, with real processes and a killed trainer: ledgers balance, both
lags keep within their bounds, and what one policy could not take is discarded for it alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.core import part_id
from tests.support.cluster import Cluster, Toys
from tests.support.lineage import Line, lineage
from tests.support.toys import toy_game

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW_S, FAST_S = 0.3, 0.05


def game(model: Path, match: dict[str, Any], *, max_staleness: int, slow: int, fast: int, **changes: Any) -> JobSpec:
    """`slow`, `fast`: steps of the policies of that name."""
    parts: dict[str, Any] = {
        "algorithm": {"group_size": 2, "groups_per_batch": 2, "max_staleness": max_staleness},
        "rollout": {"engine": "toy", "max_tokens": 4, "toy": {"seconds_per_token": 0.005}},
        "train": {"learner": "simulated", "steps": fast, "simulated_step_s": FAST_S, "checkpoint_every": 4},
        "policies": {"slow": {"train": {"steps": slow, "simulated_step_s": SLOW_S}}, "fast": {}},
        "seats": {"speaker": "slow", "listener": "fast"},
        "match": match,
    }
    return toy_game(model, **{**parts, **changes})


async def trained(cluster: Cluster, spec: JobSpec, *, kill_at: int | None) -> dict[str, list[Line]]:
    """Return the steps of each policy that count, after the job has ended and its ledgers have been checked. `kill_at`:
    step at which the trainer is killed; None: it is not."""
    job = await cluster.submit(spec)
    if kill_at is not None:
        await cluster.reaches(job, kill_at)
        cluster.kill("trainer-0")
    await cluster.succeeds(job)
    found = {}
    for name in spec.policies:
        part, own = part_id(job, name), spec_of(spec, name)
        manifest = cluster.manifest(part)
        lines = found[name] = lineage(cluster.lines(part), manifest.resumed)
        assert [line["step"] for line in lines] == list(range(1, own.train.steps + 1)), name
        times = Counter(seq for line in lines for seq in line["seqs"])
        assert max(times.values()) == 1, f"{name} trained a group twice"
        ledger = await cluster.ledger(job, name)
        assert ledger.balanced and ledger.running == ledger.pending == 0, (name, ledger)
        assert ledger.trained == times.total() == manifest.ledger["trained"], (name, ledger)
        assert max(line["staleness/max"] for line in lines) <= own.algorithm.max_staleness
    return found


@pytest.mark.parametrize(
    ("schedule", "slow", "fast", "kill_at"),
    [("drop", 8, 40, 10), ("grow", 4, 16, None), pytest.param("grow", 8, 40, 10, marks=pytest.mark.nightly)],
)
async def test_the_fast_policy_goes_ahead_and_the_slow_one_takes_what_it_can(
    toys: Toys, schedule: str, slow: int, fast: int, kill_at: int | None
) -> None:
    cluster, model = toys
    spec = game(model, {"schedule": schedule, "max_opponent_lag": 8}, max_staleness=2, slow=slow, fast=fast)
    found = await trained(cluster, spec, kill_at=kill_at)
    assert max(line["opponent_lag/max"] for lines in found.values() for line in lines) <= 8
    sizes = {name: {len(line["seqs"]) for line in lines} for name, lines in found.items()}
    if schedule == "drop":
        assert sizes == {"slow": {2}, "fast": {2}}
        assert found["slow"][-1]["dropped/surplus"] > 0
    else:
        assert (
            sizes["fast"] == {2}
            and max(sizes["slow"]) > 2
            and all(size % 2 == 0 and size <= 16 for size in sizes["slow"])
        )
        assert found["slow"][-1].get("dropped/surplus", 0.0) == 0.0


async def test_in_lockstep_no_opponent_has_moved(toys: Toys) -> None:
    cluster, model = toys
    spec = game(model, {"schedule": "lockstep"}, max_staleness=0, slow=12, fast=12)
    found = await trained(cluster, spec, kill_at=6)
    assert {line["opponent_lag/max"] for lines in found.values() for line in lines} == {0.0}
    together = [len(set(a["seqs"]) & set(b["seqs"])) for a, b in zip(found["slow"], found["fast"], strict=True)]
    assert together.count(2) >= 10, "but for the steps around the kill both learn from the same matches"


@pytest.mark.parametrize(("slow", "fast", "kill_at"), [(4, 6, None), pytest.param(9, 12, 5, marks=pytest.mark.nightly)])
async def test_policies_take_turns(toys: Toys, slow: int, fast: int, kill_at: int | None) -> None:
    cluster, model = toys
    match = {"schedule": "alternate", "alternate_steps": 3, "max_opponent_lag": 0}
    spec = game(model, match, max_staleness=1, slow=slow, fast=fast)
    found = await trained(cluster, spec, kill_at=kill_at)
    assert {line["opponent_lag/max"] for lines in found.values() for line in lines} == {0.0}
    assert all(lines[-1]["dropped/resting"] > 0 for lines in found.values())
    ends = sorted((line["time"], name, line["step"]) for name, lines in found.items() for line in lines)
    last = {"slow": 0, "fast": 0}
    for _, name, step in ends:
        others = {other: made for other, made in last.items() if other != name}
        assert all(made // 3 >= (step - 1) // 3 for other, made in others.items() if made < len(found[other])), ends
        last[name] = step


async def test_evaluations_in_lockstep_move_no_opponent(toys: Toys) -> None:
    cluster, model = toys
    plan: dict[str, Any] = {"every": 2, "episodes": 4, "against": [{"policy": "fast"}, {"policy": "slow"}]}
    changes: dict[str, Any] = {"name": "evaluated in lockstep", "validation": plan}
    spec = game(model, {"schedule": "lockstep"}, max_staleness=0, slow=4, fast=4, **changes)
    found = await trained(cluster, spec, kill_at=None)
    assert {line["opponent_lag/max"] for lines in found.values() for line in lines} == {0.0}
    assert [line["seqs"] for line in found["slow"]] == [line["seqs"] for line in found["fast"]]
    (job,) = (one["id"] for one in await cluster.client.jobs() if one["name"] == spec.name)
    for name in spec.policies:
        lines = cluster.lines(part_id(job, name), "validation.jsonl")
        assert [line["step"] for line in lines] == [0, 2, 4]
        assert {line["val/episodes"] for line in lines} == {4.0} and not any(line["val/missing"] for line in lines)


@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("drop", {}),
        pytest.param("grow", {}, marks=pytest.mark.nightly),
        pytest.param("alternate", {"alternate_steps": 3}, marks=pytest.mark.nightly),
        pytest.param("lockstep", {}, marks=pytest.mark.nightly),
    ],
)
async def test_a_pool_grows_under_every_schedule(toys: Toys, schedule: str, more: dict[str, Any]) -> None:
    cluster, model = toys
    together = schedule == "lockstep"
    voters: dict[str, Any] = {
        "environment": {"name": "tests.samples.seat_samples:Vote", "config": {"seats": 3, "rounds": 1}},
        "seats": {"voter_0": "slow", "voter_1": "fast", "voter_2": {"pool": "past"}},
        "pools": {"past": {"policy": "fast", "every": 4, "latest": 0.0}},
    }
    steps = {"slow": 12 if together else 4, "fast": 12}
    spec = game(model, {"schedule": schedule, **more}, max_staleness=0 if together else 2, **steps, **voters)
    found = await trained(cluster, spec, kill_at=5)
    assert {name: len(lines) for name, lines in found.items()} == steps
    games = [line["pool/past/games"] for line in found["fast"]]
    assert all(games) and not any("pool/past/games" in line for line in found["slow"])
    assert found["fast"][-1]["pool/past/size"] == 3.0, "the first weights and those of steps 4 and 8"
