"""Which engine a job finds of the one before: by its key, while it lives, for as long as it is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opentinker.services.rollout_worker.engines.warm_engine import KeptEngine, WarmEngine, files_of
from opentinker.services.rollout_worker.service import all_from_trainer
from tests.conftest import until
from tests.support.factories import make_spec


class Ends:
    def __init__(self) -> None:
        self.ended: list[Any] = []

    async def __call__(self, llm: Any) -> None:
        await asyncio.sleep(0)
        self.ended.append(llm)


def engine(name: str, key: tuple[Any, ...] = ("base",), *, errored: bool = False) -> KeptEngine:
    return KeptEngine(key, SimpleNamespace(name=name, errored=errored), 128, False, 0.9)


async def test_an_engine_is_taken_once_by_a_job_with_its_key() -> None:
    ends = Ends()
    warm = WarmEngine(60.0, ends)
    kept = engine("a")
    assert await warm.take(("base",)) is None and warm.share == 0
    warm.put(kept)
    assert warm.share == 0.9
    assert await warm.take(("base",)) is kept
    assert await warm.take(("base",)) is None
    assert ends.ended == [], "who takes it ends it"


@pytest.mark.parametrize("key", [("other",), None])
async def test_another_engine_starts_only_when_the_kept_one_has_ended(key: tuple[Any, ...] | None) -> None:
    ends = Ends()
    warm = WarmEngine(60.0, ends)
    kept = engine("a")
    warm.put(kept)
    assert await warm.take(key) is None
    assert ends.ended == [kept.llm]


async def test_an_engine_that_died_meanwhile_is_not_given() -> None:
    ends = Ends()
    warm = WarmEngine(60.0, ends)
    kept = engine("a", errored=True)
    warm.put(kept)
    assert await warm.take(("base",)) is None
    assert ends.ended == [kept.llm]


async def test_an_engine_ends_when_no_job_comes_and_when_its_worker_ends() -> None:
    ends = Ends()
    warm = WarmEngine(0.01, ends)
    first, second = engine("a"), engine("b")
    warm.put(first)
    await until(lambda: ends.ended == [first.llm])
    assert await warm.take(("base",)) is None
    warm = WarmEngine(60.0, ends)
    warm.put(second)
    await warm.close()
    assert ends.ended == [first.llm, second.llm]


def test_an_engine_is_kept_only_if_a_trainer_sends_all_weights() -> None:
    assert all_from_trainer(make_spec(train__learner="torch", rollout__engine="vllm"))
    assert not all_from_trainer(make_spec(train__learner="simulated")), "it sends none"


def test_a_model_whose_files_changed_is_another_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = files_of(str(tmp_path))
    assert files_of(str(tmp_path)) == before
    (tmp_path / "config.json").write_text("{ }")
    assert files_of(str(tmp_path)) != before
    assert files_of("someone/model") == ()
