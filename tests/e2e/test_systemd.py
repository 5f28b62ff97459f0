"""The units under deploy/systemd: systemd knows every line, and services take what they are told."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from opentinker.local.embedded import shipped_conf
from opentinker.local.server_users import Access
from opentinker.shared.config import Settings
from opentinker.shared.messaging.subjects import SERVICES
from opentinker.shared.settings_sources import PREFIX, load_settings

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy/systemd"
PYTHON = "/opt/opentinker/bin/python"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units as they would be installed on a machine whose Python is ours."""
    folder = tmp_path_factory.mktemp("units")
    shutil.copytree(UNITS, folder, dirs_exist_ok=True)
    (folder / "environment.example").unlink()
    for unit in folder.glob("*.service"):
        unit.write_text(unit.read_text().replace(PYTHON, sys.executable))
    return folder


def said_of(service: str, units: Path) -> str:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(units / f"opentinker-{service}@0.service")],
        capture_output=True, text=True, check=False, env={**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:"},
    )  # fmt: skip
    return "\n".join(
        line for line in (done.stdout + done.stderr).splitlines() if "opentinker" in line or "units" in line
    )


@pytest.mark.parametrize("service", SERVICES)
def test_systemd_knows_every_line(service: str, here: Path) -> None:
    assert said_of(service, here) == ""


def test_a_line_that_it_does_not_know_would_be_found(here: Path, tmp_path: Path) -> None:
    shutil.copytree(here, tmp_path, dirs_exist_ok=True)
    (tmp_path / "opentinker-.service.d/wrong.conf").write_text("[Service]\nProtectEverything=yes\n")
    assert "ProtectEverything" in said_of("trainer", tmp_path)


def lines(path: Path) -> list[tuple[str, str]]:
    """Names and values of a unit, in order."""
    pairs = [line.partition("=") for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return [(name, value) for name, _, value in pairs]


def test_there_is_a_unit_for_every_service_with_its_own_passwords(tmp_path: Path) -> None:
    access = Access(tmp_path, shipped_conf("nats.conf"))
    assert {path.name for path in UNITS.glob("*.service")} == {f"opentinker-{service}@.service" for service in SERVICES}
    for service in SERVICES:
        unit = lines(UNITS / f"opentinker-{service}@.service")
        loaded = dict(value.split(":") for name, value in unit if name == "LoadCredential")
        files = {name: Path(place).name for name, place in loaded.items() if "access" in place}
        own = {name: access.password_file(name, service).name for name in ("nats", "valkey")}
        assert files == own
        (start,) = (value for name, value in unit if name == "ExecStart")
        module = start.rpartition(".")[2]
        assert (ROOT / "services" / module / "__main__.py").is_file() and module.replace("_", "-") == service


def test_what_units_tell_services_is_a_setting_of_theirs() -> None:
    told = [
        word
        for path in UNITS.rglob("*.[cs]*")
        for name, value in (lines(path) if path.is_file() else [])
        if name == "Environment"
        for word in value.split()
    ]
    ours = {word.split("=")[0].removeprefix(PREFIX).lower() for word in told if word.startswith(PREFIX)}
    assert (
        {"worker_id", "nats_password_file", "redis_password_file", "admin_key_file"}
        <= ours
        <= set(Settings.model_fields)
    )
    example = configparser.ConfigParser(interpolation=None)
    example.optionxform = str  # type: ignore[assignment,method-assign]
    example.read_string("[all]\n" + (UNITS / "environment.example").read_text())
    settings = load_settings(None, dict(example["all"]))
    assert settings.advertise_host == "10.0.0.2"
