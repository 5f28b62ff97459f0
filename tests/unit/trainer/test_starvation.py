"""The trainer reports the reason when a batch cannot fill up."""

from __future__ import annotations

from typing import Any

from opentinker.services.trainer.batch.assembler import Assembler
from opentinker.services.trainer.batch.starvation import unfillable
from tests.support.factories import make_spec

PAIR: dict[str, Any] = {"policies": {"a": {}, "b": {}}, "seats": {"x": "a", "y": "b"}, "match": {"max_opponent_lag": 1}}


def test_only_what_came_in_vain_often_enough_is_a_reason() -> None:
    spec, one = make_spec(**PAIR), make_spec()
    assert unfillable(spec, "a", Assembler(1, 1, overtaken=39, absent=39, barren=999)) == ""
    assert unfillable(one, "", Assembler(1, 1, overtaken=99)) == ""
    assert "Raise match.max_opponent_lag" in unfillable(spec, "a", Assembler(1, 1, overtaken=40))
    assert "policy 'b' had no turn in 40 groups" in unfillable(spec, "b", Assembler(1, 1, absent=40))
    together = make_spec(
        **{**PAIR, "match": {"schedule": "wait"}},
        algorithm__max_staleness=0,
        rollout__seed=1,
        train__deterministic=True,
    )
    assert "every match is trained by all" in unfillable(together, "b", Assembler(0, 1, absent=1))
    assert unfillable(together, "b", Assembler(0, 1)) == ""
    lockstep = {
        "algorithm": {"max_staleness": 0, "group_size": 2, "groups_per_batch": 2},
        "match": {"schedule": "lockstep"},
    }
    told = unfillable(make_spec(**{**PAIR, **lockstep}), "a", Assembler(1, 1, overtaken=40))
    assert "more than 0 steps" in told and "schedule = 'wait'" in told
    equal = make_spec(algorithm__drop_zero_variance=True, algorithm__max_zero_variance_batches=3)
    assert "2 equal rewards each" in unfillable(equal, "", Assembler(1, 1, barren=6))
    assert unfillable(equal, "", Assembler(1, 1, barren=5)) == ""
