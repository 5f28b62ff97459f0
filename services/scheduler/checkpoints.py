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

import msgspec

from opentinker.shared.errors import NotFound
from opentinker.shared.manifest import MANIFEST, TRAINER_STATE, Manifest, fenced_epoch, instead, read_manifest

CHUNK = 1 << 20
_STEP = re.compile(r"^step-(\d{1,12})$")


def _committed(root: Path) -> list[tuple[Path, Manifest]]:
    """Oldest first; what has no readable manifest is left out."""
    found = []
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        try:
            if _STEP.match(name):
                found.append((root / name, read_manifest(root / name)))
        except (OSError, msgspec.MsgspecError):
            continue  # removed meanwhile, or damaged: the trainer tells of it
    return sorted(found, key=lambda pair: pair[1].age)


def listed(root: Path) -> list[dict[str, Any]]:
    """Oldest first: step, epoch, version, created, bytes, files."""
    return [
        {
            "step": manifest.step,
            "epoch": manifest.epoch,
            "version": msgspec.to_builtins(manifest.version),
            "created": manifest.created,
            "bytes": sum(entry.bytes for entry in manifest.files.values()),
            "model_bytes": sum(e.bytes for name, e in manifest.files.items() if not name.startswith(TRAINER_STATE)),
            "files": msgspec.to_builtins(manifest.files),
        }
        for _, manifest in _committed(root)
    ]


def newest_epoch(root: Path) -> int:
    """That may have written here; 0 if there is none."""
    return max([fenced_epoch(root), *(manifest.epoch for _, manifest in _committed(root))])


def choose(root: Path, step: int | None) -> tuple[Path, Manifest]:
    """The committed checkpoint of `step`; None: the newest. Raises NotFound."""
    committed = {manifest.step: (directory, manifest) for directory, manifest in _committed(root)}
    if not committed or (step is not None and step not in committed):
        have = ", ".join(map(str, sorted(committed))) or "none yet"
        raise NotFound(f"no checkpoint of step {'latest' if step is None else step}; there are: {have}")
    return [*committed.values()][-1] if step is None else committed[step]


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
    directory, manifest = choose(root, step)
    archive = Archive(manifest.step, [])
    try:
        for name in [MANIFEST, *sorted(manifest.files)]:
            if everything or not name.startswith(TRAINER_STATE):
                archive.members.append(_open_member(directory, name, int(manifest.created)))
    except OSError as error:
        archive.close()
        others = [known.step for _, known in reversed(_committed(root)) if known.step != manifest.step]
        raise NotFound(
            f"the checkpoint of step {manifest.step} cannot be read: {error.strerror}; {instead(manifest.job, others)}"
        ) from None
    return archive


def _open_member(directory: Path, name: str, mtime: int) -> tuple[tarfile.TarInfo, BinaryIO]:
    descriptor = os.open(directory / inside(name), os.O_RDONLY | os.O_NOFOLLOW)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(0, f"{name!r} is not a file")
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = status.st_size, mtime, 0o644
    return info, os.fdopen(descriptor, "rb")


def inside(name: str) -> PurePosixPath:
    """A name of a manifest, if it stays in the directory. Raises OSError."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise OSError(0, f"its manifest names {name!r}")
    return path


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.GNU_FORMAT)


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
