"""`opentinker env check, play`: what is wrong with an environment is found before a job is, with what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from opentinker.cli import app
from opentinker.cli.env_trials import _bounded
from opentinker.local.env_trial import look_at
from opentinker.services.scheduler.environments.check_reports_api import CheckReport
from tests.support.cluster import ROOT

FAULTY = '''
import random, subprocess, time
from opentinker.envs.base import Action, Environment, Step, user

class Drifting(Environment):
    """Its start state is drawn from numbers that nobody seeded."""
    async def open(self, row, seed):
        return [user(str(random.random()))]
    async def step(self, action):
        return Step(reward=random.random(), done=True)

class Moody(Environment):
    async def open(self, row, seed):
        return [user(f"task {row}")]
    async def step(self, action):
        return Step(reward=random.SystemRandom().random(), done=True)

class Wasted(Environment):
    async def open(self, row, seed):
        self.row = row
        return [user(f"task {row}")]
    async def step(self, action):
        return Step(reward=0.0, done=True, components={"right": 1.0})
    def gold(self):
        return "x"

class Slow(Environment):
    async def open(self, row, seed):
        return [user("go")]
    async def step(self, action):
        time.sleep(0.06)
        return Step(messages=[user("more")])

class Flat(Environment):
    async def open(self, row, seed):
        return [user(f"task {row}")]
    async def step(self, action):
        return Step(reward=0.0, done=True)

class Leaky(Flat):
    kept = []
    async def open(self, row, seed):
        self.kept.append(subprocess.Popen(["sleep", "5"]))
        return await super().open(row, seed)

class Broken(Environment):
    async def open(self, row, seed):
        return [user(f"task {row}")]
    async def step(self, action):
        return Step(reward=1.0 / 0)
'''


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"faulty_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


async def report(name: str, **config: Any) -> Any:
    return await look_at(name, config, episodes=3, seed=0, turns=4)


@pytest.mark.parametrize("name", ["bandit", "copy_digits", "gsm8k", "guess_number"])
async def test_what_we_ship_can_be_trained(name: str) -> None:
    found = await report(name)
    assert found.errors == [] and "reward 1.000" in found.facts["expert"]
    assert "assistant: " in found.transcript


@pytest.mark.parametrize(
    ("name", "errors", "advice"),
    [
        ("Drifting", ["gave other messages the second time"], ["global random numbers"]),
        ("Moody", [], ["were rewarded otherwise the second time"]),
        ("Wasted", ["the expert gets no more reward than guessing"], ["do not add up to the reward 0"]),
        ("Slow", [], ["set `blocking = True`", "3 of 3 guessing episodes had no end", "begins with the same words"]),
        ("Broken", ["step() number 1 of row 0, seed 0: env_error: "], []),
    ],
)
async def test_faults_are_named(faulty: str, name: str, errors: list[str], advice: list[str]) -> None:
    found = await report(f"{faulty}:{name}")
    for said, wanted in ((found.errors, errors), (found.advice, advice)):
        assert len(said) >= len(wanted) and bool(said) >= bool(wanted)
        for text in wanted:
            assert any(text in line for line in said), said
    if not errors:
        assert found.errors == []


async def test_processes_that_outlive_their_episodes_are_counted(faulty: str) -> None:
    found = await look_at(f"{faulty}:Leaky", {}, episodes=6, seed=0, turns=4)
    assert ["2 more than 2 episodes before: end in close() what open() starts" in error for error in found.errors] == [
        True
    ]
    few = await look_at(f"{faulty}:Leaky", {}, episodes=4, seed=0, turns=4)
    assert few.errors == [] and few.facts["processes"].startswith("not judged")
    assert (await look_at(f"{faulty}:Flat", {}, episodes=6, seed=0, turns=4)).errors == []


def test_check_prints_a_transcript_and_ends_with_a_verdict(faulty: str) -> None:
    good = CliRunner().invoke(app, ["env", "check", "copy_digits", "--set", "digits=5", "--episodes", "2"])
    assert good.exit_code == 0 and good.output.endswith("ready for training\n")
    assert "expert    reward 1.000" in good.output
    bad = CliRunner().invoke(app, ["env", "check", f"{faulty}:Broken", "--json"])
    assert bad.exit_code == 1
    assert "ZeroDivisionError" in orjson.loads(bad.output)["errors"][0]


def test_verdict_promises_nothing_where_no_two_rewards_differed(faulty: str) -> None:
    flat = CliRunner().invoke(app, ["env", "check", f"{faulty}:Flat", "--episodes", "3"])
    assert flat.exit_code == 0
    assert "advice: guessing always got 0, and no expert (gold) shows" in flat.output
    assert flat.output.endswith("no two episodes were rewarded differently: whether it can be learned is not known\n")


def test_another_interpreter_plays_what_is_named_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, trace = tmp_path / "python", tmp_path / "trace"
    python.write_text(f'#!/bin/sh\necho "$@" >> {trace}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("OPENTINKER_ENV_INTERPRETERS", f"copy_digits={python}")
    line = [sys.executable, "-c", "from opentinker.command import main; main()", "env", "play", "copy_digits"]
    by_hand = subprocess.run(line, input="12\n", capture_output=True, text=True, check=True)
    assert "you> " in by_hand.stdout and "done after 1 turn; reward " in by_hand.stdout
    assert trace.read_text().startswith("-m opentinker.local.env_trial ")
    trace.unlink()
    played = CliRunner().invoke(app, ["env", "check", "copy_digits", "--episodes", "2"])
    assert played.exit_code == 0 and played.output.endswith("ready for training\n"), played.output
    assert trace.read_text().startswith("-m opentinker.local.env_trial ")
    wrong = CliRunner().invoke(app, ["env", "check", "copy_digits", "--set", "digits=x"])
    assert wrong.exit_code != 0 and "environment.config.digits" in wrong.output + str(wrong.exception)


def test_a_library_that_fits_nowhere_is_not_advised_as_an_extra() -> None:
    lacking = CliRunner().invoke(app, ["env", "check", "gem", "--set", "id=game:GuessTheNumber-v0-easy"])
    said = lacking.output + str(lacking.exception)
    assert lacking.exit_code != 0 and "OPENTINKER_ENV_INTERPRETERS=gem=" in said and "pip install" not in said


def test_play_lets_a_person_be_the_model() -> None:
    played = CliRunner().invoke(app, ["env", "play", "copy_digits", "--row", "1"], input="12\n")
    assert played.exit_code == 0
    assert "you> " in played.output and "done after 1 turn; reward " in played.output
    left = CliRunner().invoke(app, ["env", "play", "guess_number"], input="")
    assert left.exit_code == 0 and "given up after 0 turns" in left.output


async def test_rewards_of_seats_that_cancel_out_can_be_learned() -> None:
    found = await look_at("matching_pennies", {}, episodes=16, seed=0, turns=4)
    assert found.errors == [] and found.learnable and not any("always got" in line for line in found.advice)


def test_a_person_plays_every_seat_of_a_round() -> None:
    played = CliRunner().invoke(app, ["env", "play", "matching_pennies"], input="h\nt\n")
    assert played.exit_code == 0, played.output
    order = ["(even, odd act at the same time)", "coins are the same", "even>", "coins are different", "odd>",
             "-> even gets -1, odd gets 1", "done after 1 turn; reward even: -1, odd: 1"]  # fmt: skip
    places = [played.output.find(part) for part in order]
    assert -1 not in places and places == sorted(places), played.output
    left = CliRunner().invoke(app, ["env", "play", "matching_pennies"], input="h\n")
    assert left.exit_code == 0 and "given up after 0 turns" in left.output
    alone = CliRunner().invoke(app, ["env", "play", "matching_pennies", "--bot", "odd=heads"], input="h\n")
    assert alone.exit_code == 0 and "done after 1 turn; reward even: 1" in alone.output


async def test_rounds_are_checked_like_turns() -> None:
    found = await look_at("tests.samples.seat_samples:Vote", {}, episodes=4, seed=0, turns=4)
    assert found.errors == [] and found.facts["turns"] == "2.0 per episode"
    wrong = await look_at("tests.samples.seat_samples:Wrong", {"how": "next"}, episodes=2, seed=0, turns=4)
    assert len(wrong.errors) == 2 and "step_all() number 1 of row 0" in wrong.errors[0]


def test_a_person_plays_against_a_bot() -> None:
    played = CliRunner().invoke(app, ["env", "play", "tictactoe", "--bot", "second=perfect"], input="5\n5\n")
    assert played.exit_code == 0, played.output
    assert "second>" not in played.output and "done after 2 turns; reward first: -1" in played.output
    for bot, said in (("second=stockfish", "has no bot 'stockfish'; its bots are: perfect"), ("second", "SEAT=BOT")):
        wrong = CliRunner().invoke(app, ["env", "play", "tictactoe", "--bot", bot])
        assert wrong.exit_code != 0 and said in wrong.output + str(wrong.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["nowhere:Game"], "cannot be imported"), (["copy_digits", "--set", "digits"], "is not of the form NAME=VALUE")],
)
def test_mistakes_of_the_user_are_said(arguments: list[str], said: str) -> None:
    outcome = CliRunner().invoke(app, ["env", "check", *arguments])
    assert outcome.exit_code != 0
    assert said in outcome.output + str(outcome.exception)


def test_the_page_shows_commands_that_are_there() -> None:
    page = (ROOT / "docs" / "environments" / "local.md").read_text()
    for command in ("check", "play"):
        assert f"opentinker env {command} " in page
        assert CliRunner().invoke(app, ["env", command, "--help"]).exit_code == 0


def test_options_for_the_base_model_need_its_job(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text((ROOT / "examples" / "bandit.toml").read_text())
    for options, why in (
        (["bandit", "--groups", "3"], "needs --job JOB.toml"),
        (["harbor:mine", "--job", str(job)], "--job needs an environment"),
        (["copy_digits", "--job", str(job)], "plays 'bandit', not 'copy_digits'"),
    ):
        told = CliRunner().invoke(app, ["env", "check", *options])
        assert told.exit_code == 2 and why in " ".join(told.output.replace("│", " ").split()), told.output


def test_a_saved_report_is_cut_to_what_the_server_takes_and_says_so() -> None:
    small: Any = {"environment": "e", "verdict": "v", "errors": ["x"], "advice": [], "facts": {}, "transcript": "",
                  "columns": ["task"], "rows": [["a"]]}  # fmt: skip
    assert _bounded(small) == small
    larger: list[dict[str, Any]] = [
        {"errors": ["x" * 4000] * 1200},
        {"rows": [["y" * 500]] * 3000},
        {"transcript": "z" * 60_000},
    ]
    for large in larger:
        whole: Any = {**small, **large}
        cut = _bounded(whole)
        CheckReport.model_validate(cut)
        assert len(orjson.dumps(cut)) < 256 * 1024 and "this report is cut" in cut["advice"][0]
