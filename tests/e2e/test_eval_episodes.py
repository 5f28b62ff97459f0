"""Exams: what rollout workers play for evaluations, alone and in the whole system, whoever dies."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from nats.js.errors import NotFoundError

from opentinker.services.rollout_worker.engines.base import EngineLost
from opentinker.services.rollout_worker.eval_runner import views_of
from opentinker.services.rollout_worker.transcripts import shortened
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import EXAM, EXAM_RESULT
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Ending, Message, WeightVersion
from opentinker.shared.types.evaluation import EvalEpisode, EvalResult
from tests.conftest import soon, until
from tests.integration.rollout_worker.rollout_bench import Bench, Failing, Mortal
from tests.support.cluster import toy_cluster
from tests.support.factories import make_spec, make_trajectory
from tests.support.lineage import undocumented
from tests.support.scheduling import running

V = WeightVersion
JOB = """
name = "digits"
model = {{ base = "{base}", chat_template = "plain" }}
environment = {{ name = "copy_digits", config = {{ digits = 3 }} }}
algorithm = {{ group_size = 4, groups_per_batch = 2 }}
rollout = {{ engine = "toy", max_tokens = 8, toy = {{ {toy} }} }}
train = {{ steps = 2, learner = "simulated" }}
"""


class Exams(Bench):
    """A rollout worker's lives with exams in its queue; the test is the trainer."""

    async def ask(self, *versions: WeightVersion) -> None:
        self.spec = make_spec(validation={"every": 1, "transcripts": 1})
        await self.issue(0)
        self.results: list[EvalResult] = []
        for index, version in enumerate(versions):
            exam = EvalEpisode(job=self.job, version=version, index=index, seed=index)
            await self.bus.publish(EXAM, exam, f"{self.job}/{index}", job=self.job)

    async def hear(self, noun: EvalResult) -> Any:
        from opentinker.shared.types.evaluation import EvalAck

        self.results.append(noun)
        return EvalAck(wanted=True)

    async def left(self) -> int:
        return await self.bus.count("EXAMS", EXAM.at(job=self.job))


@pytest.fixture
def exams(bus: Bus, store: Store) -> Exams:
    return Exams(bus, store)


async def test_exam_waits_for_its_version_and_is_dropped_when_it_is_past(exams: Exams) -> None:
    await exams.ask(V(1, 0), V(1, 1))
    engine = Mortal()
    engine.version = None
    serving = await exams.bus.serve(EXAM_RESULT, exams.hear, job=exams.job)
    async with running(_forever(exams, engine)):
        await asyncio.sleep(0)
        engine.version = V(1, 0)
        await until(lambda: len(exams.results) == 1)
        engine.version = V(1, 1)
        await until(lambda: len(exams.results) == 2)
        past = EvalEpisode(job=exams.job, version=V(1, 0), index=9, seed=0)
        await exams.bus.publish(EXAM, past, f"{exams.job}/9", job=exams.job)
        await until(exams.left, lambda found: found == 0)
    await serving.unsubscribe()
    assert [(r.index, r.sampled_by, r.ending) for r in exams.results] == [
        (0, [V(1, 0)], Ending.ENV_DONE),
        (1, [V(1, 1)], Ending.ENV_DONE),
    ]
    (view,) = exams.results[0].views
    tokens = view.tokens
    assert len(tokens.text) == len(tokens.ids) == len(tokens.mask) == len(tokens.logprobs)
    assert sum(tokens.mask) == exams.results[0].tokens > 0 and tokens.left_out == 0 and tokens.advantages is None
    assert [version for *_, version in tokens.versions] == ["1.0"] and exams.results[1].views == []
    first, second = (r.messages for r in exams.results)
    assert [m.role for m in first] == ["user", "assistant"] and first[0].content == "7="
    assert [m.role for m in second] == ["user", "assistant"], "the first of its version with its outcome"
    ledger = await exams.admission.ledger()
    assert (ledger.accepted, ledger.issued, ledger.running) == (0, 0, 0), "no part of the training counts"


async def test_exams_of_a_missing_version_go_to_others(exams: Exams) -> None:
    """Whatever is asked for meanwhile is neither held nor delivered again and again, which would use up its tries."""
    exams.ack_wait_s = 60.0
    await exams.ask(V(1, 0))
    engine = Mortal()
    engine.version = None

    async def delivered() -> int | None:
        """So many times; None while more may come."""
        try:
            info = await exams.bus.js.consumer_info("EXAMS", f"exam-{exams.job}")
        except NotFoundError:
            return None
        return None if info.num_waiting or info.delivered is None else info.delivered.consumer_seq

    serving = await exams.bus.serve(EXAM_RESULT, exams.hear, job=exams.job)
    async with running(_forever(exams, engine)):
        await until(delivered, lambda found: found == 1)
        exam = EvalEpisode(job=exams.job, version=V(1, 0), index=1, seed=1)
        await exams.bus.publish(EXAM, exam, f"{exams.job}/1", job=exams.job)
        assert await delivered() == 1
        engine.version = V(1, 0)
        await until(lambda: len(exams.results) == 2)
        assert (await exams.bus.js.consumer_info("EXAMS", f"exam-{exams.job}")).delivered.consumer_seq == 3
    await serving.unsubscribe()


async def _forever(exams: Exams, engine: Mortal) -> None:
    await exams.live(engine)


async def test_exam_of_a_lost_engine_is_played_by_the_next(exams: Exams) -> None:
    await exams.ask(V(1, 0))
    serving = await exams.bus.serve(EXAM_RESULT, exams.hear, job=exams.job)
    engine = Mortal()
    engine.poisoned = True
    with pytest.raises(EngineLost):
        await soon(exams.live(engine))
    async with running(_forever(exams, Mortal())):
        await until(lambda: len(exams.results) == 1)
    await serving.unsubscribe()
    assert not exams.results[0].ending.failed


async def test_episode_that_always_fails_is_a_result_with_its_reason(exams: Exams) -> None:
    await exams.ask(V(1, 0))
    serving = await exams.bus.serve(EXAM_RESULT, exams.hear, job=exams.job)
    async with running(_forever(exams, Failing())):
        await until(lambda: len(exams.results) == 1)
    await serving.unsubscribe()
    assert (exams.results[0].ending, exams.results[0].error) == (Ending.ENGINE_ERROR, "out of luck")


def test_tokens_of_an_episode_in_many_contexts_are_the_first_so_many_of_all() -> None:
    kept = [make_trajectory(stream=name, pieces=["p", "q", "r", "x", "y"]) for name in "abc"]
    views = views_of([make_trajectory(stream="none"), *kept], room=8)
    assert [(one.stream, one.tokens.text, one.tokens.left_out) for one in views] == [
        ("a", ["p", "q", "r", "x", "y"], 1),
        ("b", ["p", "q", "r"], 3),
    ]


def test_transcript_of_a_long_episode_is_cut_and_says_so() -> None:
    said = [
        Message(role=role, content=text) for role, text in (("user", "1234"), ("assistant", "567890ab"), ("user", "c"))
    ]
    assert shortened(said[:1], 10) == said[:1]
    first, second = shortened(said, 10)
    assert first == said[0] and second.content == "567890 ... (3 more characters are left out)"


# --- the whole system -----------------------------------------------------------------------------------------------


def evaluated_spec(model: Path, **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "algorithm": {"group_size": 4, "groups_per_batch": 4, "max_staleness": 2},
        "rollout": {"engine": "toy", "max_tokens": 8, "toy": {"seconds_per_token": 0.02}},
        "train": {"learner": "simulated", "steps": 10, "simulated_step_s": 0.02, "checkpoint_every": 4},
        "validation": {"every": 4, "episodes": 12, "transcripts": 2},
    }
    return make_spec(model={"base": str(model)}, **{**fields, **changes})


@pytest.mark.nightly
async def test_job_is_evaluated_from_start_to_end_whoever_dies(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path, rollout_workers=2) as (cluster, model):
        spec = evaluated_spec(model, resources={"rollout_workers": 2})
        job = await cluster.submit(spec)
        record = await cluster.succeeds(job)
        lines = cluster.lines(job, "validation.jsonl")
        assert [(line["step"], line["val/episodes"], line["val/missing"]) for line in lines] == [
            (step, 12, 0) for step in (0, 4, 8, 10)
        ]
        assert len({line["val/reward/mean"] for line in lines}) == 1, "the same start states; the toy learns nothing"
        assert "exam_with_other_weights" not in cluster.logs("trainer-0")
        ledger = await cluster.ledger(job)
        assert ledger.balanced and ledger.trained == 40 and ledger.issued == ledger.accepted
        points = await cluster.client.metrics(job)
        assert {p["step"] for p in points if p["source"] == "validation"} == {0, 4, 8, 10}
        assert undocumented({name for p in points for name in p["values"]}) == []
        assert [p["step"] for p in points if p["source"] == "trainer"] == list(range(1, 11))
        found = await cluster.client.transcripts(job, 4)
        assert found["steps"] == [0, 4, 8, 10] and [one["index"] for one in found["transcripts"]][:2] == [0, 1]
        assert [m["role"] for m in found["transcripts"][0]["messages"]] == ["user", "assistant"]
        argv = [sys.executable, "-m", "opentinker.cli", "transcripts", job, "--url", cluster.client.url, "--step", "8"]
        told = await asyncio.to_thread(
            subprocess.run, argv, capture_output=True, text=True, env=cluster.env, check=True
        )
        for line in ("step 8; kept steps: 0, 4, 8, 10", "--- episode 1: reward ", "[user] ", "[assistant] "):
            assert line in told.stdout

        plan = {"every": 4, "episodes": 30, "at_start": False}
        slow = {"engine": "toy", "max_tokens": 8, "toy": {"seconds_per_token": 0.1}}
        train = {"learner": "simulated", "steps": 5, "checkpoint_every": 4, "target": {"val/reward/mean": 0.0}}
        job = await cluster.submit(
            evaluated_spec(model, validation=plan, rollout=slow, train=train, resources={"rollout_workers": 2})
        )
        await cluster.reaches(job, 4)
        cluster.kill("rollout_worker-0")
        record = await cluster.wait(job)
        assert (record["state"], record["reason"], record["step"]) == ("succeeded", "target reached", 4)
        assert [(line["step"], line["val/episodes"]) for line in cluster.lines(job, "validation.jsonl")] == [(4, 30)]


@pytest.mark.nightly
async def test_evaluation_of_a_step_already_done_is_not_repeated_by_the_next_trainer(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path) as (cluster, model):
        train = {"learner": "simulated", "steps": 12, "simulated_step_s": 0.4, "checkpoint_every": 4}
        job = await cluster.submit(evaluated_spec(model, train=train))
        await until(lambda: [line["step"] for line in cluster.lines(job, "validation.jsonl")] == [0, 4])
        await cluster.reaches(job, 5)
        cluster.kill("trainer-0")
        await cluster.succeeds(job)
        assert cluster.manifest(job).resumed[2] == 4
        assert [(line["epoch"], line["step"]) for line in cluster.lines(job, "validation.jsonl")] == [
            (1, 0),
            (1, 4),
            (2, 8),
            (2, 12),
        ]


LARGE: dict[str, dict[str, dict[str, Any]]] = {
    "large": {
        "algorithm": {"group_size": 512, "groups_per_batch": 1},
        "rollout": {"max_concurrent_groups": 2},
        "validation": {"every": 1, "at_start": False, "episodes": 1200, "transcripts": 0},
    },
    "largest": {
        "algorithm": {"group_size": 1024, "groups_per_batch": 16, "max_staleness": 1},
        "rollout": {"max_concurrent_groups": 8, "oversample": 1024, "episode_timeout_s": 3600.0},
        "validation": {"every": 1, "at_start": False, "episodes": 50_000, "timeout_s": 3600.0},
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "numbers", ["large", pytest.param("largest", marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
)
async def test_large_numbers_that_are_allowed_cost_no_worker_a_heartbeat(tmp_path: Path, numbers: str) -> None:
    """Groups open, and exams are stored, in portions: no process ends, and nobody loses a lease."""
    changes = LARGE[numbers]
    rollout = {"engine": "toy", "max_tokens": 8, **changes["rollout"]}
    train = {"learner": "simulated", "steps": 1}
    async with toy_cluster(tmp_path, env_sessions=4096) as (cluster, model):
        job = await cluster.submit(evaluated_spec(model, **{**changes, "rollout": rollout, "train": train}))
        record = await cluster.wait(job, 3000.0)
        assert (record["state"], record["step"], record["restarts"]) == ("succeeded", 1, 0), record["reason"]
        kinds = [event["event"] async for event in cluster.client.events(job)]
        assert kinds.count("starting") == 1
        assert not {"rollout_worker_lost", "trainer_lost", "group_failed"} & set(kinds), kinds
        assert {name: process.exits for name, process in cluster.processes.items() if process.exits} == {}
        assert "exams_republished" not in cluster.logs("trainer-0")
        (line,) = cluster.lines(job, "validation.jsonl")
        assert (line["val/episodes"], line["val/missing"]) == (changes["validation"]["episodes"], 0)
        (step,) = cluster.lines(job)
        assert step["trajectories"] == changes["algorithm"]["group_size"] * changes["algorithm"]["groups_per_batch"]


async def test_a_check_says_what_groups_of_the_base_model_would_teach(tmp_path: Path) -> None:
    async with toy_cluster(tmp_path / "cluster", trainers=0) as (cluster, model):

        async def check(*options: str, **toy: Any) -> subprocess.CompletedProcess[str]:
            path = tmp_path / "job.toml"
            path.write_text(JOB.format(base=model, toy=", ".join(f"{name} = {value}" for name, value in toy.items())))
            command = [
                sys.executable,
                "-m",
                "opentinker.cli",
                "env",
                "check",
                "copy_digits",
                "--url",
                cluster.client.url,
            ]
            return await asyncio.to_thread(
                subprocess.run,
                [*command, "--job", str(path), *options],
                capture_output=True,
                text=True,
                env=cluster.env,
            )

        half = await check("--groups", "8", skill=0.5)
        assert half.returncode == 0, half.stderr
        assert re.search(r"base +reward 0\.\d+, solved \d+% of its episodes \(job j-\w+\)", half.stdout)
        signal = re.search(r"signal +rewards differ in (\d+)% of its groups of 4", half.stdout)
        assert signal is not None and int(signal[1]) > 50 and "teach nothing" not in half.stdout
        told = orjson.loads((await check("--groups", "2", "--json", skill=1.0)).stdout)
        assert "solved 100%" in told["base"] and "in 0% of its groups" in told["signal"]
        assert any("teach nothing: harder tasks" in advice for advice in told["advice"])
