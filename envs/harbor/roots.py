"""Root file systems by the image that a Dockerfile names: what the operator provides, or this machine's own system.

    data_dir/harbor/roots/NAME/    what of them is made here: unpacked tars, a small /etc, directories that may be
                                   written to

Directories and files made here belong to the sandboxes' user. Those of the operator and of this machine do not, so
programs may read them, and replace but not change files in the directories of `_writable`. All functions block.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from opentinker.shared.types.errors import SpecError

Places = dict[str, list[str]]
"""Where a file system is mounted -> its layers, the lowest first; relative paths are below data_dir/harbor."""
OWN_IMAGES = ("ubuntu", "debian", "python")
"""Images that this machine's own system stands for, unless the operator provides another one."""
TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
EMPTY = (
    "app",
    "home",
    "logs",
    "mnt",
    "opt",
    "proc",
    "dev",
    "root",
    "run",
    "srv",
    "sys",
    "tmp",
    "usr",
    "var/tmp",
    "etc",
)
PUBLIC = (
    "alternatives", "bash.bashrc", "debian_version", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime",
    "mime.types", "os-release", "profile", "ssl/certs/ca-certificates.crt", "ssl/openssl.cnf", "terminfo",
)  # fmt: skip
"""The files of this machine's /etc that sandboxes see."""
FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
DEPTH = 4
"""Levels of directories below /usr/local, and of those below /, that may be written to."""
MAX_DIRECTORIES = 2000
VERSION = "1"
"""Changes when what is made here for this machine's own system does."""


def root_of(image: str, home: Path, provided: Mapping[str, Path], uid: int) -> Places:
    """Return the layers of an image's root file system, made if they are not there. Raises SpecError, OSError."""
    name, _, _ = image.partition(":")
    if image in provided or name in provided:
        path = provided.get(image, provided.get(name, Path())).resolve()
        if path.is_dir():
            return _directory(path, home, uid)
        if path.is_file():
            return {"/": [_unpacked(path, home, uid)]}
        raise _refused(image, f"harbor_roots names {path}, which is neither a directory nor a tar")
    if name.removeprefix("docker.io/").removeprefix("library/") in OWN_IMAGES:
        return _own_system(home, uid)
    known = ", ".join([*OWN_IMAGES, *provided])
    raise _refused(image, f"no root file system is known for it; known are {known} (operator setting harbor_roots)")


def _refused(image: str, problem: str) -> SpecError:
    return SpecError.of("environment/Dockerfile: FROM", image, problem)


def _own_system(home: Path, uid: int) -> Places:
    """Build a root directory: this machine's /usr below directories that may be written to, and a small /etc."""

    def fill(place: Path) -> None:
        for name in EMPTY:
            path = place / "root" / name
            path.mkdir(parents=True)
            path.chmod(0o1777 if name in ("tmp", "var/tmp") else 0o755)
        for name in TOP:
            if os.path.islink(f"/{name}"):
                os.symlink(os.readlink(f"/{name}").lstrip("/"), place / "root" / name)
        etc = place / "root" / "etc"
        for name in PUBLIC:
            source, target = Path("/etc", name), etc / name
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True)
            elif source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        for name, text in FILES.items():
            (etc / name).write_text(text)
        _writable(Path("/usr/local"), place / "usr" / "local")

    made = _made(home, f"own-system-{VERSION}-{uid}", fill, uid)
    return {"/": [f"{made}/root"], "/usr": ["/usr", f"{made}/usr"]}


def _directory(path: Path, home: Path, uid: int) -> Places:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    made = _made(home, f"directory-{digest}-{uid}", lambda place: _writable(path, place), uid)
    return {"/": [str(path), made]}


def _unpacked(path: Path, home: Path, uid: int) -> str:
    about = path.stat()
    identity = f"{path}\0{about.st_size}\0{about.st_mtime_ns}"

    def fill(place: Path) -> None:
        try:
            with tarfile.open(path) as tar:
                tar.extractall(place, filter=_no_device)
        except tarfile.TarError as error:
            raise SpecError.of("harbor_roots", str(path), str(error)) from None

    return _made(home, f"tar-{hashlib.sha256(identity.encode()).hexdigest()[:16]}-{uid}", fill, uid)


def _no_device(member: tarfile.TarInfo, place: str) -> tarfile.TarInfo | None:
    return None if member.isdev() else tarfile.tar_filter(member, place)


def _writable(source: Path, target: Path) -> None:
    """Make the upper directories of `source` in a layer over it."""
    for count, (folder, folders, _) in enumerate(os.walk(source)):
        inside = Path(folder).relative_to(source)
        place = target / inside
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o755)
        if len(inside.parts) >= DEPTH or count > MAX_DIRECTORIES:
            folders.clear()
        folders[:] = [name for name in folders if not os.path.islink(os.path.join(folder, name))]


def _made(home: Path, name: str, fill: Callable[[Path], None], uid: int) -> str:
    """Return the directory, relative to `home`, which `fill` fills once."""
    place = home / "roots" / name
    if not place.is_dir():
        with made_once(place) as work:
            fill(work)
            give(work, uid)
    return place.relative_to(home).as_posix()


@contextlib.contextmanager
def made_once(place: Path) -> Iterator[Path]:
    """Give a directory to fill, which is named `place` at the end unless another process was faster."""
    place.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}-"))
    try:
        work.chmod(0o755)
        yield work
        with contextlib.suppress(OSError):
            work.rename(place)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def give(place: Path, uid: int) -> None:
    """Make everything below belong to the sandboxes' user, if this process may."""
    if os.geteuid() != 0:
        return
    os.lchown(place, uid, uid)
    for folder, folders, names in os.walk(place):
        for name in (*folders, *names):
            os.lchown(os.path.join(folder, name), uid, uid)
