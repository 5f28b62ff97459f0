"""What hostile code tries. It runs where nothing of ours is at hand, so it imports the standard library alone.

    python attacks.py NAME... [KEY=VALUE...]     prints {NAME: what came of it} as JSON

An attack that gets what it wants says so; one that fails gives the error. All of them are bounded: where nothing holds
them they do no more harm than a test may.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
AF_ALG, AF_VSOCK = 38, 40
PR_SET_DUMPABLE = 4
MAP_HUGETLB = 0x40000
Known = dict[str, str]
"""What an attacker may have learned: paths, ports, process ids."""


def memory(known: Known) -> str:
    held = [bytearray(64 << 20) for _ in range(64)]
    return f"got {len(held)} times 64 MB"


def memory_behind_descriptors(known: Known) -> str:
    """That no limit of a process counts."""
    return f"got descriptor {os.memfd_create('hidden')}"


def shared_memory(known: Known) -> str:
    return _called("shmget", ctypes.CDLL(None, use_errno=True).shmget(0, 1 << 20, 0o1600))


def shared_anonymous_memory(known: Known) -> str:
    """Of which one page that stays mapped keeps all: no limit of a process counts it."""
    return f"got {len(mmap.mmap(-1, 1 << 20))} bytes"


def shared_zeros(known: Known) -> str:
    """The same by the device of zeros."""
    zeros = os.open("/dev/zero", os.O_RDWR)
    return f"got {len(mmap.mmap(zeros, 1 << 20))} bytes"


def huge_pages(known: Known) -> str:
    kept = mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB)
    return f"got {len(kept)} bytes"


def semaphores(known: Known) -> str:
    return _called("semget", ctypes.CDLL(None, use_errno=True).semget(0, 1, 0o1600))


def queues(known: Known) -> str:
    return _called("msgget", ctypes.CDLL(None, use_errno=True).msgget(0, 0o1600))


def memory_of_many(known: Known) -> str:
    """Each process stays below its own limit."""
    for _ in range(6):
        if os.fork() == 0:
            held = bytearray(100 << 20)
            held[::4096] = b"x" * len(held[::4096])
            time.sleep(30)
            os._exit(0)
    time.sleep(30)
    return "six processes held 600 MB"


def forks(known: Known) -> str:
    children = []
    try:
        for _ in range(64):
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return f"forked {len(children)} times"


def disk(known: Known) -> str:
    for number in range(64):
        Path(f"/tmp/large{number}").write_bytes(b"x" * (16 << 20))
    return "wrote 1 GB"


def many_files(known: Known) -> str:
    for number in range(60_000):
        Path(f"/tmp/small{number}").touch()
    time.sleep(30)
    return "made 60,000 files"


def many_files_of_many(known: Known) -> str:
    """While the newest process has ended and nobody asks how: it has nothing to be seen."""
    if os.fork() == 0:
        os._exit(0)
    return many_files(known)


def socket_buffers(known: Known) -> str:
    """Larger ones: memory of the kernel, which no limit of a process counts."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        return f"got a buffer of {ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)} bytes"


def many_sockets(known: Known) -> str:
    """With full buffers of the usual size: four processes hold 60 MB of the kernel's, and little of their own."""
    for _ in range(3):
        if os.fork() == 0:
            break
    held = [socket.socketpair() for _ in range(75)]
    for ours, _ in held:
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(b"x" * 16384)
    time.sleep(30)
    return f"filled {len(held)} pairs of sockets"


def sockets_in_flight(known: Known) -> str:
    """Most of them sent to oneself and closed: no process has a descriptor of them."""
    ours, theirs = socket.socketpair()
    for _ in range(100):
        one, other = socket.socketpair()
        socket.send_fds(ours, [b"x"], [one.fileno(), other.fileno()])
        one.close()
        other.close()
    held = [socket.socketpair() for _ in range(40)]
    time.sleep(30)
    return f"hid 200 sockets behind {theirs.fileno()}, beside {len(held)} pairs"


def many_descriptors(known: Known) -> str:
    """Hidden from other processes of the same user."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for _ in range(11):
        if os.fork() == 0:
            break
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(220)]
    time.sleep(30)
    return f"twelve processes opened {len(held)} files each"


def descriptors(known: Known) -> str:
    """All that a process may have, and one more."""
    held: list[int] = []
    try:
        for _ in range(100_000):
            held.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for one in held:
            os.close(one)
    return f"opened {len(held)} files"


def pipe_size(known: Known) -> str:
    reading, writing = os.pipe()
    try:
        return f"got {fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)} bytes"
    finally:
        os.close(reading)
        os.close(writing)


def pages_in_pipes(known: Known) -> str:
    """A page that is given to a pipe stays when the process has unmapped it, with the huge page that it is part of."""
    reading, writing = os.pipe()
    page = ctypes.create_string_buffer(4096)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(page), 4096)
    try:
        return _called("vmsplice", ctypes.CDLL(None, use_errno=True).vmsplice(writing, vector, 1, 0))
    finally:
        os.close(reading)
        os.close(writing)


def vsock(known: Known) -> str:
    """To the host of a virtual machine: no network namespace confines it."""
    return _opened(AF_VSOCK, socket.SOCK_STREAM)


def netlink(known: Known) -> str:
    return _opened(socket.AF_NETLINK, socket.SOCK_RAW)


def packet(known: Known) -> str:
    return _opened(socket.AF_PACKET, socket.SOCK_RAW)


def kernel_crypto(known: Known) -> str:
    return _opened(AF_ALG, socket.SOCK_SEQPACKET)


def keyring(known: Known) -> str:
    """A key of the session, in memory of the kernel."""
    number = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
    session = ctypes.c_int(-3)
    libc = ctypes.CDLL(None, use_errno=True)
    return _called("add_key", libc.syscall(number, b"user", b"opentinker-test", b"x" * 1024, 1024, session))


def oom_score(known: Known) -> str:
    """Not to be the first when the machine runs out of memory."""
    path = Path("/proc/self/oom_score_adj")
    path.write_text("0")
    return f"made it {path.read_text().strip()}"


def proc(known: Known) -> str:
    Path("/proc/self/comm").write_text("innocent")
    return "wrote into /proc"


def settings_of_the_kernel(known: Known) -> str:
    Path("/proc/sys/kernel/core_pattern").open("a").close()
    return "opened it for writing"


def trace(known: Known) -> str:
    return _called("ptrace", ctypes.CDLL(None, use_errno=True).ptrace(0, 0, 0, 0))


def threads(known: Known) -> str:
    """Until there are no more."""
    ended = threading.Event()
    started = 0
    try:
        for _ in range(64):
            threading.Thread(target=ended.wait).start()
            started += 1
    except RuntimeError as error:
        raise OSError(f"after {started} threads: {error}") from None
    finally:
        ended.set()
    return f"started {started} threads"


def network(known: Known) -> str:
    with socket.create_connection(("127.0.0.1", int(known["port"])), 2.0):
        return "reached a server of the machine"


def outside_network(known: Known) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        return f"sent {sender.sendto(b'x', ('192.0.2.1', 9))} byte"


def shadow(known: Known) -> str:
    return Path("/etc/shadow").read_text()[:20]


def host_file(known: Known) -> str:
    return Path(known["secret"]).read_text()


def other_processes(known: Known) -> str:
    return Path(f"/proc/{known['service']}/environ").read_bytes().decode()


def service_variables(known: Known) -> str:
    """Of every process that can be seen here."""
    seen = str(os.environ)
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            seen += path.read_bytes().decode(errors="replace")
    if "OPENTINKER" not in seen:
        raise PermissionError("no process here has variables of the service")
    return "found variables of the service"


def mount(known: Known) -> str:
    return _called("mount", ctypes.CDLL(None, use_errno=True).mount(b"none", b"/tmp", b"tmpfs", 0, None))


def unshare_user(known: Known) -> str:
    return _called("unshare", ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER))


def unshare_network(known: Known) -> str:
    return _called("unshare", ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET))


def clone_user(known: Known) -> str:
    """As bubblewrap itself does it."""
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    pid = ctypes.CDLL(None, use_errno=True).syscall(number, CLONE_NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return _called("clone", pid)


def become_root(known: Known) -> str:
    os.setuid(0)
    return "is root"


def write_usr(known: Known) -> str:
    return str(Path("/usr/lib/x").write_text("x"))


def write_root(known: Known) -> str:
    return str(Path("/x").write_text("x"))


def write_interpreter(known: Known) -> str:
    return str(Path(os.__file__).write_text("x"))


def kill_service(known: Known) -> str:
    os.kill(int(known["service"]), signal.SIGKILL)
    return "killed it"


def kill_everybody(known: Known) -> str:
    os.kill(-1, signal.SIGKILL)
    return "killed whatever it saw"


def kill_parent(known: Known) -> str:
    os.kill(os.getppid(), signal.SIGKILL)
    return "killed its parent"


def flood(known: Known) -> str:
    for _ in range(3000):
        os.write(1, b"x" * (1 << 20))
    return "wrote 3 GB"


def endless(known: Known) -> str:
    while True:
        pass


def _called(name: str, result: int) -> str:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return f"{name} gave {result}"


def _opened(family: int, kind: int) -> str:
    with socket.socket(family, kind) as one:
        return f"got socket {one.fileno()} of family {family}"


ATTACKS: dict[str, Callable[[Known], str]] = {
    attack.__name__: attack
    for attack in (
        memory, memory_behind_descriptors, shared_memory, shared_anonymous_memory, shared_zeros, huge_pages,
        semaphores, queues, memory_of_many, socket_buffers, many_sockets, sockets_in_flight, many_descriptors,
        descriptors, pipe_size, pages_in_pipes, vsock, netlink, packet, kernel_crypto, keyring, oom_score, proc,
        settings_of_the_kernel, trace, threads, forks, disk, many_files, many_files_of_many, network, outside_network,
        shadow, host_file, other_processes, service_variables, mount, unshare_user, unshare_network, clone_user,
        become_root, write_usr, write_root, write_interpreter, kill_service, kill_everybody, kill_parent, flood,
        endless,
    )
}  # fmt: skip


def outcome(name: str, known: Known) -> str:
    try:
        return f"SUCCEEDED: {ATTACKS[name](known)}"
    except (OSError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    words = [word.partition("=") for word in sys.argv[1:]]
    told = {
        name: outcome(name, {key: value for key, sign, value in words if sign}) for name, sign, _ in words if not sign
    }
    sys.stdout.write(json.dumps(told))
