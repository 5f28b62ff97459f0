"""Unpacks a downloaded checkpoint: plain files inside the directory and nothing else, regardless of the tar's
contents."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import IO

import orjson

MANIFEST = "manifest.json"
CHUNK = 1 << 20


def unpack(file: IO[bytes], target: Path) -> None:
    """Blocking. `target` appears whole or not at all; it may exist if it is empty.

    Raises ValueError if a member leaves the directory or is not a file, or a checksum differs from the manifest's.
    """
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                hashes = {member.name: _write(tar, member, work) for member in tar}
        except tarfile.TarError as error:
            raise ValueError(f"not a tar file: {error}") from None
        _compare(work, hashes)
        if target.exists():
            target.rmdir()
        work.chmod(0o755)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, work: Path) -> str:
    """Returns the sha256 of what was written."""
    path = PurePosixPath(member.name)
    if not member.isreg() or path.is_absolute() or ".." in path.parts or "\\" in member.name or not path.parts:
        raise ValueError(f"member {member.name!r} is not a plain file inside the directory")
    source = tar.extractfile(member)
    assert source is not None
    place = work / path
    place.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with place.open("xb") as out:
        while chunk := source.read(CHUNK):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


def _compare(work: Path, hashes: dict[str, str]) -> None:
    if MANIFEST not in hashes:
        raise ValueError(f"it has no {MANIFEST}")
    try:
        files = orjson.loads((work / MANIFEST).read_bytes())["files"]
        expected = {name: entry["sha256"] for name, entry in files.items()}
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its {MANIFEST} cannot be read: {error}") from None
    for name, digest in hashes.items():
        if name != MANIFEST and expected.get(name) != digest:
            raise ValueError(f"the checksum of {name} is not that of its manifest")
