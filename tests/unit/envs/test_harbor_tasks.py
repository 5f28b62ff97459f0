"""A Harbor task's folder is read whole, or refused in words that name every mistake; what ended processes left of
their sandboxes is recognized."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opentinker.envs.harbor.dockerfile import parse
from opentinker.envs.harbor.library import opened, set_name
from opentinker.envs.harbor.task import MAX_BYTES, MAX_FILES, read_task
from opentinker.envs.harbor.verifier import REWARD_READERS
from opentinker.envs.harbor.workspace import HOST, check_size, is_stale, new_place
from opentinker.shared.config import Settings
from opentinker.shared.types.errors import SpecError
from tests.support.harbor_tasks import write_task

Change = Callable[[Path], object]


def refusal(folder: Path) -> str:
    with pytest.raises(SpecError) as told:
        read_task(folder, "task", Settings())
    return str(told.value)


def add(name: str, text: str) -> Change:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return write


def config(text: str) -> Change:
    return add("task.toml", text)


def dockerfile(line: str) -> Change:
    return add("environment/Dockerfile", f"FROM debian:12\n{line}\n")


def test_a_task_is_read_with_its_limits(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task")
    config('[environment]\nmemory = "1G"\nstorage = "512M"\n[verifier.env]\nA = "b"\n')(folder)
    task = read_task(folder, "task", Settings())
    assert (task.config.environment.memory_mb, task.config.environment.storage_mb) == (1024, 512)
    assert task.config.verifier.env == {"A": "b"} and task.has_solution
    assert task.dockerfile is not None and [step.kind for step in task.dockerfile.steps] == [
        "env",
        "workdir",
        "copy",
        "run",
    ]
    again = read_task(write_task(tmp_path / "other"), "task", Settings())
    assert again.digest != task.digest, "another task.toml is another task"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (config("[environment]\ncpu = 2\n"), "environment.cpu.*unknown setting"),
        (config("[environment]\nallow_internet = true\n"), "sandboxes have no network"),
        (config("[environment]\ngpus = 1\n"), "environment.gpus"),
        (config("[environment]\nmemory_mb = 900000\n"), "more than this server gives a task: 4096 .harbor_memory_mb"),
        (config('[environment]\nmemory = "much"\n'), 'memory must be a size such as "2G"'),
        (config("[verifier]\ntimeout_sec = 0\n"), "verifier.timeout_sec"),
        (config('[verifier.env]\nKEY = "${KEY}"\n'), "variables of this machine are not given to tasks"),
        (config('[agent]\nuser = "agent"\n'), "programs of a sandbox run as root"),
        (config("[[steps]]\nname = 'a'\n"), "steps.*unknown setting"),
        (config('[environment]\ndocker_image = "--privileged"\n'), "environment.docker_image"),
        (config("= 3"), "task.toml: Invalid"),
        (add("instruction.md", "  \n"), "instruction.md: is empty"),
        (add("steps/one/instruction.md", "a"), "several steps"),
        (add("environment/docker-compose.yaml", "services: {}"), "several containers are not supported"),
        (add("environment/.dockerignore", "*"), ".dockerignore is not supported"),
        (add("notes.txt", "a"), "'notes.txt', which is no part of a task"),
        (dockerfile("FROM debian:12"), "builds of several stages"),
        (dockerfile("COPY --from=x a b"), "--from=x is not supported"),
        (dockerfile("COPY ../a b"), "leaves the environment folder"),
        (dockerfile("RUN --mount=type=cache true"), "--mount=type=cache is not supported"),
        (dockerfile("RUN cat <<EOF"), "here-documents are not supported"),
        (dockerfile("EXPOSE 80"), "EXPOSE: is not supported: sandboxes have no network"),
        (dockerfile("USER agent"), "other users are not supported"),
        (dockerfile("WORKDIR $NOWHERE"), "NOWHERE is not set by an ENV above"),
        (dockerfile("FETCH x"), "FETCH: is not supported: known are FROM"),
        (lambda folder: (folder / "tests/test.sh").unlink(), "has no tests/test.sh"),
        (lambda folder: (folder / "tests/link").symlink_to("/etc/passwd"), "a link or a device"),
        (lambda folder: os.mkfifo(folder / "tests/pipe"), "a link or a device"),
        (lambda folder: os.truncate(folder / "tests/expected", 65 << 20), "at most 2000 files and 64 MB"),
    ],
)
def test_what_is_wrong_or_cannot_be_given_is_refused_in_words(tmp_path: Path, change: Change, words: str) -> None:
    folder = write_task(tmp_path / "task")
    change(folder)
    told = refusal(folder)
    assert re.search(words, told), told


def test_a_folder_for_the_sandbox_is_looked_at_no_further_than_it_may_be_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "agent"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/main.py").write_text("pass")
    (folder / "link").symlink_to("/nonexistent")
    check_size(folder)
    os.truncate(folder / "sub/main.py", MAX_BYTES + 1)
    with pytest.raises(ValueError, match="more than 2000 files and folders or 64 MB"):
        check_size(folder)
    (folder / "sub/main.py").unlink()
    with pytest.raises(ValueError, match=r"agent/none' cannot be read: No such file"):
        check_size(folder / "none")
    os.mkfifo(folder / "sub/pipe")
    with pytest.raises(ValueError, match=r"sub/pipe' is neither a file nor a folder"):
        check_size(folder)
    looked = 0
    scan = os.scandir

    @contextlib.contextmanager
    def counting(path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        def entries(found: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
            nonlocal looked
            for entry in found:
                looked += 1
                yield entry

        with scan(path) as found:
            yield entries(found)

    (folder / "sub/pipe").unlink()
    for number in range(2 * MAX_FILES):
        (folder / "sub" / str(number)).touch()
    monkeypatch.setattr(os, "scandir", counting)
    with pytest.raises(ValueError, match="more than 2000 files"):
        check_size(folder)
    assert looked == MAX_FILES + 1


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task")
    config("[environment]\ncpu = 2\nallow_internet = true\n")(folder)
    dockerfile("EXPOSE 80\nVOLUME /x")(folder)
    told = refusal(folder)
    assert all(word in told for word in ("cpu", "allow_internet", "Dockerfile:2", "Dockerfile:3")), told


def test_dockerfiles_are_read_as_docker_reads_them() -> None:
    text = """# a comment
FROM python:3.12-slim
ENV A=1 B="two words"
ENV C the rest of it
WORKDIR /app
WORKDIR sub
COPY --chown=root:root ["a file", "x"]
COPY a.txt b.txt $A/
RUN one && \\
    # between
    two
CMD ["never", "run"]
"""
    read = parse(text)
    assert read.image == "python:3.12-slim"
    env, older, top, sub, named, several, run = read.steps
    assert env.variables == {"A": "1", "B": "two words"} and older.variables == {"C": "the rest of it"}
    assert (top.target, sub.target) == ("/app", "/app/sub")
    assert (named.sources, named.target, named.directory) == (["a file"], "/app/sub/x", False)
    assert (several.sources, several.target, several.directory) == (["a.txt", "b.txt"], "/app/sub/1", True)
    assert (run.command.split(), run.line) == (["one", "&&", "two"], 9)


def test_archives_hold_a_task_or_a_folder_of_them_and_never_leave_it(tmp_path: Path) -> None:
    write_task(tmp_path / "set" / "task-1")
    (tmp_path / "set/task-1/solution/solve.sh").chmod(0o755)
    archive = tmp_path / "Some Set.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "set", "set")
    assert set_name(archive) == "some set"
    with opened(archive) as folder:
        assert [path.name for path in folder.iterdir()] == ["task-1"]
        assert read_task(folder / "task-1", "task-1", Settings()).has_solution
        assert (folder / "task-1/solution/solve.sh").stat().st_mode & 0o111
    assert not folder.exists()
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("../out"), io.BytesIO())
    with pytest.raises(SpecError, match="no name of a file inside"), opened(tmp_path / "bad.tar"):
        pass


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [
        ("reward.txt", "0.5\n", 0.5),
        ("reward.txt", "nan", None),
        ("reward.txt", "yes", None),
        ("reward.json", '{"score": 0.25}', 0.25),
        ("reward.json", '{"reward": 1, "style": 0.5}', 1.0),
        ("reward.json", '{"a": 1, "b": 0.5}', None),
        ("reward.json", '{"reward": true}', None),
        ("reward.json", "[1]", None),
        ("reward.json", "[" * 50_000, None),
    ],
)
def test_a_reward_is_a_number_or_the_verifier_has_failed(name: str, text: str, reward: float | None) -> None:
    read = REWARD_READERS[f"/logs/verifier/{name}"]
    if reward is None:
        with pytest.raises((ValueError, RecursionError)):
            read(text)
    else:
        assert read(text)[0] == reward


def test_places_of_dead_processes_are_stale_even_if_another_one_has_their_number(tmp_path: Path) -> None:
    place = new_place(tmp_path).name
    host, _, rest = place.partition("~")
    pid, ticks, random = rest.split("-")
    assert (host, int(pid)) == (HOST, os.getpid())
    assert not is_stale(place)
    assert is_stale(f"{host}~{pid}-{int(ticks) - 1}-{random}"), "as after a restart in a container"
    assert is_stale(f"{host}~{pid}-{random}"), "a name of an earlier release"
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert is_stale(f"{host}~{ended.pid}-{ticks}-{random}")
    assert not is_stale(f"other-host~{ended.pid}-{ticks}-{random}"), "its machine looks for itself"
