"""Settings of sign-in are whole or refused, and say what to do."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from opentinker.local.processes import ChildSpec, Guard, ServiceProcess
from opentinker.shared.config import Settings
from opentinker.shared.security.secrets import CLIENT_SECRET
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.types.errors import SpecError

GROUPS = {"ml": {"tenant": "ml", "role": "member"}}
WHOLE: dict[str, Any] = {
    "oidc_issuer": "https://id.example", "oidc_client_id": "c", "oidc_groups": GROUPS,
    "public_url": "https://tinker.example",
}  # fmt: skip


def test_a_file_and_the_environment_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(
        'public_url = "https://tinker.example"\noidc_issuer = "https://id.example"\noidc_client_id = "c"\n'
        '[oidc_groups."ml"]\ntenant = "ml"\nrole = "member"\n'
    )
    environ = {f"OPENTINKER_{name.upper()}": str(value) for name, value in WHOLE.items() if name != "oidc_groups"}
    environ["OPENTINKER_OIDC_GROUPS"] = '{"ml": {"tenant": "ml", "role": "member"}}'
    environ["OPENTINKER_OIDC_SCOPES"] = "openid, profile, email"
    assert load_settings(str(file), {}) == load_settings(None, environ) == Settings(**WHOLE)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"oidc_issuer": "http://id.example"}, "must be https://HOST"),
        ({"oidc_issuer": "https://u:p@id.example"}, "must be https://HOST"),
        ({"oidc_issuer": "https://id.example?x=1"}, "must be https://HOST"),
        ({"oidc_issuer": ""}, "oidc_issuer names no provider"),
        ({"oidc_client_id": ""}, "needs oidc_client_id"),
        ({"oidc_groups": {}}, "without it no user has a role"),
        ({"public_url": ""}, "needs public_url = https://"),
        ({"public_url": "http://tinker.example"}, "needs public_url = https://"),
        ({"auth": False}, "auth = false"),
        ({"oidc_groups": "{"}, "must be JSON, e.g."),
        ({"oidc_groups": {"x": {"tenant": "ml", "role": "operator"}}}, "operators belong to tenant default"),
        ({"oidc_groups": {"x": {"tenant": "ML", "role": "member"}}}, "tenant"),
        ({"oidc_groups": {"x": {"tenant": "ml", "role": "king"}}}, "role"),
        ({"oidc_groups": {"x": {"tenant": "ml"}}}, "role"),
        ({"oidc_groups": {f"g{n}": GROUPS["ml"] for n in range(501)}}, "at most 500"),
        ({"oidc_scopes": "profile"}, "must have openid"),
        ({"session_idle_s": 59}, "session_idle_s"),
        ({"session_max_s": 91 * 86400}, "session_max_s"),
    ],
)
def test_what_is_not_whole_is_refused_with_a_reason(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(**{**WHOLE, **change})
    assert told in str(refused.value)


def test_the_secret_is_in_a_file_or_the_environment_and_among_what_logs_hide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENTINKER_OIDC_CLIENT_SECRET", raising=False)
    settings = Settings(**WHOLE)
    with pytest.raises(SpecError, match="OPENTINKER_OIDC_CLIENT_SECRET"):
        settings.client_secret()
    monkeypatch.setenv("OPENTINKER_OIDC_CLIENT_SECRET", "from-the-environment")
    assert settings.client_secret() == "from-the-environment"
    (tmp_path / "secret").write_text("from-the-file\n")
    named = Settings(**WHOLE, oidc_client_secret_file=tmp_path / "secret")
    assert named.client_secret() == "from-the-file"
    assert named.secrets("scheduler") == ["from-the-file"] and named.secrets("trainer") == []
    assert tmp_path / "secret" in named.secret_files
    (tmp_path / "secret").write_text("short")
    with pytest.raises(SpecError, match="8 to 512"):
        named.client_secret()


def test_up_gives_the_secret_to_the_scheduler_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLIENT_SECRET, "from-the-environment")
    guard = Guard()
    try:
        for service, told in (("scheduler", "from-the-environment"), ("trainer", "")):
            seen = tmp_path / service
            write = f"import os; open({str(seen)!r}, 'w').write(os.environ.get({CLIENT_SECRET!r}, ''))"
            argv = (sys.executable, "-c", write, f"opentinker.services.{service}")
            process = ServiceProcess(ChildSpec(name="x", argv=argv, log=tmp_path / "log", healthy=lambda: True), guard)
            process.start()
            while process.ended() is None:
                time.sleep(0.01)
            assert seen.read_text() == told
    finally:
        guard.close()


def test_everyone_may_be_a_group() -> None:
    settings = Settings(**{**WHOLE, "oidc_groups": {**GROUPS, "*": {"tenant": "visitors", "role": "viewer"}}})
    assert settings.role_of([]) == ("visitors", "viewer")
    assert settings.role_of(["ml"]) == ("ml", "member")
    assert Settings(**WHOLE).role_of(["other"]) is None
