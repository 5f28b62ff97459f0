"""Files of weights of a model that newer ones have replaced: which are kept, and the removal of the others, also of
what a trainer that was killed has left unfinished.

samplers/SAMPLER@SEQ/        weights without a name
sampler_weights/NAME@SEQ/    with a name, which may be saved again; external_weights likewise
weights/NAME@SEQ/            checkpoints, which may be saved again with `overwrite`
KIND/.NAME@SEQ-...           being written, or being removed
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from opentinker.shared.state.tinker.store import TinkerStore

KEPT_S = 3600.0
"""Files stay for this time after they were last the newest, or last belonged to a client that sends heartbeats."""
WEIGHTS_KEPT_S = 600.0
"""Likewise of checkpoints: commands that load them may be under way."""
UNFINISHED_S = 600.0
"""What nothing was written to for this time, its trainer has left."""
KEPT_OF = {"weights": WEIGHTS_KEPT_S, "sampler_weights": KEPT_S, "external_weights": KEPT_S}
MOST_KEPT = 64
"""Samplers of a model that keep replaced files, the most recently used ones: a loop may make one in each step. As many
replaced files of each kind stay that no client uses."""

FULL_KEPT_S, FULL_MOST_KEPT = 600.0, 4
"""Likewise of models that train all weights: each file is as large as the base."""


async def kept_for_clients(records: TinkerStore, model: str, *, most: int) -> set[str]:
    """Return the directories of the model's samplers whose clients send heartbeats, the `most` last used ones."""
    kept, left, alive = dict[str, None](), [], dict[str, bool]()
    for sampler in await records.samplers_of(model):
        if sampler.session not in alive:
            alive[sampler.session] = await records.is_alive(sampler.session)
        if alive[sampler.session]:
            kept[sampler.directory] = None
        else:
            left.append(sampler.id)
    await records.forget_use(model, left)
    return set(list(kept)[:most])


def remove_replaced(root: Path, *, newest: Set[str], kept: Set[str], now: float, kept_s: float, most: int) -> list[str]:
    """Remove directories in `root` that for `kept_s` were neither among `newest`, by name, nor among `kept`, by path;
    sooner where more than `most` are neither, the oldest first; and unfinished ones that were left. Returns their
    names. Raises OSError."""
    replaced, gone = [], []
    for path in root.iterdir() if root.exists() else []:
        with suppress(FileNotFoundError):  # it was just removed, or finished
            if path.name.startswith("."):
                if now - _last_written(path) >= UNFINISHED_S:
                    gone.append(path.name)
                    shutil.rmtree(path, ignore_errors=True)
            elif path.name in newest or str(path) in kept:
                os.utime(path, (now, now))
            else:
                replaced.append((path.stat().st_mtime, path))
    for place, (changed, path) in enumerate(sorted(replaced, reverse=True)):
        if now - changed >= kept_s or place >= most:
            gone.append(path.name)
            shutil.rmtree(path, ignore_errors=True)
    return sorted(gone)


def _last_written(directory: Path) -> float:
    return max(path.stat().st_mtime for path in (directory, *directory.rglob("*")))


def bytes_beside(root: Path, listed: Set[str]) -> int:
    """Return the bytes of the directories in `root` but those of these names. Raises OSError."""
    found = 0
    for path in root.iterdir() if root.exists() else []:
        if path.name not in listed:
            with suppress(FileNotFoundError):  # it was just removed
                found += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return found


def newest_of(root: Path) -> set[str]:
    """Return the name of the directory SAMPLER@SEQ with the highest number."""
    numbers = {path.name: path.name.rpartition("@")[2] for path in root.iterdir()} if root.exists() else {}
    names = [name for name, number in numbers.items() if number.isdecimal()]
    return {max(names, key=lambda name: int(numbers[name]))} if names else set()
