"""The directory store while others remove the same files, and on a disk with errors."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from opentinker.services.scheduler.artifacts.store import DirectoryStore, StoreUnavailable


@pytest.fixture
async def store(tmp_path: Path) -> DirectoryStore:
    """With the files `a` and `b` in `t/j/checkpoint`."""
    store, source = DirectoryStore(tmp_path / "kept", tmp_path), tmp_path / "file"
    source.write_bytes(b"xyz")
    for name in ("a", "b"):
        await store.put(f"t/j/checkpoint/{name}", source)
    return store


def refused(*_: Any, **__: Any) -> None:
    raise OSError(5, "Input/output error")


async def test_deletion_that_failed_leaves_no_empty_directories_when_repeated(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refused)
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            await store.delete("t/j/checkpoint")
    await store.delete("t/j/checkpoint")
    assert list(store.root.iterdir()) == []


async def test_deletion_where_another_one_was_faster_takes_the_empty_directories(store: DirectoryStore) -> None:
    shutil.rmtree(store.root / "t" / "j")
    await store.delete("t/j/checkpoint/a")
    assert list(store.root.iterdir()) == []


async def test_deletion_survives_a_file_in_the_place_of_a_directory(store: DirectoryStore) -> None:
    await store.delete("t/j/checkpoint/a/below")
    assert sorted(await store.list("t")) == ["t/j/checkpoint/a", "t/j/checkpoint/b"]


async def test_listing_leaves_out_what_is_removed_meanwhile(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lstat = Path.lstat

    def late(path: Path) -> os.stat_result:
        if path.name == "a":
            (store.root / "t" / "j" / "checkpoint" / "a").unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", late)
    assert await store.list("t") == {"t/j/checkpoint/b": 3}
    assert await store.list("t/j/checkpoint/b") == await store.list("t/nothing") == {}


async def test_listing_reports_errors_of_the_disk(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "lstat", refused)
    with pytest.raises(StoreUnavailable, match="Input/output error"):
        await store.list("t")
