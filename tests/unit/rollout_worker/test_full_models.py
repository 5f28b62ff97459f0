"""Models with all weights trained, one at a time in an engine: who uses it, who waits, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from opentinker.services.rollout_worker.engines.base import SwapError
from opentinker.services.rollout_worker.tinker.adapter_files import AdapterGone, AdapterRefused
from opentinker.services.rollout_worker.tinker.full_models import FullModels
from opentinker.shared.data.model_files import weight_files
from opentinker.shared.types.core import WeightVersion
from tests.conftest import WAIT_S, until


class Engine:
    """Notes what it loads."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.fails = False

    async def load(self, version: WeightVersion, directory: Path) -> None:
        await asyncio.sleep(0)
        if self.fails:
            raise SwapError("no")
        self.loaded.append(directory.name)


def model(place: Path, value: float = 1.0) -> str:
    place.mkdir()
    (place / "config.json").write_text("{}")
    save_file({"w": np.full(4, value, np.float32)}, place / "model.safetensors")
    return str(place)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def models(engine: Any, tmp_path: Path) -> FullModels:
    return FullModels(engine, model(tmp_path / "base"))


async def test_requests_for_one_model_are_side_by_side_and_the_others_wait(
    models: FullModels, engine: Engine, tmp_path: Path
) -> None:
    a, b = model(tmp_path / "a"), model(tmp_path / "b")
    gate, inside, seen = asyncio.Event(), [], []

    async def use(directory: str) -> None:
        async with models.holding(directory, "1") as adapter:
            inside.append(directory)
            seen.append((engine.loaded or ["base"])[-1])
            await gate.wait()
            assert adapter == "" and (engine.loaded or ["base"])[-1] == Path(directory or "base").name
            inside.remove(directory)

    tasks = [asyncio.create_task(use(directory)) for directory in ("", "", a, b, a, "")]
    await until(lambda: len(inside) == 2)
    assert inside == ["", ""] and not engine.loaded
    gate.set()
    await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)
    assert sorted(seen) == ["a", "a", "b", "base", "base", "base"]
    assert models.loads == len(engine.loaded) and engine.loaded[0] == "a"


async def test_other_contents_of_a_directory_are_loaded_again(
    models: FullModels, engine: Engine, tmp_path: Path
) -> None:
    a = model(tmp_path / "a")
    for version in ("1", "1", "2"):
        async with models.holding(a, version):
            pass
    assert engine.loaded == ["a", "a"]


async def test_what_cannot_be_loaded_is_refused_and_the_next_one_is(
    models: FullModels, engine: Engine, tmp_path: Path
) -> None:
    with pytest.raises(AdapterGone, match="were removed"):
        async with models.holding(str(tmp_path / "nowhere"), "1"):
            pass
    with pytest.raises(AdapterRefused, match="not finite, such as in w"):
        async with models.holding(model(tmp_path / "spoiled", np.inf), "1"):
            pass
    engine.fails = True
    with pytest.raises(AdapterRefused, match="no"):
        async with models.holding(model(tmp_path / "a"), "1"):
            pass
    engine.fails = False
    async with models.holding("", ""):
        assert engine.loaded == ["base"], "after a failure it is unknown what the engine has"


def test_files_that_repeat_the_weights_are_not_read(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert len(weight_files(tmp_path)) == 3
    index = '{"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    (tmp_path / "consolidated.safetensors.index.json").write_text('{"weight_map": {"a": "consolidated.safetensors"}}')
    assert [path.name for path in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]
