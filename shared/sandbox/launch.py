"""Runs twice on the way into a sandbox (sandbox.py), both times in an interpreter that imports nothing else of ours.

    python -I -S launch.py outside PLAN             becomes the sandbox's user, then bubblewrap
    python -I -S launch.py inside LIMITS PROGRAM    in the sandbox: sets the limits, then becomes PROGRAM

The limits are set inside because a limit on processes counts those of the same user namespace, which only then is the
sandbox's own: outside it would count everything else that an ordinary user runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys

STAGE = "/tmp"
"""Directory in a private mount namespace, so mounts over it are invisible outside."""
CLONE_NEWNS = 0x20000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


def outside(plan: dict[str, object]) -> None:
    """PLAN: see sandbox.py. Never returns."""
    sources, options = dict(plan["sources"]), list(plan["options"])  # type: ignore[call-overload]
    overlays: list[dict[str, object]] = list(plan["overlays"])  # type: ignore[call-overload]
    binary, libraries, uid = str(plan["binary"]), str(plan["libraries"]), int(str(plan["uid"]))
    with open("/proc/self/oom_score_adj", "w") as file:  # before anybody else's, if the machine runs out of memory
        file.write("1000")
    if cgroup := str(plan["cgroup"]):
        with open(f"{cgroup}/cgroup.procs", "w") as file:
            file.write("0")
    if uid:
        layers = [layer for overlay in overlays for layer in (*overlay["lowers"], overlay["writes"])]  # type: ignore[misc]
        staged = staging([binary, libraries, *sources.values(), *layers])
        binary, libraries = staged[binary], staged[libraries]
        sources = {place: staged[source] for place, source in sources.items()}
        for overlay in overlays:
            overlay["lowers"] = [staged[lower] for lower in overlay["lowers"]]  # type: ignore[attr-defined]
            overlay["writes"] = staged[str(overlay["writes"])]
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    reading, writing = os.pipe()
    os.write(writing, bytes.fromhex(str(plan["seccomp"])))
    os.close(writing)
    os.set_inheritable(reading, True)
    binds = [word for place, source in sources.items() for word in ("--ro-bind", source, place)]
    mounts = [word for overlay in overlays for word in mount_overlay(overlay)]
    argv = [binary, *mounts, *binds, "--seccomp", str(reading), *options]
    os.execve(binary, argv, {"LD_LIBRARY_PATH": libraries} if libraries else {})


def mount_overlay(overlay: dict[str, object]) -> list[str]:
    """Return bubblewrap's options for one overlay of overlay_root.py; the directory that takes its writes holds both
    halves, because overlayfs wants them on one mount."""
    lowers, writes = list(overlay["lowers"]), overlay["writes"]  # type: ignore[call-overload]
    sources = [word for lower in lowers for word in ("--overlay-src", lower)]
    return [*sources, "--overlay", f"{writes}/upper", f"{writes}/work", str(overlay["place"])]


def staging(paths: list[str]) -> dict[str, str]:
    """Map every path, as root, to a place that any user can reach, even below directories without permission.

    Permissions of the files themselves still apply. Where root may not mount, each path stays.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        return {path: path for path in paths}
    _mount(libc, None, "/", MS_REC | MS_PRIVATE)
    held = {path: os.open(path, os.O_PATH) for path in paths if path}
    _mount(libc, "tmpfs", STAGE, 0, "tmpfs", "mode=755")
    staged = {"": ""}
    for number, (path, descriptor) in enumerate(held.items()):
        place = staged[path] = f"{STAGE}/{number}"
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.mkdir(place, 0o755)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(libc, f"/proc/self/fd/{descriptor}", place, MS_BIND | MS_REC)
        os.close(descriptor)
    return staged


def _mount(libc: ctypes.CDLL, source: str | None, target: str, flags: int, kind: str = "", data: str = "") -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    if libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mounting {source or target}: {os.strerror(number)}")


def inside(limits: dict[str, int], program: list[str]) -> None:
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    os.execv(program[0], program)


if __name__ == "__main__":
    try:
        if sys.argv[1] == "outside":
            outside(json.loads(sys.argv[2]))
        else:
            inside(json.loads(sys.argv[2]), sys.argv[3:])
    except OSError as error:
        sys.exit(str(error))
