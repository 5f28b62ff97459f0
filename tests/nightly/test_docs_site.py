"""The documentation as a site: it builds without a warning, its code is code, and the tutorial does what it says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from opentinker.shared.config import Settings
from opentinker.shared.spec import parse_spec
from tests.support.cluster import ROOT
from tests.unit.client.test_docs import commands

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
TUTORIAL = ROOT / "docs" / "first-environment.md"


def blocks(page: Path, *languages: str) -> list[str]:
    return re.findall(rf"```(?:{'|'.join(languages)})\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_every_page_is_code(page: Path) -> None:
    for code in blocks(page, "python"):
        ast.parse(code)
    known = commands()
    for script in blocks(page, "sh", "bash"):
        typed = re.findall(r"^(?:[A-Z_]+=\S+ )*opentinker ([\w-]+)", script, re.MULTILINE)
        assert set(typed) <= known, script


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "largest.py").write_text(blocks(TUTORIAL, "python")[0])
    spec = parse_spec(tomllib.loads(blocks(TUTORIAL, "toml")[0]))
    assert spec.environment.name in TUTORIAL.read_text()
    told = subprocess.run(
        [sys.executable, "-m", "opentinker.cli", "env", "check", spec.environment.name],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr


def test_the_site_builds_without_a_warning_and_asks_nobody_else(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    for page in ("index.html", "api/client.html", "api/http.html", "api/cli.html", "job-spec.html"):
        text = (tmp_path / page).read_text()
        assert not re.findall(r'(?:src|<link[^>]*href)="(?:https?:)?//[^"]*"', text)
    http = (tmp_path / "api" / "http.html").read_text()
    assert "POST /v1/jobs/{id}/cancel" in http
    assert "<code>expires_in_s</code>" in http and '<a href="../job-spec.html">the job spec</a>' in http, "bodies"
    assert "<code>application/x-tar</code>" in http
    assert "opentinker env check" in (tmp_path / "api" / "cli.html").read_text()
    settings = (tmp_path / "api" / "settings.html").read_text()
    assert all(f"<code>{name}</code>" in settings for name in Settings.model_fields)
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []
    assert "wait_s" in (tmp_path / "api" / "client.html").read_text()
