"""Settings: defaults, then the file, then the environment; every wrong one is named with where it was set."""

from __future__ import annotations

from pathlib import Path

import pytest

from opentinker.cli.run import with_own_modules
from opentinker.shared.config import Settings, worker_name
from opentinker.shared.security.egress import LOOPBACK
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.types.errors import SpecError
from tests.support.factories import refusals


def test_environment_goes_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('http_port = 1234\nlog_level = "debug"\n')
    settings = load_settings(str(file), {"OPENTINKER_LOG_LEVEL": "error", "OTHER": "x"})
    assert (settings.http_port, settings.log_level, settings.heartbeat_s) == (1234, "error", Settings().heartbeat_s)
    assert load_settings(None, {"OPENTINKER_CONFIG": str(file)}).http_port == 1234
    assert load_settings(None, {}) == Settings()


def test_run_allows_modules_of_its_user_where_nobody_has_said_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    given = {"OPENTINKER_CONFIG": str(file)}
    file.write_text("env_modules = false\n")
    assert load_settings(None, with_own_modules(given)).env_modules is False
    file.write_text("http_port = 1234\n")
    assert load_settings(None, with_own_modules(given)) == Settings(env_modules=True, http_port=1234)
    assert load_settings(None, with_own_modules({"OPENTINKER_ENV_MODULES": "false"})).env_modules is False
    assert load_settings(None, with_own_modules({})).env_modules is True
    file.unlink()
    with pytest.raises(SpecError):
        with_own_modules(given)


def test_every_mistake_is_named_with_its_source(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('http_port = 99999\nunknown = 1\nlog_format = "xml"\n')
    environ = {"OPENTINKER_HEARTBEAT_S": "0", "OPENTINKER_ENV_MODULES": "maybe"}
    by_field = refusals(load_settings, str(file), environ)
    assert set(by_field) == {"http_port", "unknown", "log_format", "heartbeat_s", "env_modules"}
    assert str(file) in by_field["http_port"]
    assert "OPENTINKER_HEARTBEAT_S" in by_field["heartbeat_s"]


@pytest.mark.parametrize(
    ("file", "environ", "where"),
    [
        ("heartbeat_s = 2.6", {}, "(its default)"),
        ("heartbeat_s = 10\nworker_ttl_s = 19", {}, "s.toml"),
        ("worker_ttl_s = 8", {"OPENTINKER_HEARTBEAT_S": "5"}, "s.toml"),
        ("heartbeat_s = 5", {"OPENTINKER_WORKER_TTL_S": "9.9"}, "OPENTINKER_WORKER_TTL_S"),
    ],
)
def test_ttl_is_at_least_two_heartbeats(tmp_path: Path, file: str, environ: dict[str, str], where: str) -> None:
    (tmp_path / "s.toml").write_text(file)
    ((field, problem),) = refusals(load_settings, str(tmp_path / "s.toml"), environ).items()
    assert field == "worker_ttl_s" and where in problem and "at least twice heartbeat_s" in problem


def test_a_worker_may_be_dead_when_its_second_heartbeat_is_due() -> None:
    assert load_settings(None, {"OPENTINKER_HEARTBEAT_S": "2.5"}).worker_ttl_s == 5.0


@pytest.mark.parametrize("content", [b"a = ", b"\xff\xfe", None])
def test_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "s.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SpecError, match=r"s\.toml"):
        load_settings(str(file), {})


def test_a_given_worker_name_stays_and_others_are_of_one_process_alone() -> None:
    assert worker_name(Settings(worker_id="rollout-3"), "rollout-worker") == "rollout-3"
    names = {worker_name(Settings(), "trainer") for _ in range(10)}
    assert len(names) == 10 and all(name.startswith("trainer-") for name in names)


def test_networks_are_a_list_or_text_with_commas(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('env_egress_allow = ["10.1.0.0/16", "::1"]\n')
    assert load_settings(str(file), {}).env_egress_allow == ["10.1.0.0/16", "::1/128"]
    assert load_settings(None, {"OPENTINKER_ENV_EGRESS_ALLOW": "127.0.0.0/8, ::1"}).env_egress_allow == list(LOOPBACK)
    assert load_settings(None, {"OPENTINKER_ENV_EGRESS_ALLOW": ""}).env_egress_allow == []
    with pytest.raises(SpecError, match="env_egress_allow"):
        load_settings(None, {"OPENTINKER_ENV_EGRESS_ALLOW": "example.org"})


def test_what_tenants_may_have_is_a_table_or_json(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('[tenants."*"]\nrunning_jobs = 4\n[tenants.acme]\nweight = 2.5\n')
    found = load_settings(str(file), {}).tenants
    assert (found["*"].running_jobs, found["acme"].weight, found["acme"].running_jobs) == (4, 2.5, None)
    found = load_settings(None, {"OPENTINKER_TENANTS": '{"acme": {"gpu_seconds_per_day": 60}}'}).tenants
    assert found["acme"].by_time and found["acme"].gpu_seconds_per_day == 60
    wrong = {
        "no json": "must be JSON",
        '{"a": {"weight": 0}}': "tenants.a.weight",
        '{"a": {"jobs": 1}}': "tenants.a.jobs",
    }
    for text, problem in wrong.items():
        with pytest.raises(SpecError, match=problem):
            load_settings(None, {"OPENTINKER_TENANTS": text})
