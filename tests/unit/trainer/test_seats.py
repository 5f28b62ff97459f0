"""Credit where a sample has several trajectories: seats are compared with themselves alone, streams are one play."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from opentinker.services.reference_forward.rewards import RewardModel
from opentinker.services.trainer.algorithm.credit_assignment import Credit, Values, assign
from opentinker.services.trainer.algorithm.seats import seat_plays
from opentinker.services.trainer.batch.assembler import Assembler
from opentinker.services.trainer.batch.batch_metrics import batch_metrics
from opentinker.services.trainer.batch.micro_batch import micro_batches
from opentinker.shared.evaluation.validation_metrics import validation_metrics
from opentinker.shared.spec import AlgorithmSpec
from opentinker.shared.types.core import Discard, Ending
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.evaluation import EvalResult
from opentinker.shared.types.trajectories import Group, Trajectory
from tests.support.factories import V0, group_of, make_spec, make_trajectory, trajectory_of

GROUP_BASELINES = ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "per_turn"]


def credit(groups: list[Group], values: list[Any] | None = None, **algorithm: Any) -> Credit:
    critic = None if values is None else Values(values, [0.0] * len(values))
    return assign(groups, AlgorithmSpec.model_validate(algorithm), critic)


def view(index: int, seat: str, reward: float, tokens: int = 2, **changes: Any) -> Trajectory:
    return make_trajectory(index=index, seat=seat, reward=reward, output=tuple(range(8, 8 + tokens)), **changes)


def duel(*rewards: float, seq: int = 0) -> Group:
    """Zero-sum, `rewards` being black's; the seats say differently much."""
    return group_of([view(i, seat, r, n) for i, own in enumerate(rewards) for seat, r, n in _sides(own)], seq)


def _sides(reward: float) -> list[tuple[str, float, int]]:
    return [("black", reward, 2), ("white", -reward, 5)]


def seat(groups: list[Group], name: str) -> list[Group]:
    """The batch as if that seat played alone."""
    return [group_of([t for t in group.trajectories if t.seat == name], group.seq) for group in groups]


@pytest.mark.parametrize("advantage", [*GROUP_BASELINES, "reinforce_pp", "rae", "gae", "maxrl"])
def test_a_seat_gets_what_it_would_get_alone(advantage: str) -> None:
    """Whatever the other seat was paid, and however much it said."""
    rewards = ((1.0, 0.0, 1.0), (0.0, 0.5, 1.0)) if advantage == "maxrl" else ((1.0, -1.0, 1.0), (0.0, 0.5, -1.0))
    groups = [duel(*own, seq=seq) for seq, own in enumerate(rewards)]
    if advantage == "maxrl":  # rewards must not be negative: white gets 0, 0.25, 0.5 ... of its own
        groups = [
            group_of(
                [
                    view(i, s, r, n)
                    for i, own in enumerate(each)
                    for s, r, n in (("black", own, 2), ("white", own / 2, 5))
                ]
            )
            for each in rewards
        ]
    values = [np.linspace(0.1, 0.9, int(t.mask.sum())) for group in groups for t in group.trajectories]
    options = {"group_size": 3, "advantage": advantage} | ({"loss": "ppo"} if advantage == "gae" else {})
    found = credit(groups, values if advantage == "gae" else None, **options).advantages_S
    places = [t.seat for group in groups for t in group.trajectories]
    for name in ("black", "white"):
        own = [value for value, place in zip(values, places, strict=True) if place == name]
        alone = credit(seat(groups, name), own if advantage == "gae" else None, **options).advantages_S
        mine = [value for value, place in zip(found, places, strict=True) if place == name]
        for one, other in zip(mine, alone, strict=True):
            np.testing.assert_array_equal(one, other)
        assert any(value.any() for value in mine)


def test_zero_sum_rewards_are_no_noise_for_each_other() -> None:
    """By hand: black won 2 of 3. A baseline over both seats would be 0."""
    found = credit([duel(1.0, 1.0, -1.0)], group_size=3, name="dr_grpo").advantages_S
    third = 1.0 / 3.0
    expected = [2 * third, -2 * third, 2 * third, -2 * third, -4 * third, 4 * third]
    assert [value[0] for value in found] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("advantage", GROUP_BASELINES)
def test_a_seat_that_acted_in_one_sample_alone_has_nothing_to_compare_with(advantage: str) -> None:
    lonely = group_of([view(0, "black", 1.0), view(0, "white", -1.0), view(1, "black", -1.0)])
    others = duel(1.0, 0.0, seq=1)
    found = credit([lonely, others], advantage=advantage).advantages_S
    assert all(np.isfinite(value).all() for value in found)
    assert not found[1].any() and found[0].all() and found[2].all() and found[4].all()
    pair = credit([seat([lonely], "black")[0], others], advantage=advantage).advantages_S
    np.testing.assert_array_equal(found[0], pair[0])


def streams(index: int, rewards: tuple[float, ...], tokens: int = 3) -> list[Trajectory]:
    """Turns 0, 2, 3 of one seat: 0 and 3 in stream `a`, 2 in stream `b` (another seat had turn 1)."""
    first, second, third = rewards
    mask = [0] + [1] * tokens + [0] + [1] * tokens
    a = trajectory_of(range(5, 5 + len(mask)), mask, reward=(first, third), numbers=(0, 3), index=index, stream="a")
    b = trajectory_of([30, 31, 32], [0, 1, 1], reward=second, numbers=[2], index=index, stream="b")
    return [a, b]


def whole(index: int, rewards: tuple[float, ...], tokens: int = 3) -> Trajectory:
    """The same play in one stream."""
    mask = [0] + [1] * tokens + [0] + [1, 1] + [0] + [1] * tokens
    return trajectory_of(range(5, 5 + len(mask)), mask, reward=rewards, index=index)


def in_order(a: Any, b: Any, tokens: int = 3) -> Any:
    return np.concatenate([a[:tokens], b, a[tokens:]])


@pytest.mark.parametrize("advantage", [*GROUP_BASELINES, "reinforce_pp", "rae", "gae"])
@pytest.mark.parametrize("shaped", [False, True])
def test_streams_of_a_seat_are_credited_as_one_play(advantage: str, shaped: bool) -> None:
    """Outcome, turn by turn and token by token, KL in the reward and the length penalty included."""
    paid = [(0.0, 1.0, 0.5), (0.25, 0.0, -1.0)]
    several = group_of([t for i, own in enumerate(paid) for t in streams(i, own)])
    one = group_of([whole(i, own) for i, own in enumerate(paid)])
    options: dict[str, Any] = {"advantage": advantage}
    if advantage == "gae":
        options |= {"loss": "ppo", "gamma": 0.9, "lam": 0.8}
    if advantage == "per_turn":
        options |= {"gamma": 0.9}
    if shaped:
        options |= {"overlong_shaping": True, "overlong_length": 8, "overlong_buffer": 4}
        options |= {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
        several, one = _with_reference(several), _with_reference(one)
    values = np.linspace(-1.0, 1.0, 8)
    given = [np.concatenate([values[:3], values[5:]]), values[3:5]] * 2
    needs = advantage == "gae"
    found = credit([several], given if needs else None, **options)
    same = credit([one], [values, values] if needs else None, **options)
    for i in (0, 1):
        a, b = found.advantages_S[2 * i : 2 * i + 2]
        np.testing.assert_allclose(in_order(a, b), same.advantages_S[i], rtol=1e-12, atol=1e-12)
    if needs:
        assert found.returns_S is not None and same.returns_S is not None
        np.testing.assert_allclose(
            in_order(found.returns_S[0], found.returns_S[1]), same.returns_S[0], rtol=1e-12, atol=1e-12
        )
    assert found.metrics.keys() == same.metrics.keys()
    for name, value in found.metrics.items():
        assert value == pytest.approx(same.metrics[name], rel=1e-6), name


def _with_reference(group: Group) -> Group:
    """A KL that differs from token to token, the same for the same token of the play."""
    made = []
    for t in group.trajectories:
        numbers = np.repeat([turn.number for turn in t.turns], [turn.end - turn.start for turn in t.turns])
        own = np.zeros(len(t.mask))
        order = {0: 1.0, 1: 2.0, 2: 2.0 if t.stream else 3.0, 3: 3.0}
        own[t.mask == 1] = [-4.0 + order[int(n)] for n in numbers]
        made.append(msgspec.structs.replace(t, ref_logprobs_T=own.astype("<f4").tobytes()))
    return group_of(made)


def test_an_outcome_is_that_of_all_streams_and_reaches_all_their_tokens() -> None:
    """By hand: the sums are 1.5 and -0.75."""
    group = group_of([*streams(0, (0.0, 1.0, 0.5)), *streams(1, (0.25, 0.0, -1.0))])
    found = credit([group], name="dr_grpo").advantages_S
    half = (1.5 + 0.75) / 2
    for place, expected in enumerate((half, half, -half, -half)):
        np.testing.assert_allclose(found[place], expected, rtol=1e-12)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("budget", [1000, 1])
def test_tokens_weigh_as_if_their_streams_were_one(aggregation: str, budget: int) -> None:
    """In one micro-batch and in one per trajectory: what a play's tokens weigh together is the same."""
    paid = [(0.0, 1.0, 0.5), (0.25, 0.0, -1.0)]
    batches = {
        "several": [group_of([*streams(0, paid[0]), *streams(1, paid[1], tokens=1)])],
        "one": [group_of([whole(0, paid[0]), whole(1, paid[1], tokens=1)])],
    }
    spec = make_spec(
        algorithm={"group_size": 2, "groups_per_batch": 1, "aggregation": aggregation},
        train={"learner": "torch", "steps": 1, "tokens_per_micro_batch": budget},
    )
    sums = {}
    for name, groups in batches.items():
        (micros,) = micro_batches(groups, V0, spec, torch.device("cpu"))
        assert len(micros) == (1 if budget == 1000 else len(groups[0].trajectories))
        weight = {}
        for micro in micros:
            for member, scale in zip(micro.members, micro.scale_M.split(micro.counts), strict=True):
                weight[member] = scale.double().sum().item()
        sums[name] = [sum(weight[place] for place in play.places) for play in seat_plays(groups)]
    assert sums["several"] == pytest.approx(sums["one"], rel=1e-6)
    expected = {"token_mean": [8 / 12, 4 / 12], "sequence_mean": [0.5, 0.5], "constant": [8 / 16, 4 / 16]}
    assert sums["one"] == pytest.approx(expected[aggregation], rel=1e-6)


def test_shared_beginnings_of_streams_and_seats_are_computed_once() -> None:
    spec = make_spec(train={"learner": "torch", "steps": 1, "tokens_per_micro_batch": 1000})
    (micros,) = micro_batches([duel(1.0, -1.0), duel(1.0, -1.0, seq=1)], V0, spec, torch.device("cpu"))
    (micro,) = micros
    assert len(micro.plan.ids_N) == 3 + 4, "the prompt, and all but the last token of the longer answer"
    assert micro.tokens == 2 * 2 * (5 + 8)


def test_groups_of_equal_rewards_are_so_seat_by_seat() -> None:
    """Black always wins: +1 and -1 are there, and nothing to learn from."""
    assembler = Assembler(max_staleness=1, epoch=1, drop_zero_variance=True)
    for seq, group in enumerate((duel(1.0, 1.0), duel(1.0, -1.0, seq=1))):
        assembler.add(seq + 1, group)
    assert assembler.drop(0) == {Discard.ZERO_VARIANCE: [0]}


def test_metrics_count_players_and_not_streams() -> None:
    many = [*streams(0, (0.0, 1.0, 0.5)), view(0, "black", -1.0), view(1, "black", 3.0)]
    ended = {"metrics": {"exact": 1.0}}
    many = [msgspec.structs.replace(t, **ended) if t.index == 0 else t for t in many]
    many[-1] = msgspec.structs.replace(many[-1], metrics={"exact": 0.0}, ending=Ending.MAX_TURNS)
    found = batch_metrics([group_of(many)], V0)
    assert (found["reward/mean"], found["reward/min"], found["reward/max"]) == (3.5 / 3, -1.0, 3.0)
    assert (found["reward/seat/"], found["reward/seat/black"]) == (1.5, 1.0)
    assert found["reward/env/copy_digits"] == pytest.approx(3.5 / 3)
    assert (found["response_length/mean"], found["response_length/max"]) == (12 / 3, 8)
    assert (found["turns/mean"], found["trajectories"], found["zero_variance"]) == (5 / 3, 4, 0.0)
    assert (found["exact"], found["ending/env_done"], found["ending/max_turns"]) == (0.5, 0.5, 0.5)
    assert not [name for name in batch_metrics([group_of([view(0, "", 1.0)])], V0) if name.startswith("reward/seat")]


def test_evaluations_report_by_seat() -> None:
    def played(index: int, **seats: float) -> EvalResult:
        mean = sum(seats.values()) / len(seats)
        fields: dict[str, Any] = {"job": "j", "version": V0, "index": index, "worker": "w", "ending": Ending.ENV_DONE}
        return EvalResult(**fields, reward=mean, seats=seats)

    found = validation_metrics(
        [played(0, black=1.0, white=-1.0), played(1, black=1.0, white=-1.0), played(2, black=0.0)], 3
    )
    assert found["val/reward/seat/black"] == pytest.approx(2 / 3)
    assert (found["val/reward/seat/white"], found["val/reward/mean"]) == (-1.0, 0.0)
    assert found["val/reward/seat/black/low"] < 2 / 3 < found["val/reward/seat/black/high"]
    assert not [name for name in validation_metrics([played(0, black=1.0)], 1) if "seat" in name]


def test_reward_models_refuse_conversations_in_several_streams() -> None:
    judge = RewardModel("judge", model=None, tokenizer=None, label=0)
    with pytest.raises(JobFailed, match="the policy had several in one episode"):
        judge.score([group_of(streams(0, (0.0, 0.0, 0.0)))], 100)
