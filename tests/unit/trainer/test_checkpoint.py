"""Checkpoints: whole or not there, whatever kills their writer; verified when read; fenced by epoch."""

from __future__ import annotations

import errno
import glob
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from opentinker.services.trainer.checkpoint import commit, fence, find_newest, list_checkpoints, orphan_pattern, sweep
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import Fenced, JobFailed
from opentinker.shared.types.manifest import Manifest


def manifest(step: int, epoch: int = 1) -> Manifest:
    return Manifest(
        job="j",
        epoch=epoch,
        step=step,
        version=WeightVersion(epoch, step),
        resumed={1: 0},
        stream_floor=7,
        consumed=[9, 11],
        ledger={"trained": 12, "discarded/stale": 2},
    )


def write(directory: Path, content: bytes = b"weights") -> None:
    (directory / "trainer").mkdir()
    (directory / "model.safetensors").write_bytes(content * 100)
    (directory / "trainer" / "state.json").write_bytes(content)


def test_what_was_committed_is_read_back(tmp_path: Path) -> None:
    assert find_newest(tmp_path) is None
    directory = commit(tmp_path, manifest(50), write)
    assert directory == tmp_path / "step-000050"
    found = find_newest(tmp_path)
    assert found is not None
    assert found[0] == directory
    assert found[1].consumed == [9, 11] and found[1].resumed == {1: 0} and found[1].version == WeightVersion(1, 50)
    assert set(found[1].files) == {"model.safetensors", "trainer/state.json"}
    assert found[1].files["model.safetensors"].bytes == 700
    assert found[1].created == pytest.approx(time.time(), abs=60)


def test_a_flipped_bit_or_a_lost_file_makes_it_skip_to_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        commit(tmp_path, manifest(step), write)
    victim = tmp_path / "step-000004" / "model.safetensors"
    data = bytearray(victim.read_bytes())
    data[123] ^= 4
    victim.write_bytes(data)
    (tmp_path / "step-000003" / "trainer" / "state.json").unlink()
    found = find_newest(tmp_path)
    assert found is not None and found[1].step == 2
    (tmp_path / "step-000002" / "manifest.json").write_text("{")
    found = find_newest(tmp_path)
    assert found is not None and found[1].step == 1


def test_an_older_epoch_may_not_write_or_sweep(tmp_path: Path) -> None:
    commit(tmp_path, manifest(10, epoch=3), write)
    for step in (5, 10, 20):
        with pytest.raises(Fenced, match="epoch 3"):
            commit(tmp_path, manifest(step, epoch=2), write)
    with pytest.raises(Fenced):
        sweep(tmp_path, keep=2, epoch=2)
    commit(tmp_path, manifest(20, epoch=3), write)
    commit(tmp_path, manifest(30, epoch=4), write)
    assert [m.step for _, m in list_checkpoints(tmp_path)] == [10, 20, 30]


def test_a_newer_epoch_that_appears_while_writing_wins(tmp_path: Path) -> None:
    def slow(directory: Path) -> None:
        write(directory)
        commit(tmp_path, manifest(7, epoch=2), write)

    with pytest.raises(Fenced):
        commit(tmp_path, manifest(8, epoch=1), slow)
    assert [m.step for _, m in list_checkpoints(tmp_path)] == [7]
    assert not list(tmp_path.glob(".writing*"))


def test_a_restart_removes_only_its_own_partial_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other containers may share the directory, and the number of the process."""

    def halfway(directory: Path) -> None:
        for epoch, host, found in ((2, "here", [str(directory)]), (3, "here", []), (1, "here", []), (2, "there", [])):
            monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
            assert glob.glob(orphan_pattern(tmp_path, epoch)) == found
        write(directory)

    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    commit(tmp_path, manifest(12, epoch=2), halfway)
    assert [m.step for _, m in list_checkpoints(tmp_path)] == [12]


def test_a_fence_stops_an_older_epoch_that_is_just_writing(tmp_path: Path) -> None:
    """The newer epoch need not have committed anything yet."""

    def overtaken(directory: Path) -> None:
        write(directory)
        fence(tmp_path, 2)

    with pytest.raises(Fenced, match="epoch 2"):
        commit(tmp_path, manifest(100, epoch=1), overtaken)
    assert find_newest(tmp_path) is None
    with pytest.raises(Fenced):
        fence(tmp_path, 1)
    fence(tmp_path, 2)
    commit(tmp_path, manifest(60, epoch=2), write)


def test_the_newest_is_of_the_newest_epoch_even_if_an_older_one_came_further(tmp_path: Path) -> None:
    commit(tmp_path, manifest(50, epoch=1), write)
    commit(tmp_path, manifest(100, epoch=1), write)
    commit(tmp_path, manifest(60, epoch=2), write)
    found = find_newest(tmp_path)
    assert found is not None and (found[1].epoch, found[1].step) == (2, 60)
    sweep(tmp_path, keep=2, epoch=2)
    assert [found.step for _, found in list_checkpoints(tmp_path)] == [100, 60]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EROFS, "Read-only file system"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # tokenizers
    ],
)
def test_what_the_disk_refuses_is_said_and_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    commit(tmp_path, manifest(1), write)

    def refused(directory: Path) -> None:
        write(directory)
        raise error

    with pytest.raises(JobFailed, match=r"step 2 .*(No space left|Read-only).*keep_checkpoints"):
        commit(tmp_path, manifest(2), refused)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-000001"]


def test_a_mistake_in_writing_is_no_full_disk(tmp_path: Path) -> None:
    def mistaken(directory: Path) -> None:
        write(directory)
        raise KeyError("lm_head")

    with pytest.raises(KeyError):
        commit(tmp_path, manifest(2), mistaken)
    assert list(tmp_path.iterdir()) == []


def test_root_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for act in (lambda root: fence(root, 1), lambda root: commit(root, manifest(1), write)):
        with pytest.raises(JobFailed, match="Not a directory"):
            act(tmp_path / "file" / "checkpoints")


def test_sweep_keeps_the_newest_and_removes_orphans(tmp_path: Path) -> None:
    for step in range(6):
        commit(tmp_path, manifest(step), write)
    for name in (".writing-000009-x", ".removing-step-000000-1-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("x")
    sweep(tmp_path, keep=2, epoch=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-000004", "step-000005"]
    sweep(tmp_path / "missing", keep=2, epoch=1)


@pytest.mark.parametrize("point", ["written", "sealed", "replacing", "renamed"])
def test_a_crash_while_replacing_leaves_the_old_or_the_new(tmp_path: Path, point: str) -> None:
    """Without any clean-up, as after kill -9: the same step is written again and the process stops at `point`."""
    commit(tmp_path, manifest(5), lambda d: write(d, b"old"))

    def crash(reached: str) -> None:
        if reached == point:
            os._exit(9)

    child = os.fork()
    if child == 0:
        commit(tmp_path, manifest(5), lambda d: write(d, b"new"), crash)
        os._exit(0)
    os.waitpid(child, 0)
    found = find_newest(tmp_path)
    assert found is not None and found[1].step == 5
    assert (found[0] / "trainer" / "state.json").read_bytes() == (b"new" if point == "renamed" else b"old")
    commit(tmp_path, manifest(6), write)
    sweep(tmp_path, keep=2, epoch=1)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith((".writing", ".removing"))]


WRITER = """
import sys
from pathlib import Path
from opentinker.services.trainer.checkpoint import commit, find_newest, sweep
from opentinker.shared.types.manifest import Manifest
from opentinker.shared.types.core import WeightVersion
root = Path(sys.argv[1])
found = find_newest(root)
step = found[1].step if found else 0
def write(directory):
    for i in range(8):
        (directory / f"part-{i}").write_bytes(step.to_bytes(8, "little") * 20000)
while True:
    step += 1
    commit(root, Manifest(job="j", epoch=1, step=step, version=WeightVersion(1, step)), write)
    print(step, flush=True)
    sweep(root, 3, 1)
"""


def test_kill_nine_at_random_moments_never_tears_a_checkpoint(tmp_path: Path) -> None:
    """12 writers in a row, each continuing after the newest; what one has reported as committed is never lost."""
    rng = random.Random(0)
    confirmed = 0
    for _ in range(12):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert writer.stdout is not None
        confirmed = max(confirmed, int(writer.stdout.readline()))
        time.sleep(rng.random() * 0.06)  # the random moment is the test
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.stdout.read().split("\n")
        confirmed = max([confirmed, *[int(line) for line in rest[:-1]]])
        writer.wait()
        writer.stdout.close()
        found = find_newest(tmp_path)
        assert found is not None and found[1].step in (confirmed, confirmed + 1)
        for name in found[1].files:
            assert (found[0] / name).read_bytes() == found[1].step.to_bytes(8, "little") * 20000
        assert len(list(tmp_path.glob("step-*"))) <= 4
    assert confirmed >= 12, "each of them got on"
