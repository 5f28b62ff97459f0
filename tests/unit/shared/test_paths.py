"""The rule by which the text for a model or a data set is a path or a hub id."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

from opentinker.services.scheduler.jobs.check_dataset import check_data
from opentinker.shared.data.jsonl import rows_path
from opentinker.shared.durable_files import create_durably, local_path, not_on_hub
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


@pytest.mark.parametrize("name", sorted(_PACKAGED_DATASETS_MODULES))
def test_a_file_format_is_no_data_set(name: str) -> None:
    """`datasets` would load every file below the working directory under such a name."""
    for data in (DataSpec(path=name), DataSpec(path="owner/name", validation=name)):
        (mistake,) = check_data(data, "sft")
        assert "is a file format, not a data set" in mistake["problem"]


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
def test_a_missing_path_is_no_hub_id(name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_of_those_who_make_a_file_at_the_same_time_one_does(tmp_path: Path) -> None:
    """Also where a power cut has left an empty one: nobody believes in a secret that another has replaced."""
    makers = 4

    def make(path: Path, start: threading.Barrier, text: bytes) -> bytes | None:
        start.wait()
        try:
            create_durably(path, text)
        except FileExistsError:
            return None
        return text

    with ThreadPoolExecutor(makers) as pool:
        for round in range(100):
            path, start = tmp_path / str(round), threading.Barrier(makers)
            if round % 2:
                path.touch()
            made = [pool.submit(make, path, start, b"secret of %d" % maker) for maker in range(makers)]
            assert [text for one in made if (text := one.result()) is not None] == [path.read_bytes()]
            assert path.stat().st_mode & 0o777 == 0o600
