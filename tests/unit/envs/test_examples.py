"""Every built-in environment comes with an example episode, or says what one needs."""

from __future__ import annotations

import pytest

from examples.record_episodes import NEEDS, example
from opentinker.envs.examples import example_of, examples
from opentinker.envs.registry import BUILT_IN


def test_every_built_in_environment_has_an_example_or_says_what_one_needs() -> None:
    assert examples().keys() == BUILT_IN.keys(), "python -m examples.record_episodes"
    for name, one in examples().items():
        assert ("note" in one) == (name in NEEDS), name
        assert "note" in one or ("assistant" in one["transcript"] and "Played by" in one["played"]), name
    assert example_of("upload:mine") == "" and example_of("harbor").startswith("An episode needs tasks")
    assert len(NEEDS) <= 11, "no fewer environments have an episode than today"


@pytest.mark.parametrize("name", ["bandit", "copy_digits", "gomoku", "kuhn_poker", "math", "tictactoe", "tool_calc"])
def test_an_example_is_what_the_environment_plays_today(name: str) -> None:
    assert example(name) == examples()[name], "python -m examples.record_episodes"
