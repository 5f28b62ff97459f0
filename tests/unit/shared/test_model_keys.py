"""Keys for models behind URLs: who may use them, where they go, and that no error shows one."""

from __future__ import annotations

from pathlib import Path

import pytest

from opentinker.shared.config import Settings
from opentinker.shared.data.readable_paths import Readable
from opentinker.shared.messaging.subjects import SERVICES
from opentinker.shared.security.model_keys import MODEL_KEY_SERVICES, NO_KEY, key_problem, read_model_keys
from opentinker.shared.types.errors import SpecError

SECRET = "sk-canary-0123456789"
FILE = f"""
[lab]
key = "{SECRET}"
url = "https://models.lab.example/v1"
tenants = ["red", "blue"]

[everyone]
key = "another-canary"
url = "http://10.0.0.5:8000/v1/"
tenants = ["*"]
"""


def test_a_key_is_for_its_tenants_and_its_url(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    keys, lab = read_model_keys(file), "https://models.lab.example/v1"
    assert key_problem(keys, "lab", lab, "red") == key_problem(keys, "lab", f"{lab}/", "blue") == ""
    assert key_problem(keys, "lab", lab, "green") == key_problem(keys, "missing", lab, "red") == NO_KEY
    assert key_problem(keys, "everyone", "http://10.0.0.5:8000/v1", "green") == ""
    for elsewhere in ("https://evil.example/v1", "http://models.lab.example/v1", f"{lab}/evil", f"{lab}@evil.example"):
        assert "is sent nowhere else" in key_problem(keys, "lab", elsewhere, "red")
    assert SECRET not in repr(keys) and read_model_keys(None) == {}


def test_the_server_keeps_the_file_to_itself_and_its_contents_out_of_logs(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    settings = Settings(model_keys_file=file)
    for service in ("scheduler", "rollout-worker"):
        assert {SECRET, "another-canary"} <= set(settings.secrets(service))
    for service in set(SERVICES) - set(MODEL_KEY_SERVICES):  # which need not even be able to read it
        assert Settings(model_keys_file=tmp_path / "out of reach").secrets(service) == []
    (mistake,) = Readable(settings).mistakes_in({"data": {"path": str(file)}})
    assert mistake["field"] == "data.path"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (FILE.replace('tenants = ["*"]', ""), "wrong: tenants"),
        (FILE.replace('["*"]', "[]"), "wrong: tenants"),
        (FILE.replace("another-canary", "short"), "wrong: key"),
        (FILE.replace("http://10.0.0.5:8000/v1/", "10.0.0.5"), "wrong: url"),
        (FILE.replace("url =", "uri ="), "wrong: uri, url"),
        (f"lab = '{SECRET}'", "each .NAME. must have"),
        (f"{SECRET} is it", "is no TOML"),
        (f"[lab]\nkey = {SECRET}", "is no TOML"),
        ("a" * 2_000_000, "1,048,576 bytes"),
    ],
)
def test_a_file_that_is_wrong_is_refused_without_showing_what_is_in_it(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(SpecError, match=problem) as wrong:
        read_model_keys(file)
    assert SECRET not in str(wrong.value.mistakes)
    with pytest.raises(SpecError, match="No such file"):
        read_model_keys(tmp_path / "missing")
