"""The frozen models in memory: which goes for the next one, within the budget."""

from __future__ import annotations

import pytest

from opentinker.services.reference_forward.model_cache import MIN_STAY_LOADS, ModelCache
from opentinker.services.reference_forward.required_models import ModelKey
from opentinker.shared.types.errors import JobFailed

A, B, C = (ModelKey(name, "float32") for name in ("a", "b", "c"))


def fill(cache: ModelCache, *keys: ModelKey, bytes: int = 40) -> None:
    for key in keys:
        assert cache.make_room(bytes, ())
        cache.put(key, key.base, bytes, 1.0)
        with cache.use(key):
            pass


def test_the_least_recently_used_model_goes_first_and_the_budget_holds() -> None:
    cache = ModelCache(100)
    fill(cache, A, B)
    with cache.use(A):
        pass
    fill(cache, C)
    assert A in cache and C in cache and B not in cache
    assert cache.used_bytes == 80 and (cache.loads, cache.evictions) == (3, 1)


def test_a_model_larger_than_the_budget_is_refused_by_name_and_size() -> None:
    cache = ModelCache(10**9)
    cache.check(A, 10**9)
    with pytest.raises(JobFailed, match=r"model 'big' takes 16\.1 GB in bfloat16, .* at most 1 GB .*reference_memory"):
        cache.check(ModelKey("big", "bfloat16"), 16_060_000_000)


def test_a_model_that_is_used_or_waited_for_stays_until_it_had_its_time() -> None:
    now = 0.0
    cache = ModelCache(100, clock=lambda: now)
    fill(cache, A, B)
    assert not cache.make_room(40, {A, B}) and len(cache) == 2
    with cache.use(A):
        assert not cache.make_room(90, ()), "nothing goes if that is not enough"
        assert cache.make_room(40, {A}) and B not in cache
    fill(cache, B)
    now = MIN_STAY_LOADS * 1.0
    assert cache.make_room(40, {A, B}) and A not in cache
