"""Uploaded packages on this machine, in data_dir by digest, and the virtual environments of their locks.

A virtual environment is created once per lock and interpreter for all env workers that share data_dir: under a lock, in
a directory that gets its final name when it is complete. uv installs wheels by their hashes and builds nothing, so no
code of a package runs here. The interpreter of a virtual environment is started only in a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from packaging.specifiers import SpecifierSet

from opentinker.envs.registry import wrong_name
from opentinker.envs.runtime.venv_overlay import RuntimePackages
from opentinker.shared.asyncio_tools import cancel_and_wait, finish_uncancelled, sleep
from opentinker.shared.data import uploads
from opentinker.shared.data.uploads import Package, Pin, Reference
from opentinker.shared.durable_files import make_directories, sync_directory, sync_tree
from opentinker.shared.types import codec

BUILD_TIMEOUT_S = 600.0
POLL_S = 0.2
SIZE_POLL_S = 1.0
"""Interval of size checks while a virtual environment is created."""
KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "LANG",
    "TMPDIR",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
)
KEPT_BEGINNINGS = ("UV_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
"""Environment variables of the service that uv inherits: the location of the operator's index, and no others."""
ERROR_CHARACTERS = 1500

log = structlog.get_logger()


@dataclass(frozen=True)
class Installed:
    """An upload that can be played."""

    package: Package
    files: Path
    venv: Path
    runtime: dict[str, str]
    """Paths mounted with it (venv_overlay.py)."""


class Packages:
    """`venv_mb`: size limit of a virtual environment; None: no limit."""

    def __init__(self, data_dir: Path, venv_mb: int | None = None) -> None:
        self._data_dir = data_dir.resolve()
        self._venv_mb = venv_mb
        self._python = os.path.realpath(sys.executable)
        self._runtime = RuntimePackages()
        self._found: dict[str, asyncio.Task[Installed]] = {}
        """By digest."""

    async def find(self, name: str) -> Installed:
        """Return the installed package of an exact reference. Concurrent calls share one installation; a failed one is
        retried by the next call.

        Raise SpecError for the field `environment.name`.
        """
        reference = uploads.parse(name)
        if not reference.digest:
            raise wrong_name(name, "has no version and digest: the scheduler gives both when a job is submitted")
        making = self._found.get(reference.digest)
        if making is None or (making.done() and not _exists(making)):
            making = self._found[reference.digest] = asyncio.get_running_loop().create_task(self._install(reference))
        return await asyncio.shield(making)

    async def close(self) -> None:
        running = [making for making in self._found.values() if not making.done()]
        for making in running:
            making.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _install(self, reference: Reference) -> Installed:
        try:
            package = await asyncio.to_thread(uploads.intact, self._data_dir, reference.digest)
        except FileNotFoundError:
            why = "it was deleted, or this env worker has another data_dir than the scheduler"
            raise wrong_name(str(reference), f"is not in {uploads.home(self._data_dir)}: {why}") from None
        except (OSError, codec.WireError) as error:
            again = f"push it again to repair it: `opentinker env push DIR --name {reference.name}`"
            raise wrong_name(str(reference), f"is damaged on the server's disk ({error}); {again}") from None
        if not SpecifierSet(package.python).contains(platform.python_version(), prereleases=True):
            raise wrong_name(
                str(reference), f"is for Python {package.python}; env workers here run {platform.python_version()}"
            )
        files = uploads.package_dir(self._data_dir, reference.digest) / "files"
        built_for = f"{self._python} {sys.version} {platform.machine()}"
        venvs = uploads.venvs_dir(self._data_dir, package.lock_digest)
        await asyncio.to_thread(make_directories, venvs)
        async with _alone(venvs / f"{_short(built_for)}.lock"):
            pins = await asyncio.to_thread(uploads.pins, await self._requirements(package, files, venvs))
            # uv's result for a uv.lock also depends on the project, so projects must not share it
            venv = venvs / _short(f"{built_for} {uploads.normal_of(pins)}")
            if conflicts := self._runtime.conflicts(pins):
                raise wrong_name(str(reference), f"its lock pins {'; '.join(conflicts)}: lock versions of that range")
            if not venv.is_dir():
                await self._make(str(reference), pins, venv)
        return Installed(package, files, venv, self._runtime.binds(pins))

    async def _requirements(self, package: Package, files: Path, venvs: Path) -> str:
        """Return the requirements to install, with versions and hashes."""
        if package.lock == uploads.LOCKS[0]:
            return await asyncio.to_thread((files / package.lock).read_text)
        options = ("--frozen", "--offline", "--no-config", "--no-emit-project", "--no-dev", "--no-header", "--quiet")
        python = ("--python", self._python, "--no-python-downloads")
        return await _uv(package.name, "export", *options, *python, "--project", str(files), cwd=venvs)

    async def _make(self, name: str, pins: list[Pin], venv: Path) -> None:
        log.info("virtual_environment_creating", environment=name, place=str(venv))
        for left in venv.parent.glob(f".{venv.name}-*"):  # left by a killed process
            await _remove(left)
        work = venv.with_name(f".{venv.name}-{os.getpid()}")
        try:
            await _uv(name, "venv", "--quiet", "--no-project", "--python", self._python, str(work), cwd=venv.parent)
            listed = work / "requirements.lock"
            await asyncio.to_thread(listed.write_text, "".join(f"{pin.line()}\n" for pin in pins))
            if pins:
                options = ("--quiet", "--require-hashes", "--no-build", "--python", str(work / "bin" / "python"))
                installing = _uv(name, "pip", "install", *options, "-r", str(listed), cwd=venv.parent)
                await self._within_limit(name, installing, work)
            await asyncio.to_thread(_open_to_all, work)
            size = await self._size(name, work)
            listed_size = work / "size"
            await asyncio.to_thread(listed_size.write_text, str(size))
            await asyncio.to_thread(sync_tree, work)  # a power cut must not leave an incomplete one that looks complete
            listed_size.rename(venv.with_name(f"{venv.name}{uploads.SIZE}"))
            work.rename(venv)
            await asyncio.to_thread(sync_directory, venv.parent)
        finally:
            await _remove(work)
        log.info("virtual_environment_created", environment=name, place=str(venv))

    async def _within_limit(self, name: str, installing: Coroutine[Any, Any, str], work: Path) -> None:
        """Run the installation and monitor its size. Raise SpecError if it grows too large."""
        task = asyncio.get_running_loop().create_task(installing)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=SIZE_POLL_S)
                await self._size(name, work)
            task.result()
        finally:
            await cancel_and_wait(task)

    async def _size(self, name: str, work: Path) -> int:
        """Return the size of a virtual environment. Raise SpecError beyond the limit."""
        size = await asyncio.to_thread(_bytes_of, work)
        if self._venv_mb is not None and size > self._venv_mb << 20:
            problem = f"its virtual environment takes more than {self._venv_mb} MB (upload_venv_mb): lock less"
            raise wrong_name(name, problem)
        return size


def _exists(made: asyncio.Task[Installed]) -> bool:
    """Return whether a virtual environment still exists: its package may have been deleted and pushed again."""
    return not made.cancelled() and made.exception() is None and made.result().venv.is_dir()


def _bytes_of(directory: Path) -> int:
    """Return the size of a tree whose files may change. Blocking."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


async def _remove(directory: Path) -> None:
    """Remove a tree, possibly of gigabytes, in a thread; completes even if cancelled."""
    await finish_uncancelled(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))


def _open_to_all(directory: Path) -> None:
    """Make a tree readable for every user, regardless of the umask, because the user of a sandbox is not known yet.
    Blocking."""
    for folder, _, names in os.walk(directory):
        os.chmod(folder, 0o755)
        for path in (os.path.join(folder, name) for name in names):
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode) and mode & 0o444 != 0o444:
                os.chmod(path, stat.S_IMODE(mode) | 0o444)


async def _uv(name: str, *arguments: str, cwd: Path) -> str:
    """Run it and return its output. Raise SpecError with its error message."""
    environ = {
        key: value for key, value in os.environ.items() if key in KEPT_VARIABLES or key.startswith(KEPT_BEGINNINGS)
    }
    process = await asyncio.create_subprocess_exec(
        _uv_binary(name), *arguments, cwd=cwd, env=environ, start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(BUILD_TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise wrong_name(name, f"its virtual environment could not be made within {BUILD_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        said = err.decode(errors="replace").strip()[-ERROR_CHARACTERS:]
        raise wrong_name(name, f"its virtual environment cannot be made: `uv {arguments[0]}` says: {said}")
    return out.decode()


def _uv_binary(name: str) -> str:
    try:
        from uv import find_uv_bin

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
    if found is None:
        raise wrong_name(name, "uploaded environments need uv where the env worker runs: pip install uv")
    return found


@asynccontextmanager
async def _alone(path: Path) -> AsyncIterator[None]:
    """Hold an exclusive lock on the file, across processes."""
    with await asyncio.to_thread(path.open, "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await sleep(POLL_S)
        yield


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
