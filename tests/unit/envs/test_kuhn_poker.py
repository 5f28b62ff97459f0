"""Kuhn poker: OpenSpiel's values and exploitability, prompts that are the information sets, chips that sum to zero."""

from __future__ import annotations

import random
from collections import Counter

import pyspiel
import pytest
from open_spiel.python import policy as spiel_policies  # type: ignore[import-untyped]
from open_spiel.python.algorithms import expected_game_score  # type: ignore[import-untyped]
from open_spiel.python.algorithms import exploitability as spiel_exploitability

from opentinker.envs.base import Action, Opening, Step, play_gold
from opentinker.envs.bots import with_bots
from opentinker.envs.builtin.kuhn_poker import FORFEIT, KuhnPoker, prompt_of, prompts
from opentinker.envs.builtin.kuhn_rules import (
    CARDS,
    FIRST,
    INFORMATION_SETS,
    SECOND,
    average_policy,
    best_response_value,
    equilibrium,
    exploitability,
    game_value,
    payoff,
)
from opentinker.envs.registry import make
from opentinker.shared.types.core import StopReason
from tests.support.playing import say

UNIFORM = dict.fromkeys(INFORMATION_SETS, 0.5)


def by_openspiel(policy: dict[tuple[str, str], float]) -> tuple[float, float]:
    """Return OpenSpiel's exploitability of the policy, and its value for the first player."""
    game = pyspiel.load_game("kuhn_poker")
    table = spiel_policies.TabularPolicy(game)
    histories = {"": "", "c": "p", "b": "b", "cb": "pb"}
    for (card, history), active in policy.items():
        place = table.state_lookup[f"{CARDS.index(card)}{histories[history]}"]
        table.action_probability_array[place] = [1 - active, active]
    value, _ = expected_game_score.policy_value(game.new_initial_state(), [table, table])
    return spiel_exploitability.exploitability(game, table), value


def test_uniform_play_can_be_exploited_by_eleven_twentyfourths() -> None:
    assert exploitability(UNIFORM) == pytest.approx(11 / 24, abs=1e-15)
    assert game_value(UNIFORM) == pytest.approx(1 / 8, abs=1e-15)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.2, 1 / 3])
def test_the_equilibria_have_one_value_and_cannot_be_exploited(alpha: float) -> None:
    policy = equilibrium(alpha)
    assert game_value(policy) == pytest.approx(-1 / 18, abs=1e-15)
    assert exploitability(policy) == pytest.approx(0.0, abs=1e-15)
    assert best_response_value(policy, FIRST) == pytest.approx(-1 / 18, abs=1e-15)
    assert best_response_value(policy, SECOND) == pytest.approx(1 / 18, abs=1e-15)
    off = {**policy, ("q", "b"): 1.0}
    assert exploitability(off) > 0.01


def test_any_policy_has_openspiels_value_and_exploitability() -> None:
    draw = random.Random(0)
    for _ in range(25):
        policy = {one: draw.choice((0.0, 1.0, draw.random())) for one in INFORMATION_SETS}
        expected, value = by_openspiel(policy)
        assert exploitability(policy) == pytest.approx(expected, abs=1e-12)
        assert game_value(policy) == pytest.approx(value, abs=1e-12)


def test_an_average_plays_like_a_draw_of_one_policy_per_hand() -> None:
    draw = random.Random(1)

    def drawn() -> dict[tuple[str, str], float]:
        return {one: draw.choice((0.0, 1.0, draw.random())) for one in INFORMATION_SETS}

    for _ in range(50):
        several, rival = [drawn() for _ in range(3)], drawn()
        for seat, own in ((FIRST, ("", "cb")), (SECOND, ("c", "b"))):
            values = [game_value({**rival, **_part(policy, own)}) for policy in several]
            mean = game_value({**rival, **_part(average_policy(several), own)})
            assert mean == pytest.approx(sum(values) / 3, abs=1e-12), seat
    assert average_policy([UNIFORM]) == UNIFORM
    with pytest.raises(ValueError, match="no average of no policies"):
        average_policy([])


def _part(policy: dict[tuple[str, str], float], histories: tuple[str, str]) -> dict[tuple[str, str], float]:
    return {key: value for key, value in policy.items() if key[1] in histories}


def test_what_is_no_policy_is_refused() -> None:
    assert len(INFORMATION_SETS) == len(set(INFORMATION_SETS)) == 12
    with pytest.raises(ValueError, match="has no entry for card 'k' after 'cb'"):
        game_value({one: 0.5 for one in INFORMATION_SETS if one != ("k", "cb")})
    with pytest.raises(ValueError, match=r"is 1\.5, not a probability for card 'j' after ''"):
        exploitability(UNIFORM | {("j", ""): 1.5})
    with pytest.raises(ValueError, match="alpha must be between 0 and 1/3"):
        equilibrium(0.5)


# --- the environment -------------------------------------------------------------------------------------------------


async def opened(cards: str = "", seed: int = 0, **config: object) -> tuple[KuhnPoker, Opening]:
    environment = make("kuhn_poker", config)
    assert isinstance(environment, KuhnPoker)
    opening = await environment.open(0, seed)
    while cards and "".join(environment.cards) != cards:
        seed += 1
        opening = await environment.open(0, seed)
    return environment, opening


@pytest.mark.parametrize(
    ("cards", "moves", "chips"),
    [
        ("kj", ["c", "c"], 1.0),
        ("jk", ["check", "Check."], -1.0),
        ("kq", ["b", "c"], 2.0),
        ("qk", ["bet", "I call"], -2.0),
        ("jk", ["I will not check: bet", "f"], 1.0),
        ("kj", ["c", "b", "fold"], -1.0),
        ("jq", ["c", "b", "f, no: c"], -2.0),
        ("qj", ["c", "b", "call"], 2.0),
    ],
)
async def test_hands_pay_chips_to_both_seats(cards: str, moves: list[str], chips: float) -> None:
    environment, _ = await opened(cards)
    *earlier, last = await say(environment, *moves)
    seats = [step.seat for step in earlier]
    assert seats == [SECOND, FIRST][: len(earlier)] and not any(step.reward or step.done for step in earlier)
    mover, rival = (FIRST, SECOND) if len(moves) == 3 else (SECOND, FIRST)
    paid = {mover: last.reward, rival: last.rewards[rival]["chips"]}
    assert last.done and paid == {FIRST: chips, SECOND: -chips}
    assert payoff((cards[0], cards[1]), environment.history) == chips


async def test_each_turn_is_a_context_that_shows_the_information_set() -> None:
    environment, opening = await opened("qk")
    first, second = await say(environment, "c", "b")
    shown = [opening.messages[0].text, first.messages[0].text, second.messages[0].text]
    assert shown == [prompt_of("q", ""), prompt_of("k", "c"), prompt_of("q", "cb")]
    assert shown[2] == (
        "kuhn poker: j, q, k, one card each, 1 chip each in the pot.\n"
        "you have q. you checked, second bet. c to call, f to fold:"
    )
    assert [opening.stream, first.stream, second.stream] == ["0", "1", "2"]
    assert len(set(prompts().values())) == len(set(prompts(rules=False).values())) == 12
    _, bare = await opened("qk", rules=False)
    assert bare.messages[0].text == "q=" and prompt_of("k", "cb", rules=False) == "kcb="


@pytest.mark.parametrize("moves", [[""], ["f"], ["can't fold"], ["c", "xyz"], ["b", "bet"]])
async def test_an_illegal_answer_pays_the_most_to_the_other_seat(moves: list[str]) -> None:
    environment, _ = await opened()
    *_, last = await say(environment, *moves)
    rival = SECOND if len(moves) != 2 else FIRST
    assert (last.done, last.reward, last.rewards) == (True, -FORFEIT, {rival: {"chips": FORFEIT}})
    assert last.metrics["illegal"] == 1.0


async def test_chips_sum_to_zero_whatever_is_said() -> None:
    draw, amounts = random.Random(0), Counter[float]()
    for game in range(300):
        environment, _ = await opened(seed=game)
        step = Step()
        while not step.done:
            (step,) = await say(environment, draw.choice(("c", "b", "f", "c", "b", "?")))
            paid = step.reward + sum(sum(parts.values()) for parts in step.rewards.values())
            assert paid == 0.0
        amounts[abs(step.reward)] += 1
    assert set(amounts) == {1.0, 2.0}


async def test_deals_are_even_and_alike_within_a_group() -> None:
    environment, _ = await opened()
    deals = Counter[tuple[str, str]]()
    for row in range(1200):
        await environment.open(row, 5)
        deals[environment.cards] += 1
    assert len(deals) == 6 and max(deals.values()) < 260 and min(deals.values()) > 140
    assert (await opened(seed=3))[0].cards == (await opened(seed=3))[0].cards


@pytest.mark.parametrize(("bot", "expected"), [("random", 0.5), ("equilibrium", 1.0)])
async def test_bots_play_their_policies(bot: str, expected: float) -> None:
    """After a bet, second's king calls: always in an equilibrium."""
    called = []
    for seed in range(400):
        game = make("kuhn_poker", {})
        assert isinstance(game, KuhnPoker)
        game.bot_seats = {SECOND: bot}
        environment = with_bots(game, game)
        await environment.open(0, seed)
        step = await environment.step(Action(text="b", stop=StopReason.EOS, turn=0, seat=FIRST))
        assert step.done and step.rewards == {SECOND: {"chips": -step.reward}}
        if game.cards[1] == "k":
            called.append(float(game.history == "bc"))
    assert len(called) > 80 and sum(called) / len(called) == pytest.approx(expected, abs=0.15)


async def test_there_is_no_expert_that_always_wins() -> None:
    with pytest.raises(ValueError, match="has no expert"):
        await play_gold(make("kuhn_poker", {}), 0, 0)
