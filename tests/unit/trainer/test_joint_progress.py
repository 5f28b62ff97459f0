"""Progress that the policies of one job share in their trainer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from opentinker.services.trainer.batch.assembler import Assembler
from opentinker.services.trainer.joint_progress import JointProgress
from opentinker.shared.evaluation.job_ratings import JobRatings
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.spec.matches.schedules import Rule
from opentinker.shared.types.core import Discard, WeightVersion
from opentinker.shared.types.match_results import IdleSeat
from opentinker.shared.types.trajectories import Group
from tests.support.factories import group_of, make_group, make_spec, make_trajectory, version

ALTERNATE: dict[str, Any] = {"schedule": "alternate", "alternate_steps": 3}
LOCKSTEP: dict[str, Any] = {"schedule": "lockstep"}


def two_policies(**changes: Any) -> JobSpec:
    lockstep = {"algorithm__max_staleness": 0} if changes.get("match") == LOCKSTEP else {}
    seats = {"one": "a", "two": "b"}
    return make_spec(policies={"a": {}, "b": {}}, seats=seats, train__steps=40, **lockstep, **changes)


def test_the_job_s_step_is_that_of_its_slowest_policy() -> None:
    joint = JointProgress(100, {"a": 100, "b": 50})
    assert joint.restore("a", 10) is None and joint.restore("b", 4) == 8
    assert joint.advance("a", 40) == 8 and joint.advance("b", 30) == 40


def test_a_finished_policy_holds_up_neither_the_step_nor_the_stream() -> None:
    joint = JointProgress(100, {"a": 100, "b": 100})
    joint.restore("a", 0)
    joint.restore("b", 0)
    assert joint.release("b", 90) == 0 and joint.release("a", 70) == 70
    joint.advance("b", 60)
    joint.finish("b", "target reached")
    assert joint.release("a", 92) == 90, "its last checkpoint may be damaged"
    joint.cover("b")
    assert joint.advance("a", 80) == 80 and joint.release("a", 95) == 95
    assert not joint.all_finished
    joint.finish("a")
    assert joint.all_finished and joint.step == 80 and joint.reason == "b: target reached"


def test_one_policy_without_a_name_is_the_job() -> None:
    joint = JointProgress(0, {"": 0})
    assert joint.restore("", 0) == 0 and joint.advance("", 7) == 7 and joint.release("", 5) == 5
    joint.finish("", "target reached")
    assert (joint.all_finished, joint.step, joint.reason) == (True, 7, "target reached")
    assert joint.show("", {"loss": 1.0}) == {"loss": 1.0}


def test_equal_reasons_are_said_once() -> None:
    joint = JointProgress(1, {"a": 1, "b": 1})
    joint.finish("a", "target reached")
    joint.finish("b", "target reached")
    assert joint.reason == "target reached"
    assert joint.show("a", {"loss": 1.0}) == {"policies": {"a": {"loss": 1.0}}}


def test_the_distance_to_a_rolled_back_version_leads_over_the_step_that_both_have_in_common() -> None:
    joint = JointProgress(100, {"a": 100, "b": 100})
    joint.restore("a", 7, {1: 0, 2: 7})
    joint.restore("b", 4, {1: 0, 2: 4})
    assert joint.moved({}) == 0 and joint.moved({"bot": WeightVersion(1, 9)}) == 0
    assert joint.moved({"b": WeightVersion(1, 3)}) == 1
    assert joint.moved({"b": WeightVersion(1, 6)}) == 2, "two steps back, none forward"
    joint.advance("b", 6)
    assert joint.moved({"b": WeightVersion(1, 6)}) == 4, "the same number, not the same weights"
    assert joint.moved({"a": WeightVersion(2, 7), "b": WeightVersion(2, 5)}) == 1, "the one that has moved most"


def pair(rule: Rule, made: dict[str, int]) -> JointProgress:
    joint = JointProgress(100, dict.fromkeys(made, 100), rule)
    for name, step in made.items():
        joint.restore(name, step)
    return joint


def test_versions_become_visible_together() -> None:
    joint = pair(Rule(together=True), {"a": 4, "b": 4})
    woken = asyncio.Event()
    joint.watch(woken)
    assert joint.may_show("a") and joint.may_show("b")
    joint.advance("a", 5)
    assert woken.is_set() and not joint.may_show("a") and joint.may_show("b")
    assert joint.moved({"a": WeightVersion(1, 4)}) == 0, "nobody has seen version 5"
    joint.advance("b", 5)
    assert joint.may_show("a") and joint.moved({"a": WeightVersion(1, 4)}) == 1
    joint.advance("b", 6)
    joint.finish("a", "target reached")
    assert joint.may_show("b"), "a policy without steps left holds up nobody"


def test_a_policy_that_resumed_ahead_waits_for_the_others() -> None:
    joint = pair(Rule(together=True), {"a": 5, "b": 4})
    assert not joint.may_show("a") and joint.moved({"a": WeightVersion(1, 5)}) == 0
    joint.advance("b", 5)
    assert joint.may_show("a") and joint.moved({"b": WeightVersion(1, 4)}) == 1


def test_policies_take_turns_and_resume_in_the_same_turn() -> None:
    joint = pair(Rule(gate="turn", turn=2), {"a": 0, "b": 0})
    order = []
    for _ in range(8):
        (name,) = [name for name in ("a", "b") if not joint.rests(name)]
        order.append(name)
        joint.advance(name, order.count(name))
    assert order == ["a", "a", "b", "b"] * 2
    assert [pair(Rule(gate="turn", turn=2), {"a": 2, "b": 1}).rests(name) for name in ("a", "b")] == [True, False]
    assert [pair(Rule(gate="turn", turn=2), {"a": 1, "b": 1}).rests(name) for name in ("a", "b")] == [False, True]
    joint.finish("a")
    assert not joint.rests("b") and not joint.rests("a"), "it rests no more than it learns"
    assert not pair(Rule(), {"a": 9, "b": 0}).rests("a")
    ended = JointProgress(4, {"a": 2, "b": 4}, Rule(gate="turn", turn=2))
    for name in ("a", "b"):
        ended.restore(name, 2)
    assert not ended.rests("b"), "a has made all its steps, though its last evaluation is not over"


def test_only_a_policy_that_is_behind_takes_larger_batches() -> None:
    joint = JointProgress(9, {"a": 9, "b": 9}, Rule(gate="fastest", growth=4), {"a": 8, "b": 4})
    for name in ("a", "b"):
        joint.restore(name, 2)
    assert (joint.growth("a"), joint.growth("b")) == (1, 4)
    joint.advance("b", 4)
    assert (joint.growth("a"), joint.growth("b")) == (1, 1), "level, counted in groups"
    joint.advance("a", 5)
    joint.finish("a")
    assert joint.growth("b") == 1, "nobody is ahead of it any more"
    assert pair(Rule(), {"a": 9, "b": 0}).growth("b") == 1


async def test_results_of_before_are_counted_once_all_policies_have_resumed() -> None:
    """Until then, a version that a restarted trainer has published again would be another player."""
    joint = JointProgress(100, {"a": 100, "b": 100})
    joint.ratings, joint.rates = JobRatings(["a", "b"]), True
    met = {("b@2.5", "bot:x"): (1.0, 0.0, 0.0), ("b@1.5", "bot:x"): (1.0, 0.0, 0.0)}
    joint.ratings.restore(iter([(1.0, "", met)]))
    joint.restore("a", 3, {1: 0, 2: 3})
    waiting = [asyncio.create_task(joint.until_restored()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(one.done() for one in waiting)
    joint.restore("b", 5, {1: 0, 2: 5})
    await asyncio.gather(*waiting)
    assert joint.ratings._trained == {("b@1.5", "bot:x"): (2.0, 0.0, 0.0)}


@pytest.mark.parametrize("schedule", [{}, {"schedule": "drop"}, {"schedule": "grow"}, ALTERNATE, LOCKSTEP])
@pytest.mark.parametrize("acted", ["a", "b"])
def test_a_group_is_gone_whose_other_policy_was_rolled_back_with_or_without_a_turn(
    schedule: dict[str, Any], acted: str
) -> None:
    joint = JointProgress.of(two_policies(match=schedule))
    joint.restore("a", 30)
    joint.restore("b", 20, {1: 0, 2: 20})

    def played(step: int) -> Group:
        version, other = WeightVersion(1, step), {"a": "b", "b": "a"}[acted]
        idle = {"two": IdleSeat(policy=other, reward=1.0, version=version)}
        return make_group(seat="one", policy=acted, versions=[version], idle=idle).of("a")

    assert [joint.is_gone(played(step)) for step in (20, 30)] == [False, True]


@pytest.mark.parametrize("policies", [1, 2])
def test_a_group_is_gone_that_met_a_member_from_which_the_policy_of_its_pool_was_rolled_back(policies: int) -> None:
    seats = {"one": "a", "two": {"pool": "past"}} | ({"three": "b"} if policies == 2 else {})
    pools = {"past": {"policy": "a", "every": 10}}
    named: dict[str, Any] = {name: {} for name in "ab"[:policies]}
    joint = JointProgress.of(make_spec(policies=named, seats=seats, pools=pools, train__steps=40))
    learner = "ab"[policies - 1]

    def met(step: int, seat: str = "one") -> Group:
        version = WeightVersion(1, step)
        member = make_trajectory(seat="two", policy=f"past@{version}", versions=[version])
        own = make_trajectory(seat=seat, policy=learner, versions=[WeightVersion(1, 0)])
        return group_of([own, member], 0, "j-test").of(learner)

    assert not joint.is_gone(met(30)), "nobody has resumed yet"
    joint.restore("a", 20, {1: 0, 2: 20})
    if policies == 2:
        joint.restore("b", 30, {1: 0, 2: 30})
    assert [joint.is_gone(met(step)) for step in (20, 30)] == [False, True]
    other = make_trajectory(seat="two", policy="past@https://models.example/v1", versions=[WeightVersion(0, 0)])
    assert not joint.is_gone(group_of([met(20).trajectories[0], other], 0, "j-test").of(learner))


def test_a_match_against_weights_that_were_rolled_back_is_discarded_by_those_who_stay() -> None:
    spec = two_policies(match={"schedule": "drop"})
    joint = JointProgress.of(spec)
    joint.restore("a", 3, {1: 0, 2: 3})
    joint.restore("b", 2, {1: 0, 2: 2})
    assembler = Assembler.of(spec_of(spec, "a"), 2, joint)
    assembler.resumed = {1: 0, 2: 3}
    for seq, step in enumerate((2, 3)):
        seats = [("one", "a", 3), ("two", "b", step)]
        views = [make_trajectory(seat=seat, policy=name, versions=[version(at)]) for seat, name, at in seats]
        assembler.add(seq + 1, group_of(views, seq, "j-test").of("a"))
    assert assembler.drop(3) == {Discard.FROM_FUTURE: [1]} and len(assembler.pending) == 1
