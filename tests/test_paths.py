"""What the text for a model or a data set means: one rule for both."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from opentinker.services.scheduler.data_check import check_data
from opentinker.shared.paths import local_path, not_on_hub
from opentinker.shared.rows import rows_path
from opentinker.shared.spec import DataSpec

ODD = ("a\0b", "a/b\0", "/" + "x" * 5000, "x" * 5000, "~nobody-here/x", "~nobody-here")
"""Names that no file can have, or that no home directory has."""


def test_ids_of_a_hub_are_told_from_places_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine" / "model").mkdir(parents=True)
    for id in ("gpt2", "owner/name", "other/model"):
        assert local_path(id) is None and rows_path(id) is None
    for name in ("/a", "./a", "../a", "a/b/c", "mine/model", "mine"):
        assert local_path(name) == rows_path(name) == Path(name)
    assert local_path("~/mine") == tmp_path / "mine"
    for name in ("a.jsonl", "owner/a.jsonl.gz", "a.parquet"):
        assert local_path(name) is None and rows_path(name) == Path(name)


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_no_file_can_have_is_a_place_where_nothing_is(name: str) -> None:
    for path in (local_path(name), rows_path(name)):
        assert path is not None and not path.exists()
    (mistake,) = check_data(DataSpec(path=name), "sft")
    assert mistake["field"] == "data.path" and "does not exist on the server" in mistake["problem"]


def test_a_place_that_may_not_be_looked_at_is_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    assert local_path("secret/rows") == Path("secret/rows")
    (mistake,) = check_data(DataSpec(path="secret/rows.jsonl"), "sft")
    assert "Permission denied" in mistake["problem"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("models/tiny", "did you mean runs/models/tiny?"),
        ("runs/tiny", "relative paths begin at"),
        ("spaces/x", "OWNER/NAME"),
    ],
)
def test_a_path_at_which_nothing_is_is_no_hub_id(
    name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "models" / "tiny" / "config.json").touch()
    why = not_on_hub(name)
    assert why is not None and f"no directory {name} on the server" in why and meant in why
    assert not_on_hub("Qwen/Qwen3-0.6B") is None and not_on_hub("gpt2") is None


def test_what_a_server_keeps_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("data/run/lock", "data/jobs/secret/config.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert not_on_hub("jobs/secret") is None
