"""The sandbox itself: what programs in it can do, and that every attack of the list fails (attacks.py)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from opentinker.shared.config import Settings
from opentinker.shared.runtime.reexec import below
from opentinker.shared.sandbox import cgroup as sandbox_cgroup
from opentinker.shared.sandbox import sandbox as module
from opentinker.shared.sandbox.cgroup import PREFIX, Cgroups
from opentinker.shared.sandbox.limits import Limits
from opentinker.shared.sandbox.sandbox import Sandbox, Sandboxed, Unavailable, own_packages
from tests.conftest import soon, until
from tests.samples import attacks
from tests.support.cluster import PYTHONPATH
from tests.support.listening import runs

ATTACKS = Path(attacks.__file__)
TOO_MUCH = {
    "memory_of_many": "MB of memory; at most 512",
    "many_files": "files in /tmp",
    "many_files_of_many": "files in /tmp",
    "many_sockets": "sockets; at most 256 (sandbox_open_files)",
    "sockets_in_flight": "sockets; at most 256 (sandbox_open_files)",
    "many_descriptors": "open files; at most 2048",
}
FIRST_UID = 70_000
"""Of sandboxes that no other test starts."""
DEADLY = {"kill_everybody", "kill_parent", "flood", "endless", *TOO_MUCH}
"""They end their own sandbox, or are ended from outside; the others get an error and their program goes on."""


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    yield await Sandbox.open(Settings(sandbox_memory_mb=512, sandbox_disk_mb=32))


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


async def attack(sandbox: Sandbox, *words: str) -> Sandboxed:
    argv = [sandbox.python, "-I", "-S", "/run/attacks.py", *words]
    return await sandbox.start(argv, binds={"/run/attacks.py": ATTACKS}, stdout=PIPE, stderr=PIPE)


async def ended(running: Sandboxed) -> int:
    """With its pipes, which what it has started may hold for a moment longer."""
    if running.process.stdout is not None:
        await soon(running.process.communicate())
    return await soon(running.wait())


def processes(running: Sandboxed) -> list[int]:
    return [running.process.pid, *below(running.process.pid)]


async def output(running: Sandboxed) -> str:
    out, err = await soon(running.process.communicate())
    assert await running.wait() == 0, err.decode()
    return out.decode()


async def test_programs_get_an_interpreter_a_home_and_the_variables_they_are_given(sandbox: Sandbox) -> None:
    code = (
        "import os; open('x', 'w').write('y'); print(os.getcwd(), sorted(os.environ), os.listdir('/'), os.environ['A'])"
    )
    running = await sandbox.start([sandbox.python, "-I", "-c", code], variables={"A": "b"}, stdout=PIPE, stderr=PIPE)
    told = await output(running)
    assert told.startswith("/tmp ['A', 'HOME', 'LANG', 'PATH', 'PWD', 'USER']")
    assert told.endswith("b\n")
    assert "'etc'" not in told
    assert "'home'" not in told


async def test_the_packages_of_the_service_can_be_lent(sandbox: Sandbox) -> None:
    argv = [sys.executable, "-c", "import numpy; print(int(numpy.ones(3).sum()))"]
    variables = {"OPENBLAS_NUM_THREADS": "1"}
    running = await sandbox.start(argv, binds=own_packages(), variables=variables, stdout=PIPE, stderr=PIPE)
    assert await output(running) == "3\n"


async def test_a_program_is_no_user_of_this_machine(sandbox: Sandbox) -> None:
    running = await sandbox.start([sandbox.python, "-I", "-c", "import time; time.sleep(60)"])
    await until(lambda: len(_users(running)) > 2)
    held = processes(running)
    assert _users(running) == [running.uid] * len(held)
    assert running.uid != 0
    running.kill("the test is over")
    assert await running.wait() == -signal.SIGKILL
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in held))


def _users(running: Sandboxed) -> list[int]:
    """Of each of its processes; the first is there before it has changed its user, and is alone then."""
    return [Path(f"/proc/{pid}").stat().st_uid for pid in processes(running)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give uids")
async def test_every_sandbox_of_root_has_a_uid_of_its_own() -> None:
    sandbox = await Sandbox.open(Settings(sandbox_first_uid=1_000_000 + 256 * os.getpid()))
    argv = [sandbox.python, "-I", "-c", "import time; time.sleep(60)"]
    first, second = await sandbox.start(argv), await sandbox.start(argv)
    assert first.uid != second.uid
    first.kill("the test is over")
    await first.wait()
    third = await sandbox.start(argv)
    assert third.uid == first.uid
    for running in (second, third):
        running.kill("the test is over")
        await running.wait()


async def test_surviving_attacks_get_errors(sandbox: Sandbox, listening: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of another tenant")
    names = [name for name in attacks.ATTACKS if name not in DEADLY]
    words = [*names, f"secret={secret}", f"service={os.getpid()}", f"port={listening}"]
    told = json.loads(await output(await attack(sandbox, *words)))
    assert set(told) == set(names)
    assert {name: came for name, came in told.items() if came.startswith("SUCCEEDED")} == {}
    assert "Resource temporarily unavailable" in told["forks"]
    assert "No such file" in told["host_file"]
    assert "MemoryError" in told["memory"]
    for name in ("shared_memory", "semaphores", "queues", "memory_behind_descriptors", "pages_in_pipes", "keyring"):
        assert "not implemented" in told[name]
    assert "not permitted" in told["shared_anonymous_memory"] and "not permitted" in told["huge_pages"]
    assert "Permission denied: '/dev/zero'" in told["shared_zeros"]
    assert "not permitted" in told["socket_buffers"] and "not permitted" in told["pipe_size"]
    for name in ("vsock", "netlink", "packet", "kernel_crypto"):
        assert "Address family not supported" in told[name]
    assert "Read-only" in told["oom_score"] and "Read-only" in told["proc"]
    assert "Too many open files" in told["descriptors"]


def test_the_attacks_succeed_where_nothing_holds_them(listening: str, tmp_path: Path) -> None:
    """So that an error in the test above means that the sandbox held, and not that the attack is broken."""
    secret = tmp_path / "secret"
    secret.write_text("of another tenant")
    names = ["memory_behind_descriptors", "shared_memory", "shared_anonymous_memory", "shared_zeros", "semaphores"]
    names += ["queues", "forks", "network", "host_file", "other_processes", "socket_buffers", "pipe_size", "netlink"]
    names += ["pages_in_pipes", "oom_score", "proc", "trace", "threads"]
    words = [*names, "service_variables", f"secret={secret}", f"service={os.getpid()}", f"port={listening}"]
    environ = {**os.environ, "OPENTINKER_NATS_URL": "nats://secret"}
    argv = [sys.executable, str(ATTACKS), *words]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert {came.partition(":")[0] for came in json.loads(done.stdout).values()} == {"SUCCEEDED"}


@pytest.mark.parametrize("name", TOO_MUCH)
async def test_what_processes_hold_together_is_limited_from_outside(sandbox: Sandbox, name: str) -> None:
    sandbox.cgroups = None
    running = await attack(sandbox, name)
    await ended(running)
    assert TOO_MUCH[name] in running.reason


@pytest.mark.parametrize("name", ["memory_of_many", "many_sockets"])
async def test_memory_cgroups_are_used(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also its own: no look from outside is needed."""
    if sandbox.cgroups is None:
        pytest.skip("no memory cgroup can be made here")
    monkeypatch.setattr(module, "excess", lambda pid, limits: "")
    memory_mb = 300 if name == "memory_of_many" else 56
    sandbox.limits = replace(sandbox.limits, memory_mb=memory_mb, disk_mb=1, kernel_mb=1)
    running = await attack(sandbox, name)
    await ended(running)
    assert "MB of memory; at most" in running.reason
    assert list(sandbox.cgroups.parent.glob(f"{PREFIX}{os.getpid()}-*")) == []


async def test_cgroups_of_services_that_were_killed_are_removed() -> None:
    cgroups = Cgroups.find()
    if cgroups is None:
        pytest.skip("no memory cgroup can be made here")
    left, kept = cgroups.parent / f"{PREFIX}4194305-x", cgroups.parent / f"{PREFIX}{os.getpid()}-x"
    left.mkdir()
    kept.mkdir()
    Cgroups.find()
    assert (left.exists(), kept.exists()) == (False, True)
    kept.rmdir()


def test_v2_cgroups_need_the_memory_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are those of the kernel's documentation; a machine with the controller in version 1 has no others."""
    unit = tmp_path / "system.slice" / "env-worker.service"
    unit.mkdir(parents=True)
    told = {
        "/proc/self/cgroup": ["0::/kubepods/system.slice/env-worker.service"],
        "/proc/self/mountinfo": [f"30 24 0:26 /kubepods {tmp_path} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"],
        str(unit.parent / "cgroup.subtree_control"): ["cpu memory pids"],
    }
    monkeypatch.setattr(sandbox_cgroup, "_lines", lambda path: told.get(path, []))
    assert sandbox_cgroup._places() == [(unit.parent, 2)]
    cgroup = Cgroups(unit.parent, 2).make(5 << 20)
    assert cgroup.path.parent == unit.parent
    assert {file.name: file.read_text() for file in cgroup.path.iterdir()} == {
        "memory.max": str(5 << 20),
        "memory.oom.group": "1",
    }
    assert not cgroup.exceeded()
    cgroup.events.write_text("max 7\noom 1\noom_kill 1\n")
    assert cgroup.exceeded()


@pytest.mark.parametrize("name", ["kill_everybody", "kill_parent"])
async def test_who_kills_everybody_ends_its_own_sandbox_alone(sandbox: Sandbox, name: str) -> None:
    other = await sandbox.start(
        [sandbox.python, "-I", "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=PIPE
    )
    assert other.process.stdout is not None
    assert await other.process.stdout.readline() == b"1\n"
    running = await attack(sandbox, name)
    await ended(running)
    assert other.process.returncode is None
    other.kill("the test is over")
    await ended(other)


@pytest.mark.parametrize("name", ["endless", "flood"])
async def test_what_never_ends_is_killed_from_outside(sandbox: Sandbox, name: str) -> None:
    running = await attack(sandbox, name)
    await until(lambda: len(processes(running)) > 2)
    held = processes(running)
    running.kill("it took too long")
    assert await ended(running) == -signal.SIGKILL
    assert running.reason == "it took too long"
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in held))


async def test_a_sandbox_ends_with_the_service() -> None:
    code = (
        "import asyncio, sys\n"
        "from opentinker.shared.config import Settings\n"
        "from opentinker.shared.sandbox import sandbox as module\n"
        "from opentinker.shared.runtime.reexec import below\n"
        "async def main():\n"
        "    box = await module.Sandbox.open(Settings())\n"
        "    running = await box.start([box.python, '-I', '-c', 'import time; time.sleep(60)'])\n"
        "    while len(found := [running.process.pid, *below(running.process.pid)]) < 3:\n"
        "        await asyncio.sleep(0.01)\n"
        "    print(*found, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=PIPE)
    assert service.stdout is not None
    processes = (await soon(service.stdout.readline())).split()
    assert len(processes) > 2
    service.kill()
    await service.wait()
    await until(lambda: not any(runs(int(pid)) for pid in processes))


NOBODY = 65534
AS_USER = (
    "import asyncio, json\n"
    "from asyncio.subprocess import PIPE\n"
    "from opentinker.shared.config import Settings\n"
    "from opentinker.shared.sandbox.sandbox import Sandbox\n"
    "async def main():\n"
    "    box = await Sandbox.open(Settings(sandbox_memory_mb=512))\n"
    "    attacks = ['forks', 'unshare_user', 'become_root', 'memory', 'shadow', 'oom_score', 'vsock']\n"
    "    argv = [box.python, '-I', '-S', '/run/attacks.py', *attacks]\n"
    "    running = await box.start(argv, binds={'/run/attacks.py': sys.argv[1]}, stdout=PIPE)\n"
    "    print((await running.process.communicate())[0].decode(), running.uid)\n"
    "    argv = [box.python, '-I', '-S', '/run/attacks.py', 'many_descriptors']\n"
    "    running = await box.start(argv, binds={'/run/attacks.py': sys.argv[1]}, stdout=PIPE)\n"
    "    await running.process.communicate()\n"
    "    await running.wait()\n"
    "    print(running.reason)\n"
    "import sys\n"
    "asyncio.run(main())\n"
)


def _python_of_everybody(packages: str) -> str | None:
    """An interpreter of this version that any user may start, if they may read our packages as well."""
    found = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")
    argv = [found or "", "-c", "import opentinker.shared.sandbox.sandbox"]
    environ = {"PYTHONPATH": packages, "PATH": "/usr/bin"}
    if found is None:
        return None
    done = subprocess.run(argv, env=environ, user=NOBODY, cwd="/", capture_output=True, timeout=60, check=False)
    return found if done.returncode == 0 else None


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_an_ordinary_users_sandboxes_hold_too() -> None:
    packages = os.pathsep.join([PYTHONPATH, sysconfig.get_path("purelib")])
    python = _python_of_everybody(packages)
    if python is None:
        pytest.skip("there is no interpreter here that an ordinary user may start with these packages")
    argv = [python, "-c", AS_USER, str(ATTACKS)]
    environ = {"PYTHONPATH": packages, "PATH": "/usr/bin"}
    done = subprocess.run(
        argv, env=environ, user=NOBODY, cwd="/", capture_output=True, text=True, timeout=90, check=True
    )
    first, reason = done.stdout.splitlines()
    assert TOO_MUCH["many_descriptors"] in reason
    told, uid = first.rsplit(" ", 1)
    came = json.loads(told)
    assert int(uid) == NOBODY
    assert {name for name, text in came.items() if text.startswith("SUCCEEDED")} == set(), came
    assert "Resource temporarily unavailable" in came["forks"]


async def test_a_level_that_cannot_be_had_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="names '/no/bwrap'"):
        await Sandbox.open(Settings(sandbox_bwrap="/no/bwrap"))
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(
        Unavailable, match=r"(?s)No permissions to create new namespace.*allow unprivileged user namesp"
    ):
        await Sandbox.open(Settings(sandbox_bwrap=str(broken)))
    if os.geteuid() == 0:
        with ExitStack() as taken, pytest.raises(Unavailable, match="run on this machine already"):
            for _ in range(module.UIDS):
                taken.callback(module._Uid(FIRST_UID).release)
            await Sandbox.open(Settings(sandbox_first_uid=FIRST_UID))


async def test_limits_are_the_operators(sandbox: Sandbox) -> None:
    code = "import resource; print(*(resource.getrlimit(getattr(resource, n))[1] for n in ('RLIMIT_AS', 'RLIMIT_NPROC',\
 'RLIMIT_CPU', 'RLIMIT_FSIZE', 'RLIMIT_NOFILE')))"
    limits = Limits(memory_mb=256, processes=9, cpu_s=11, disk_mb=3, open_files=33)
    running = await sandbox.start([sandbox.python, "-I", "-c", code], limits=limits, stdout=PIPE, stderr=PIPE)
    assert await output(running) == f"{256 << 20} 9 11 {3 << 20} 33\n"


def test_every_name_of_an_interpreter_is_followed_to_the_file(tmp_path: Path) -> None:
    """As in a virtual environment of Debian's Python."""
    (tmp_path / "usr").mkdir()
    (tmp_path / "venv").mkdir()
    real, link, venv = tmp_path / "usr" / "python3.11", tmp_path / "usr" / "python3", tmp_path / "venv" / "python"
    real.touch()
    link.symlink_to("python3.11")
    venv.symlink_to(link)
    assert module.names_of(str(venv)) == [str(venv), str(link), str(real)]
    assert module.names_of(str(real)) == [str(real)]
    real.unlink()
    real.symlink_to(link)
    with pytest.raises(module.Unavailable, match="leads nowhere"):
        module.names_of(str(venv))
