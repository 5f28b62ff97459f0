"""Reads tars that anybody may have made: plain files and directories inside of them, up to bounds, and nothing else."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from opentinker.shared.types.errors import SpecError

MIB = 1 << 20
MAX_FILES = 2000
"""Files of a package, and its directories."""
MAX_PATH_LENGTH = 240
MAX_NAME_BYTES = 255
"""Bytes of a file's or directory's own name: file systems take no more."""


def refused(problem: str) -> SpecError:
    return SpecError([{"field": "(package)", "value": None, "problem": problem}])


class Unpacking:
    """Writes the files of a tar below `files`, which exists. With `programs`, those that may be executed stay so."""

    def __init__(
        self, files: Path, most_bytes: int, setting: str = "", most_files: int = MAX_FILES, *, programs: bool = False
    ) -> None:
        self._files, self._most, self._most_files = files, most_bytes, most_files
        self._setting = f" ({setting})" if setting else ""
        """Name of the operator's setting for the size, in parentheses."""
        self._programs = programs
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
        if self._count > self._most_files or self._size > self._most or self._members > 2 * self._most_files:
            limits = f"{self._most_files} files, as many directories and {self._most // MIB} MB{self._setting}"
            raise refused(f"is too large: the limit is {limits}")
        if member.isdir():
            return
        self._make(path.parent)
        source = tar.extractfile(member)
        assert source is not None
        place = self._files / path
        mode = 0o755 if self._programs and member.mode & 0o100 else 0o644
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as out:
            shutil.copyfileobj(source, out)
            os.fchmod(out.fileno(), mode)

    def _make(self, directory: PurePosixPath) -> None:
        """Make a directory readable for every user, because the sandbox's user is not known yet."""
        for path in (*reversed(directory.parents), directory):
            if path in self._made:
                continue
            self._made.add(path)
            if len(self._made) > self._most_files:
                raise refused(f"has more than {self._most_files} directories")
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
