"""The simulation that plans: where the answer is known by thought, it says so; the command line around it."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from opentinker.cli import app
from opentinker.cli.planning.estimates import models_of, parameters_of, players_of
from opentinker.cli.planning.plan import limit, measured_of, trained_of, work_of
from opentinker.cli.planning.schedules import joint_batch, policy_steps
from opentinker.envs.registry import _found, find
from opentinker.shared.data.pipeline_simulation import Pools, Work, enough_env_workers, predict
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.errors import OpenTinkerError

ROOT = Path(__file__).resolve().parents[3]
WORK = Work(
    group_size=4, groups_per_batch=8, max_staleness=1, concurrent_groups=8, turns=1, tokens=5, token_s=0.1, env_s=0.0,
    train_s=0.3,
)  # fmt: skip
ONE = Pools(rollout_workers=1, env_workers=1, sessions=512)


def test_without_staleness_a_step_takes_the_sum_and_with_it_the_longest() -> None:
    alone = predict(replace(WORK, max_staleness=0), ONE)
    assert alone.step_s == pytest.approx(0.8) and alone.trainer_waits == pytest.approx(0.5 / 0.8)
    assert alone.staleness == 0
    overlapped = predict(WORK, ONE)
    assert overlapped.step_s == pytest.approx(0.5, rel=0.01)
    two_batches = predict(replace(WORK, concurrent_groups=16), ONE)  # both of the versions that are allowed at once
    assert two_batches.step_s == pytest.approx((0.5 + 0.3) / 2, rel=0.01)
    assert predict(replace(WORK, train_s=0.9), ONE).step_s == pytest.approx(0.9)
    assert predict(replace(WORK, train_s=0.9), ONE).trainer_waits == pytest.approx(0.0, abs=1e-9)


def test_a_swap_stops_generation_and_not_the_trainer() -> None:
    assert predict(replace(WORK, swap_s=0.1), ONE).step_s == pytest.approx(0.6, rel=0.01)
    assert predict(replace(WORK, swap_s=0.1, train_s=2.0), ONE).step_s == pytest.approx(2.0)


@pytest.mark.parametrize("staleness", [0, 2])
def test_engines_that_sleep_during_steps_take_turns_with_the_trainer(staleness: int) -> None:
    work = replace(WORK, max_staleness=staleness, sleeps=True)
    found = predict(work, ONE)
    assert found.step_s == pytest.approx(0.5 + 0.3, rel=0.02)
    assert found.engines_busy == pytest.approx(0.5 / 0.8, rel=0.02) and "take turns" in limit(work, found)
    with_swap = predict(replace(work, swap_s=0.1), ONE)
    assert with_swap.step_s == pytest.approx(0.5 + 0.3 + 0.1, rel=0.02), "a step begins after the swap"


def test_the_plan_of_a_job_says_whether_its_engines_sleep() -> None:
    data: dict[str, Any] = {
        "name": "x",
        "model": {"base": "a/b-1B"},
        "environment": {"name": "copy_digits"},
        "rollout": {"sleep": "always"},
        "train": {"steps": 10},
        "resources": {"trainer_ranks": 4},
    }
    known = {"env_s": 0.0}
    work, reasons, _ = work_of(parse_spec(data), known, 0.5)
    assert work.sleeps and "engines stand still during each step" in " ".join(reasons)
    assert "its 4 ranks share that" in " ".join(reasons)
    of_gpus = {**data, "rollout": {}, "resources": {"trainer_gpus": 1, "rollout_gpus": 1}}
    work, reasons, _ = work_of(parse_spec(of_gpus), known, 0.5)
    assert not work.sleeps and "--set rollout.sleep=always" in " ".join(reasons)
    never = {**of_gpus, "rollout": {"sleep": "never"}}
    assert "sleep" not in " ".join(work_of(parse_spec(never), known, 0.5)[1])


def test_an_engine_shares_its_tokens_and_more_engines_have_more() -> None:
    slow = replace(WORK, tokens_per_s=160.0, train_s=0.1)  # 32 sequences of 5 tokens: a batch a second
    assert predict(slow, ONE).step_s == pytest.approx(1.0, rel=0.02)
    assert predict(slow, ONE).tokens_per_s == pytest.approx(160, rel=0.02)
    two = predict(slow, replace(ONE, rollout_workers=2))
    assert two.step_s == pytest.approx(0.5, rel=0.15)  # not faster than one sequence alone


def test_sessions_and_calls_bound_episodes() -> None:
    waits = replace(WORK, token_s=0.0, env_s=0.25, train_s=0.0, max_staleness=4)
    pools = replace(ONE, sessions=4)
    per_worker = 4 / 0.5  # an episode opens and calls once
    for workers in (1, 2, 4):
        found = predict(waits, replace(pools, env_workers=workers))
        # chance picks the worker, and one whose line has run empty waits while others are asked
        least = 0.98 if workers == 1 else 0.85
        assert least < found.trajectories_per_s / (per_worker * workers) < 1.02
        assert least < found.sessions_used < 1.02
    blocking = predict(waits, replace(pools, sessions=16, calls=1))
    assert blocking.trajectories_per_s == pytest.approx(1 / 0.5, rel=0.02)


def test_lag_is_that_of_the_oldest_token_and_not_of_the_wait_for_a_session() -> None:
    """16 groups are under way and one batch of them is played: the others have no token yet, and so no age."""
    waits = replace(WORK, groups_per_batch=4, token_s=0.001, env_s=0.1, train_s=0.0, max_staleness=4, turns=2)
    waits = replace(waits, concurrent_groups=16, swap_s=0.02)
    one = predict(waits, replace(ONE, sessions=4))
    assert one.staleness < 0.25
    four = predict(waits, replace(ONE, sessions=4, env_workers=4))  # of a group, some get a session long before others
    assert one.staleness < four.staleness < 3.0


def test_as_many_env_workers_as_change_something() -> None:
    waits = replace(WORK, env_s=0.25, token_s=0.01, train_s=1.0, max_staleness=4)
    # 32 episodes a second of 0.25 + 0.05 + 0.25 s: 17.6 sessions, so 5 workers of 4 if all were asked alike
    count, found = enough_env_workers(waits, replace(ONE, sessions=4))
    assert 5 <= count <= 7 and found.step_s == pytest.approx(1.0, rel=0.03)
    assert predict(waits, replace(ONE, sessions=4, env_workers=count - 1)).step_s > found.step_s * 1.03


@settings(max_examples=25, deadline=None)
@given(
    work=st.builds(
        Work,
        group_size=st.integers(1, 4), groups_per_batch=st.integers(1, 6), max_staleness=st.integers(0, 3),
        concurrent_groups=st.integers(1, 8), turns=st.floats(1, 3), tokens=st.floats(1, 50),
        token_s=st.floats(0, 0.05), tokens_per_s=st.floats(10, 1000), spread=st.floats(0, 1),
        env_s=st.floats(0, 0.3), train_s=st.floats(0.01, 1), swap_s=st.floats(0, 0.2), sleeps=st.booleans(),
    ),
    rollout=st.integers(1, 3), env=st.integers(1, 3), sessions=st.integers(1, 8),
)  # fmt: skip
def test_laws_hold_whatever_is_planned(work: Work, rollout: int, env: int, sessions: int) -> None:
    pools = Pools(rollout_workers=rollout, env_workers=env, sessions=sessions)
    found = predict(work, pools, steps=5)
    assert found.step_s >= work.train_s * (1 - 1e-9)
    assert 0 <= found.staleness <= work.max_staleness
    for share in (found.trainer_waits, found.engines_busy, found.sessions_used):
        assert -1e-9 <= share <= 1.5  # an episode that began before the counting counts as a whole
    assert found.trainer_waits == pytest.approx(1 - work.train_s / found.step_s, abs=1e-6)
    assert predict(work, pools, steps=5) == found


def point(source: str, **values: float) -> dict[str, Any]:
    return {"source": source, "values": {name.replace("__", "/"): value for name, value in values.items()}}


def test_a_job_that_has_run_gives_durations_and_lengths() -> None:
    steps = [
        point("trainer-0", train_seconds=2.0, turns__mean=1.5, swap__pause_s=0.01, swap__load_s=0.02)
        for _ in range(4)
    ]  # fmt: skip
    workers = [
        point("rollout-0", rollout__turns=100, rollout__tokens=1000, rollout__generate_s=50.0),
        point("rollout-0", rollout__turns=200, rollout__tokens=2000, rollout__generate_s=100.0, rollout__env_s=40.0),
        point("rollout-1", rollout__turns=200, rollout__tokens=6000, rollout__generate_s=300.0, rollout__env_s=40.0),
    ]
    found = measured_of([*steps, *workers], "j")
    assert found == pytest.approx(
        {"turns": 1.5, "tokens": 20.0, "token_s": 0.05, "env_s": 0.2, "train_s": 2.0, "swap_s": 0.03}
    )
    with pytest.raises(OpenTinkerError, match="no metrics of its rollout workers"):
        measured_of(steps, "j")


def test_a_job_with_several_policies_gives_the_turns_of_all_and_the_time_of_the_slowest() -> None:
    speaker = [point("trainer~speaker", speaker__train_seconds=2.0, speaker__turns__mean=1.0) for _ in range(3)]
    listener = [point("trainer~listener", listener__train_seconds=1.5, listener__turns__mean=2.0) for _ in range(6)]
    worker = point("rollout-0", rollout__turns=30, rollout__tokens=60, rollout__generate_s=3.0, rollout__env_s=6.0)
    found = measured_of([*speaker, *listener, worker], "j")
    assert found["turns"] == 3.0 and found["tokens"] == 2.0
    assert found["train_s"] == 3.0, "it makes two steps where the other makes one"
    assert trained_of([*speaker, *listener, worker]) == {"speaker": 2.0, "listener": 1.5}, (
        "of each, per step of its own"
    )
    with pytest.raises(OpenTinkerError, match="too few steps"):
        measured_of([*speaker[:2], *listener, worker], "j")


def test_policies_are_planned_with_their_own_models_and_batches(small: Path) -> None:
    spec: dict[str, Any] = {
        "name": "game",
        "model": {"base": "a/b-1B"},
        "environment": {"name": "signalling"},
        "algorithm": {"group_size": 2, "groups_per_batch": 4, "max_staleness": 1},
        "train": {"steps": 24},
        "policies": {"speaker": {}, "listener": {"model": {"base": "a/b-3B", "lora": {"rank": 8}}}},
        "seats": {"speaker": "speaker", "listener": "listener"},
    }
    work, reasons, _ = work_of(parse_spec(spec), {"env_s": 0.0, "turns": 2.0, "tokens": 10.0}, 0.5)
    assert (work.groups_per_batch, work.max_staleness) == (4, 1)
    assert work.token_s == pytest.approx(0.01 + 2e9 * 4 / 1e10), "the mean of both models, in float32"
    tokens = 2 * 4 * 2 * 10 * 2  # each trains on half of them: one all weights, one an adapter
    assert work.train_s == pytest.approx((6 * 1e9 + 4 * 3e9) / 2 * tokens / 1e11)
    assert "1 B parameters (its name) and 3 B parameters (its name)" in " ".join(reasons)
    assert "160 tokens of 1 B parameters and 160 tokens of 3 B parameters" in " ".join(reasons)
    work, reasons, _ = work_of(
        parse_spec({**spec, "resources": {"rollout_gpus": 4}}), {"env_s": 0.0, "turns": 2.0, "tokens": 10.0}, 0.5
    )
    assert work.token_s == pytest.approx(0.005 + 2e9 * 4 / 1e12 / 4), "each GPU reads its part of the weights"
    assert "4 of them for each engine" in " ".join(reasons)
    spec["policies"]["listener"] = {
        **{"algorithm": {"groups_per_batch": 2, "max_staleness": 1}, "train": {"steps": 48}},
    }
    assert joint_batch(parse_spec(spec)) == (2, 4, 0), "the smaller batch lets 4 groups begin, not 8"


@pytest.mark.parametrize(
    ("match", "algorithm", "steps", "large", "small"),
    [
        ({}, {}, 24, 10.0, 8.0),
        ({}, {"groups_per_batch": 5}, 48, 10.0, 4.0),
        ({"schedule": "drop"}, {"groups_per_batch": 5}, 24, 12.0, 4.0),
        ({"schedule": "alternate", "alternate_steps": 3}, {"groups_per_batch": 5}, 24, 6.0, 2.0),
    ],
)
def test_training_is_divided_by_what_each_policy_trains(
    match: dict[str, Any], algorithm: dict[str, Any], steps: int, large: float, small: float
) -> None:
    """All weights take 6 operations per parameter and token, an adapter 4: a step of 10 groups takes 6 units of time
    and one of 5 groups 2, for a policy that has the trainer to itself."""
    own = {"model": {"lora": {"rank": 8}}, "algorithm": algorithm, "train": {"steps": steps}}
    spec = parse_spec(
        {
            "name": "game",
            "model": {"base": "a/b-1B"},
            "environment": {"name": "signalling"},
            "algorithm": {"group_size": 2, "groups_per_batch": 10, "max_staleness": 1},
            "train": {"steps": 24},
            "match": match,
            "policies": {"large": {}, "small": own},
            "seats": {"speaker": "large", "listener": "small"},
        }
    )
    known = {"env_s": 0.0, "turns": 2.0, "tokens": 10.0, "token_s": 0.01}
    unit = 1e9 * (2 * 10 * 2 * 10 * 2 / 2) / 1e11
    _, reasons, paces = work_of(spec, known, 0.0)
    assert [pace.train_s / unit for pace in paces.values()] == pytest.approx([large, small])
    assert f"large {large * unit:.3g} s, small {small * unit:.3g} s" in " ".join(reasons)
    _, _, paces = work_of(spec, {**known, "train_s": 30.0}, 0.0)
    assert paces["large"].train_s == 30.0 and paces["small"].train_s == pytest.approx(30.0 * small / large)
    _, reasons, paces = work_of(spec, known, 0.0, {"large": 7.0, "small": 6.0})
    assert [pace.train_s for pace in paces.values()] == [7.0, 6.0] and "of its own" not in " ".join(reasons)


GAME: dict[str, Any] = {
    "name": "game",
    "model": {"base": "a/b-1B"},
    "environment": {"name": "signalling"},
    "algorithm": {"group_size": 2, "groups_per_batch": 2, "max_staleness": 2},
    "train": {"learner": "simulated", "steps": 12},
    "policies": {"slow": {"train": {"simulated_step_s": 3.0}}, "fast": {"train": {"simulated_step_s": 1.0}}},
    "seats": {"speaker": "slow", "listener": "fast"},
}
KNOWN = {"env_s": 0.0, "turns": 2.0, "tokens": 1.0, "token_s": 0.25}
"""A match takes half a second."""


SCHEDULED: list[tuple[dict[str, Any], float, float]] = [
    ({}, 3.0, 3.0),
    ({"schedule": "drop"}, 3.0, 1.0),
    ({"schedule": "grow"}, 3.0, 1.0),
    ({"schedule": "lockstep"}, 3.5, 3.5),
    ({"schedule": "alternate", "alternate_steps": 3}, 13 / 3, 13 / 3),
]
"""Seconds per step of a policy that trains for 3 s and of one that trains for 1 s."""


@pytest.mark.parametrize(("match", "slow", "fast"), SCHEDULED)
def test_each_policy_is_planned_by_the_time_that_it_took(match: dict[str, Any], slow: float, fast: float) -> None:
    """Whatever the simulated learners say; one time for all stands in where a policy was not measured."""
    algorithm = {**GAME["algorithm"], "max_staleness": 0 if match.get("schedule") == "lockstep" else 2}
    policies = {"slow": {"train": {"simulated_step_s": 7.0}}, "fast": {"train": {"simulated_step_s": 9.0}}}
    spec = parse_spec({**GAME, "algorithm": algorithm, "match": match, "policies": policies})
    pools = Pools(rollout_workers=1, env_workers=1, sessions=64)
    known = {**KNOWN, "train_s": 3.0}
    work, _, paces = work_of(spec, known, 0.0, {"slow": 3.0, "fast": 1.0})
    assert policy_steps(spec, paces, work, pools) == pytest.approx({"slow": slow, "fast": fast}, rel=0.05)
    _, _, paces = work_of(spec, known, 0.0, {"slow": 2.0, "other": 1.0})
    assert {name: pace.train_s for name, pace in paces.items()} == {"slow": 3.0, "fast": 3.0}


@pytest.mark.parametrize(("match", "slow", "fast"), SCHEDULED)
def test_each_policy_is_planned_by_the_schedule(match: dict[str, Any], slow: float, fast: float) -> None:
    algorithm = {**GAME["algorithm"], "max_staleness": 0 if match.get("schedule") == "lockstep" else 2}
    spec = parse_spec({**GAME, "algorithm": algorithm, "match": match})
    work, _, paces = work_of(spec, KNOWN, 0.0)
    pools = Pools(rollout_workers=1, env_workers=1, sessions=64)
    assert policy_steps(spec, paces, work, pools) == pytest.approx({"slow": slow, "fast": fast}, rel=0.05)
    step = {"drop": 1.0, "grow": 1.0, "lockstep": 3.5, "alternate": 4.0}.get(match.get("schedule", ""), 3.0)
    assert predict(work, pools).step_s == pytest.approx(step, rel=0.05), "the step that admission follows"


def test_players_that_do_not_learn_are_planned_with_their_models(small: Path) -> None:
    def against(judge: dict[str, Any]) -> JobSpec:
        return parse_spec(
            {
                **{**GAME, "policies": {}, "train": {"steps": 12}, "model": {"base": str(small)}},
                "environment": {"name": "debate"},
                "seats": {"judge": {"frozen": "j-0123456789@5", "model": judge}, "bob": {"pool": "past"}},
                "pools": {"past": {"every": 4}},
            }
        )

    large = against({"base": "a/b-3B", "dtype": "bfloat16"})
    mine, checkpoint, pool = players_of(large)
    assert (mine, checkpoint.parameters, checkpoint.bytes) == (pool, 3e9, 6e9)
    assert [mine] == models_of(large), "a checkpoint is not trained"
    known = {"env_s": 0.0}
    assert not [line for line in work_of(large, known, 0.5)[1] if line.startswith("memory")], "its size is not known"
    (line,) = (line for line in work_of(against({"base": str(small)}), known, 0.5)[1] if line.startswith("memory"))
    assert f"{3 * mine.bytes / 2**20:.3g} MiB of weights in 3 engines" in line


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", str(ROOT / "examples" / "copy_digits.toml"), *arguments])


def test_plan_says_how_many_env_workers_and_what_limits() -> None:
    told = plan("--token-ms=10", "--env-ms=200", "--train-s=1", "--sessions=8", "--rollout-workers=2", "--json")
    assert told.exit_code == 0, told.output
    found = orjson.loads(told.output)
    assert found["work"]["groups_per_batch"] == 8 and found["work"]["tokens"] == 6
    assert [row["rollout_workers"] for row in found["plans"]] == [2]
    # 128 episodes of 0.46 s a second: 59 sessions; more, for chance sends many episodes of a group to one worker
    assert all(8 <= row["env_workers"] <= 20 and row["limited_by"] == "training" for row in found["plans"])
    table = plan("--token-ms=10", "--env-ms=200", "--train-s=1", "--rollout-workers=1")
    assert table.exit_code == 0 and "env workers" in table.output and "training" in table.output


@pytest.mark.nightly
def test_plan_knows_what_a_session_costs_an_env_worker(tmp_path: Path) -> None:
    """Costly: 2 of the 8 that a worker holds, so as if it had half the sessions; Blocking plays in children."""
    job = tmp_path / "job.toml"
    text = (ROOT / "examples" / "copy_digits.toml").read_text()
    durations = ("--token-ms=10", "--env-ms=200", "--train-s=1", "--rollout-workers=2", "--json")

    def planned(environment: str, **settings: str) -> dict[str, Any]:
        job.write_text(text.replace('"copy_digits"', f'"tests.samples.env_samples:{environment}"', 1))
        environ = {f"OPENTINKER_{name}": value for name, value in settings.items()}
        told = CliRunner().invoke(app, ["plan", str(job), *durations], env=environ)
        assert told.exit_code == 0, told.output
        row: dict[str, Any] = orjson.loads(told.stdout)["plans"][0]
        return row

    plain, costly = (planned(name, ENV_SESSIONS="8") for name in ("Counting", "Costly"))
    assert (plain["sessions"], costly["sessions"]) == (
        8,
        int(8 / find("tests.samples.env_samples:Costly", modules=True).cost),
    )
    assert costly["env_workers"] > plain["env_workers"]
    assert planned("Blocking", ENV_CHILDREN="2", ENV_SESSIONS_PER_CHILD="3")["calls"] == 2


@pytest.mark.nightly
def test_plan_finds_the_environment_of_this_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part])
    monkeypatch.delitem(_found, "verifiers", raising=False)
    monkeypatch.setitem(sys.modules, "opentinker.envs.agents.verifiers", None)  # as where its library is lacking
    (tmp_path / "of_this_directory.py").write_text("from tests.samples.env_samples import Costly as Own\n")
    (tmp_path / "torn.py").write_text("1 / 0\n")
    job = tmp_path / "job.toml"
    text = (ROOT / "examples" / "copy_digits.toml").read_text()
    durations = ("--token-ms=10", "--env-ms=200", "--train-s=1", "--rollout-workers=2", "--json")

    def planned(environment: str) -> tuple[int, str]:
        job.write_text(text.replace('"copy_digits"', f'"{environment}"', 1))
        told = CliRunner().invoke(app, ["plan", str(job), *durations], env={"OPENTINKER_ENV_SESSIONS": "8"})
        assert told.exit_code == 0, told.output
        return orjson.loads(told.stdout)["plans"][0]["sessions"], told.stderr

    sessions, said = planned("of_this_directory:Own")
    assert sessions < 8 and said == ""
    for name, why in (
        ("of_this_directory:Other", "has no Other"),
        ("nowhere:Own", "cannot be imported"),
        ("torn:Own", "ZeroDivisionError"),
        ("served:games", "not on this machine"),
        ("verifiers", "cannot be imported"),
    ):
        sessions, said = planned(name)
        assert sessions == 8 and said.startswith(f"note: {name} is not inspected") and why in said, said


@pytest.mark.parametrize("command", ["run", "plan"])
def test_commands_for_one_job_say_how_a_sweep_is_started(command: str) -> None:
    told = CliRunner().invoke(app, [command, str(ROOT / "examples" / "sweep_toy.toml")])
    assert told.exit_code != 0
    said = str(told.exception)
    assert re.search(r"sweep_toy\.toml is a sweep of many jobs: run `.* up`, .*submit .*sweep_toy\.toml`", said), said


def test_plan_answers_from_the_spec_alone_and_says_what_it_assumed() -> None:
    told = plan("--rollout-workers=1,2")
    assert told.exit_code == 0, told.output
    assert re.search(r"start with: opentinker up --rollout-workers \d+ --env-workers \d+\n", told.output)
    for estimate in (
        "assumed: --token-ms",
        "assumed: --train-s",
        "measured, an episode of copy_digits on this machine",
    ):
        assert estimate in told.output
    found = orjson.loads(plan("--rollout-workers=1", "--train-s=1", "--json").output)
    assert found["work"]["train_s"] == 1.0 and found["work"]["env_s"] > 0.0
    assert not any("--train-s" in reason for reason in found["estimates"])


@pytest.mark.parametrize(
    ("durations", "said"),
    [
        (("--token-ms=1", "--env-ms=1", "--train-s=9"), "of which training takes 9 s: more workers do not shorten it"),
        (("--token-ms=1", "--env-ms=900", "--train-s=0"), "an episode waits 0.9 s for its environment"),
        (("--token-ms=900", "--env-ms=1", "--train-s=0", "--spread=0"), "generating takes longest, 5.4 s or more"),
    ],
)
def test_plan_says_what_would_make_a_step_shorter(durations: tuple[str, ...], said: str) -> None:
    assert said in plan(*durations, "--rollout-workers=1,2").output


def test_a_model_s_size_is_known_by_its_files_or_its_name(small: Path) -> None:
    count, why = parameters_of(str(small))
    assert 5e4 < count < 2e5 and why == "its files"
    assert parameters_of("Qwen/Qwen3-0.6B")[0] == 0.6e9 and parameters_of("a/SmolLM2-135M-Instruct")[0] == 135e6
    assert parameters_of("a/b")[1].startswith("a guess")


def test_a_number_of_workers_is_one() -> None:
    assert plan("--token-ms=1", "--env-ms=1", "--train-s=1", "--rollout-workers=0").exit_code == 2
