"""Unpacks an untrusted tar into the files of a package, in a separate process with limits on memory and time.

    python -m opentinker.services.scheduler.environments.unpack DIRECTORY MOST_BYTES NAME < TAR

writes DIRECTORY/files, prints an Outcome as JSON and ends with 0. A tar or a lock that asks for more than MEMORY or
TIME_S ends this process alone, and not the scheduler. Nothing of a package is run.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO, Any

import msgspec
import structlog

from opentinker.shared.data import uploads
from opentinker.shared.data.uploads import Package
from opentinker.shared.types import codec
from opentinker.shared.types.errors import SpecError

MIB = 1 << 20
MAX_FILES = 2000
MAX_DIRECTORIES = 2000
MAX_PATH_LENGTH = 240
MAX_NAME_BYTES = 255
"""Bytes of a file's or directory's own name: file systems take no more."""
MEMORY = 512 * MIB
"""Address space of the process."""
TIME_S = 30
"""Processor time of the process."""
WAIT_S = 120.0
"""By the clock, on a machine that has much else to do."""
STDERR_CHARACTERS = 2000

log = structlog.get_logger()


class UnpackOutcome(msgspec.Struct, frozen=True, kw_only=True):
    package: Package | None = None
    """None: there are mistakes, or the disk refused."""
    digest: str = ""
    mistakes: list[dict[str, Any]] = []
    errno: int = 0
    """Error number of the disk."""


def unpack(tar: IO[bytes], directory: Path, most_bytes: int, name: str) -> tuple[Package, str]:
    """Unpack into `directory`, in a separate process; return the package and its digest. `name` overrides the package's
    name. Blocking. Raises SpecError for anything wrong with the tar or the package, OSError for the disk."""
    if name and not re.fullmatch(uploads.NAME, name):
        raise SpecError([{"field": "name", "value": name[:100], "problem": uploads.NAME_RULE}])
    # -P: nothing in the working directory is taken for a package of ours
    argv = [sys.executable, "-P", "-m", __name__, str(directory), str(most_bytes), name]
    try:
        ended = subprocess.run(argv, stdin=tar, capture_output=True, timeout=WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise refused(f"could not be read within {WAIT_S:g} s") from None
    if ended.returncode != 0:
        said = ended.stderr.decode(errors="replace")[-STDERR_CHARACTERS:]
        log.warning("package_unreadable", returncode=ended.returncode, stderr=said)
        raise refused(f"cannot be read with {MEMORY // MIB} MB of memory and {TIME_S} s of processor time")
    outcome = codec.from_json(UnpackOutcome, ended.stdout)
    if outcome.errno:
        raise OSError(outcome.errno, os.strerror(outcome.errno))
    if outcome.package is None:
        raise SpecError(outcome.mistakes)
    return outcome.package, outcome.digest


def refused(problem: str) -> SpecError:
    return SpecError([{"field": "(package)", "value": None, "problem": problem}])


# --- in the process ------------------------------------------------------------------------------------------------


def main(directory: str, most_bytes: str, name: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (TIME_S, TIME_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.buffer.write(codec.to_json(read(sys.stdin.buffer, Path(directory) / "files", int(most_bytes), name)))


def read(source: IO[bytes], files: Path, most_bytes: int, name: str) -> UnpackOutcome:
    """Blocking. `files` is made."""
    try:
        files.mkdir()
        Unpacking(files, most_bytes).run(source)
        package = uploads.read_package(files, name)
        return UnpackOutcome(package=package, digest=uploads.digest_of(files)[0])
    except SpecError as error:
        return UnpackOutcome(mistakes=error.mistakes)
    except OSError as error:
        return UnpackOutcome(errno=error.errno or errno.EIO)


class Unpacking:
    def __init__(self, files: Path, most_bytes: int) -> None:
        self._files, self._most = files, most_bytes
        self._made: set[PurePosixPath] = set()
        """Directories."""
        self._size = self._count = self._members = 0

    def run(self, source: IO[bytes]) -> None:
        """Raises SpecError, OSError."""
        try:
            with tarfile.open(fileobj=source, mode="r:") as tar:
                for member in tar:
                    self._take(tar, member)
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            raise refused(f"holds {Path(str(error.filename)).name!r} twice") from None
        except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
            raise refused(f"is not a tar file: {error}") from None

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = _inside(member)
        self._members += 1
        if member.isreg():
            self._count, self._size = self._count + 1, self._size + member.size
        if self._count > MAX_FILES or self._size > self._most or self._members > MAX_FILES + MAX_DIRECTORIES:
            limits = f"{MAX_FILES} files, {MAX_DIRECTORIES} directories and {self._most // MIB} MB (upload_mb)"
            raise refused(f"is too large: the limit is {limits}")
        if member.isdir():
            return
        self._make(path.parent)
        source = tar.extractfile(member)
        assert source is not None
        place = self._files / path
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(descriptor, "wb") as out:
            shutil.copyfileobj(source, out)
            os.fchmod(out.fileno(), 0o644)

    def _make(self, directory: PurePosixPath) -> None:
        """Make a directory readable for every user, because the sandbox's user is not known yet."""
        for path in (*reversed(directory.parents), directory):
            if path in self._made:
                continue
            self._made.add(path)
            if len(self._made) > MAX_DIRECTORIES:
                raise refused(f"has more than {MAX_DIRECTORIES} directories")
            (self._files / path).mkdir(exist_ok=True)
            (self._files / path).chmod(0o755)


def _inside(member: tarfile.TarInfo) -> PurePosixPath:
    """Return the member's path. Raises SpecError for anything but a plain file or directory inside the package."""
    path = PurePosixPath(member.name)
    shown = repr(member.name[:100])
    if not (member.isreg() or member.isdir()):
        raise refused(f"holds {shown}, which is a link or a device: only plain files are taken")
    if member.issparse():
        raise refused(f"holds {shown}, which is a sparse file: only plain files are taken")
    bad = path.is_absolute() or ".." in path.parts or "\\" in member.name or not member.name.isprintable()
    if bad or len(member.name) > MAX_PATH_LENGTH or (member.isreg() and not path.parts):
        raise refused(f"holds {shown}, which is no name of a file inside it")
    if any(len(part.encode()) > MAX_NAME_BYTES for part in path.parts):
        raise refused(f"holds {shown}, a part of which has more than {MAX_NAME_BYTES} bytes")
    if member.size < 0:
        raise refused(f"holds {shown}, which has a negative size")
    return path


if __name__ == "__main__":
    main(*sys.argv[1:])
