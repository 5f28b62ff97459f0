"""After a Tinker server: its clients' commands count no longer, and of its models only checkpoints stay on disk."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from opentinker.shared.runtime.service import Context
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.tinker import CheckpointKind, tinker_place


async def end_server(ctx: Context, job: str) -> None:
    """Release what the models of a server hold that has ended, and that nothing answers or cleans any longer."""
    store = TinkerStore(ctx.store.redis)
    await store.release_samples(job)
    for model in await store.models_of(job):
        await store.release_commands(model, over=True)
        place = tinker_place(ctx.settings.data_dir, model)
        await asyncio.to_thread(remove_files, [place / "state", place / "samplers"])
        await remove_unlisted(store, place, model)


async def remove_unlisted(store: TinkerStore, place: Path, model: str) -> None:
    """Remove weights of a model whose server has ended, but for its checkpoints: they were replaced or not finished."""
    found = await asyncio.to_thread(_weights_in, place)  # before the records: what is saved meanwhile stays
    listed = {place / one.kind / one.place for one in await store.checkpoints(model)}
    await asyncio.to_thread(remove_files, found - listed)


def _weights_in(place: Path) -> set[Path]:
    return {path for kind in get_args(CheckpointKind) for path in (place / kind).glob("*")}


def remove_files(doomed: Iterable[Path]) -> None:
    """Blocking."""
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)
