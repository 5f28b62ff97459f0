"""Stores artifacts: files under keys `{tenant}/{job}/...`, in a directory or in an object store.

    put     a file of this machine under a key, whole or not at all
    open    what is under a key, to be read in pieces from anywhere
    stat    how many bytes that has
    list    keys below a prefix
    delete  a key, and all keys below it

Who may have what is decided elsewhere: a store knows nothing of tenants.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath
from typing import Protocol

from opentinker.shared.config import Settings
from opentinker.shared.durable_files import make_directories, sync_directory, sync_file
from opentinker.shared.types.errors import NotFound, OpenTinkerError

CHUNK = 1 << 20
MISSING = (FileNotFoundError, NotADirectoryError)
"""Errors of a path that does not exist, or is not below a directory."""
_LEFT = re.compile(r"\.(removing|putting)-[0-9a-f]{32}")
"""Names of ours alone: a trainer's `.removing-step-...` may still be a checkpoint."""


class StoreUnavailable(OpenTinkerError):
    """The store does not answer, or refuses; the text contains its error."""


class CorruptCheckpoint(OSError):
    """A checkpoint is not, or no more, what its manifest says: trying again does not help."""


class Opened(Protocol):
    """Immutable bytes while open, in a directory even if they are deleted in between."""

    @property
    def size(self) -> int: ...

    def chunks(self, first: int, length: int) -> AsyncIterator[bytes]:
        """`length` bytes from `first` on, in pieces. Raises StoreUnavailable, OSError."""
        ...

    def close(self) -> None: ...


class ArtifactStore(Protocol):
    """All may raise StoreUnavailable."""

    @property
    def apart(self) -> bool:
        """Return whether stored files take separate space: no bytes are shared with the original."""
        ...

    async def put(self, key: str, file: Path) -> None:
        """Replaces what is there."""
        ...

    async def open(self, key: str) -> Opened:
        """Raises NotFound."""
        ...

    async def stat(self, key: str) -> int | None:
        """Bytes; None if there is nothing."""
        ...

    async def list(self, prefix: str) -> dict[str, int]:
        """Bytes by key, of what is below."""
        ...

    async def delete(self, prefix: str) -> None:
        """Delete everything below a prefix; missing keys count as deleted."""
        ...


def store_of(settings: Settings) -> ArtifactStore:
    """Return the store that the settings name. Raises SpecError."""
    if settings.artifacts_url.startswith("s3://"):
        from opentinker.services.scheduler.artifacts.s3_store import ObjectStore

        return ObjectStore(settings)
    place = settings.artifact_directory
    assert place is not None
    return DirectoryStore(place, settings.data_dir)


def inside(name: str) -> PurePosixPath:
    """A name, if it stays in its directory. Raises CorruptCheckpoint."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
        raise CorruptCheckpoint(0, f"its manifest names {name!r}")
    return path


class DirectoryStore:
    """A key is a path below `root`. A file gets a second name there, where the file system has such: no copy."""

    def __init__(self, root: Path, sources: Path | None = None) -> None:
        """`sources`: what is put lies below it."""
        self.root = root
        self._sources = sources

    @property
    def apart(self) -> bool:
        """Two file systems share no bytes. Blocking, shortly."""
        return self._sources is None or _device(self.root) != _device(self._sources)

    def path(self, key: str) -> Path:
        """Raises OSError."""
        return self.root / inside(key)

    async def put(self, key: str, file: Path) -> None:
        try:
            await asyncio.to_thread(_link, file, self.path(key))
        except OSError as error:
            raise StoreUnavailable(f"{self.root}: {error.strerror or error}") from error

    async def open(self, key: str) -> Opened:
        try:
            return await asyncio.to_thread(OpenFile, self.path(key))
        except OSError as error:
            raise NotFound(error.strerror or f"nothing is under {key}") from None

    async def stat(self, key: str) -> int | None:
        try:
            found = await asyncio.to_thread(self.path(key).lstat)
        except OSError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    async def list(self, prefix: str) -> dict[str, int]:
        try:
            return await asyncio.to_thread(self._below, self.path(prefix))
        except OSError as error:
            raise StoreUnavailable(f"{self.root}: {error.strerror or error}") from error

    def _below(self, place: Path) -> dict[str, int]:
        found = {}
        for folder, _, names in os.walk(place, onerror=_ignore_missing):
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(*MISSING):  # removed in the meantime
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode):
                        found[path.relative_to(self.root).as_posix()] = status.st_size
        return dict(sorted(found.items()))

    async def delete(self, prefix: str) -> None:
        try:
            await asyncio.to_thread(self._remove, self.path(prefix))
        except OSError as error:
            raise StoreUnavailable(f"{self.root}: {error.strerror or error}") from error

    async def left_of(self, prefix: str) -> int | None:
        """Return the bytes that a failed deletion of `prefix` has left; None if it left nothing. Raises
        StoreUnavailable."""
        place = _removal_of(self.path(prefix))
        if not await asyncio.to_thread(place.exists):
            return None
        return sum((await self.list(place.relative_to(self.root).as_posix())).values())

    def _remove(self, place: Path) -> None:
        """Renamed before it is removed: a directory that has its name is whole. A repeated call also removes what a
        failed one left under the other name."""
        doomed = _removal_of(place)
        _unlink(doomed)
        with contextlib.suppress(*MISSING):
            place.rename(doomed)
            _unlink(doomed)
        remove_empty(place.parent, self.root)


def _removal_of(place: Path) -> Path:
    """Return the name under which a file or directory is removed."""
    return place.with_name(f".removing-{hashlib.blake2b(place.name.encode(), digest_size=16).hexdigest()}")


def _ignore_missing(error: BaseException) -> None:
    if not isinstance(error, MISSING):
        raise error


def _unlink(path: Path) -> None:
    """Remove a file or a directory, there or not; somebody else may be removing it as well. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=lambda _, __, info: _ignore_missing(info[1]))
    else:
        with contextlib.suppress(*MISSING):
            path.unlink()


class OpenFile:
    """A regular file. Blocking; raises OSError."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError(0, f"{path.name!r} is not a file")
        self._size = status.st_size

    @property
    def size(self) -> int:
        return self._size

    async def chunks(self, first: int, length: int) -> AsyncIterator[bytes]:
        while length:
            chunk = await asyncio.to_thread(os.pread, self._descriptor, min(CHUNK, length), first)
            if not chunk:
                raise OSError(0, "the file is shorter than it was")
            first, length = first + len(chunk), length - len(chunk)
            yield chunk

    def close(self) -> None:
        os.close(self._descriptor)


def _link(source: Path, target: Path) -> None:
    make_directories(target.parent)
    temporary = target.with_name(f".putting-{uuid.uuid4().hex}")
    try:
        hard_link(source, temporary)
        sync_file(temporary)
        temporary.replace(target)  # nothing happens where both are names of the same file
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(target.parent)


def hard_link(source: Path, target: Path) -> None:
    """Link to the same file, or copy it where the file system has no hard links. Blocking."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
        sync_file(target)


def sweep(root: Path, older_s: float) -> None:
    """Remove leftovers of killed processes' puts and deletions below `root`. Blocking."""
    for place, directories, files in os.walk(root):
        for name in filter(_LEFT.fullmatch, [*directories, *files]):
            drop_old(Path(place) / name, older_s)
        directories[:] = [name for name in directories if not _LEFT.fullmatch(name)]


def drop_old(path: Path, older_s: float) -> None:
    """Remove a file or directory in which nothing has changed for this time. Blocking."""
    with contextlib.suppress(OSError):  # somebody else was faster, or it stays until the next time
        status = path.lstat()
        if time.time() - status.st_ctime > older_s:
            shutil.rmtree(path) if stat.S_ISDIR(status.st_mode) else path.unlink()


def remove_empty(place: Path, root: Path) -> None:
    """Remove a directory below `root`, there or not, and those above it there, as far as they are empty. Blocking.
    Raises OSError."""
    while place != root and place.is_relative_to(root):
        try:
            place.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                return
            raise
        place = place.parent


def _device(path: Path) -> int:
    """Return the device of the path, or of the directory in which it will be made."""
    while not path.exists():
        path = path.absolute().parent
    return path.stat().st_dev
