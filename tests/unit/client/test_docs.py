"""Commands and files named in the documentation exist, and every example is a job that would be accepted."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from examples.curve_digest import digest_of
from opentinker.cli import app
from opentinker.envs.adapters.library import is_installed
from opentinker.envs.registry import check
from opentinker.shared.data import uploads
from opentinker.shared.security.egress import LOOPBACK, VARIABLE
from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.sweeps.children import first_job
from tests.support.cluster import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
PUSHED = sorted((ROOT / "examples" / "environments").glob("*/job.toml"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "Makefile",
    *sorted((ROOT / "docs").glob("**/*.md")),
    *EXAMPLES,
]
NAMED = re.compile(r"\b(?:examples|docs|envs|deploy|services|shared|loadtest|tests|src)/[\w./{},*-]*[\w/*}]")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_valid_job(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ",".join(LOOPBACK))  # as `opentinker run` has it
    spec = parse_spec(first_job(tomllib.loads(example.read_text())))
    if name := spec.environment.name:
        elsewhere = name in ("miniwob", "harbor", "phone_page") or (name == "alfworld" and not is_installed("alfworld"))
        check(name, spec.environment.config, modules=True, elsewhere=elsewhere)


def test_every_template_of_the_page_has_a_curve_of_its_settings_or_the_reason_why_it_has_none() -> None:
    known = orjson.loads((ROOT / "examples" / "curves.json").read_bytes())
    folder = ROOT / "examples"
    others = set(folder.glob("data/**/*.toml"))
    files = [file for file in folder.glob("**/*.toml") if file.name != uploads.DESCRIPTION and file not in others]
    templates = {str(file.relative_to(folder).with_suffix("")): file for file in files}
    assert sorted(known) == sorted(templates)
    for name, expected in known.items():
        assert expected.get("note") or (len(expected["values"]) > 1 and expected["metric"]), name
    outdated = [
        name for name, file in templates.items()
        if "values" in known[name] and known[name].get("digest") != digest_of(file.read_text())
    ]  # fmt: skip
    assert outdated == [], "their settings have changed: python -m examples.record_curves NAME"


@pytest.mark.parametrize("example", PUSHED, ids=lambda path: path.parent.name)
def test_every_example_to_be_pushed_is_a_package_that_its_job_names(example: Path) -> None:
    name = uploads.read_package(example.parent).name
    assert parse_spec(tomllib.loads(example.read_text())).environment.name == f"upload:{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    named = {path for match in NAMED.findall(page.read_text()) for path in spelled_out(match)}
    assert [path for path in sorted(named) if not any(ROOT.glob(path))] == []


def spelled_out(pattern: str) -> Iterator[str]:
    """`{a,b}.py` as `a.py`, `b.py`."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ("".join(choice).rstrip("/") for choice in itertools.product(*parts))


@pytest.mark.parametrize("example", sorted((ROOT / "examples" / "tinker").glob("*.py")), ids=lambda path: path.stem)
def test_loops_of_the_tinker_api_are_under_60_lines(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 60


def test_every_command_of_the_readme_is_one() -> None:
    lines = [
        line.strip()
        for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        for line in block.splitlines()
    ]
    targets = {line.split()[1] for line in lines if line.startswith("make ")}
    assert "run" in targets
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    typed = {match[1] for line in lines if (match := re.match(r"(?:[A-Z_]+=\S+ )*opentinker (\w+)", line))}
    assert {"up", "submit"} <= typed
    assert typed <= commands()


def commands() -> set[str | None]:
    """First words after `opentinker`."""
    single = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.name or group.typer_instance.info.name for group in app.registered_groups if group.typer_instance}
    return single | groups
