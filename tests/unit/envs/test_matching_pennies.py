"""Matching pennies: one round of two seats, hidden coins, and rewards that sum to zero."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from opentinker.envs.base import Action, Step
from opentinker.envs.bots import with_bots
from opentinker.envs.registry import make
from opentinker.envs.rounds import prompts_of
from opentinker.shared.types.core import StopReason

SEATS = ("even", "odd")


async def prompts(**config: object) -> dict[str, str]:
    environment = make("matching_pennies", config)
    opened = await environment.open(0, 0)
    return {seat: prompt.messages[0].text for seat, prompt in prompts_of(environment, opened, "open").items()}  # type: ignore[arg-type]


async def play(even: str, odd: str) -> Step:
    environment = make("matching_pennies", {})
    await environment.open(0, 0)
    texts = zip(SEATS, (even, odd), strict=True)
    return await environment.step_all(
        [Action(text=text, stop=StopReason.EOS, turn=0, seat=seat) for seat, text in texts]
    )


@pytest.mark.parametrize(
    ("even", "odd", "outcome"),
    [
        ("h", "h", 1.0),
        ("t", "Tails!", 1.0),
        ("heads", "t", -1.0),
        ("not h, t", "h", -1.0),
        ("?", "h", -1.0),
        ("h", "can't say", 1.0),
        ("", "x", 0.0),
    ],
)
async def test_the_coins_decide_and_an_illegal_answer_loses(even: str, odd: str, outcome: float) -> None:
    step = await play(even, odd)
    assert (step.done, step.reward, step.components) == (True, 0.0, {})
    assert step.rewards == {"even": {"outcome": outcome}, "odd": {"outcome": -outcome}}


async def test_both_seats_are_asked_at_once_so_neither_sees_the_other_s_coin() -> None:
    assert await prompts() == {
        "even": "matching pennies. you win if the coins are the same. say h or t:",
        "odd": "matching pennies. you win if the coins are different. say h or t:",
    }
    assert await prompts(rules=False) == {"even": "even=", "odd": "odd="}


async def test_rewards_sum_to_zero_and_metrics_count_heads() -> None:
    draw = random.Random(0)
    for _ in range(100):
        texts = [draw.choice(("h", "t", "heads", "x", "")) for _ in range(2)]
        last = await play(*texts)
        assert sum(last.rewards[seat]["outcome"] for seat in SEATS) == 0.0
        heads = {f"heads/{seat}": float(text in ("h", "heads"))
                 for seat, text in zip(SEATS, texts, strict=True) if text not in ("x", "")}  # fmt: skip
        assert last.metrics == {"illegal": float(sum(text in ("x", "") for text in texts)), **heads}


async def test_bots_show_their_coins() -> None:
    won: Counter[float] = Counter()
    for seed in range(200):
        environment = make("matching_pennies", {})
        environment.bot_seats = {"odd": "random" if seed % 2 else "heads"}
        played = with_bots(environment, environment)
        opening = await played.open(0, seed)
        assert list(opening.acting) == ["even"]  # type: ignore[union-attr, arg-type]
        step = await played.step_all([Action(text="t", stop=StopReason.EOS, turn=0, seat="even")])
        assert step.done and step.rewards["odd"]["outcome"] == -step.rewards["even"]["outcome"]
        reward = step.rewards["even"]["outcome"]
        assert seed % 2 or reward == -1.0
        won[reward] += seed % 2
    assert won[1.0] > 25 < won[-1.0]
