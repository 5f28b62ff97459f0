"""The signalling game, which both seats win together."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from opentinker.envs.base import play_gold
from opentinker.envs.builtin.signalling import ALPHABET, MESSAGE_CHARACTERS, Signalling
from opentinker.envs.registry import check, make
from opentinker.shared.types.errors import SpecError
from tests.support import playing
from tests.support.playing import say

opened = partial(playing.opened, Signalling)


async def test_the_listener_hears_the_message_and_nothing_of_the_symbol() -> None:
    for row in range(20):
        environment, opening = await opened(row, rules=False)
        symbol = environment.symbol
        assert (opening.seat, opening.messages[0].text, opening.max_tokens) == ("speaker", f"{symbol}>", 1)
        first, last = await say(environment, "q", symbol)
        assert (first.seat, first.messages[0].text, first.max_tokens) == ("listener", "q<", 1)
        assert (first.reward, first.done, last.done) == (0.0, False, True)
        assert (last.reward, last.rewards, last.metrics) == (1.0, {"speaker": {"exact": 1.0}}, {"exact": 1.0})


async def test_both_seats_get_nothing_for_another_answer() -> None:
    for text in ("", "7 or 8", "77", "=", "hear"):
        environment, _ = await opened(symbols=36)
        *_, last = await say(environment, "7", text)
        assert (last.reward, last.rewards, last.metrics["exact"]) == (0.0, {"speaker": {"exact": 0.0}}, 0.0)
    environment, _ = await opened(symbols=36)
    *_, last = await say(environment, "", f" {environment.symbol.upper()}\n")
    assert last.reward == 1.0


async def test_prompts_state_the_rules_and_long_messages_are_cut() -> None:
    environment, opening = await opened(symbols=3, tokens=9)
    assert opening.messages[0].text.startswith("you are the speaker. tell the listener which of 012 you see.\nsee ")
    (step,) = await say(environment, "x" * 1000)
    text = step.messages[0].text
    assert text.startswith("you are the listener. name the one of 012 that the speaker sees.\nhear x")
    assert text.count("x") == MESSAGE_CHARACTERS and (opening.max_tokens, step.max_tokens) == (9, 9)


async def test_the_expert_says_what_it_sees() -> None:
    for symbols in (2, 8, 36):
        for row in range(20):
            played = await play_gold(make("signalling", {"symbols": symbols}), row, 3)
            assert played.rewards == {"speaker": 1.0, "listener": 1.0} and played.turns == 2


async def test_symbols_are_equally_frequent_and_alike_within_a_group() -> None:
    drawn: Counter[str] = Counter()
    for row in range(1600):
        environment, _ = await opened(row)
        drawn[environment.symbol] += 1
    assert set(drawn) == set(ALPHABET[:8]) and all(140 < count < 260 for count in drawn.values())
    assert (await opened(5))[1] == (await opened(5))[1]


@pytest.mark.parametrize("config", [{"symbols": 1}, {"symbols": 37}, {"tokens": 0}, {"tokens": 65}])
def test_sizes_are_bounded(config: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        check("signalling", config)
