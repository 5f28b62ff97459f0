"""Checkpoints on disk: committed atomically, verified before use, fenced by epoch.

    {root}/step-000050/manifest.json + files        committed
    {root}/.writing-EPOCH-HOST-PID-000050-XXXX/     being written; an orphan after a crash
    {root}/.removing-...                            being removed; an orphan after a crash
    {root}/.rewind                                  go on from an older checkpoint, see rewinder.py
    {root}/.epoch                                   lower epochs may not write here

The manifest names every file with its size and sha256; it is written last inside the temporary directory, and the
rename makes the checkpoint exist. The manifest is authoritative: anything that it does not record did not happen.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import structlog

from opentinker.shared.durable_files import make_directories, replace_durably, sync_directory, write_durably
from opentinker.shared.types.errors import Fenced, JobFailed
from opentinker.shared.types.manifest import (
    EPOCH,
    MANIFEST,
    REWIND,
    FileEntry,
    Manifest,
    fenced_epoch,
    name_of,
    read_manifest,
)

WRITING, REMOVING = ".writing-", ".removing-"
RELEASED = ".released"
"""File with the step of the oldest checkpoint that its policy can go back to."""
RUST_OS_ERROR = "(os error "
"""Part of the messages that safetensors and tokenizers raise for disk errors: not as OSError, the latter even as a bare
Exception."""
ADVICE = "If the disk is full, free some space or lower keep_checkpoints."
log = structlog.get_logger(__name__)


Damaged = Callable[[Path, str], None]
"""Called with the directory and the problem of each damaged checkpoint."""


def fence(root: Path, epoch: int) -> None:
    """Prevent commits of lower epochs from now on, including one in progress. Raises Fenced if a higher epoch did so,
    JobFailed if the disk is full or fails otherwise."""
    try:
        make_directories(root)
        with _locked(root):
            _refuse_epoch_below(fenced_epoch(root), epoch, root)
            replace_durably(root / EPOCH, str(epoch).encode())
    except OSError as error:
        raise JobFailed(f"no checkpoint can be written below {root}: {error}. {ADVICE}") from error


def commit(
    root: Path,
    manifest: Manifest,
    write: Callable[[Path], None],
    crash: Callable[[str], None] = lambda _: None,
    name: str = "",
) -> Path:
    """Write a checkpoint through `write(directory)` and make it exist in one rename. Returns its directory, which has
    the name of the step, or `name`.

    A checkpoint of the same step is replaced. Raises Fenced if a newer epoch has committed here, JobFailed if the disk
    is full or fails otherwise; in both cases, and when `write` raises, no files of the attempt remain. `crash(point)`
    is called between the stages, for tests.
    """
    temporary = root / f"{_writing(manifest.epoch)}{manifest.step:06d}-{time.time_ns()}"
    try:
        make_directories(root)
        _refuse_old_epoch(root, manifest)
        temporary.mkdir()
        write(temporary)
        crash("written")
        files = _seal(temporary)
        sealed = msgspec.structs.replace(manifest, files=files, created=time.time())
        write_durably(temporary / MANIFEST, msgspec.json.format(msgspec.json.encode(sealed)))
        sync_directory(temporary)
        crash("sealed")
        with _locked(root):
            _refuse_old_epoch(root, manifest)
            final = root / (name or name_of(manifest.step))
            replaced = _set_aside(final) if final.exists() else None
            crash("replacing")
            temporary.rename(final)
            crash("renamed")
            sync_directory(root)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) or RUST_OS_ERROR in str(error):
            raise JobFailed(
                f"the checkpoint of step {manifest.step} could not be written below {root}, the ones before it are "
                f"untouched: {error}. {ADVICE}"
            ) from error
        raise
    return final


def orphan_pattern(root: Path, epoch: int) -> str:
    """Return a glob pattern of the directories that this process leaves behind if it dies while writing."""
    return f"{glob.escape(str(root / _writing(epoch)))}*"


def _writing(epoch: int) -> str:
    """Return the name prefix of this process's temporary directories. The epoch and host make it unique where
    containers share a directory and process ids; an epoch has one trainer."""
    return f"{WRITING}{epoch}-{socket.gethostname()}-{os.getpid()}-"


def find_newest(
    root: Path, damaged: Damaged = lambda *_: None, *, position: int | None = None
) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint whose files all have their recorded hashes; damaged ones are skipped, logged as
    errors, and passed to `damaged`. `position`: only one with this `Manifest.position`.

    If a crash interrupted the replacement of a checkpoint, the one that was to be replaced still counts.
    """
    for directory, manifest in reversed(_with_replaced(root, damaged)):
        if position is not None and manifest.position != position:
            continue
        try:
            _verify(directory, manifest)
        except (OSError, ValueError) as error:
            log.error("checkpoint_damaged", checkpoint=str(directory), problem=str(error))
            if not directory.name.startswith(REMOVING):
                damaged(directory, str(error))
            continue
        return directory, manifest
    return None


def write_rewind(root: Path, record: Manifest) -> None:
    """Make the next trainer resume from the checkpoint of `record.step`, as this manifest says. Raises Fenced,
    JobFailed."""
    try:
        with _locked(root):
            _refuse_old_epoch(root, record)
            replace_durably(root / REWIND, msgspec.json.encode(record))
    except OSError as error:
        raise JobFailed(f"the job cannot go back to step {record.step}: {error}. {ADVICE}") from error


def after_rewind(root: Path, newest: tuple[Path, Manifest] | None) -> tuple[Path, Manifest] | None:
    """Return the checkpoint that the job has gone back to, with its new manifest, unless `newest`, which is intact, was
    written since then. Raises JobFailed if it is damaged."""
    try:
        record = msgspec.json.decode((root / REWIND).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return newest
    if newest is not None and newest[1].epoch > record.epoch:
        return newest
    directory = root / name_of(record.step)
    read_intact(directory)
    return directory, record


def remove_after(root: Path, record: Manifest, epoch: int) -> list[int]:
    """Remove the checkpoints that a job has gone back from. Returns their steps. Raises Fenced if a newer epoch owns
    the job."""
    with _locked(root):
        _refuse_epoch_below(fenced_epoch(root), epoch, root)
        found = _with_replaced(root, lambda *_: None)
        gone = [(path, one.step) for path, one in found if one.epoch <= record.epoch and one.step > record.step]
        for path, _ in gone:
            shutil.rmtree(path if path.name.startswith(REMOVING) else _set_aside(path), ignore_errors=True)
        sync_directory(root)
    return sorted({step for _, step in gone})


def find_before(root: Path, manifest: Manifest) -> tuple[Path, Manifest] | None:
    """Return the newest intact checkpoint before this one, unless something that a trainer needs to continue from it
    has been released (`note_release`)."""
    for directory, older in reversed(list_checkpoints(root)):
        if older.age < manifest.age and older.step >= _released(root):
            try:
                return directory, read_intact(directory)
            except JobFailed as error:
                log.error("checkpoint_damaged", checkpoint=str(directory), problem=str(error))
    return None


def may_begin_again(root: Path) -> bool:
    """Return whether a policy can go back to its first weights."""
    return _released(root) == 0


def note_release(root: Path, step: int) -> None:
    """Record that data which only checkpoints before this step account for is no longer kept."""
    replace_durably(root / RELEASED, str(step).encode())


def _released(root: Path) -> int:
    try:
        return int((root / RELEASED).read_text())
    except FileNotFoundError:
        return 0


def remove_newer(root: Path, kept: Manifest | None, epoch: int) -> list[int]:
    """Remove the checkpoints that a policy has gone back from, all of them for None. Returns their steps. Raises Fenced
    if a newer epoch owns the job."""
    with _locked(root):
        _refuse_epoch_below(fenced_epoch(root), epoch, root)
        gone = [pair for pair in list_checkpoints(root) if kept is None or pair[1].age > kept.age]
        for path, _ in gone:
            shutil.rmtree(_set_aside(path), ignore_errors=True)
        sync_directory(root)
    return [one.step for _, one in gone]


def positions(root: Path, damaged: Damaged) -> set[int]:
    """Return the positions of a deterministic job's checkpoints, see `Manifest.position`; files are not verified."""
    return {manifest.position for _, manifest in _with_replaced(root, damaged) if manifest.position is not None}


def read_intact(directory: Path) -> Manifest:
    """Return the directory's manifest if every file has its recorded hash. Raises JobFailed."""
    try:
        manifest = read_manifest(directory)
        _verify(directory, manifest)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise JobFailed(f"the checkpoint in {directory} is gone or damaged: {error}") from error
    return manifest


def list_checkpoints(root: Path) -> list[tuple[Path, Manifest]]:
    """Return committed checkpoints with a readable manifest, oldest first; files are not verified."""
    return _readable(root.glob("step-*"))


def _with_replaced(root: Path, damaged: Damaged) -> list[tuple[Path, Manifest]]:
    """Return committed checkpoints and those that were being replaced, oldest first; files are not verified."""
    return _readable([*root.glob(f"{REMOVING}step-*"), *root.glob("step-*")], damaged)


def _readable(directories: Iterable[Path], damaged: Damaged = lambda *_: None) -> list[tuple[Path, Manifest]]:
    """Return the directories that have a readable manifest, oldest first."""
    found = []
    for directory in directories:
        try:
            found.append((directory, read_manifest(directory)))
        except (OSError, msgspec.MsgspecError) as error:
            if not directory.name.startswith(REMOVING):  # those may be incomplete
                log.error("checkpoint_manifest_unreadable", checkpoint=str(directory), problem=str(error))
                damaged(directory, str(error))
    return sorted(found, key=lambda pair: (pair[1].age, not pair[0].name.startswith(REMOVING)))


def sweep(root: Path, keep: int, epoch: int, positions: Collection[int] = (), steps: Collection[int] = ()) -> None:
    """Remove all but the newest `keep` checkpoints and those at a position in `positions` or of a step in `steps`, and
    orphans of crashed writers and removers.

    A checkpoint with an unreadable manifest does not count towards `keep` and stays, as evidence. Raises Fenced if a
    newer epoch has committed: it may be writing.
    """
    if not root.exists():
        return
    with _locked(root):
        known = list_checkpoints(root)
        _refuse_epoch_below(max([fenced_epoch(root), *(manifest.epoch for _, manifest in known)]), epoch, root)
        for directory, manifest in known[: max(0, len(known) - keep)]:
            if manifest.position in positions or manifest.step in steps:
                continue
            shutil.rmtree(_set_aside(directory), ignore_errors=True)
        for orphan in root.iterdir():
            if orphan.name.startswith((WRITING, REMOVING)):
                shutil.rmtree(orphan, ignore_errors=True)
        sync_directory(root)


def remove(directory: Path, epoch: int) -> None:
    """Remove what `commit` wrote. Raises Fenced, with nothing removed, if a newer epoch has fenced the root."""
    with owned(directory.parent, epoch):
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def owned(root: Path, epoch: int) -> Iterator[None]:
    """Lock the directory against others on this machine. Raises Fenced if a newer epoch has fenced it."""
    with _locked(root):
        _refuse_epoch_below(fenced_epoch(root), epoch, root)
        yield


def _refuse_old_epoch(root: Path, manifest: Manifest) -> None:
    newest_epoch = max((other.epoch for _, other in list_checkpoints(root)), default=manifest.epoch)
    _refuse_epoch_below(max(newest_epoch, fenced_epoch(root)), manifest.epoch, root)


def _refuse_epoch_below(newest_epoch: int, epoch: int, root: Path) -> None:
    if epoch < newest_epoch:
        raise Fenced(f"epoch {newest_epoch} owns the checkpoints in {root}; epoch {epoch} may no longer write")


def _seal(directory: Path) -> dict[str, FileEntry]:
    """Flush every file and directory below to disk. Returns sizes and hashes by relative path."""
    files = {}
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            sync_directory(path)
            continue
        with path.open("rb") as file:
            files[path.relative_to(directory).as_posix()] = FileEntry(
                bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
            )
            os.fsync(file.fileno())
    return files


def _verify(directory: Path, manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        path = directory / name
        size = path.stat().st_size
        if size != entry.bytes:
            raise ValueError(f"{name} has {size} bytes instead of {entry.bytes}")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise ValueError(f"{name} does not have its recorded sha256")


def _set_aside(directory: Path) -> Path:
    """Rename a checkpoint before its removal, so that a directory under the original name is always complete."""
    doomed = directory.with_name(f"{REMOVING}{directory.name}-{os.getpid()}-{time.time_ns()}")
    directory.rename(doomed)
    return doomed


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Lock the directory against other committers on this machine, so that epoch check and rename are atomic."""
    with (root / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
