"""The command line's help, version, completion, and errors as JSON."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import typer

from opentinker import __version__
from opentinker.cli import app
from opentinker.cli.help_format import HEADINGS, SYNONYMS, name_values
from opentinker.local.processes import free_port
from tests.integration.client.test_cli import environ, typed


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
            assert "range>" not in said and "<str>" not in said and "{" not in said.splitlines()[0], said
            below(one, *path, name)

    below(top)
    assert "--port PORT" in typed("up", "-h").stdout and "JOB  Job id" in typed("help", "job").stdout


def test_usual_words_for_jobs_are_understood() -> None:
    for word, command in SYNONYMS.items():
        assert typed(word, "-h").stdout.partition("\n\n")[2] == typed(command, "-h").stdout.partition("\n\n")[2]
    assert "No such command" in typed("env", "describe").stderr


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
