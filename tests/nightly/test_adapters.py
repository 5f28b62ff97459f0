"""All adapters of environment libraries, and an env worker that plays them like other environments."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from opentinker.envs.adapters import library
from opentinker.envs.adapters.library import Randomness, episode_seed
from opentinker.envs.registry import ADAPTERS, check, rehearse
from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.services.env_worker.service import check_environment
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import EnvCheck
from opentinker.shared.types.errors import SpecError
from tests.support.playing import opening, sit, step, transcript

PLAYED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("gymnasium", {"id": "FrozenLake-v1"}, ["right"] * 5),
    ("gymnasium", {"id": "Blackjack-v1"}, ["hit"] * 5),
    ("pettingzoo", {"id": "classic/connect_four_v3"}, ["3"] * 4),
    ("textarena", {"id": "GuessTheNumber-v0"}, ["[5]", "[10]"]),
    ("reasoning_gym", {"dataset": "chain_sum"}, ["7"]),
]


# --- seeds and generators -------------------------------------------------------------------------------------------


def test_episodes_draw_from_generators_of_their_own() -> None:
    def draw() -> tuple[float, float]:
        return random.random(), float(np.random.random())

    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    one, other = Randomness(1), Randomness(1)
    drawn: list[tuple[float, float]] = []
    for randomness in (one, other, one, other):
        with randomness:
            drawn.append(draw())
            random.seed(0) if randomness is other and len(drawn) == 4 else None
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]


def test_an_episode_that_raises_gives_the_generators_back() -> None:
    before = random.getstate()
    with pytest.raises(ZeroDivisionError), Randomness(1):
        random.seed(5)
        _ = 1 / 0
    assert random.getstate() == before


@pytest.mark.parametrize(("name", "config", "texts"), PLAYED)
async def test_start_state_depends_on_row_and_seed_alone(name: str, config: dict[str, Any], texts: list[str]) -> None:
    first = [await transcript(name, texts, row, 4, **config) for row in range(4)]
    random.seed(99)
    np.random.seed(99)
    before = random.getstate()
    assert [await transcript(name, texts, row, 4, **config) for row in range(4)] == first
    assert random.getstate() == before


def test_seeds_are_such_as_every_library_takes() -> None:
    seeds = {episode_seed(row, seed) for row in range(20) for seed in range(20)}
    assert len(seeds) == 400 and min(seeds) >= 0 and max(seeds) < 2**31


# --- configs and workers --------------------------------------------------------------------------------------------

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gymnasium", {}, "is needed"),
    ("gymnasium", {"id": "FrozenLak-v1"}, "did you mean FrozenLake-v1"),
    ("gymnasium", {"id": "os:Env-v0"}, "no modules are imported"),
    ("gymnasium", {"id": "CartPole-v1", "view": "ansi"}, "cannot be drawn in letters"),
    ("gymnasium", {"id": "CartPole-v1", "steps": 3}, "Gymnasium knows: actions, hint, id"),
    ("gymnasium", {"id": "CartPole-v1", "penalty": -1}, "greater than or equal to 0"),
    ("pettingzoo", {"id": "classic/tictacto_v3"}, "classic/tictactoe-v3"),
    ("pettingzoo", {"id": "classic/chess_v6", "api": "parallel"}, "not found in registry"),
    ("textarena", {"id": "TicTacTo-v0"}, "did you mean TicTacToe-v0"),
    ("reasoning_gym", {"dataset": "chain_sums"}, "did you mean chain_sum"),
    ("reasoning_gym", {"config": {"min_terms": 0}}, "min_terms must be positive"),
    ("reasoning_gym", {"config": {"size": 3}}, "set seed and rows"),
]


@pytest.mark.parametrize(("name", "config", "problem"), WRONG)
def test_wrong_config_is_refused_before_anything_is_played(name: str, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        check(name, config)


def test_every_example_of_the_page_is_valid() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "environments" / "adapters.md").read_text()
    examples = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    for example in examples:
        overrides = example.get("validation", {}).get("config", {})
        name = example["environment"]["name"]
        check(name, example["environment"]["config"] | overrides, elsewhere=name in ("gem", "miniwob", "skyrl_gym"))
    assert {example["environment"]["name"] for example in examples} == ADAPTERS.keys()


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_a_missing_library_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_installed", lambda module: False)
    minimal = {name: config for name, config, _ in PLAYED}
    minimal |= {"skyrl_gym": {"id": "gsm8k", "path": "rows.jsonl"}, "gem": {"id": "game:Sudoku-v0-easy"}}
    minimal |= {"miniwob": {"tasks": ["click-test"]}}
    config = minimal[name]
    advice = "OPENTINKER_ENV_INTERPRETERS=gem=" if name == "gem" else rf"pip install 'opentinker\[{name}\]'"
    with pytest.raises(SpecError, match=advice):
        check(name, config)
    check(name, config, elsewhere=True)


@pytest.mark.parametrize(
    ("name", "config", "part", "problem"),
    [
        ("gymnasium", {"id": "LunarLander-v3"}, "Box2D", "DependencyNotInstalled: Box2D is not installed"),
        ("pettingzoo", {"id": "classic/leduc_holdem_v4"}, "rlcard", "FailedToImport: "),
        ("tests.samples.published_games:Lacking", {}, "no_such_library", "ModuleNotFoundError: "),
    ],
)
def test_a_part_of_a_library_that_is_missing_is_found_before_anything_is_played(
    name: str, config: dict[str, Any], part: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, part, None)
    with pytest.raises(SpecError) as caught:
        rehearse(name, *check(name, config, modules=True))
    (mistake,) = caught.value.mistakes
    assert mistake["problem"].startswith("cannot be played by the env workers here: ") and problem in mistake["problem"]
    assert part.lower() in mistake["problem"].lower() or "pip install" in mistake["problem"]


async def test_a_game_whose_words_are_missing_names_the_command_and_with_them_it_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nltk.download", lambda *_, **__: False)  # the library asks for it at each start
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    wordle: dict[str, Any] = {"id": "Wordle-v0"}
    with pytest.raises(SpecError, match=r"reads nltk's 'words'.*python -m nltk\.downloader .* words averaged_per"):
        rehearse("textarena", *check("textarena", wordle))
    tagger = "taggers/averaged_perceptron_tagger_eng/averaged_perceptron_tagger_eng"
    for file, text in {
        "corpora/words/en": "crane\nhouse\n", "corpora/words/en-basic": "crane\nhouse\n",
        f"{tagger}.weights.json": "{}", f"{tagger}.classes.json": '["NN"]',
        f"{tagger}.tagdict.json": '{"crane": "NN", "house": "NN"}',
    }.items():  # fmt: skip
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    rehearse("textarena", *check("textarena", wordle))
    played = await transcript("textarena", ["[crane]", "[house]"], 0, 0, **wordle)
    assert "5" in played[0] and played[-1].done and played[-1].reward == 1.0


BROUGHT_BY_EXTRAS: list[tuple[str, str, list[str]]] = [
    ("pettingzoo", "classic/leduc_holdem_v4", ["call", "raise"]),
    ("pettingzoo", "classic/texas_holdem_v4", ["call", "raise"]),
    ("pettingzoo", "classic/texas_holdem_no_limit_v6", ["check or call", "raise half the pot"]),
    ("pettingzoo", "classic/hanabi_v5", ["play card 1", "play card 5"]),
    ("gymnasium", "LunarLander-v3", ["2", "0"]),
    ("gymnasium", "BipedalWalker-v3", ["[0, 0, 0, 0]", "[0, 1, 0, 1]"]),
]


OWN_WARNING = pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision:UserWarning")
"""Of PettingZoo's poker, about its own spaces."""


@OWN_WARNING
@pytest.mark.parametrize(("name", "id", "texts"), BROUGHT_BY_EXTRAS)
async def test_what_the_extras_bring_is_played(name: str, id: str, texts: list[str]) -> None:
    rehearse(name, *check(name, {"id": id}))
    played = await transcript(name, texts, 0, 1, id=id)
    assert len(played) == 1 + len(texts) and all(step.metrics["illegal"] == 0.0 for step in played[1:])


async def test_hanabi_is_told_in_words() -> None:
    table = await sit("pettingzoo", 0, 1, id="classic/hanabi_v5")
    every = "red, yellow, green, white or blue, rank 1, 2, 3, 4 or 5"
    assert (
        "Lives: 3. Hints left: 8. Cards in the deck: 40. Fireworks: red 0, yellow 0, green 0, white 0, blue 0."
        in table.seen
    )
    assert f"Your cards: 1: {every}; 2: {every}" in table.seen and "XX" not in table.seen
    first, (card, *_) = table.seat, re.findall(r"\+1\) holds: (\w+) (\d)", table.seen)
    await table.say(f"tell player +1 {card[0]}")
    assert table.seat != first and f"Your cards: 1: {card[0]}, rank 1, 2, 3, 4 or 5;" in table.seen
    assert "Hints left: 7." in table.seen
    await table.say("discard card 2")
    assert f"holds: {card[0]} {card[1]} (knows {card[0]})" in table.seen and "Discarded: " in table.seen
    await table.environment.close()
    small = {"colors": 2, "ranks": 3, "hand_size": 2, "players": 2}
    table = await sit("pettingzoo", 0, 1, id="classic/hanabi_v5", kwargs=small)
    assert "play card 2" in table.seen and "play card 3" not in table.seen and "tell player +1 rank 3" in table.seen
    await table.environment.close()


@OWN_WARNING
async def test_poker_is_told_in_words() -> None:
    """What is said is what rlcard's own state says."""
    table = await sit("pettingzoo", 0, 1, id="classic/leduc_holdem_v4")
    for said in ("call", "check"):
        own = table.environment._environment.unwrapped.env.get_state(int(table.seat[-1]))["raw_obs"]
        mine, theirs = own["my_chips"], sum(own["all_chips"]) - own["my_chips"]
        public = f"is {own['public_card'][1]}" if own["public_card"] else "is not shown yet"
        words = f"You hold {own['hand'][1]}. The public card {public}."
        assert words in table.seen and re.search(rf"pot: {mine} chips? of yours, {theirs} of theirs", table.seen)
        await table.say(said)
    assert "The public card is " in table.seen and "not shown" not in table.seen
    await table.environment.close()
    table = await sit("pettingzoo", 0, 1, id="classic/texas_holdem_no_limit_v6")
    own = table.environment._environment.unwrapped.env.get_state(int(table.seat[-1]))["raw_obs"]
    suits = {suit[0].upper(): suit for suit in ("spades", "hearts", "diamonds", "clubs")}
    assert all(f"{card[1]} of {suits[card[0]]}" in table.seen for card in own["hand"])
    assert (
        sum(table.seen.count(suit) for suit in suits.values()) == 2
        and f"the highest bet is {max(own['all_chips'])}" in table.seen
    )
    await table.environment.close()
    raw = await sit("pettingzoo", 0, 1, id="classic/leduc_holdem_v4", view="observation")
    assert "[" in raw.seen and "You hold" not in raw.seen
    await raw.environment.close()


@pytest.mark.parametrize(("name", "config", "texts"), PLAYED)
def test_what_can_be_played_can_be_rehearsed(name: str, config: dict[str, Any], texts: list[str]) -> None:
    rehearse(name, *check(name, config))


async def test_a_submission_reports_missing_parts_without_slow_checks() -> None:
    host, resolver = ChildPool(children=1, per_child=1, modules=True, rehearsal_s=0.5), Resolver(modules=True)
    try:
        asked = [EnvCheck(name=f"tests.samples.published_games:{game}", config={}) for game in ("Lacking", "Endless")]
        lacking, endless = [await check_environment(request, resolver, host) for request in asked]
        assert [e["field"] for e in lacking.errors] == ["environment.name"]
        assert "ModuleNotFoundError: No module named 'no_such_library'" in lacking.errors[0]["problem"]
        assert endless.errors == []
    finally:
        await host.close()


def test_adapters_load_no_library_before_they_are_used() -> None:
    code = (
        "import sys\n"
        "from opentinker.envs.registry import ADAPTERS, find\n"
        "names = [find(name).Config.library for name in ADAPTERS]\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    host = ChildPool(children=1, per_child=8, modules=False)
    yield Sessions("w", limit=8, resolver=Resolver(modules=False), host=host)
    await host.close()


async def test_an_env_worker_plays_them_in_child_processes(sessions: Sessions) -> None:
    """All in one process, turn about: prints, global seeds and errors of one touch none of the others."""
    opened = {name: await sessions.open(opening(name, name, row=1, seed=2, **config)) for name, config, _ in PLAYED[1:]}
    broken = await sessions.open(opening("reasoning_gym", "broken", dataset="maze", config={"min_dist": 900}))
    assert broken.failure == Ending.ENV_ERROR
    for turn in range(2):
        for name, _, texts in PLAYED[1:]:
            if name in opened and not opened[name].done:
                seat = opened[name].seat
                opened[name] = await sessions.step(step(turn, texts[0], name, seat=seat))
                assert opened[name].failure is None, opened[name].error
    assert opened["pettingzoo"].messages[0].text.count("\n. . . 1 . . .") == 1
    expected = (await transcript("textarena", ["[5]", "[5]"], 1, 2, id="GuessTheNumber-v0"))[-1]
    assert opened["textarena"].messages == expected.messages
    assert msgspec.json.encode(opened["reasoning_gym"].metrics)
