"""Ranks of several policies in one trainer process: each policy learns what it would with one rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from opentinker.services.trainer.distributed.multi_rank_learner import MultiRankRlLearner
from opentinker.shared.spec.matches.policies import spec_of
from tests.integration.trainer.test_ranks import Pair
from tests.support.learning import random_groups, torch_spec

TWO_POLICIES: dict[str, Any] = {
    "environment": {"name": "signalling"},
    "seats": {"speaker": "speaker", "listener": "listener"},
    "algorithm": {"group_size": 4, "groups_per_batch": 4},
}


@pytest.mark.parametrize("parallel", ["data", pytest.param("zero2", marks=pytest.mark.nightly)])
def test_the_ranks_of_several_policies_in_one_trainer_do_not_meet(small: Path, parallel: str) -> None:
    """Both step at the same time, each on its own batches."""
    first = {"train": {"lr": 1e-3, "parallel": parallel}, "trainer_ranks": 2}
    spec = torch_spec(small, **TWO_POLICIES, policies={"speaker": first, "listener": {"trainer_ranks": 2}})
    with closing(Pair(small)) as speaker, closing(Pair(small)) as listener:
        alone = {}
        for pair, name in ((speaker, "speaker"), (listener, "listener")):
            pair.multi_rank = MultiRankRlLearner(spec_of(spec, name), "cpu")
            alone[pair] = pair.alone(None)
            pair.multi_rank.load(None)
        with ThreadPoolExecutor() as threads:
            for step in range(2):
                batches = {speaker: random_groups(step), listener: random_groups(step + 10)}
                list(threads.map(lambda pair: pair.both_step(alone[pair], batches[pair], step), batches))  # noqa: B023
        for pair, single in alone.items():
            pair.assert_same_weights(single)
