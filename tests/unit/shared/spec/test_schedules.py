"""[match] schedule of a spec: when which policy learns."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.matches.schedules import Rule, kept_groups, max_opponent_lag, rule_of
from tests.unit.shared.spec.signalling_job import BASE, refused

SYNCHRONOUS = {"group_size": 4, "groups_per_batch": 4, "max_staleness": 0}


@pytest.mark.parametrize(
    ("match", "changes", "problems"),
    [
        ({"schedule": "alternate"}, {}, {"match.alternate_steps": "is needed"}),
        ({"alternate_steps": 3}, {}, {"match.alternate_steps": "needs schedule = 'alternate'"}),
        ({"schedule": "drop", "max_growth": 3}, {}, {"match.max_growth": "needs schedule = 'grow'"}),
        (
            {"schedule": "drop"},
            {"policies": {}, "seats": {"speaker": {"bot": "x"}}},
            {"match.schedule": "two"},
        ),
        (
            {"schedule": "lockstep", "max_opponent_lag": 1},
            {"policies": {"speaker": {}, "listener": {"algorithm": {"groups_per_batch": 2}, "train": {"steps": 20}}}},
            {
                "algorithm.max_staleness": "must be 0",
                "match.max_opponent_lag": "must be 0",
                "policies.listener.algorithm.groups_per_batch": "must be the job's, 4",
            },
        ),
        (
            {"schedule": "lockstep"},
            {"algorithm": SYNCHRONOUS, "policies": {"speaker": {}, "listener": {"train": {"steps": 20}}}},
            {"policies.listener.train.steps": "not with match.schedule = 'drop'"},
        ),
        (
            {"schedule": "grow", "max_growth": 64},
            {"algorithm": {"group_size": 64, "groups_per_batch": 512}},
            {"match.max_growth": "more than 1,048,576 episodes"},
        ),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(
    match: dict[str, Any], changes: dict[str, Any], problems: dict[str, str]
) -> None:
    found = refused(match=match, **changes)
    assert found.keys() == problems.keys()
    assert all(problem in found[field] for field, problem in problems.items()), found


def test_schedules_are_settings_of_one_rule() -> None:
    uneven = {"speaker": {}, "listener": {"train": {"steps": 7}}}
    waits = parse_spec(BASE)
    drops = parse_spec({**BASE, "policies": uneven, "match": {"schedule": "drop", "max_opponent_lag": 4}})
    grows = parse_spec({**BASE, "policies": uneven, "match": {"schedule": "grow"}})
    turns = parse_spec({**BASE, "policies": uneven, "match": {"schedule": "alternate", "alternate_steps": 5}})
    steps = parse_spec({**BASE, "algorithm": SYNCHRONOUS, "match": {"schedule": "lockstep"}})
    assert rule_of(waits) == Rule()
    assert rule_of(drops) == Rule(gate="fastest")
    assert rule_of(grows) == Rule(gate="fastest", growth=8)
    assert rule_of(turns) == Rule(gate="turn", turn=5)
    assert rule_of(steps) == Rule(gate="neediest", together=True)
    assert [kept_groups(spec) for spec in (waits, drops, grows, turns, steps)] == [None, 12, 32, None, None]
    patient = {"max_staleness": 9, "group_size": 4, "groups_per_batch": 4}
    grows_less = parse_spec({**BASE, "algorithm": patient, "match": {"schedule": "grow", "max_growth": 2}})
    assert kept_groups(grows_less) == 40, "never less than admission lets the fastest one have"
    assert [max_opponent_lag(spec) for spec in (waits, drops, grows, turns, steps)] == [None, 4, None, None, 0]
    assert parse_spec(grows.model_dump(mode="json")) == grows
