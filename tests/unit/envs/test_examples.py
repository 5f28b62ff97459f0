"""Every built-in environment comes with an example episode, or says what one needs."""

from __future__ import annotations

import pytest

from examples.record_episodes import ANSWERS, NEEDS, example
from opentinker.envs.examples import example_of, examples
from opentinker.envs.registry import BUILT_IN
from opentinker.shared.spec.built_in_environments import SUMMARIES


def test_every_built_in_environment_has_one_sentence_in_lists() -> None:
    assert SUMMARIES.keys() == BUILT_IN.keys()
    for name, text in SUMMARIES.items():
        assert 20 < len(text) <= 90 and text.endswith(".") and ". " not in text, name


def test_every_built_in_environment_has_an_example_or_says_what_one_needs() -> None:
    assert examples().keys() == BUILT_IN.keys(), "python -m examples.record_episodes"
    for name, one in examples().items():
        assert ("note" in one) == (name in NEEDS), name
        assert "note" in one or ("assistant" in one["transcript"] and "Played by" in one["played"]), name
    assert example_of("upload:mine") == "" and example_of("android_world").startswith("An episode needs emulated")
    assert len(NEEDS) <= 1, "no fewer environments have an episode than today"


def test_the_episodes_of_scripts_come_to_their_end() -> None:
    endless = {"openenv"}
    """Its server ends no episode; the job's rollout.max_turns does."""
    unended = [name for name in ANSWERS if not examples()[name]["transcript"].endswith("; done")]
    assert set(unended) == endless


@pytest.mark.parametrize(
    "name", ["agent_program", "bandit", "copy_digits", "gomoku", "kuhn_poker", "math", "tictactoe", "tool_calc"]
)
def test_an_example_is_what_the_environment_plays_today(name: str) -> None:
    assert example(name) == examples()[name], "python -m examples.record_episodes"
