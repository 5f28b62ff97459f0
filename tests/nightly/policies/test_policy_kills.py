"""Matches of two policies while every process and both servers are killed at random: each match is zero-sum to the last
bit, is trained once by each policy and as the same play, and every policy's ledger balances at every moment. The
results of all matches, in matches.jsonl, say so of each, also of those that one policy alone was trained on.

OPENTINKER_MATCHES says how many matches are trained (10,000), OPENTINKER_MATCH_KILLS how often something is killed
(100); the seed of a run is printed, OPENTINKER_KILL_SEED repeats it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import Discard, part_id
from opentinker.shared.types.manifest import name_of
from tests.conftest import Figure, until
from tests.e2e.test_kills import SERVICES, seed
from tests.samples.seat_samples import BACKER, RIVAL
from tests.support.cluster import SERVERS, Cluster, toy_cluster
from tests.support.lineage import lineage

MATCHES = int(os.environ.get("OPENTINKER_MATCHES", "10000"))
KILLS = int(os.environ.get("OPENTINKER_MATCH_KILLS", "100"))
GROUP_SIZE, BATCH = 4, 50
"""Matches of a group, groups of a step: of 100 steps every kept episode is still there."""
STEPS = MATCHES // (GROUP_SIZE * BATCH)
SPARE = 3 + KILLS // 10
"""Shares of the matches that come after the last kill."""
LONGEST_PAUSE_S = 0.5
"""Between a share of the matches and the kill that it calls for."""
JOB_S = 90.0 + 30.0 * KILLS + MATCHES / 5
POLICIES = {"first": BACKER, "second": RIVAL}
"""By name: the seat."""
NAMES = (*SERVICES, *SERVERS, "rollout_worker-1", "env_worker-1")


def game(model: Path) -> JobSpec:
    """The second policy takes half as many matches a step and saves at other matches, so that a killed trainer goes on
    from steps of different age. One episode of each group is kept, with all its rewards."""
    halves = {"algorithm": {"groups_per_batch": BATCH // 2}, "train": {"steps": 2 * STEPS, "checkpoint_every": 7}}
    spec: dict[str, Any] = {
        "name": "zero-sum under kills",
        "model": {"base": str(model), "chat_template": "plain"},
        "environment": {"name": "tests.samples.seat_samples:Stakes"},
        "algorithm": {"group_size": GROUP_SIZE, "groups_per_batch": BATCH, "max_staleness": 3},
        "rollout": {"engine": "toy", "max_turns": 2, "max_tokens": 6, "transcripts": BATCH},
        "train": {"learner": "simulated", "steps": STEPS, "simulated_step_s": 0.05, "checkpoint_every": 3},
        "policies": {"first": {}, "second": halves},
        "seats": {seat: name for name, seat in POLICIES.items()},
    }
    return parse_spec(spec)


@pytest.mark.nightly
@pytest.mark.timeout(JOB_S + 120)
async def test_matches_are_whole_and_zero_sum_whoever_is_killed(tmp_path: Path, figure: Figure) -> None:
    async with toy_cluster(tmp_path, rollout_workers=2, env_workers=2) as (cluster, model):
        spec = game(model)
        job = await cluster.submit(spec)
        killed = await harm(cluster, job, random.Random(seed()))
        await cluster.succeeds(job, JOB_S)
        assert {name: cluster.processes[name].exits.count(-signal.SIGKILL) for name in killed} == killed
        trained = {name: await check(cluster, job, spec, name) for name in POLICIES}
        both = await check_shared(cluster, job, trained)
        one = [GROUP_SIZE * len(groups) - both for groups in trained.values()]
        said = [event["event"] async for event in cluster.client.events(job)]
        assert "out_of_step" not in said, "policies resume from checkpoints that fit each other"
        assert both > 0.97 * MATCHES
        figure(
            f"{both} matches trained by both policies, {one} by one alone (stale for the other), under {KILLS} kills "
            f"({dict(killed)}): each zero-sum, none half, none twice; ledgers balanced throughout"
        )


async def harm(cluster: Cluster, job: str, random_: random.Random) -> Counter[str]:
    """Kill everything in turn, in a random order: one each time that another equal share of the matches has been
    accepted, so that all kills come while the job trains. Returns how often each was killed."""
    order = itertools.cycle(random_.sample(NAMES, len(NAMES)))
    killed: Counter[str] = Counter()
    most = 0
    for number in range(1, KILLS + 1):
        while most < number * STEPS * BATCH // (KILLS + SPARE):
            record = await cluster.store.job(job)
            assert not record.state.final, f"{record.state}: {record.reason}"
            ledgers = [await cluster.ledger(job, name) for name in POLICIES]
            assert all(ledger.balanced for ledger in ledgers), ledgers
            most = max(most, *(ledger.accepted for ledger in ledgers))
            await asyncio.sleep(0.05)
        await asyncio.sleep(random_.uniform(0.0, LONGEST_PAUSE_S))
        killed[name := next(order)] += 1
        await until(partial(runs, cluster, name))
        assert not (await cluster.store.job(job)).state.final, "every kill comes while the job trains"
        cluster.kill(name)
    return killed


def runs(cluster: Cluster, name: str) -> bool:
    process = cluster.processes[name].popen
    return process is not None and process.poll() is None


async def check(cluster: Cluster, job: str, spec: JobSpec, policy: str) -> dict[int, list[float]]:
    """Check a policy's lineage and ledger. Return what it was trained on: by group, the reward of each match."""
    part = part_id(job, policy)
    ledger = await cluster.trained(job, spec, policy)
    assert ledger.running == ledger.pending == 0, ledger
    groups = {}
    resumed = cluster.manifest(part).resumed
    results = {line["step"]: line["matches"] for line in lineage(cluster.lines(part, "matches.jsonl"), resumed)}
    for line in lineage(cluster.lines(part), resumed):
        matches = results.pop(line["step"])
        assert Counter(one["group"] for one in matches) == dict.fromkeys(line["seqs"], GROUP_SIZE)
        for one in matches:
            assert one["rewards"].keys() == set(POLICIES.values()) and sum(one["rewards"].values()) == 0.0, one
        path = cluster.data / "jobs" / part / "rollouts" / f"{name_of(line['step'])}.jsonl"
        kept = {one["group"]: one for one in map(orjson.loads, path.read_bytes().splitlines())}
        assert kept.keys() == set(line["seqs"]), f"step {line['step']} of {policy}"
        for number, one in kept.items():
            (seat, rewards), *others = one["group_rewards"].items()
            assert (seat, others, len(rewards)) == (POLICIES[policy], [], GROUP_SIZE), f"group {number}: {one}"
            assert one["metrics"][BACKER] == -one["metrics"][RIVAL], f"group {number}: {one['metrics']}"
            assert one["metrics"][seat] == one["rewards"][seat], f"group {number} is not of the play that ended"
            groups[number] = rewards
    assert not results, "results of steps that were not made"
    times = Counter(abs(reward) for rewards in groups.values() for reward in rewards)
    assert set(times.values()) == {1}, "each play of a match has its own stakes: one was trained twice"
    return groups


async def check_shared(cluster: Cluster, job: str, trained: dict[str, dict[int, list[float]]]) -> int:
    """Check that both policies were trained on the same play of each match. What one alone was trained on was too old
    for the other, or took the place of what was when the other had made its last step. Return the number of matches
    that both were trained on."""
    first, second = trained.values()
    both = first.keys() & second.keys()
    for number in both:
        assert first[number] == [-reward for reward in second[number]], f"group {number}: halves of two plays"
    stale = [(await cluster.ledger(job, name)).discarded.get(Discard.STALE, 0) for name in trained]
    assert len(first.keys() - both) == len(second.keys() - both) <= sum(stale), stale
    return GROUP_SIZE * len(both)
