"""Groups that wait for frozen models: passes across jobs, turns of models, room for every job."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from opentinker.services.reference_forward.group_queue import GroupQueue, QueuedGroup
from opentinker.services.reference_forward.model_cache import ModelCache
from opentinker.services.reference_forward.required_models import REFERENCE, REWARD, ModelKey
from opentinker.services.reference_forward.results import add_results
from opentinker.shared.types.trajectories import Group
from tests.support.factories import group_of, make_group, make_trajectory

A, B, C = (ModelKey(name, "float32") for name in ("a", "b", "c"))


def queued(group: Group, **needs: list[str]) -> QueuedGroup:
    """`needs`: roles by the name of a model."""
    models = {ModelKey(name, "float32"): dict.fromkeys(roles, ("",)) for name, roles in needs.items()}
    return QueuedGroup(cast(Any, None), group, 1.0, dict(models))


def work(job: str, key: ModelKey, seq: int = 0) -> QueuedGroup:
    """Of 12 tokens."""
    return queued(make_group(job=job, seq=seq), **{key.base: [REFERENCE]})


def test_trajectories_of_frozen_checkpoints_are_not_scored_and_keep_their_places() -> None:
    own, theirs = make_trajectory(index=0, seat="a"), make_trajectory(index=0, seat="b", policy="j-0123456789@5")
    alone = make_trajectory(index=1, seat="b", policy="j-0123456789@5")
    last = make_trajectory(index=1, seat="a")
    some = queued(group_of([own, theirs, alone, last]), a=[REFERENCE])
    some.select_own()
    assert some.group.trajectories == [own, last]
    found = some.put_back(add_results(some.group, {REFERENCE: [np.zeros(6), np.zeros(6)]}, {}))
    assert [(t.index, t.seat, t.ref_logprobs_T is not None) for t in found.trajectories] == [
        (0, "a", True),
        (0, "b", False),
        (1, "b", False),
        (1, "a", True),
    ]
    usual = queued(make_group())
    usual.select_own()
    assert usual.whole is None and usual.put_back(usual.group) is usual.group


def test_a_model_has_each_of_its_roles_for_other_policies() -> None:
    rows = [make_trajectory(index=0, seat=seat, policy=seat) for seat in "abc"]
    match = queued(group_of(rows))
    match.select({A: {REWARD + "more": ["a"], REWARD + "less": ["b"]}, B: {REFERENCE: ["a"]}, C: {REFERENCE: ["d"]}})
    assert match.needs.keys() == {A, B}, "nobody plays for d"
    assert match.part(A).trajectories == rows[:2] and match.part(B).trajectories == rows[:1]
    match.add(A, [2.0, 3.0])
    match.add(B, [np.zeros(6)])
    weights = {"more": 1.0, "less": -1.0, "absent": 5.0}
    found = match.put_back(add_results(match.group, match.results, weights)).trajectories
    assert [t.scores for t in found] == [{"more": 2.0}, {"less": 3.0}, {}] and not match.needs
    assert [t.reward - own.reward for t, own in zip(found, rows, strict=True)] == [2.0, -3.0, 0.0]
    assert [t.ref_logprobs_T is not None for t in found] == [True, False, False] and found[2] is rows[2]


def test_a_pass_takes_groups_of_all_jobs_of_a_model_up_to_its_tokens_and_at_least_one() -> None:
    queue = GroupQueue(30)
    works = [work(job, A, seq) for seq, job in enumerate(("j1", "j2", "j1"))]
    for each in works:
        queue.add(each)
    assert queue.take([A]) == (A, works[:2]) and queue.take([A]) == (A, works[2:]) and queue.take([A]) is None
    narrow = GroupQueue(1)
    narrow.add(works[0])
    assert narrow.take([A]) == (A, works[:1])


def test_models_take_turns_however_much_waits_for_one_of_them() -> None:
    queue, cache = GroupQueue(12), ModelCache(100)
    for key in (A, B, C):
        cache.put(key, key.base, 1, 0.0)
    for seq in range(20):
        queue.add(work("j1", A, seq))
    for seq in range(2):
        queue.add(work("j2", B, seq))
        queue.add(work("j3", C, seq))
    order = []
    while (batch := queue.take(cache)) is not None:
        with cache.use(batch[0]):
            order.append(batch[0].base)
    assert sorted(order[:3]) == sorted(order[3:6]) == ["a", "b", "c"] and order[6:] == ["a"] * 18


def test_every_job_may_have_one_group_in_hand_and_more_only_while_its_model_is_loaded() -> None:
    queue = GroupQueue(12)
    for seq in range(2):
        assert queue.capacity("j1", {A}) > 0
        queue.add(work("j1", A, seq))
    assert queue.capacity("j1", {A}) == 0, "two passes' worth"
    assert queue.capacity("j2", {A}) == 1
    queue.add(work("j2", B))
    assert (queue.capacity("j2", {A}), queue.capacity("j2", {A, B}), queue.capacity("j2", {B})) == (0, 0, 2)
    assert queue.capacity("j3", {A}) == 1
    for each in queue.in_flight:
        each.needs.clear()  # scored, and not passed on
    assert (queue.capacity("j1", {A}), queue.capacity("j2", {A}), queue.capacity("j3", {A})) == (0, 1, 1)
    assert queue.next_to_load({A}) == B and queue.next_to_load({A, B}) is None


def test_a_group_that_needs_two_models_is_done_when_both_are() -> None:
    queue = GroupQueue(100)
    both = queued(make_group(), a=["x"], b=["y", "z"])
    queue.add(both)
    assert queue.take([B]) == (B, [both]) and queue.drop({"j-test"}) == [], "it is with a forward pass"
    assert not queue.complete(B, both, [1, 2])
    assert queue.take([A]) == (A, [both]) and queue.complete(A, both, [3, 4])
    assert both.results == {"x": [3, 4], "y": [1, 2], "z": [1, 2]}
    queue.release(both)
    assert not queue.in_flight and not queue.queues
