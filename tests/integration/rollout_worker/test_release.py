"""GPU memory of a version that has been loaded: given back before the engine sleeps."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm


def test_versions_of_all_policies_are_let_go() -> None:
    from opentinker.services.rollout_worker.engines.vllm_worker_extension import BucketEngine

    one, other = (BucketEngine.__new__(BucketEngine) for _ in range(2))
    for engine, more in ((one, {1: other}), (other, {})):
        engine.buckets, engine._of_policy = [torch.zeros(8)], more
    one.release()
    assert one.buckets is None and other.buckets is None


async def test_an_engine_lets_go_of_its_version_before_it_sleeps() -> None:
    from opentinker.services.rollout_worker.engines.vllm import VllmEngine

    calls: list[str] = []

    async def call(method: str) -> None:
        calls.append(method)

    async def sleep_async(**_: Any) -> None:
        calls.append("sleep")

    core = SimpleNamespace(engine_core=SimpleNamespace(sleep_async=sleep_async))
    process: Any = SimpleNamespace(
        policies=iter([0]), broken="", while_open=contextlib.nullcontext, call=call, llm=lambda: core
    )
    engine = VllmEngine(process, eos_ids=[1])
    await engine.sleep()
    assert calls == ["weights_release", "sleep"] and engine.asleep_s > 0.0
