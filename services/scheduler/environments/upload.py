"""Receives pushed environment packages: an untrusted tar -> files under data_dir, and a version of a name.

Everything here blocks and is called in threads. The files are written whole or not at all, by their content's digest;
a name's versions are one small file, changed under a lock. All of it is on the disk before a push is answered; what is
damaged all the same is pushed again. Nothing of a package is run.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import IO

import msgspec
import structlog

from opentinker.services.scheduler.environments.unpack import MIB, unpack
from opentinker.services.scheduler.environments.upload_quota import OverQuota, Quota, StoredVersion, room
from opentinker.shared.config import Settings
from opentinker.shared.data import uploads
from opentinker.shared.data.untrusted_tar import refused
from opentinker.shared.data.uploads import Package, Reference
from opentinker.shared.durable_files import make_directories, replace_durably, sync_directory, sync_tree
from opentinker.shared.types import codec
from opentinker.shared.types.errors import Conflict, NotFound, SpecError

INCOMING, LEFT_S = ".incoming-", 3600.0

log = structlog.get_logger()


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    digest: str
    pushed: float
    """Unix time."""
    path: str
    """`module:Class`."""
    lock: str
    files: int
    bytes: int


class Unreadable(Conflict):
    """A name's file is damaged; other names are not."""


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """names/{tenant}/{name}.json"""

    versions: list[Version] = []
    """Oldest first."""
    next: int = 1
    """A number is never given twice, so that what a job names never changes."""


class Uploads:
    """`most_mb`: of one package, unpacked. `quota`: of a tenant's; None: no limit."""

    def __init__(self, data_dir: Path, most_mb: int, quota: Quota | None = None) -> None:
        self._data_dir = data_dir
        self._home = uploads.home(data_dir)
        self._most = most_mb * MIB
        self._quota = quota

    @classmethod
    def of(cls, settings: Settings) -> Uploads:
        quota = Quota(mb=settings.upload_tenant_mb, versions=settings.upload_tenant_versions)
        return cls(settings.data_dir, settings.upload_mb, quota)

    def incoming(self) -> IO[bytes]:
        """A file for the tar, which is gone when it is closed."""
        make_directories(self._home)
        return tempfile.TemporaryFile(dir=self._home)

    def store(
        self, tar: IO[bytes], tenant: str, name: str, used: Set[str] = frozenset()
    ) -> tuple[Package, Version, bool]:
        """The package, its version, and whether it is a new one: what the newest version holds already is no new one.

        No version goes for it yet, though the tenant's quota may ask for that: call `fit` when the new one has proved
        itself. Raises SpecError with every mistake in the package, or with what the quota says if even without the old
        versions whose digests are not `used` there would be no room.
        """
        for left in self._home.glob(f"{INCOMING}*"):  # by a process that was killed
            with contextlib.suppress(FileNotFoundError):  # it has just been taken away
                if time.time() - left.stat().st_mtime > LEFT_S:
                    shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(dir=self._home, prefix=INCOMING))
        try:
            package, digest = unpack(tar, work, self._most, name)
            (work / "package.json").write_bytes(codec.to_json(package))
            work.chmod(0o755)
            sync_tree(work)
            with self._locked():
                known = self._newest(tenant, package.name, digest)
                if known is None:
                    self._room(tenant, used, coming=(package, digest))
                self._place(work, digest)
                version = known or self._add_version(tenant, package, digest)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return package, version, known is None

    def _place(self, work: Path, digest: str) -> None:
        """Durably. What is there already stays if it is whole, and is replaced if not."""
        place = uploads.package_dir(self._data_dir, digest)
        try:
            uploads.intact(self._data_dir, digest)
            return
        except FileNotFoundError:
            make_directories(place.parent)
        except (OSError, codec.WireError) as error:
            log.warning("package_replaced", digest=digest, error=str(error))
        doomed = work.with_name(f"{work.name}-damaged")
        with contextlib.suppress(FileNotFoundError):
            place.rename(doomed)
        work.rename(place)
        sync_directory(place.parent)
        shutil.rmtree(doomed, ignore_errors=True)

    def fit(self, tenant: str, used: Set[str]) -> None:
        """Once a new version stays, and its virtual environment is there: old ones go as far as the tenant's quota asks
        for it, but none whose digest is `used`. Raises SpecError, and then all stay."""
        with self._locked():
            for one in self._room(tenant, used):
                log.info("old_version_removed", environment=one.name, version=one.version, tenant=tenant)
                self._remove(tenant, one.name, one.version)

    def _room(self, tenant: str, used: Set[str], coming: tuple[Package, str] | None = None) -> list[StoredVersion]:
        """The versions that have to go. Raises SpecError."""
        if self._quota is None:
            return []
        replaced = "" if coming is None else coming[0].name
        names = self.names(tenant)
        kept = [
            self._kept(name, version, newest=version is versions[-1] and name != replaced)
            for name, versions in names.items()
            for version in versions
        ]
        if coming is not None:
            package, digest = coming
            kept.append(StoredVersion(name=package.name, version=0, pushed=time.time(), digest=digest,
            bytes=package.bytes,
                             lock=package.lock_digest, newest=True))  # fmt: skip
        venvs = {lock: uploads.venv_bytes(self._data_dir, lock) for lock in {one.lock for one in kept} if lock}
        try:
            return room(kept, venvs, self._quota, used)
        except OverQuota as error:
            raise refused(f"does not fit: {error}") from None

    def _kept(self, name: str, version: Version, *, newest: bool) -> StoredVersion:
        return StoredVersion(name=name, version=version.version, pushed=version.pushed, digest=version.digest,
                    bytes=version.bytes, lock=self._lock_of(version.digest), newest=newest)  # fmt: skip

    def _lock_of(self, digest: str) -> str:
        """Empty if the package is damaged: then no virtual environment is known to be its."""
        try:
            return uploads.load(self._data_dir, digest).lock_digest
        except (OSError, codec.WireError):
            return ""

    def _newest(self, tenant: str, name: str, digest: str) -> Version | None:
        """Return the newest version if it has this digest."""
        versions = self._readable(tenant, name).versions
        return versions[-1] if versions and versions[-1].digest == digest else None

    def _add_version(self, tenant: str, package: Package, digest: str) -> Version:
        named = self._readable(tenant, package.name)
        version = Version(version=named.next, digest=digest, pushed=time.time(), path=package.path, lock=package.lock,
                          files=package.files, bytes=package.bytes)  # fmt: skip
        self._write(tenant, package.name, Named(versions=[*named.versions, version], next=named.next + 1))
        return version

    # --- names --------------------------------------------------------------------------------------------------

    def names(self, tenant: str) -> dict[str, list[Version]]:
        """Return the environments whose versions can be read."""
        found = {path.stem: self._readable(tenant, path.stem).versions for path in self._names(tenant).glob("*.json")}
        return {name: versions for name, versions in sorted(found.items()) if versions}

    def versions(self, tenant: str, name: str) -> list[Version]:
        """Raises NotFound, Unreadable."""
        found = self._read(tenant, name).versions
        if not found:
            raise NotFound(f"you have no environment {name[:100]!r}")
        return found

    def resolve(self, name: str, tenant: str) -> Reference:
        """`upload:NAME[@VERSION]` -> with version and digest. Raises SpecError for the field `environment.name`."""
        reference = uploads.parse(name)
        try:
            versions = self.versions(tenant, reference.name)
        except NotFound:
            yours = ", ".join(self.names(tenant)) or "none yet"
            push = f"push it with `opentinker env push DIR --name {reference.name}`"
            problem = f"you have no such environment; {push} (there are: {yours})"
            raise SpecError.of("environment.name", name, problem) from None
        except Unreadable as error:
            raise SpecError.of("environment.name", name, str(error)) from None
        wanted = reference.version or versions[-1].version
        for version in versions:
            if version.version == wanted and reference.digest in ("", version.digest):
                return Reference(reference.name, wanted, version.digest)
        there = ", ".join(str(version.version) for version in versions)
        raise SpecError.of("environment.name", name, f"has no such version; there are: {there}")

    def delete(self, tenant: str, name: str, version: int | None) -> list[Version]:
        """The versions that are gone. What only they had is removed. Raises NotFound."""
        with self._locked():
            return self._remove(tenant, name, version)

    def _remove(self, tenant: str, name: str, version: int | None) -> list[Version]:
        versions = self.versions(tenant, name)
        gone = [v for v in versions if version in (None, v.version)]
        if not gone:
            raise NotFound(f"environment {name!r} has no version {version}")
        left = [v for v in versions if v not in gone]
        self._write(tenant, name, Named(versions=left, next=self._read(tenant, name).next))
        self._sweep({v.digest for v in gone})
        return gone

    def _sweep(self, digests: set[str]) -> None:
        """Delete packages that no name refers to, and virtual environments that only they used."""
        paths = (self._home / "names").glob("*/*.json")
        held = {v.digest for path in paths for v in self._readable(path.parent.name, path.stem).versions}
        locks = {digest: self._lock_of(digest) for digest in held | digests}
        for digest in digests - held:
            shutil.rmtree(uploads.package_dir(self._data_dir, digest), ignore_errors=True)
            if locks[digest] and locks[digest] not in {locks[other] for other in held}:
                shutil.rmtree(self._home / "venvs" / locks[digest], ignore_errors=True)

    def _names(self, tenant: str) -> Path:
        return self._home / "names" / tenant

    def _read(self, tenant: str, name: str) -> Named:
        """Raises Unreadable."""
        if not re.fullmatch(uploads.NAME, name):
            return Named()
        path = self._names(tenant) / f"{name}.json"
        try:
            return codec.from_json(Named, path.read_bytes())
        except FileNotFoundError:
            return Named()
        except (OSError, codec.WireError) as error:
            log.error("versions_unreadable", environment=name, tenant=tenant, file=str(path), error=str(error))
            raise Unreadable(
                f"the list of versions of environment {name!r} is damaged; push it again to begin a new one:"
                f" `opentinker env push DIR --name {name}`"
            ) from None

    def _readable(self, tenant: str, name: str) -> Named:
        """Without versions if they cannot be read."""
        with contextlib.suppress(Unreadable):
            return self._read(tenant, name)
        return Named()

    def _write(self, tenant: str, name: str, named: Named) -> None:
        make_directories(self._names(tenant))
        replace_durably(self._names(tenant) / f"{name}.json", codec.to_json(named))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        make_directories(self._home)
        with (self._home / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
