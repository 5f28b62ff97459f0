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
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import msgspec
import structlog

from opentinker.shared.data import uploads
from opentinker.shared.data.untrusted_tar import Unpacking, refused
from opentinker.shared.data.uploads import Package
from opentinker.shared.types import codec
from opentinker.shared.types.errors import SpecError

MIB = 1 << 20
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
        Unpacking(files, most_bytes, "upload_mb").run(source)
        package = uploads.read_package(files, name)
        return UnpackOutcome(package=package, digest=uploads.digest_of(files)[0])
    except SpecError as error:
        return UnpackOutcome(mistakes=error.mistakes)
    except OSError as error:
        return UnpackOutcome(errno=error.errno or errno.EIO)


if __name__ == "__main__":
    main(*sys.argv[1:])
