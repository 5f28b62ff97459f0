"""Nothing outlives its parent: programs that are held or contained, process groups that are guarded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from opentinker.shared.runtime import parent_death
from opentinker.shared.runtime.parent_death import contain_command, guard_command
from tests.conftest import until
from tests.support.listening import runs

PARENT = """
    import subprocess, sys
    from opentinker.shared.runtime.parent_death import {command}
    subprocess.Popen({command}(sys.argv[1:]))
    sys.stdin.read()
"""
LEAVES_ITS_GROUP = """
    import os, pathlib, subprocess, sys, time
    hidden = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {hidden.pid} {os.environ['TMPDIR']}")
    time.sleep(float(sys.argv[2]))
"""


def written(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def parent_of(command: str, *argv: str) -> subprocess.Popen[bytes]:
    """A process that runs `argv` by that command of the module, and waits."""
    script = textwrap.dedent(PARENT.format(command=command))
    return subprocess.Popen([sys.executable, "-c", script, *argv], stdin=subprocess.PIPE)


async def test_a_held_program_is_killed_with_its_parent(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    note = tmp_path / "pid"
    script = f"trap '' TERM HUP; echo $$ > {note}; while true; do sleep 0.05; done"
    parent = parent_of("hold_command", "sh", "-c", script)
    started.append(parent)
    await until(lambda: written(note))
    pid = int(note.read_text())
    assert runs(pid)
    parent.kill()
    await until(lambda: not runs(pid))


def test_a_program_whose_parent_has_died_before_is_not_started(tmp_path: Path) -> None:
    note = tmp_path / "ran"
    for verb in ("hold", "contain"):
        argv = [sys.executable, "-I", "-S", parent_death.__file__, verb, "1", "touch", str(note)]
        assert subprocess.run(argv, check=False).returncode == 1
    assert not note.exists()


def test_a_program_that_does_not_exist_is_named() -> None:
    done = subprocess.run(parent_death.hold_command(["no-such-program"]), check=False, capture_output=True, text=True)
    assert done.returncode == 127
    assert "cannot run no-such-program: No such file or directory" in done.stderr


async def test_hidden_children_die_with_the_parent(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    note = tmp_path / "note"
    parent = parent_of("contain_command", sys.executable, "-c", textwrap.dedent(LEAVES_ITS_GROUP), str(note), "1000")
    started.append(parent)
    await until(lambda: len(written(note)) == 3)
    program, hidden, place = written(note)
    assert place.startswith(tempfile.gettempdir())
    assert runs(int(program)) and runs(int(hidden))
    parent.kill()
    await until(lambda: not runs(int(program)) and not runs(int(hidden)) and not Path(place).exists())


def test_what_a_contained_program_hides_is_killed_when_it_ends(tmp_path: Path) -> None:
    note = tmp_path / "note"
    argv = [sys.executable, "-c", textwrap.dedent(LEAVES_ITS_GROUP) + "sys.exit(3)", str(note), "0"]
    assert subprocess.run(contain_command(argv), check=False).returncode == 3
    _, hidden, place = written(note)
    assert not runs(int(hidden)) and not Path(place).exists()


def test_a_guard_kills_listed_groups_at_end_of_input(started: list[subprocess.Popen[bytes]]) -> None:
    listed, forgotten = (subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2))
    started += [listed, forgotten]
    lines = f"+{listed.pid}\n+{forgotten.pid}\n-{forgotten.pid}\n"
    subprocess.run(guard_command(), input=lines, text=True, check=True)
    assert listed.wait() == -signal.SIGKILL
    assert forgotten.poll() is None and os.getpgid(forgotten.pid) == forgotten.pid
