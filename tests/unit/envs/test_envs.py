"""The environments we ship, and how they are found."""

from __future__ import annotations

import random
import re
from decimal import Decimal
from typing import Any

import pytest

from opentinker.envs import base
from opentinker.envs.base import Environment, Step, play_gold
from opentinker.envs.builtin import gsm8k
from opentinker.envs.registry import check, find, make
from opentinker.shared.types.core import Message, StopReason
from opentinker.shared.types.errors import SpecError
from tests.support.playing import say

PAIRS = [(row, seed) for row in (0, 1, 999, 123_456) for seed in (0, 7)]
GAMES = ("bandit", "copy_digits", "gsm8k", "guess_number")
"""Those that play without any settings, and have an expert."""
EOS, LENGTH = StopReason.EOS, StopReason.LENGTH


async def answer(environment: Environment, text: str, stop: StopReason = EOS, row: int = 0, seed: int = 0) -> Step:
    await environment.open(row, seed)
    (step,) = await say(environment, text, stop=stop)
    return step


@pytest.mark.parametrize("name", GAMES)
async def test_expert_scores_full_marks_from_a_start_that_row_and_seed_alone_decide(name: str) -> None:
    before = random.getstate()
    first = [await play_gold(make(name, {}), row, seed) for row, seed in PAIRS]
    assert random.getstate() == before, "the global generator is left alone"
    assert [(played.reward, played.metrics["exact"]) for played in first] == [(1.0, 1.0)] * len(PAIRS)
    random.seed(99)
    assert [await play_gold(make(name, {}), row, seed) for row, seed in PAIRS] == first
    assert len({str(played.messages) for played in first}) > 1
    random.setstate(before)


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("text", ["", "no idea", "0" * 40, "\n\n", "-1"])
async def test_wrong_answer_scores_less(name: str, text: str) -> None:
    step = await answer(make(name, {}), text)
    assert step.reward < 1.0
    assert step.metrics["exact"] == 0.0


@pytest.mark.parametrize("name", GAMES)
async def test_cut_completion_is_played_like_any_other(name: str) -> None:
    """A letter is an arm, one digit of three is worth a quarter, no number nothing; `5` is a whole guess, but wrong."""
    expected = {
        "bandit": (1.0, True),
        "copy_digits": (0.25, True),
        "gsm8k": (0.0, True),
        "guess_number": (0.0, False),
    }
    environment = make(name, {})
    await environment.open(0, 0)
    (step,) = await say(environment, str(environment.gold())[:1], stop=LENGTH)
    assert (step.reward, step.done) == expected[name]


@pytest.mark.parametrize(
    ("text", "stop", "reward"),
    [
        ("472", EOS, 1.0),
        ("472", LENGTH, 0.75),
        ("4721", EOS, 0.6),
        ("47", EOS, 0.5),
        ("470", EOS, 0.75),
        ("", EOS, 0.0),
        ("272", EOS, 0.75),
        ("999999", LENGTH, 0.0),
    ],
)
async def test_copy_digits_pays_right_tokens_by_position(text: str, stop: StopReason, reward: float) -> None:
    environment: Any = make("copy_digits", {})
    await environment.open(0, 0)
    environment.answer = "472"
    (step,) = await say(environment, text, stop=stop)
    assert step.reward == pytest.approx(reward)
    assert step.done
    assert step.metrics["exact"] == float(reward == 1.0)


async def asked(environment: Environment, row: int, seed: int) -> list[Message]:
    opened = await environment.open(row, seed)
    assert isinstance(opened, list)
    return opened


async def test_copy_digits_asks_for_as_many_digits_as_configured() -> None:
    environment = make("copy_digits", {"digits": 5})
    (message,) = await asked(environment, 12, 34)
    assert re.fullmatch(r"\d{5}=", message.text)


async def test_copy_digits_has_a_thousand_rows() -> None:
    environment = make("copy_digits", {"digits": 12})
    assert await environment.open(5, 1) == await environment.open(1005, 1)
    assert await environment.open(5, 1) != await environment.open(6, 1)


async def test_bandit_has_one_right_arm_per_context_and_the_table_decides_which() -> None:
    def tables(number: int) -> Any:
        return make("bandit", {"contexts": 6, "arms": 5, "table": number})

    found: list[dict[str, str | None]] = []
    for number in (0, 1):
        right: dict[str, str | None] = {}
        for row in range(100):
            environment = tables(number)
            (message,) = await environment.open(row, 3)
            gold = environment.gold()
            assert right.setdefault(message.content, gold) == gold
            paid = [(await answer(tables(number), arm, row=row, seed=3)).reward for arm in "abcdef"]
            assert paid == [float(arm == gold) for arm in "abcdef"]
        assert len(right) == 6 and set(right.values()) <= set("abcde")
        found.append(right)
    assert found[0] != found[1]


async def test_bandit_noise_turns_pay_round_and_exact_knows_better() -> None:
    steps = [await answer(make("bandit", {"noise": 0.3}), arm, row=row) for row in range(200) for arm in "abcd"]
    turned = [step.reward != step.metrics["exact"] for step in steps]
    assert 0.2 < sum(turned) / len(turned) < 0.4
    again = [await answer(make("bandit", {"noise": 0.3}), arm, row=row) for row in range(200) for arm in "abcd"]
    assert steps == again
    silent = [await answer(make("bandit", {"noise": 0.4}), "", row=row) for row in range(20)]
    assert all(step.reward == 0.0 for step in silent)


async def test_guess_number_hints_lead_to_the_number() -> None:
    environment: Any = make("guess_number", {"low": -5, "high": 500, "max_guesses": 9})
    for seed in range(50):
        played = await play_gold(environment, 0, seed)
        assert played.reward == 1.0
        assert played.turns <= 9
        assert all(set(m.content) <= set("0123456789abcdefghijklmnopqrstuvwxyz =-") for m in played.messages)


async def test_guess_number_ends_when_guesses_are_used_up() -> None:
    environment: Any = make("guess_number", {"max_guesses": 2})
    await environment.open(0, 0)
    first, last = await say(environment, "hm", str(environment.secret + 1))
    assert (first.done, first.messages[0].text) == (False, "number=")
    assert (last.done, last.reward) == (True, 0.0)


async def test_guess_number_shaped_pays_for_closeness_but_less_than_for_a_hit() -> None:
    rewards = []
    for away in (0, 1, 4):
        environment: Any = make("guess_number", {"max_guesses": 1, "shaped": True})
        await environment.open(0, 0)
        environment.secret = 5
        (step,) = await say(environment, str(5 + away))
        rewards.append(step.reward)
        assert step.reward == sum(step.components.values())
    assert rewards[0] == 1.0 > rewards[1] > rewards[2] > 0.0


def test_every_gsm8k_row_scores_its_own_answer() -> None:
    for split, rows in (("train", 7473), ("test", 1319)):
        loaded = gsm8k.read(split)
        assert len(loaded) == rows
        for row in loaded:
            assert gsm8k.answer_of(row.answer) == Decimal(row.answer.split("####")[1].strip().replace(",", ""))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 18", "18"),
        ("so 3 and then #### -1,000.50 dollars", "-1000.5"),
        ("#### 18\n#### 19", "19"),
        ("first \\boxed{7}, no: \\boxed{ 12 }", "12"),
        ("It costs $18.", "18"),
        ("it is 1,234,567.00 in all", "1234567"),
        ("10-5", "5"),
        ("1, 2, 3", "3"),
        ("\N{MINUS SIGN}7", "-7"),
        ("a discount of -$5", "-5"),
        (".5", "0.5"),
    ],
)
def test_gsm8k_reads_the_number(text: str, value: str) -> None:
    assert gsm8k.answer_of(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "none", "####", "#### ten", "9" * 100_000, "####" * 1000, "\\boxed{" * 1000])
def test_gsm8k_finds_no_number(text: str) -> None:
    assert gsm8k.answer_of(text) is None


async def test_gsm8k_instruction_can_be_left_out() -> None:
    environment = make("gsm8k", {"split": "test", "instruction": ""})
    (message,) = await asked(environment, 0, 0)
    assert message.text.endswith("farmers' market?")


def test_unknown_name_lists_near_ones() -> None:
    with pytest.raises(SpecError, match="did you mean copy_digits") as caught:
        find("copydigit")
    assert caught.value.mistakes[0]["field"] == "environment.name"


def test_every_mistake_of_a_config_is_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        check("guess_number", {"low": "x", "max_guesses": 0, "colour": "red"})
    fields = {mistake["field"] for mistake in caught.value.mistakes}
    assert fields == {f"environment.config.{name}" for name in ("low", "max_guesses", "colour")}
    assert "knows: high, low, max_guesses, shaped" in str(caught.value)


def test_config_rule_over_two_fields_is_reported() -> None:
    with pytest.raises(SpecError, match="low=9 must be less than high=3"):
        check("guess_number", {"low": 9, "high": 3})


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tests.samples.env_samples:Missing", "has no Missing"),
        ("no_such_module:Env", "cannot be imported"),
        ("tests.samples.env_samples:LET_GO", "not a subclass"),
        ("env samples:Counting", "module:Class"),
        ("os:system", "not a subclass"),
    ],
)
def test_wrong_module_names_are_explained(name: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        find(name, modules=True)


def test_module_names_need_the_operators_leave() -> None:
    with pytest.raises(SpecError, match=r"env_modules.*OPENTINKER_ENV_MODULES=1 opentinker up.*opentinker env push"):
        find("tests.samples.env_samples:Counting")
    assert find("tests.samples.env_samples:Counting", modules=True).__name__ == "Counting"
    with pytest.raises(SpecError, match="env_modules"):
        find("tests.samples.env_samples:Counting")


async def test_the_example_in_the_documentation_runs() -> None:
    assert base.__doc__ is not None
    source = base.__doc__.split("A complete environment:")[1].split("An env worker guarantees")[0]
    names: dict[str, Any] = {"random": random, **vars(base)}
    exec(re.sub(r"^    ", "", source, flags=re.MULTILINE), names)  # our own text
    parity = names["Parity"]
    assert (await play_gold(parity(parity.Config()), 0, 0)).reward == 1.0


async def test_gsm8k_rewards_the_form_of_a_wrong_answer_when_asked() -> None:
    for form, reward in ((0.0, 0.0), (0.2, 0.2)):
        environment = make("gsm8k", {"format_reward": form})
        await environment.open(0, 0)
        wrong, nothing, right = await say(environment, "so #### -1", "-1", str(environment.gold()))
        assert (wrong.reward, wrong.metrics["format"], wrong.metrics["exact"]) == (reward, 1.0, 0.0)
        assert (nothing.reward, nothing.metrics["format"], right.reward) == (0.0, 0.0, 1.0)
