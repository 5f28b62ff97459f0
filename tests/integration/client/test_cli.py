"""The command line as a user meets it: exit statuses, messages instead of tracebacks, in real processes where that
matters and in this one (`typed`) where what is said does."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import orjson
import pytest

from opentinker.cli import main
from opentinker.cli.common import as_typed
from opentinker.cli.logs import follow_logs, format_line
from opentinker.cli.specs import read_spec
from opentinker.local.processes import free_port
from opentinker.shared.spec.algorithm_parts import PRESETS
from tests.support.cluster import JOB_S

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))


def environ() -> dict[str, str]:
    kept = "OPENTINKER_API_KEY"
    return {key: value for key, value in os.environ.items() if key == kept or not key.startswith("OPENTINKER_")}


def opentinker(*arguments: object, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "opentinker.cli", *map(str, arguments)]
    env = environ() | more
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=JOB_S, check=False)


def typed(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same in this process: it need not start one and import everything again."""
    argv = ["opentinker", *map(str, arguments)]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        patch.dict(os.environ, environ(), clear=True),
        patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def test_an_inference_job_is_not_run_to_its_end() -> None:
    done = typed("run", ROOT / "examples" / "inference.toml")
    assert done.returncode == 1 and "an inference job has no end to wait for" in done.stderr


def test_settings_of_the_file_are_changed_by_options() -> None:
    path = ROOT / "examples" / "copy_digits.toml"
    done = typed("validate", path, "--quick", "--set", "train.lr=-1", "--set", "resources.rollout_workers=2")
    assert done.returncode == 2 and "train.lr = -1" in done.stderr and "rollout_workers" not in done.stderr
    done = typed("validate", path, "--quick", "--set", "train.target.exact=0.5", "--set", "name=Ünique name")
    assert done.returncode == 0, done.stderr
    for wrong in ("train.lr", "=1", "name.x=1"):
        assert typed("validate", path, "--quick", "--set", wrong).returncode == 2


def test_hints_name_the_command_as_it_is_reached_from_outside_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_COMMAND", "docker compose exec scheduler opentinker")
    assert as_typed("watch", "j-1") == "docker compose exec scheduler opentinker watch j-1"


def test_every_mistake_of_a_spec_is_reported_at_once(tmp_path: Path) -> None:
    spec = tmp_path / "job.toml"
    spec.write_text('name = ""\nfoo = 1\n[model]\n[train]\nsteps = 0\n[environment]\nname = "copy_digits"\n')
    done = opentinker("validate", spec)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for field in ("name = ''", "foo: unknown setting (job.toml:2)", "model.base: is needed", "train.steps = 0"):
        assert field in done.stderr
    listed = typed("validate", spec, "--json")
    assert listed.returncode == 2
    assert {m["field"] for m in orjson.loads(listed.stdout)["mistakes"]} == {"name", "foo", "model.base", "train.steps"}


def test_an_unknown_environment_is_answered_with_the_near_ones(tmp_path: Path) -> None:
    spec = tmp_path / "job.toml"
    spec.write_text((ROOT / "examples" / "copy_digits.toml").read_text().replace('"copy_digits"', '"copy_digit"'))
    done = typed("validate", spec)
    assert done.returncode == 2 and "did you mean copy_digits" in done.stderr


def test_a_checkpoint_to_start_from_must_be_named_and_reachable() -> None:
    (spec, *_) = EXAMPLES
    for arguments, said in (
        (("submit", spec, "--from-checkpoint", "Yesterday"), "start.from = 'Yesterday': must be JOB@STEP"),
        (("submit", spec, "--with-optimizer"), "--with-optimizer needs --from-checkpoint"),
        (("run", spec, "--from-checkpoint", "j-0123456789@5"), "needs the --data-dir that holds the other job"),
    ):
        done = typed(*arguments)
        assert done.returncode == 2 and said in " ".join(done.stderr.replace("│", " ").split()), done.stderr


def test_a_job_is_submitted_with_fewer_steps_than_its_file_says() -> None:
    spec = read_spec(ROOT / "examples" / "sft_gsm8k.toml", changes=["data.epochs=3", "train.lr=1e-4"], steps=2)
    assert spec["train"] | {"lr": 1e-4, "steps": 2, "warmup_steps": 2} == spec["train"] and "epochs" not in spec["data"]
    done = typed("submit", ROOT / "examples" / "eval.toml", "--steps", "3")
    assert done.returncode == 2 and "set evaluation.episodes" in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize("text", ["steps = = 1", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    spec = tmp_path / "job.toml"
    if text is not None:
        spec.write_text(text)
    done = typed("submit", spec)
    assert done.returncode == 2 and str(spec) in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("options", [[], ["--steps", "1"], ["--set", "train.lr=1"]])
def test_a_file_that_holds_no_table_is_a_mistake(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "job.json").write_text('"text"')
    done = typed("submit", tmp_path / "job.json", *options)
    assert done.returncode == 2 and "(whole spec) = 'text': must be a table" in done.stderr


def test_an_unreachable_server_is_named_with_how_to_start_it() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = opentinker("jobs", "--url", url)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert url in done.stderr and "opentinker up" in done.stderr


def test_spec_prints_every_field_with_its_meaning() -> None:
    done = typed("spec")
    assert "max_staleness = 2" in done.stdout and "[rollout]" in done.stdout
    schema = orjson.loads(typed("spec", "--json").stdout)
    assert {"model", "train", "rollout"} <= set(schema["properties"])


def test_presets_are_printed_with_their_parts_and_values() -> None:
    assert "clip_high = 0.28" in typed("algorithms", "dapo").stdout
    listed = orjson.loads(typed("algorithms", "--json").stdout)
    assert [preset["name"] for preset in listed] == list(PRESETS)
    unknown = typed("algorithms", "grop")
    assert unknown.returncode == 2 and "grpo" in unknown.stderr


def test_the_page_of_the_job_spec_is_current() -> None:
    made = typed("spec", "--markdown").stdout
    assert (ROOT / "docs" / "job-spec.md").read_text() == made, "run `make docs`"
    assert [line for line in made.splitlines() if line.startswith("| `") and line.endswith("|  |")] == []


def test_status_of_nothing_says_how_to_start(tmp_path: Path) -> None:
    done = opentinker("status", "--data-dir", tmp_path)
    assert done.returncode == 3 and f"opentinker.cli up --data-dir {tmp_path}" in done.stdout
    assert orjson.loads(typed("status", "--data-dir", tmp_path, "--json").stdout) == {"running": False}


@pytest.mark.parametrize(
    ("program", "typed"),
    [(".venv/bin/opentinker", ".venv/bin/opentinker"), ("on/path/opentinker", "opentinker"), ("", None)],
    ids=["beside a venv", "on PATH", "as a module"],
)
def test_shown_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, typed: str | None) -> None:
    for folder in (".venv/bin", "on/path"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "opentinker").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "on" / "path"))
    monkeypatch.setattr(sys, "argv", [program or str(ROOT / "src" / "opentinker" / "cli" / "__main__.py")])
    shown = as_typed("up", "--data-dir", tmp_path / "my runs" / "one", "--port", 1)
    assert shown == f"{typed or f'{sys.executable} -m opentinker.cli'} up --data-dir 'my runs/one' --port 1"


def test_logs_of_an_unknown_service_name_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "nats.log").write_text("one\ntwo\n")
    done = typed("logs", "trainer", "--data-dir", tmp_path)
    assert done.returncode == 1 and "there is: nats" in done.stderr
    assert typed("logs", "nats", "-n", 1, "--data-dir", tmp_path).stdout == "nats  two\n"


def test_a_taken_port_is_refused_when_asked_for(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = opentinker("up", "--data-dir", tmp_path, "--port", port)
    assert done.returncode == 1 and f"--port {port} is taken" in done.stderr and "Traceback" not in done.stderr


def test_doctor_reports_binaries_and_versions(tmp_path: Path) -> None:
    checks = {c["what"]: c for c in orjson.loads(opentinker("doctor", "--json", "--data-dir", tmp_path).stdout)}
    assert "nats-server: v" in checks["nats-server"]["found"]
    assert "v=9." in checks["valkey"]["found"]
    assert checks["aiohttp"]["result"] == "ok"
    assert checks["sandbox"]["found"].startswith("bubblewrap runs programs")


def test_a_json_log_line_is_made_readable() -> None:
    line = orjson.dumps({"event": "ready", "level": "info", "timestamp": "2026-11-21T12:03:44Z", "step": 3})
    assert format_line("trainer-0", line.decode()) == "12:03:44  trainer-0     info     ready step=3"
    assert format_line("nats", "[1] listening") == "nats  [1] listening"


def test_json_lines_of_standard_input_are_made_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = '{"event":"job_started","level":"info","timestamp":"2026-01-02T03:04:05Z","worker":"trainer-0"}\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"\x1b[2K{lines}not JSON\n"))
    assert typed("logs", "-").stdout.splitlines() == ["03:04:05  trainer-0     info     job_started", "not JSON"]


def test_following_logs_sees_new_lines_and_rotations(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("old\n")
    lines = follow_logs({"x": log}, lines=1)
    assert next(lines) == ("x", "old")
    with log.open("a") as file:
        file.write("new\nhalf")
    assert next(lines) == ("x", "new")
    log.write_text("a\n")
    assert next(lines) == ("x", "a")


def test_up_in_a_directory_that_cannot_be_written_says_so() -> None:
    done = typed("up", "--data-dir", "/proc/opentinker")
    assert done.returncode == 1
    said = done.stderr
    assert "/proc/opentinker cannot be written" in said and "--data-dir" in said and said.count("\n") == 1
