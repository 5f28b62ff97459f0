"""Jobs through the whole system: real processes and servers, the simulated engine and learner. Submitted over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import orjson
import pytest

from opentinker.client import ApiError
from opentinker.shared.messaging.permissions import HISTORY
from opentinker.shared.messaging.subjects import SERVICES
from tests.conftest import until
from tests.e2e.toy_jobs import free, job_spec, steps_of
from tests.samples import canaries
from tests.samples.upload_samples import PARITY
from tests.support.api import OPERATOR, bearing
from tests.support.cluster import SERVERS, Toys, shared_fixture, toy_cluster, toy_model
from tests.support.lineage import undocumented

pytestmark = pytest.mark.asyncio(loop_scope="module")

PER_STEP = {
    *(f"reward/{part}" for part in ("mean", "std", "min", "max")),
    *(f"staleness/{part}" for part in ("min", "mean", "max")),
    *("reward/env/copy_digits", "exact", "zero_variance", "response_length/mean", "response_length/max"),
    *("turns/mean", "stop/eos", "stop/length", "spans/mean", "tokens", "trainer/tokens_per_s", "trainer/wait_share"),
    *("swap/pause_s", "swap/transfer_s", "swap/load_s", "swap/resume_s", "swap/seconds"),
    *("queue/pending_groups", "queue/running_groups", "step_seconds", "train_seconds"),
}
PER_SERVICE = {
    "rollout_worker-0": {
        *("rollout/tokens_per_s", "rollout/episodes_per_s", "rollout/running_groups", "rollout/swap_load_s"),
        *("rollout/open_s", "rollout/generate_s", "rollout/env_s", "rollout/tool_s"),
        *("rollout/start_s", "rollout/verify_s"),
    },
    "env_worker-0": {"env/sessions", "env/steps", "env/steps_per_s", "env/ended/done"},
    "scheduler": {
        *("scheduler/tickets_issued", "scheduler/tickets_issued_per_s", "scheduler/groups_accepted"),
        *("scheduler/running_groups", "scheduler/pending_groups", "queue/tickets", "queue/scores", "queue/groups"),
    },
}


toys = shared_fixture(toy_cluster, forked=False)


@pytest.fixture
def shared(request: pytest.FixtureRequest, toys: Toys) -> Iterator[Toys]:
    """The module's cluster: every job finds the processes that the one before has left. Its logs are shown if the test
    fails, and no process may have ended by itself."""
    failed = request.session.testsfailed
    yield toys
    cluster, _ = toys
    ended = {name: p.exits for name, p in cluster.processes.items() if p.exits}
    if ended or request.session.testsfailed > failed:
        cluster.show()
    assert ended == {}


# --- a job's whole life ---------------------------------------------------------------------------------------------


async def test_job_runs_from_submission_to_download(shared: Toys, tmp_path: Path) -> None:
    cluster, model = shared
    spec = job_spec(model)
    job = await cluster.submit(spec)
    events = [event async for event in cluster.client.events(job)]
    record = await cluster.wait(job)
    assert (record["state"], record["step"]) == ("succeeded", 10), record["reason"]

    kinds = [event["event"] for event in events]
    life = [kind for kind in kinds if kind not in ("checkpoint", "nothing_learned")]
    assert life == ["queued", "starting", "model_loaded", "running", "succeeded"]
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [4, 8, 10]

    ledger = await cluster.trained(job, spec)
    assert ledger.failed == {} and ledger.issued == ledger.accepted + ledger.running

    points = await cluster.client.metrics(job, source="trainer")
    assert [point["step"] for point in points] == list(range(1, 11))
    assert set(points[-1]["values"]) >= PER_STEP
    assert record["metrics"]["trainer"]["step"] == 10

    told = await cluster.client.rollouts(job)
    assert told["step"] == 10 and len(told["rollouts"]) == 4
    assert [said["role"] for said in told["rollouts"][0]["views"][0]["messages"]][-2:] == ["user", "assistant"]
    tokens = told["rollouts"][0]["views"][0]["tokens"]
    assert tokens is not None
    lengths = {len(tokens["text"]), len(tokens["ids"]), len(tokens["mask"]), len(tokens["logprobs"])}
    assert lengths == {len(tokens["ids"])} and tokens["left_out"] == 0 and tokens["advantages"] is None
    assert sum(tokens["mask"]) == told["rollouts"][0]["tokens"] == sum(b - a for a, b, _ in tokens["versions"])
    (spread,) = await cluster.client.distributions(job)
    assert spread["step"] == 10 and sum(spread["reward"]["counts"]) == points[-1]["values"]["trajectories"]

    assert {line["trace"] for line in cluster.lines(job)} == {record["trace"].split("-")[1]}

    async def all_spent() -> bool:
        (spent,) = (await cluster.client.usage(job=job))["usage"]
        trained = sum(point["values"]["tokens"] for point in points)
        counted = spent["tokens_trained"] == trained <= spent["tokens_generated"]
        return bool(counted and spent["cpu_s"] and spent["bytes_stored"])

    await until(all_spent)
    await until(
        lambda: cluster.client.log_lines(job),
        lambda found: {line["service"] for line in found} >= {"scheduler", "trainer", "rollout-worker"},
    )

    async def all_shown() -> bool:
        segments = [s for part in await cluster.client.timeline(job) for s in part["segments"]]
        kinds = {(s["lane"], s["kind"]) for s in segments}
        made = {s["version"] for s in segments if (s["lane"], s["kind"]) == ("training", "step")}
        return made == {f"1.{step}" for step in range(1, 11)} and kinds >= {
            *(("generation", "rollout"), ("env", "rollout"), ("training", "wait"), ("training", "checkpoint")),
            *(("swap", "publish"), ("env", "open"), ("env", "turn")),
        }

    await until(all_shown)

    target = await cluster.client.download(job, tmp_path / "model")
    assert (target / "manifest.json").exists()


async def test_no_secret_is_anywhere_but_in_its_file(shared: Toys) -> None:
    """Passwords of all users and the operator's key, over a whole job and what a wrong key is told."""
    cluster, model = shared
    job = await cluster.submit(job_spec(model))
    record = await cluster.wait(job)
    events = [event async for event in cluster.client.events(job)]
    passwords = [cluster.access.password(server, user) for server in SERVERS for user in (*SERVICES, "operator")]
    wrong = OPERATOR[:-8] + "AAAAAAAA"
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{cluster.http_port}/v1/jobs", headers=bearing(wrong)) as refused,
    ):
        told = [("job", str(record)), ("events", str(events)), ("answer", await refused.text())]
    places, looked_at = canaries.found(cluster, [*passwords, wrong], told)
    assert places == [] and looked_at > 50, places
    places, _ = canaries.found(cluster, [OPERATOR.split("_")[3]], told)
    given = {f"environment of {name}" for name in cluster.processes}  # by these tests, to their own clients
    assert set(places) <= given, places
    places, _ = canaries.found(cluster, passwords, [("planted", f"a log line with {passwords[0]}")])
    assert places == ["planted"], "the test finds what is there"


async def test_an_uploaded_environment_is_trained_on_in_a_sandbox(shared: Toys) -> None:
    cluster, model = shared
    pushed = await cluster.client.push_environment(PARITY)
    assert pushed["checked"]
    spec = job_spec(model, environment={"name": "upload:parity", "config": {"largest": 9}})
    job = await cluster.submit(spec)
    record = await cluster.succeeds(job)
    assert record["environment"] == pushed["environment"]
    assert cluster.faults(job, spec) == []
    points = await cluster.client.metrics(job, source="trainer")
    assert undocumented({name for point in points for name in point["values"]}) == []


@pytest.mark.parametrize("forgets", [False, True], ids=["one stream", "a stream per request"])
async def test_what_agents_ask_over_http_is_trained_on(shared: Toys, forgets: bool) -> None:
    cluster, model = shared
    spec = job_spec(
        model,
        environment={"name": "tests.samples.agent_samples:Echo", "config": {"asks": 3, "forgets": forgets}},
        rollout={"engine": "toy", "max_turns": 3, "max_tokens": 24, "max_tokens_per_turn": 8},
        train={"learner": "simulated", "steps": 3, "simulated_step_s": 0.0},
    )
    job = await cluster.run(spec)
    assert cluster.faults(job, spec) == []
    points = await cluster.client.metrics(job, source="trainer")
    assert {point["values"]["turns/mean"] for point in points} == {3.0}


async def test_job_starts_from_another_jobs_checkpoint_which_is_swept_meanwhile(shared: Toys) -> None:
    """The only trainer is busy with the first job, which sweeps the checkpoint before the second one can begin."""
    cluster, model = shared
    train = {"learner": "simulated", "simulated_step_s": 0.02, "checkpoint_every": 2, "keep_checkpoints": 2}
    first = await cluster.submit(job_spec(model, train={**train, "steps": 40}))
    await until(lambda: steps_of(cluster, first))
    chosen = steps_of(cluster, first)[-1]
    second = (await cluster.client.submit(job_spec(model), from_checkpoint=f"{first}@{chosen}"))["id"]
    await cluster.succeeds(first)
    assert chosen not in steps_of(cluster, first)
    await cluster.succeeds(second)
    loaded = [event for event in await cluster.client.event_log(second) if event["event"] == "model_loaded"]
    assert [dict(event)["from"] for event in loaded] == [f"{first}@{chosen}"]
    assert cluster.faults(second, job_spec(model)) == []
    await until(lambda: not (cluster.data / "jobs" / second / "start").exists())


async def test_every_service_reports_while_the_job_runs(shared: Toys) -> None:
    cluster, model = shared
    spec = job_spec(model, rollout={"engine": "toy", "max_tokens": 8, "toy": {"seconds_per_token": 0.05}})
    job = await cluster.submit(spec)
    await until(
        lambda: cluster.client.metrics(job),
        lambda points: all(
            any(point["source"] == source and set(point["values"]) >= names for point in points)
            for source, names in PER_SERVICE.items()
        ),
    )
    await cluster.succeeds(job)
    assert undocumented({name for point in await cluster.client.metrics(job) for name in point["values"]}) == []
    points = await cluster.client.metrics(job, source="scheduler")
    issued = [point["values"]["scheduler/tickets_issued"] for point in points]
    assert issued == sorted(issued) and issued[-1] > 0
    assert max(point["values"]["queue/groups"] for point in points) > 0


async def test_cancelled_job_lets_go_of_its_workers_and_the_next_one_runs(shared: Toys) -> None:
    cluster, model = shared
    job = await cluster.submit(
        job_spec(model, train={"learner": "simulated", "steps": 10_000, "simulated_step_s": 0.02})
    )
    waiting = await cluster.submit(job_spec(model))

    async def stored() -> bool:
        streams = [queue for queue in await cluster.client.queues() if queue["stream"] not in HISTORY]
        return any(subject.endswith(f".{job}") for queue in streams for subject in queue["subjects"])

    await cluster.reaches(job, 3)
    await until(stored)
    assert (await cluster.client.job(waiting))["state"] == "queued"
    await cluster.client.cancel(job)
    assert (await cluster.wait(job))["state"] == "cancelled"
    await cluster.succeeds(waiting)
    await free(cluster)
    assert (await cluster.ledger(job)).balanced
    saved, logged = (await cluster.client.checkpoints(job))[-1]["step"], cluster.lines(job)[-1]["step"]
    assert saved - logged in (0, 1)  # the step that was being computed counts
    await until(stored, lambda found: not found)


async def test_two_seats_are_rewarded_each_for_itself_and_their_streams_count_once(shared: Toys) -> None:
    cluster, model = shared
    spec = job_spec(
        model,
        environment={"name": "tests.samples.seat_samples:Duel", "config": {"rounds": 2}},
        rollout={"engine": "toy", "max_tokens": 16, "max_turns": 2, "max_tokens_per_turn": 8},
        validation={"every": 10, "episodes": 8},
    )
    job = await cluster.run(spec)
    assert cluster.faults(job, spec) == []
    lines = cluster.lines(job)
    for line in lines:
        assert line["trajectories"] == 4 * 4 * 3, "one of second, two of first"
        assert line["turns/mean"] == 2.0 and line["ending/env_done"] == 1.0
        assert line["reward/seat/first"] == -line["reward/seat/second"] and line["reward/mean"] == 0.0
    assert any(line["reward/seat/first"] for line in lines)
    for line in cluster.lines(job, "validation.jsonl"):
        assert line["val/reward/seat/first"] == -line["val/reward/seat/second"] != 0.0
        assert (line["val/reward/mean"], line["val/component/outcome"], line["val/failed"]) == (0.0, 0.0, 0.0)
    points = await cluster.client.metrics(job)
    assert undocumented({name for point in points for name in point["values"]}) == []


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "ending", "words"),
    [
        ("raise", "env_error", "the board is on fire"),
        (
            "hang",
            "env_timeout",
            r"the episode's [\d.]+ s were over|no end within rollout.episode_timeout_s = 2|no env worker answered",
        ),
        ("nan", "env_bad_reply", "must be finite, not nan"),
    ],
)
async def test_job_fails_when_its_environment_always_does(shared: Toys, how: str, ending: str, words: str) -> None:
    cluster, model = shared
    spec = job_spec(
        model,
        environment={"name": "tests.samples.env_samples:Misbehaving", "config": {"how": how}},
        rollout={"engine": "toy", "max_tokens": 8, "retries": 1, "episode_timeout_s": 2.0 if how == "hang" else 20.0},
    )
    job = await cluster.submit(spec)
    reason = await cluster.fails(job)
    assert "groups failed (rollout.max_failed_share is 0.5)" in reason
    assert ending in reason and re.search(words, reason), reason
    ledger = await cluster.ledger(job)
    assert set(ledger.failed) == {ending} and ledger.failed[ending] >= 20 and ledger.accepted == 0
    lines = cluster.logs("rollout_worker-0").splitlines()
    tries = [orjson.loads(line) for line in lines if '"event":"episode_failed"' in line and job in line]
    assert len(tries) > ledger.failed[ending], "they were retried"
    assert all(line["job"] == job and line["episode"].startswith(f"{job}-{line['group']}-") for line in tries)
    await free(cluster)


async def test_job_goes_on_past_groups_that_fail(shared: Toys) -> None:
    cluster, model = shared
    spec = job_spec(
        model,
        environment={"name": "tests.samples.env_samples:Moody", "config": {"how": "raise", "every": 4}},
        rollout={"engine": "toy", "max_tokens": 8, "retries": 1},
    )
    job = await cluster.run(spec)
    ledger = await cluster.trained(job, spec)
    assert ledger.failed["env_error"] >= 10
    failures = [event for event in await cluster.client.event_log(job) if event["event"] == "group_failed"]
    assert {event["reason"] for event in failures} == {"env_error"}
    assert all(event["group"] % 4 == 0 and "the board is on fire" in event["error"] for event in failures)
    assert cluster.lines(job)[-1]["failed/env_error"] >= 10
    found = await cluster.client.why(job, last_s=10)
    seconds = {one["cause"]: one["seconds"] for one in found["causes"]}
    assert sum(seconds.values()) == pytest.approx(found["until"] - found["since"], abs=1e-3) and seconds["training"] > 0
    assert any(
        "most by env_error" in one["what"] and "opentinker failures" in one["advice"] for one in found["findings"]
    )


async def test_a_missing_chat_template_is_refused_unless_allowed(shared: Toys, tmp_path: Path) -> None:
    cluster, _ = shared
    model = toy_model(tmp_path / "bare")
    (model / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    spec = job_spec(model)
    with pytest.raises(ApiError, match="has no chat template") as refused:
        await cluster.client.submit(spec)
    assert [m["field"] for m in refused.value.mistakes] == ["model.chat_template"]
    data = spec.model_dump(mode="json")
    data["model"]["chat_template"] = "plain"
    await cluster.succeeds((await cluster.client.submit(data))["id"])


async def test_model_that_cannot_be_read_fails_the_job_with_its_reason(shared: Toys, tmp_path: Path) -> None:
    cluster, _ = shared
    (tmp_path / "config.json").write_text("{}")
    assert "no tokenizer in model" in await cluster.fails(await cluster.submit(job_spec(tmp_path)))
    await free(cluster)
