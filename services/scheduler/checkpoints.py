"""Committed checkpoints on disk, as the API shows them: list, and one tar stream made on the fly. Read only.

The trainer writes `{data_dir}/jobs/{job}/checkpoints/step-NNNNNN` with `manifest.json`; only what a manifest names
leaves the machine. All functions block: call them in a thread.
"""

from __future__ import annotations

import os
import re
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import orjson

from opentinker.shared.errors import NotFound

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer/"
"""Files under it are for resuming (optimizer, random state); a model loads without them."""
CHUNK = 1 << 20
_STEP = re.compile(r"^step-(\d{1,12})$")


def _directories(root: Path) -> dict[int, Path]:
    """Step -> directory, in order of steps."""
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {int(match[1]): root / name for name in names if (match := _STEP.match(name))}


def _manifest(directory: Path) -> dict[str, Any] | None:
    try:
        manifest = orjson.loads((directory / MANIFEST).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return manifest if isinstance(manifest, dict) else None


def listed(root: Path) -> list[dict[str, Any]]:
    """Oldest first: step, epoch, version, created, bytes, files."""
    found = []
    for step, directory in sorted(_directories(root).items()):
        manifest = _manifest(directory)
        if manifest is None:
            continue
        files: dict[str, dict[str, Any]] = manifest.get("files", {})
        model = {name: entry for name, entry in files.items() if not name.startswith(TRAINER_STATE)}
        found.append(
            {
                "step": step,
                "epoch": manifest.get("epoch"),
                "version": manifest.get("version"),
                "created": manifest.get("created"),
                "bytes": sum(entry["bytes"] for entry in files.values()),
                "model_bytes": sum(entry["bytes"] for entry in model.values()),
                "files": files,
            }
        )
    return found


def newest_epoch(root: Path) -> int:
    """Of all manifests; 0 if there is none."""
    manifests = (_manifest(directory) for directory in _directories(root).values())
    return max((int(manifest.get("epoch", 0)) for manifest in manifests if manifest), default=0)


@dataclass
class Archive:
    """An open checkpoint: the files stay readable even if the trainer removes the directory meanwhile."""

    step: int
    members: list[tuple[tarfile.TarInfo, BinaryIO]]

    @property
    def size(self) -> int:
        return sum(len(_header(info)) + _padded(info.size) for info, _ in self.members) + 2 * tarfile.BLOCKSIZE

    def chunks(self) -> Iterator[bytes]:
        """The tar stream, at most 1 MiB at a time."""
        for info, file in self.members:
            yield _header(info)
            left = info.size
            while left:
                chunk = file.read(min(left, CHUNK))
                if not chunk:
                    raise OSError(f"{info.name} is shorter than its manifest says")
                left -= len(chunk)
                yield chunk
            yield b"\0" * (_padded(info.size) - info.size)
        yield b"\0" * (2 * tarfile.BLOCKSIZE)

    def close(self) -> None:
        for _, file in self.members:
            file.close()


def open_archive(root: Path, step: int | None, everything: bool) -> Archive:
    """The checkpoint of `step` (None: the newest), its model files or also the trainer's state. Raises NotFound."""
    directories = _directories(root)
    if not directories or (step is not None and step not in directories):
        have = ", ".join(map(str, sorted(directories))) or "none yet"
        raise NotFound(f"no checkpoint of step {'latest' if step is None else step}; there are: {have}")
    chosen = max(directories) if step is None else step
    directory = directories[chosen]
    manifest = _manifest(directory)
    if manifest is None:
        raise NotFound(f"the checkpoint of step {chosen} is gone or damaged; take another one")
    archive = Archive(chosen, [])
    try:
        for name in [MANIFEST, *sorted(manifest.get("files", {}))]:
            if everything or not name.startswith(TRAINER_STATE):
                archive.members.append(_open_member(directory, name, int(manifest.get("created", 0))))
    except OSError as error:
        archive.close()
        raise NotFound(f"the checkpoint of step {chosen} cannot be read: {error.strerror}") from None
    return archive


def _open_member(directory: Path, name: str, mtime: int) -> tuple[tarfile.TarInfo, BinaryIO]:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise OSError(0, f"its manifest names {name!r}")
    descriptor = os.open(directory / path, os.O_RDONLY | os.O_NOFOLLOW)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(0, f"{name!r} is not a file")
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = status.st_size, mtime, 0o644
    return info, os.fdopen(descriptor, "rb")


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.GNU_FORMAT)


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
