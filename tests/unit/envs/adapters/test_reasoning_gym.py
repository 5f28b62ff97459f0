"""Real reasoning-gym data sets, unmodified; and answers that are attacks."""

from __future__ import annotations

import inspect
import re
import time
from pathlib import Path

import pytest

from opentinker.envs.adapters.answers import EVALUATED, FORMULAS, SUMS, harmless, within
from opentinker.envs.base import play_gold
from opentinker.envs.registry import make
from tests.support.playing import sit

PLAIN = {"basic_arithmetic", "chain_sum", "gsm_symbolic", "knights_knaves", "leg_counting", "letter_counting",
         "spell_backward", "sudoku", "word_sorting"}  # fmt: skip
NAMES = sorted(PLAIN | EVALUATED | SUMS | {"polynomial_multiplication"})
NO_SINGLE_GOLD = ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]


@pytest.mark.parametrize("dataset", NAMES)
async def test_gold_answer_scores_full_marks(dataset: str) -> None:
    for row in (0, 1, 9_999, 10_001):
        played = await play_gold(make("reasoning_gym", {"dataset": dataset}), row, 0)
        assert (played.reward, played.metrics["exact"], played.metrics["answered"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("dataset", NO_SINGLE_GOLD)
async def test_a_data_set_without_a_single_right_answer_is_still_played(dataset: str) -> None:
    played = await play_gold(make("reasoning_gym", {"dataset": dataset}), 0, 0)
    assert 0.0 <= played.reward <= 1.0


async def test_wrong_answers_score_less_and_the_tag_is_not_needed() -> None:
    table = await sit("reasoning_gym")
    gold = table.environment.gold()
    assert table.prompt.endswith("Give the final answer between <answer> and </answer>.")
    assert (await table.say("hm")).reward < 0.1
    assert (await table.say(f"first <answer>12</answer>, then {gold}")).reward == 1.0
    step = await table.say(gold.removeprefix("<answer>").removesuffix("</answer>"))
    assert (step.reward, step.metrics["answered"]) == (1.0, 0.0)


async def test_settings_reach_the_data_set_and_its_seed_makes_other_questions() -> None:
    easy = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    prompts = {(await sit("reasoning_gym", config=easy, instruction="", seed=seed)).prompt for seed in range(3)}
    assert len(prompts) > 1
    assert all(re.search(r": \d [+-] \d =", prompt) for prompt in prompts), prompts


async def test_a_mixture_says_of_which_data_set_a_question_is() -> None:
    parts = [{"name": "chain_sum"}, {"name": "spell_backward", "weight": 3.0}]
    tasks = set()
    for row in range(20):
        environment = make("reasoning_gym", {"dataset": "composite", "config": {"datasets": parts}})
        tasks |= {name for name in (await play_gold(environment, row, 0)).metrics if name.startswith("task/")}
    assert tasks == {"task/chain_sum", "task/spell_backward"}


ATTACKS = [
    "__import__('os').system('touch {0}')",
    "().__class__.__base__.__subclasses__()",
    "open('{0}', 'w')",
    "[open('{0}', 'w') for _ in range(1)]",
    "(lambda: open('{0}', 'w'))()",
    "print(1)",
    "9**9**9**9",
    "(9**9)**(9**9)",
    "1" * 5000 + "**2",
    "(" * 5000,
    "factorial(99999)",
    "Symbol",
]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("dataset", sorted(EVALUATED | SUMS | FORMULAS))
async def test_answers_are_never_run(dataset: str, attack: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    answer = attack.format(touched)
    table = await sit("reasoning_gym", dataset=dataset)
    began = time.process_time()
    step = await table.say(f"<answer>{answer}</answer>")
    assert step.reward < 0.5
    assert not touched.exists()
    assert time.process_time() - began < 10.0


def test_honest_answers_pass() -> None:
    assert harmless("n_queens", "_ _ Q\nQ _ _")
    assert harmless("n_queens", "[['Q', '_'], ['_', 'Q']]")
    assert harmless("string_insertion", "ABBA")
    assert harmless("countdown", "(58 + 39) * 2 / (7 - 3)")
    assert harmless("simple_integration", "2*X**9 - X**8/2 + 10*X**3/9 + X + C")
    assert harmless("intermediate_integration", "-cos(3*x - 10)**3/3 + exp(0.5*x)*sqrt(x) + C")
    assert harmless("intermediate_integration", "x**(3/2) + x^2*y")
    assert harmless("chain_sum", "__import__('os')")  # is compared, not run


def test_every_data_set_that_evaluates_answers_is_known() -> None:
    """By the library's source: an upgrade that adds one fails here."""
    from reasoning_gym.factory import DATASETS

    evaluating = re.compile(r"(?<!\w)(?:eval|exec|parse_expr|sympify|literal_eval)\(\s*(?!entry\b|metadata\b)(\w+)")
    found = set()
    for name, (kind, _) in DATASETS.items():
        scoring = inspect.getsource(kind.score_answer)
        arguments = set(evaluating.findall(scoring))
        if arguments:
            found.add(name)
    assert found == EVALUATED | SUMS | FORMULAS


def test_scoring_has_its_time() -> None:
    with pytest.raises(TimeoutError, match="not done within"), within(0.05):
        while True:
            pass
    with within(60.0):
        pass
