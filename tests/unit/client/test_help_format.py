"""The command line's help, version, completion, and errors as JSON."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import typer

from opentinker import __version__
from opentinker.cli import app
from opentinker.cli.common import assigned
from opentinker.cli.help_format import HEADINGS, name_values
from opentinker.cli.jobs import STATE_EXIT
from opentinker.cli.machine.status import NOTHING_RUNS
from opentinker.cli.shell import complete
from opentinker.cli.shell.synonyms import WORDS
from opentinker.cli.sweeps import SWEEP_EXIT
from opentinker.local.processes import free_port
from tests.integration.client.test_cli import environ, typed

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_every_command_stands_under_one_heading_of_the_help() -> None:
    known = [name for names in HEADINGS.values() for name in names.split()]
    assert sorted(known) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    shown = typed("-h").stdout
    assert [line for line in shown.splitlines() if re.fullmatch(r"[A-Z].*:", line)][1:] == [f"{h}:" for h in HEADINGS]
    assert "..." not in shown.partition("Server:")[2]
    assert typed("help").stdout == shown == typed("--help").stdout


def test_values_have_names_in_the_help_of_every_command() -> None:
    top = typer.main.get_command(app)
    name_values(top)

    def below(command: object, *path: str) -> None:
        for name, one in getattr(command, "commands", {}).items():
            said = typed("help", *path, name).stdout
            usage = said.splitlines()[0]
            assert "range>" not in said and "<str>" not in said and "{" not in usage, said
            assert "[[" not in usage and "....." not in usage and "]...]" not in usage, usage
            assert all(word.isupper() for word in re.findall(r"(?<=\] )[a-z_]+$", usage)), usage
            below(one, *path, name)

    below(top)
    assert "--port PORT" in typed("up", "-h").stdout and "JOB  Job id" in typed("help", "job").stdout


def test_words_of_other_command_lines_are_understood() -> None:
    def shown(*words: str) -> str:
        return typed(*words, "-h").stdout.partition("\n")[2]

    for word, command in WORDS.items():
        assert shown(word) == shown(command) != "", word
    for words, command in (
        ("get jobs", "jobs"), ("list sweeps", "sweeps"), ("get job j-1", "job"), ("describe sweep s-1", "sweep"),
        ("checkpoint list", "checkpoints"), ("sweeps ls", "sweeps"), ("list environments", "env list"),
        ("describe environment copy_digits", "env about"), ("get keys", "keys list"), ("env describe x", "env about"),
        ("get metrics j-1", "metrics"), ("list models", "checkpoints"), ("get logs j-1", "logs"),
        ("get usage", "usage"), ("list published", "published"), ("environments ls", "env list"),
        ("job get j-1", "job"), ("get j-1", "job"),
    ):  # fmt: skip
        assert shown(*words.split()) == shown(*command.split()) != "", words
    assert typed("version").stdout == typed("--version").stdout
    assert "opentinker jobs [OPTIONS]" in typed("get", "jobs", "-n", "x").stderr
    assert "No such command" in typed("env", "paint").stderr


def test_a_shells_completion_script_is_for_that_shell() -> None:
    for shell, mark in (("bash", "complete -o"), ("zsh", "#compdef"), ("fish", "complete --command"),
                        ("powershell", "Register-ArgumentCompleter")):  # fmt: skip
        script = typed("completion", shell).stdout
        assert mark in script and f"complete_{shell}" in script and "opentinker" in script, script
        assert f"opentinker completion {shell}" in (ROOT / "docs/install.md").read_text() or shell == "powershell"
    assert typed("completion", "csh").returncode == 2


def test_nothing_is_offered_while_no_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_URL", "http://127.0.0.1:1")
    job = typer.main.get_command(app).commands["job"]  # type: ignore[attr-defined]
    context = job.make_context("job", ["--url", "http://127.0.0.1:1"], resilient_parsing=True)
    assert complete.jobs(context, "j-") == complete.environments(context, "") == []


def test_every_argument_that_names_a_job_sweep_or_environment_is_completed() -> None:
    named = {"JOB", "JOB@STEP", "JOB|SERVICE", "SWEEP", "CHECKPOINT", "ENVIRONMENT"}
    completed = {f"{command} {p.metavar or p.name}": p._custom_shell_complete for command, p in parameters()}
    asked = {
        name for name in completed
        if name.split()[-1] in named | {"environment"} or re.match(r"env (show|about|delete) NAME", name)
    }  # fmt: skip
    assert asked >= {"env play ENVIRONMENT", "env show NAME", "job JOB", "jobs environment", "run JOB@STEP"}
    assert [name for name in sorted(asked) if completed[name] is None] == []


def parameters() -> Iterator[tuple[str, Any]]:
    """Every command with each of its parameters."""
    commands = list(typer.main.get_command(app).commands.items())  # type: ignore[attr-defined]
    for name, command in commands:
        commands += [(f"{name} {below}", one) for below, one in getattr(command, "commands", {}).items()]
        yield from ((name, parameter) for parameter in command.params)


def test_environments_of_this_machine_are_offered_without_a_server() -> None:
    assert complete.local_environments("tic") == ["tictactoe"]


def test_the_table_of_exit_statuses_is_that_of_the_commands() -> None:
    text = (ROOT / "docs/observability.md").read_text()
    told = {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)}
    assert told.keys() == {*STATE_EXIT.values(), *SWEEP_EXIT.values(), 2, NOTHING_RUNS, 130}
    for states in (STATE_EXIT, SWEEP_EXIT):
        for state, code in states.items():
            assert state == "running" or f"it has {state}" in told[code] or f"it was {state}" in told[code], state
    assert "nothing runs" in told[NOTHING_RUNS]


def test_version_and_completion() -> None:
    assert typed("--version").stdout == f"opentinker {__version__}\n"
    assert "--install-completion" in typed("-h").stdout
    program = Path(sys.executable).with_name("opentinker")
    for shell, typing in (
        ("bash", {"COMP_WORDS": "opentinker subm", "COMP_CWORD": "1"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "opentinker subm"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "opentinker subm", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ):
        asked = environ() | typing | {"_OPENTINKER_COMPLETE": f"complete_{shell}"}
        done = subprocess.run([program], env=asked, capture_output=True, text=True, check=True)
        assert "submit" in done.stdout and "unpublish" not in done.stdout, done.stdout


def test_an_error_with_json_is_an_object_on_stdout() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for arguments, code, what in (
        (("job", "j-0123456789", "--url", url, "--json"), 1, f"cannot reach {url}"),
        (("job", "--json"), 2, "Missing argument"),
        (("jbs", "--json"), 2, "Did you mean 'jobs'"),
    ):
        done = typed(*arguments)
        said = orjson.loads(done.stdout.splitlines()[-1])
        assert (done.returncode, said["exit_status"]) == (code, code) and what in said["error"], said


def test_mistakes_of_a_spec_come_one_by_one_with_json(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("spec") / "job.toml"
    path.write_text('name = "x"\nmodle = 1\n')
    done = typed("submit", path, "--json")
    assert done.returncode == 2
    assert "modle" in [mistake["field"] for mistake in orjson.loads(done.stdout)["mistakes"]]


@pytest.mark.parametrize(
    ("typed_value", "value"),
    [
        ("1e-4", 1e-4),
        ("[1, 2]", [1, 2]),
        ("['seed-1', 'rank=8']", ["seed-1", "rank=8"]),
        ("{ rank = 8 }", {"rank": 8}),
        ("'text'", "text"),
        ("a name of words", "a name of words"),
        ("[left open", "[left open"),
        ("2026-11-29", "2026-11-29"),
    ],
)
def test_values_of_settings_are_json_toml_or_text(typed_value: str, value: object) -> None:
    assert assigned(f"tags={typed_value}") == ("tags", value)
