"""The text that `opentinker sweep` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opentinker.cli import app
from opentinker.cli.specs import read_spec
from opentinker.cli.sweeps import _show
from opentinker.sdk.sweeps import best_job
from opentinker.shared.types.errors import OpenTinkerError

LR = "train.lr"


def trial(number: int, values: list[float | None], *, seeds: bool = True, **fields: Any) -> dict[str, Any]:
    jobs = [{"id": f"j-{number}{n}", "seed": n if seeds else None, "value": value} for n, value in enumerate(values)]
    known = [value for value in values if value is not None]
    value = sum(known) / len(known) if known else None
    made = {"number": number, "state": "finished", "value": value, "settings": {LR: number}, "jobs": jobs, "reason": ""}
    return {**made, **fields}


def sweep(*trials: dict[str, Any], best: int | None = None, **fields: Any) -> Any:
    times = {"created": 0.0, "finished": 9.0}
    told: dict[str, Any] = {
        "id": "s-1",
        "name": "x",
        "state": "succeeded",
        "reason": "",
        "method": "grid",
        "goal": "maximize",
    }
    told |= {"project": "", "tags": [], "notes": ""}
    made: dict[str, Any] = {
        **times,
        **told,
        "metric": "exact",
        "jobs": 2,
        "worker_s": 1.0,
        "planned": len(trials),
        "trials": {},
    }
    shown = None if best is None else {"number": best, "value": 1.0, "settings": {LR: best}}
    return {
        **made,
        "spec": {"sweep": {"parameters": {LR: {}}}},
        "all_trials": trials,
        "importance": {},
        "best": shown,
        **fields,
    }


def printed(found: Any, capsys: pytest.CaptureFixture[str]) -> str:
    _show(found, 20, None)
    return capsys.readouterr().out


def test_each_job_has_its_seed_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(sweep(trial(0, [0.25, 0.75]), trial(1, [0.5, None], state="running")), capsys)
    assert "j-00 (seed 0: 0.25), j-01 (seed 1: 0.75)" in shown and "j-10 (seed 0: 0.5), j-11 (seed 1)" in shown
    assert "seed" not in printed(sweep(trial(0, [0.25], seeds=False)), capsys)


def test_a_message_that_was_given_up_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    given_up = {"time": 1.0, "occasion": "failed", "entry": 1, "tries": 9, "error": "answered 503:\nno"}
    shown = printed(sweep(undelivered=[given_up]), capsys)
    assert "message failed to notify.1 not delivered: answered 503: no\n" in shown


def test_the_hint_names_the_best_job_of_the_best_trial(capsys: pytest.CaptureFixture[str]) -> None:
    found = sweep(trial(0, [0.1, 0.2]), trial(1, [0.3, 0.9, None]), best=1)
    assert best_job(found) == "j-11" and printed(found, capsys).rstrip().endswith("job j-11")
    found["goal"] = "minimize"
    assert best_job(found) == "j-10"


def test_labels_are_shown_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(sweep(trial(0, [0.5]), project="maths", tags=["base", "odd"], notes="second seed"), capsys)
    assert said.startswith("s-1  x  project maths  base, odd\nsecond seed\n")
    assert printed(sweep(trial(0, [0.5])), capsys).startswith("s-1  x\nsucceeded")


def test_a_reason_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    failed = [trial(n, [None], state="failed", reason="boom at step 3") for n in range(2)]
    all_fail = sweep(*failed, state="failed", reason="none of 2 trials has a value: boom at step 3")
    assert printed(all_fail, capsys).count("boom") == 1
    assert printed(sweep(*failed, trial(2, [0.5]), best=2), capsys).count("boom") == 2, "of two trials among others"


SWEPT = "[sweep.parameters]\ntrain.lr = [1e-5, 1e-4]\n"


def test_an_environment_is_served_for_one_job(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(SWEPT)
    ran = CliRunner().invoke(app, ["env", "serve", "copy:Digits", "--job", str(file), "--url", "http://127.0.0.1:1"])
    assert ran.exit_code == 2 and "is a sweep of many jobs" in " ".join(ran.output.replace("│", " ").split())


def test_a_command_for_one_job_says_how_the_sweep_is_submitted_with_its_changes(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("")
    with pytest.raises(OpenTinkerError, match=r"job.toml --set 'sweep={.*}' --set train.steps=3`$"):
        read_spec(file, changes=['sweep={"parameters": {"train.lr": [1]}}', "train.steps=3"])


def test_a_tie_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    said = "all 2 finished trials have the same exact"
    assert said in printed(sweep(trial(0, [0.5]), trial(1, [0.5]), best=0), capsys)
    assert "the same" not in printed(sweep(trial(0, [0.5]), trial(1, [0.25]), best=0), capsys)
