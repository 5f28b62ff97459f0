"""A model of the Tinker API on disk, below `tinker_place`.

state/model.safetensors     weights, moments, gradient sum, and which commands they contain
state/ended.json            the model has ended, and why
state/.epoch                trainers of lower epochs may not write here
weights/NAME@SEQ/           checkpoint: PEFT adapter, and state.safetensors with moments too, in float32
sampler_weights/NAME@SEQ/   PEFT adapter
samplers/SAMPLER@SEQ/       likewise, not synced: it need not outlive the machine

A model that trains all weights has a Hugging Face directory in the place of a PEFT adapter, and its moments in
trainer/state.safetensors, which engines do not read.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.bank import adapter_files
from opentinker.services.trainer.bank.adapter import Adapter, AdapterShape, FullShape
from opentinker.services.trainer.bank.adapter_tensors import MOMENTS, matrices
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.full_files import export_full, import_full
from opentinker.services.trainer.bank.limits import Refused
from opentinker.shared.data.safetensors_header import difference
from opentinker.shared.durable_files import make_directories, replace_durably, sync_directory, sync_tree
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import ADAPTER
from opentinker.shared.types.tinker import LoraShape

STATE, ENDED, WHOLE = "model.safetensors", "ended.json", "state.safetensors"
NOTES = "model"
"""Name of the notes in a state file."""


class ModelNotes(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    """Last command that the state contains."""
    tenant: str
    lora: LoraShape
    passes: int
    """Commands forward_backward so far."""
    left_out: list[tuple[int, int]] = []
    """First and last numbers of commands that were given up, newest last."""


class ModelEnd(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    """Answer to later commands."""


def read_state(root: Path, epoch: int, name: str) -> tuple[Adapter, ModelNotes] | ModelEnd | None:
    """Return the model's state as an adapter of this name; None if it was never stored. Trainers of lower epochs can
    store none from now on. Raises Fenced, Refused for a damaged file, OSError if the disk fails."""
    try:
        checkpoint.fence(root, epoch)
        return _read_state(root, name)
    except (JobFailed, Refused) as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise Refused(first_line(error.__cause__ or error)) from error  # without the place of the file


def _read_state(root: Path, name: str) -> tuple[Adapter, ModelNotes] | ModelEnd | None:
    try:
        return msgspec.json.decode((root / ENDED).read_bytes(), type=ModelEnd)
    except FileNotFoundError:
        pass
    try:
        (root / STATE).open("rb").close()  # safetensors takes a file that cannot be opened for a missing one
    except FileNotFoundError:
        return None
    try:
        notes = msgspec.json.decode(adapter_files.notes_of(root / STATE)[NOTES], type=ModelNotes)
    except (KeyError, msgspec.MsgspecError) as error:
        raise Refused(str(error)) from error
    return adapter_files.restore(name, root / STATE), notes


def write_state(root: Path, epoch: int, adapter: Adapter, notes: ModelNotes) -> None:
    """Replace the model's state. Raises Fenced if a trainer of a newer epoch has read it, OSError."""
    with checkpoint.owned(root, epoch):
        whole = replace(adapter, partial=None)
        adapter_files.store(whole, root / STATE, **{NOTES: msgspec.json.encode(notes).decode()})


def write_end(root: Path, epoch: int, end: ModelEnd) -> None:
    """Replace the model's state by the reason of its end. Raises likewise."""
    with checkpoint.owned(root, epoch):
        replace_durably(root / ENDED, msgspec.json.encode(end))
        (root / STATE).unlink(missing_ok=True)


def write_checkpoint(
    directory: Path, adapter: Adapter, base: BaseModel, *, optimizer: bool, owner: tuple[Path, int]
) -> int:
    """Write a PEFT directory, or one of all weights, with `optimizer` everything that training continues from; one of
    this name is replaced.
    `owner`: root of the model's state, and the epoch. Returns its bytes. Raises OSError, and Fenced if a trainer of a
    newer epoch has read that state."""
    with _replaced(directory, owner) as temporary:
        if isinstance(adapter.shape, FullShape):
            export_full(base, adapter, temporary)
            sync_tree(temporary)
        else:
            adapter_files.export_peft(adapter, temporary, base.dtype)
        if optimizer:
            unfinished, place = torch.zeros_like(adapter.gradient), _state_in(temporary, adapter.shape)
            make_directories(place.parent)
            adapter_files.store(replace(adapter, gradient=unfinished, partial=None), place)
        size = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
    sync_directory(directory.parent)
    return size


def write_sampler(directory: Path, adapter: Adapter, base: BaseModel, *, owner: tuple[Path, int]) -> None:
    """Write a PEFT directory, or one of all weights, without waiting for the disk. Raises likewise."""
    with _replaced(directory, owner) as temporary:
        if isinstance(adapter.shape, FullShape):
            export_full(base, adapter, temporary)
        else:
            adapter_files.export_peft(adapter, temporary, base.dtype, Path.write_bytes)


def _state_in(directory: Path, shape: AdapterShape | FullShape) -> Path:
    """Return where a checkpoint has everything that training continues from."""
    return directory / "trainer" / WHOLE if isinstance(shape, FullShape) else directory / WHOLE


@contextmanager
def _replaced(directory: Path, owner: tuple[Path, int]) -> Iterator[Path]:
    """Yield a new directory, which then takes the place of this one. Raises Fenced."""
    make_directories(directory.parent)
    mark = f"{os.getpid()}-{time.time_ns()}"
    temporary, doomed = (directory.with_name(f".{directory.name}-{mark}-{what}") for what in ("new", "old"))
    try:
        temporary.mkdir()
        yield temporary
        with checkpoint.owned(*owner):
            if directory.exists():
                directory.rename(doomed)
            temporary.rename(directory)
    finally:
        for left in (temporary, doomed):
            shutil.rmtree(left, ignore_errors=True)


def read_vectors(directory: Path, shape: AdapterShape | FullShape, *, optimizer: bool) -> tuple[dict[str, Tensor], int]:
    """Return weights, moments and step count of a checkpoint; without `optimizer` those of a fresh one. Raises Refused
    if it does not fit the shape."""
    if not directory.exists():
        raise Refused("the checkpoint does not exist any more; load another one")
    if (place := _state_in(directory, shape)).exists():
        found = adapter_files.restore("checkpoint", place)
        if found.shape != shape:
            raise Refused(_unfit(shape, found.shape))
        vectors, steps = found.vectors, found.steps
    elif optimizer:
        raise Refused(
            "weights for samplers have no optimizer state; load them without it, or a checkpoint of save_state"
        )
    elif isinstance(shape, FullShape):
        vectors, steps = {"weights": import_full(directory, shape)}, 0
    else:
        vectors, steps = {"weights": _peft_weights(directory, shape)}, 0
    if not vectors["weights"].isfinite().all():
        raise Refused("the checkpoint has weights that are not finite; load an earlier one")
    if not optimizer:
        zeros = torch.zeros_like(vectors["weights"])
        return {"weights": vectors["weights"], **{moment: zeros for moment in MOMENTS}}, 0
    return {name: vectors[name] for name in ("weights", *MOMENTS)}, steps


def _unfit(shape: AdapterShape | FullShape, found: AdapterShape | FullShape) -> str:
    if isinstance(shape, FullShape) or isinstance(found, FullShape):
        return "the checkpoint has other weights than the model; create the model from it instead"
    if shape.rank != found.rank:
        return (
            f"the checkpoint has rank {found.rank}, and the model rank {shape.rank}; create the model from it instead"
        )
    odd = sorted(shape.layers.items() ^ found.layers.items())
    layer = f", such as {odd[0][0]}" if odd else ""
    return f"the checkpoint has other layers than the model{layer}; create the model from it instead"


def _peft_weights(directory: Path, shape: AdapterShape) -> Tensor:
    try:
        saved = load_file(directory / ADAPTER)
    except (OSError, ValueError, SafetensorError) as error:
        raise Refused(f"the checkpoint cannot be read: {first_line(error)}") from error
    expected = dict(matrices(shape, torch.empty(shape.size)))
    if odd := difference({n: t.shape for n, t in saved.items()}, {n: t.shape for n, t in expected.items()}):
        raise Refused(f"the checkpoint does not fit the model: {odd}; create the model from it instead")
    return torch.cat([saved[name].float().flatten() for name in expected])
