"""Batches in arrival order, the hard staleness drop, and the account a checkpoint takes."""

import pytest

from opentinker.services.trainer.batch.assembler import Assembler
from opentinker.shared.types.core import Discard, WeightVersion
from opentinker.shared.types.match_results import IdleSeat
from tests.support.factories import make_group


def test_batch_is_taken_in_arrival_order_and_only_when_whole() -> None:
    assembler = Assembler(max_staleness=2, epoch=1)
    for stream_seq, seq in [(5, 3), (6, 1), (9, 2)]:
        assert assembler.add(stream_seq, make_group(seq=seq))
    assert assembler.take(step=0, groups=4) is None
    assert [g.seq for g in assembler.take(step=0, groups=2) or []] == [3, 1]
    assert [g.seq for g in assembler.pending.values()] == [2]


def test_second_message_of_a_group_is_a_duplicate_whatever_became_of_the_first() -> None:
    assembler = Assembler(max_staleness=2, epoch=1)
    assembler.add(1, make_group(seq=7))
    assert not assembler.add(2, make_group(seq=7))
    assembler.take(step=0, groups=1)
    assert not assembler.add(3, make_group(seq=7))


def test_oldest_token_decides_staleness() -> None:
    assembler = Assembler(max_staleness=1, epoch=1)
    assembler.add(1, make_group(seq=0, versions=[WeightVersion(1, 3), WeightVersion(1, 5)]))
    assembler.add(2, make_group(seq=1, versions=[WeightVersion(1, 4)]))
    assert assembler.drop(step=5) == {Discard.STALE: [0]}
    assert assembler.discarded == {Discard.STALE: 1}
    assert [g.seq for g in assembler.pending.values()] == [1]


def test_tokens_of_rolled_back_weights_are_dropped_and_those_of_the_lineage_kept() -> None:
    assembler = Assembler(max_staleness=5, epoch=2, resumed={1: 0, 2: 10})
    assembler.add(1, make_group(seq=0, versions=[WeightVersion(1, 12)]))  # trained after the checkpoint: gone
    assembler.add(2, make_group(seq=1, versions=[WeightVersion(1, 10)]))  # the checkpoint's own weights
    assembler.add(3, make_group(seq=2, versions=[WeightVersion(2, 12)]))
    assert assembler.drop(step=12) == {Discard.FROM_FUTURE: [0]}


def test_rolled_back_step_is_seen_even_when_the_new_lineage_has_passed_it() -> None:
    assembler = Assembler(max_staleness=50, epoch=3, resumed={1: 0, 2: 10, 3: 4})
    assembler.add(1, make_group(seq=0, versions=[WeightVersion(2, 11)]))
    assembler.add(2, make_group(seq=1, versions=[WeightVersion(1, 6)]))
    assembler.add(3, make_group(seq=2, versions=[WeightVersion(1, 4)]))
    assert assembler.drop(step=20) == {Discard.FROM_FUTURE: [0, 1]}


def test_account_separates_what_the_checkpoint_covers_from_what_came_after() -> None:
    assembler = Assembler(max_staleness=1, epoch=1, floor=10, last=10)
    assembler.add(11, make_group(seq=0))
    assembler.add(13, make_group(seq=1))
    assembler.add(14, make_group(seq=2))
    assembler.add(15, make_group(seq=3, versions=[WeightVersion(1, 1)]))
    assembler.take(step=0, groups=1)  # batch 1: group 0
    assembler.drop(step=2)  # batch 3: groups 1 and 2 are stale
    assert assembler.account(step=1, settled=99) == (12, [], {})
    assert assembler.account(step=3, settled=99) == (14, [], {"stale": 2})
    assembler.take(step=3, groups=1)
    assert assembler.account(step=4, settled=99) == (15, [], {"stale": 2})


def test_groups_consumed_above_an_open_one_are_named() -> None:
    assembler = Assembler(max_staleness=9, epoch=1)
    assembler.add(1, make_group(seq=4))
    assembler.add(2, make_group(seq=5, versions=[WeightVersion(9, 0)]))  # a newer epoch: never trained by this one
    assembler.add(3, make_group(seq=6))
    assert assembler.drop(step=0) == {Discard.FROM_FUTURE: [5]}
    floor, above, _ = assembler.account(step=1, settled=99)
    assert (floor, above) == (0, [5])
    assembler.take(step=0, groups=2)
    assert assembler.account(step=1, settled=99)[:2] == (3, [])


def test_forgetting_keeps_memory_bounded_and_floor_monotonic() -> None:
    assembler = Assembler(max_staleness=9, epoch=1)
    for seq in range(20):
        assembler.add(seq + 1, make_group(seq=seq))
        assembler.take(step=seq, groups=1)
    floor, _, _ = assembler.account(step=20, settled=99)
    assembler.forget(floor)
    assert (floor, assembler.consumed, assembler.known) == (20, {}, set())
    assert assembler.account(step=20, settled=99)[0] == 20


def test_ignored_and_rejected_messages_move_the_floor() -> None:
    assembler = Assembler(max_staleness=9, epoch=1)
    assembler.ignore(3, batch=1)
    assembler.reject(4, 9, batch=1)
    assert assembler.account(step=1, settled=99) == (4, [], {"invalid": 1})
    assert assembler.account(step=0, settled=99) == (2, [], {})


def test_groups_of_equal_rewards_are_discarded_only_when_asked_and_counted_until_a_batch_is_taken() -> None:
    for asked in (False, True):
        assembler = Assembler(max_staleness=1, epoch=1, drop_zero_variance=asked)
        assembler.add(1, make_group(seq=0, reward=1.0))
        assembler.add(2, make_group(seq=1))
        assembler.add(3, make_group(seq=2, reward=0.0))
        assert assembler.drop(step=0) == ({Discard.ZERO_VARIANCE: [0, 2]} if asked else {})
        assert assembler.barren == (2 if asked else 0)
    assert [g.seq for g in assembler.take(step=0, groups=1) or []] == [1]
    assert assembler.barren == 0
    assert assembler.account(step=1, settled=99) == (3, [], {"zero_variance": 2})
    assert assembler.account(step=0, settled=99)[2] == {}, "the discards belong to the batch that they made room for"


def test_games_in_which_the_policy_had_no_turn_are_results_though_it_cannot_train_on_them() -> None:
    idle = {"two": IdleSeat(policy="a", reward=1.0, version=WeightVersion(1, 0))}
    assembler = Assembler(max_staleness=1, epoch=1)
    assembler.add(1, make_group(seq=0, seat="one", policy="b", idle=idle).of("a"))
    assert assembler.drop(step=0) == {Discard.ABSENT: [0]} and (assembler.absent, assembler.barren) == (1, 0)
    assert [match.opponents["b"].outcome for match in assembler.pop_uncounted()] == [0.5, 1.0]
    assert assembler.pop_uncounted() == []


@pytest.mark.parametrize("step", [20, 40])
def test_games_that_rolled_back_weights_would_have_played_are_no_results(step: int) -> None:
    assembler = Assembler(
        max_staleness=1, epoch=2, resumed={1: 0, 2: 20}, opponent_is_gone=lambda group: group.seq == 2
    )
    for seq, version in enumerate((30, 20, 20)):
        idle = {"two": IdleSeat(policy="a", reward=1.0, version=WeightVersion(1, version))}
        assembler.add(seq + 1, make_group(seq=seq, seat="one", policy="b", idle=idle).of("a"))
    assert assembler.drop(step) == {Discard.ABSENT: [0, 1, 2]} and assembler.absent == 3
    assert {match.group for match in assembler.pop_uncounted()} == {1}


def test_a_stale_group_of_equal_rewards_is_stale() -> None:
    assembler = Assembler(max_staleness=0, epoch=1, drop_zero_variance=True)
    assembler.add(1, make_group(seq=0, reward=1.0))
    assert assembler.drop(step=3) == {Discard.STALE: [0]}
    assert assembler.barren == 0


def test_the_floor_waits_for_messages_that_come_out_of_order() -> None:
    """A message lost on its way is delivered again after later ones: until then it must stay in the stream."""
    assembler = Assembler(max_staleness=1, epoch=1)
    assembler.add(5, make_group(seq=0))
    assembler.add(7, make_group(seq=2))
    assert assembler.take(step=0, groups=2) is not None
    assert assembler.account(step=1, settled=5) == (5, [2], {})
    assembler.add(6, make_group(seq=1))
    assert assembler.account(step=1, settled=7) == (5, [2], {})
    assert assembler.take(step=1, groups=1) is not None
    assert assembler.account(step=2, settled=7) == (7, [], {})


def test_groups_whose_opponents_have_moved_too_far_are_dropped() -> None:
    lags = {0: 2, 1: 3}
    assembler = Assembler(max_staleness=5, epoch=1, max_opponent_lag=2, opponent_lag=lambda group: lags[group.seq])
    for seq in lags:
        assembler.add(seq + 1, make_group(seq=seq))
    assert assembler.drop(step=1) == {Discard.OPPONENT_MOVED: [1]} and assembler.overtaken == 1
    lags[0] = 3
    assert assembler.drop(step=1) == {Discard.OPPONENT_MOVED: [0]}, "an opponent moves on while a group waits"
    assert assembler.account(step=2, settled=99) == (2, [], {"opponent_moved": 2})


def test_the_oldest_groups_beyond_those_that_may_wait_are_surplus() -> None:
    assembler = Assembler(max_staleness=1, epoch=1, keep=3)
    assembler.add(1, make_group(seq=0, versions=[WeightVersion(1, 0)]))
    for seq in range(1, 6):
        assembler.add(seq + 1, make_group(seq=seq, versions=[WeightVersion(1, 1)]))
    assert assembler.overfull
    assert assembler.drop(step=2) == {Discard.STALE: [0], Discard.SURPLUS: [1, 2]}
    assert not assembler.overfull and [g.seq for g in assembler.pending.values()] == [3, 4, 5]


def test_a_batch_grows_by_whole_batches_and_is_counted() -> None:
    assembler = Assembler(max_staleness=9, epoch=1, trained=10)
    for seq in range(5):
        assembler.add(seq + 1, make_group(seq=seq))
    assert [g.seq for g in assembler.take(step=2, groups=2, growth=3) or []] == [0, 1, 2, 3]
    assert (assembler.trained_by(2), assembler.trained_by(3)) == (10, 14)
    for seq in range(5, 14):
        assembler.add(seq + 1, make_group(seq=seq))
    assert len(assembler.take(step=3, groups=2, growth=3) or []) == 6, "no more than growth allows"
    assert assembler.take(step=4, groups=5, growth=3) is None
    assembler.forget(4)
    assert (assembler.trained_by(3), assembler.trained_by(4)) == (14, 20), "also after what was trained is forgotten"


def test_a_policy_at_rest_takes_nothing() -> None:
    assembler = Assembler(max_staleness=1, epoch=1, resting=True)
    for seq in range(2):
        assembler.add(seq + 1, make_group(seq=seq))
    assert assembler.take(step=0, groups=1) is None
    assert assembler.drop(step=0) == {Discard.RESTING: [0, 1]}
    assert assembler.account(step=0, settled=99) == (2, [], {"resting": 2}), "the stream need not hold them for a step"
    assembler.resting = False
    assembler.add(3, make_group(seq=2, versions=[WeightVersion(1, 5)]))
    assert assembler.drop(step=0) == {Discard.FROM_FUTURE: [2]}
    assert assembler.account(step=0, settled=99) == (2, [], {"resting": 2}), "others belong to the next step"
