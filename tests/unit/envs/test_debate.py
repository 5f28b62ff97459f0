"""Debate: claims of which one is right, a judge that decides, and rewards of the debaters that sum to zero."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from examples.debate_verdicts import write_verdicts
from opentinker.envs.base import Action, Step
from opentinker.envs.bots import with_bots
from opentinker.envs.builtin.debate import SPEECH_CHARACTERS, Debate
from opentinker.envs.rounds import prompts_of
from opentinker.shared.types.core import StopReason
from tests.support import playing

ROWS = Path(__file__).parents[3] / "examples" / "data" / "verdicts.jsonl"
SEATS = ("first", "second")


opened = partial(playing.opened, Debate)


async def speak(debate: Debate, first: str = "Trust me.", second: str = "Trust me more.") -> Step:
    said = zip(SEATS, (first, second), strict=True)
    return await debate.step_all([Action(text=text, stop=StopReason.EOS, turn=0, seat=seat) for seat, text in said])


async def judge(debate: Debate, text: str) -> Step:
    return await debate.step(Action(text=text, stop=StopReason.EOS, turn=1, seat="judge"))


async def test_each_debater_argues_for_a_claim_and_one_claim_is_right() -> None:
    honest = Counter[str]()
    for row in range(200):
        debate, _ = await opened(row, largest=50)
        first, second = debate.claims["first"], debate.claims["second"]
        assert first != second and debate.claims[debate.honest] == debate.truth
        honest[debate.honest] += 1
    assert min(honest.values()) > 60
    asked = prompts_of(*(await opened()), "open")
    assert set(asked) == set(SEATS) and {prompt.max_tokens for prompt in asked.values()} == {40}
    assert asked["first"].messages[0].text != asked["second"].messages[0].text


async def test_a_debater_hears_the_other_from_the_second_round_on_and_the_judge_hears_both() -> None:
    debate, _ = await opened(rounds=2)
    step = await speak(debate, "apples", "y" * 2 * SPEECH_CHARACTERS)
    heard = {seat: prompt.messages[0].text for seat, prompt in prompts_of(debate, step, "step").items()}
    assert "apples" in heard["second"] and "apples" not in heard["first"]
    assert heard["first"].count("y" * SPEECH_CHARACTERS) == 1 and "y" * (SPEECH_CHARACTERS + 1) not in heard["first"]
    step = await speak(debate, "pears", "plums")
    assert (step.seat, step.max_tokens, step.acting) == ("judge", 16, None)
    shown = step.messages[0].text
    assert all(word in shown for word in (debate.question, "apples pears", "plums", *map(str, debate.claims.values())))


@pytest.mark.parametrize(("right", "first"), [(True, 1.0), (True, -1.0), (False, 1.0), (False, -1.0)])
async def test_the_debater_whose_claim_the_judge_names_wins_what_the_other_loses(right: bool, first: float) -> None:
    winner, loser = SEATS if first > 0 else SEATS[::-1]
    debates = [(await opened(row))[0] for row in range(20)]
    debate = next(debate for debate in debates if (debate.honest == winner) == right)
    await speak(debate)
    step = await judge(debate, f"Not {debate.claims[loser]}, but {debate.claims[winner]}.")
    assert step.rewards == {"first": {"verdict": first}, "second": {"verdict": -first}}
    assert (step.done, step.reward, step.metrics) == (True, right, {"judge_right": right, "undecided": 0.0})


@pytest.mark.parametrize("text", ["", "Both.", "12345678901234567890", "1"])
async def test_a_verdict_that_names_no_claim_pays_nobody(text: str) -> None:
    debate, _ = await opened()
    await speak(debate)
    step = await judge(debate, text)
    assert step.rewards == {"first": {"verdict": 0.0}, "second": {"verdict": 0.0}}
    assert (step.reward, step.metrics) == (0.0, {"judge_right": 0.0, "undecided": 1.0})


@pytest.mark.parametrize(("bot", "least", "most"), [("perfect", 100, 100), ("random", 30, 70)])
async def test_bots_judge(bot: str, least: int, most: int) -> None:
    right = 0.0
    for row in range(100):
        debate, _ = await opened(row)
        debate.bot_seats = {"judge": bot, "first": bot}
        played = with_bots(debate, debate)
        await played.open(row, 0)
        step = await played.step_all([Action(text="Trust me.", stop=StopReason.EOS, turn=0, seat="second")])
        right += step.metrics["judge_right"]
        assert step.done and {abs(step.rewards[seat]["verdict"]) for seat in SEATS} == {1.0}
    assert least <= right <= most


def test_the_rows_for_the_judge_are_those_of_the_environment(tmp_path: Path) -> None:
    write_verdicts(tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.jsonl").read_text() == ROWS.read_text()
