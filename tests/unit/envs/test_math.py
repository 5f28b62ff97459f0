"""Problems from files: which row is played when, mistakes by line, and answers compared by value, within a limit."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import orjson
import pyarrow
import pyarrow.parquet
import pytest

from examples.geometry3k_rows import write_rows
from opentinker.envs import data, grading
from opentinker.envs.base import Action, play_gold
from opentinker.envs.data import DataConfig, read, table
from opentinker.envs.registry import check, make
from opentinker.shared.data.jsonl import RowError
from opentinker.shared.types.core import Image, Message, StopReason, Text
from opentinker.shared.types.errors import SpecError
from tests.conftest import WAIT_S

PROBLEMS = [
    {"problem": "Half of one?", "answer": "\\frac{1}{2}"},
    {"problem": "Six times seven?", "answer": "42"},
    {"problem": "Which x solve x^2 = 4?", "answer": "\\{-2, 2\\}"},
    {"problem": "Ten plus a number?", "answer": "1,234.5"},
]
ROOT = Path(__file__).resolve().parents[3]
PNG = b"\x89PNG\r\n\x1a\n...."


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    return write(tmp_path / "problems.jsonl", PROBLEMS)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def said(text: str) -> Action:
    return Action(text=text, stop=StopReason.EOS, turn=0)


def numbered(tmp_path: Path, rows: int = 10, **config: Any) -> DataConfig:
    path = write(tmp_path / "rows.jsonl", [{"n": n} for n in range(rows)])
    return DataConfig.model_validate({"path": str(path)} | config)


# --- rows -----------------------------------------------------------------------------------------------------------


async def test_every_row_is_played_once_per_pass_in_an_order_of_the_seed(tmp_path: Path) -> None:
    rows = await table(numbered(tmp_path))
    passes = [[rows.at(10 * epoch + place, shuffle=True)[1]["n"] for place in range(10)] for epoch in range(3)]
    assert [sorted(order) for order in passes] == [list(range(10))] * 3
    assert len({tuple(order) for order in passes}) == 3
    again = await table(numbered(tmp_path, seed=0))
    assert [again.at(17, shuffle=True), again.at(3, shuffle=True)] == [
        rows.at(17, shuffle=True),
        rows.at(3, shuffle=True),
    ]
    other = await table(numbered(tmp_path, seed=1))
    assert [other.at(place, shuffle=True)[1]["n"] for place in range(10)] != passes[0]
    assert [rows.at(place, shuffle=False)[1]["n"] for place in (0, 9, 10)] == [0, 9, 0]


def test_what_is_held_back_is_never_trained_on(tmp_path: Path) -> None:
    train = read(numbered(tmp_path, validation=0.3))
    held = read(numbered(tmp_path, validation=0.3, part="validation"))
    found = [{row["n"] for _, row in rows.rows} for rows in (train, held)]
    assert (len(found[0]), len(found[1]), found[0] | found[1]) == (7, 3, set(range(10)))


def test_what_is_kept_of_the_data_is_bounded_by_memory_and_written_anew_read_anew(tmp_path: Path) -> None:
    library = data.RowCache(max_bytes=100_000)

    def table_of(name: str, rows: int, seed: int = 0) -> data.Table:
        path = tmp_path / name
        if not path.exists():
            write(path, [{"n": n, "text": "x" * 100} for n in range(rows)])
        config = DataConfig.model_validate({"path": str(path), "seed": seed})
        return library.table(config, data._stamp(str(path)))

    first = table_of("a.jsonl", 100)
    assert table_of("a.jsonl", 100) is first and 20_000 < library.bytes < 80_000
    assert table_of("a.jsonl", 100, seed=1).rows is first.rows
    for seed in range(40):
        table_of("a.jsonl", 100, seed)
    assert library.bytes < 80_000 and len(next(iter(library._entries.values())).tables) <= data.MAX_TABLES
    for name in "bcdefg":
        table_of(f"{name}.jsonl", 100)
    assert library.bytes <= 100_000 and table_of("a.jsonl", 100) is not first
    big = table_of("big.jsonl", 1000)
    assert len(library._entries) == 1 and table_of("big.jsonl", 1000) is big
    write(tmp_path / "big.jsonl", [{"n": 1}])
    assert len(table_of("big.jsonl", 1)) == 1 and library.bytes < 1000


def test_who_reads_holds_up_only_those_who_want_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, reading, go_on = data.RowCache(1 << 20), threading.Event(), threading.Event()
    opened: list[str] = []

    def slowly(path: str, *_: Any) -> list[Any]:
        opened.append(path)
        if path == "hub/slow":
            reading.set()
            assert go_on.wait(WAIT_S)
        if path == "hub/none":
            raise RowError("no such data set")
        return [("row 1", {"n": 1})]

    monkeypatch.setattr(data, "open_rows", slowly)

    def get(path: str) -> data.Table:
        return library.table(DataConfig.model_validate({"path": path}), ())

    with ThreadPoolExecutor(2) as threads:
        slow = [threads.submit(get, "hub/slow") for _ in range(2)]
        assert reading.wait(WAIT_S)
        assert len(get("hub/fast")) == 1 and not slow[0].done()
        go_on.set()
        assert slow[0].result() is slow[1].result()
    for _ in range(2):
        with pytest.raises(RowError, match="no such data set"):
            get("hub/none")
    assert opened == ["hub/slow", "hub/fast", "hub/none", "hub/none"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"part": "validation"}, 'part = "validation" needs a share'),
        ({"split": "test"}, "has no splits"),
        ({"subset": "main"}, "only hub ids have subsets"),
    ],
)
def test_parts_that_are_not_there_are_named(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(numbered(tmp_path, **config))


def test_a_file_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    config = numbered(tmp_path)
    assert len(read(config)) == 10 and read(config) is read(config)
    write(tmp_path / "rows.jsonl", [{"n": n} for n in range(3)])
    assert len(read(config)) == 3


# --- the environment ------------------------------------------------------------------------------------------------


async def test_gold_answers_score_full_marks(problems: Path) -> None:
    played = [await play_gold(make("math", {"path": str(problems)}), row, 0) for row in range(len(PROBLEMS))]
    assert [p.reward for p in played] == [1.0] * 4
    assert {p.messages[0].text.splitlines()[0] for p in played} == {row["problem"] for row in PROBLEMS}


@pytest.mark.parametrize("kind", ["json", "parquet"])
async def test_other_files_and_columns(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"p.{kind}"
    rows = [{"q": "How many?", "a": 3, "pictures": [PNG]}]
    if kind == "json":
        path.write_bytes(orjson.dumps([{"q": "How many?", "a": 3}]))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    config: dict[str, object] = {
        "path": str(path),
        "problem": "q",
        "answer": "a",
        "system": "Be brief.",
        "instruction": "",
    }
    if kind == "parquet":
        config["images"] = "pictures"
    environment = make("math", config)
    opened = await environment.open(0, 0)
    assert isinstance(opened, list)
    expected: Any = "How many?" if kind == "json" else [Image(PNG), Text("How many?")]
    assert [(m.role, m.content) for m in opened] == [("system", "Be brief."), ("user", expected)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"problem": "p"}], "problems.jsonl, line 1: answer is missing; the columns are: problem"),
        ([{"problem": ["p"], "answer": "1"}], "line 1: problem must be a text, it is list"),
        ([], "has no rows"),
        (["text"], "line 1: is not an object"),
    ],
)
def test_rows_that_are_wrong_are_found_at_submission(tmp_path: Path, rows: list[Any], said: str) -> None:
    path = write(tmp_path / "problems.jsonl", rows)
    with pytest.raises(SpecError) as refused:
        check("math", {"path": str(path)})
    assert said in str(refused.value)


async def test_an_episode_has_the_category_of_its_row(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [{"level": 5}, {"level": "Größe/2"}, {"level": None}, {}]
    path = write(tmp_path / "rows.jsonl", [{**one, **kind} for one, kind in zip(PROBLEMS, kinds, strict=True)])
    environment = make("math", {"path": str(path), "shuffle": False, "category": "level"})
    played = [await play_gold(environment, row, 0) for row in range(4)]
    assert [[name for name in one.metrics if name.startswith("task/")] for one in played] == [
        ["task/level 5"],
        ["task/Gr??e/2"],
        [],
        [],
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([None, None], "rows.jsonl, line 1: level is in no row; the columns are: problem, answer, level"),
        (["a", ["b"]], "rows.jsonl, line 2: level must be a text or a number, it is list ['b']"),
        (list(range(51)), "level has 51 different values; a column of categories has at most 50"),
    ],
)
def test_columns_that_hold_no_categories_are_refused(tmp_path: Path, values: list[Any], said: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{**PROBLEMS[0], "level": value} for value in values])
    with pytest.raises(SpecError) as refused:
        check("math", {"path": str(path), "category": "level"})
    assert said in str(refused.value.mistakes)


def test_images_that_are_none_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"problem": "p", "answer": "1", "image": "cat.png"}])
    with pytest.raises(SpecError, match="line 1: image must hold PNG or JPEG images, as bytes"):
        check("math", {"path": str(path), "images": "image"})


async def test_problems_of_geometry3k_are_played_with_their_figures(tmp_path: Path) -> None:
    folder = tmp_path / "11"
    folder.mkdir()
    told = {"id": 11, "annotat_text": "Find $x$.", "choices": ["5", "5 \\sqrt { 2 }", "7", "8"], "answer": "B"}
    (folder / "data.json").write_bytes(orjson.dumps(told))
    (folder / "img_diagram.png").write_bytes(PNG)
    assert write_rows(tmp_path, tmp_path / "made" / "p.parquet") == 1
    environment = make("math", {"path": str(tmp_path / "made" / "p.parquet"), "images": "images", "instruction": ""})
    (message,) = cast(list[Message], await environment.open(0, 0))
    assert message.content == [Image(PNG), Text("Find $x$.")]
    assert (await environment.step(said("It is \\boxed{5\\sqrt{2}}."))).reward == 1.0
    with pytest.raises(FileNotFoundError, match="no folders with a data"):
        write_rows(folder, tmp_path / "none.parquet")


async def test_the_answers_of_the_example_s_problems_are_right() -> None:
    config = {"path": str(ROOT / "examples/data/geometry3k/problems.parquet"), "images": "images", "tries": 3}
    for row in range(10):
        played = await play_gold(make("math", config), row, 0)
        assert (played.reward, played.turns) == (1.0, 1) and len(played.messages[0].images) == 1


async def test_a_wrong_answer_is_told_as_often_as_there_are_tries(problems: Path) -> None:
    config = {"path": str(problems), "shuffle": False, "tries": 3, "format_reward": 0.2, "retry_penalty": 0.1}
    environment = make("math", config)
    await environment.open(1, 0)
    first = await environment.step(said("\\boxed{41}"))
    assert (first.reward, first.done, first.metrics["tries"]) == (0.0, False, 1.0)
    assert first.messages[0].text.startswith("This is not right. 2 tries are left. Think") and "42" not in str(first)
    second = await environment.step(said("\\boxed{43}"))
    assert (second.reward, second.done) == (-0.1, False) and "One try is left." in second.messages[0].text
    right = await environment.step(said("\\boxed{42}"))
    assert (right.reward, right.done, right.metrics["exact"], right.metrics["tries"]) == (1.0, True, 1.0, 3.0)
    await environment.open(1, 0)
    last = [await environment.step(said("\\boxed{0}")) for _ in range(3)][-1]
    assert last.done and last.reward == pytest.approx(0.2 - 0.1), "the form is paid once, when no try is left"


# --- grading --------------------------------------------------------------------------------------------------------


async def test_answers_are_compared_by_value(problems: Path) -> None:
    graded = grading.graders()
    said = {
        "0.5": ("\\frac{1}{2}", True),
        "so it is \\boxed{\\frac{2}{4}}": ("\\frac{1}{2}", True),
        "\\boxed{\\{2, -2\\}}": ("\\{-2, 2\\}", True),
        "\\boxed{1234.50}": ("1,234.5", True),
        "first \\boxed{42}, no, \\boxed{41}": ("42", False),
        "not \\boxed{5} but \\boxed{\\frac{1}{2}}": ("5", False),
        "not \\boxed{5}, \\boxed{\\frac{10}{2}}": ("5", True),
        "\\boxed{3}": ("\\frac{1}{2}", False),
        "I do not know": ("42", False),
    }
    verdicts = await asyncio.gather(*(graded.grade(wanted, text) for text, (wanted, _) in said.items()))
    assert [verdict.right for verdict in verdicts] == [right for _, right in said.values()]
    assert [verdict.answered for verdict in verdicts][-2:] == [True, False]
    assert not any(verdict.late for verdict in verdicts)


async def test_plain_numbers_need_no_process() -> None:
    verdict = grading.grade_number("1,234.5", "it is \\boxed{$1234.50$}")
    assert verdict is not None and verdict.right
    assert grading.grade_number("1/2", "\\boxed{0.5}") is None and grading.grade_number("42", "42") is None


async def test_a_slow_comparison_is_killed_and_the_next_is_graded() -> None:
    grader = grading.Grader()
    await grader.grade("1/2", "0.5")  # it is up
    killed = grader._process
    assert killed is not None
    grader.limit_s = 0.0
    late = await grader.grade("9^{9^{9^9}}", "\\boxed{9^{9^{9^9}} + 1}")
    assert late.late and not late.right and killed.returncode is not None
    grader.limit_s = grading.LIMIT_S
    assert (await grader.grade("1/2", "0.5")).right
    await grader.close()


async def test_an_episode_says_that_it_could_not_be_graded(problems: Path) -> None:
    environment = make("math", {"path": str(problems), "shuffle": False, "format_reward": 0.1})
    await environment.open(0, 0)
    grading._of_loops[asyncio.get_running_loop()] = grading.Graders(limit_s=0.0)
    step = await environment.step(said("\\boxed{1 over 2}"))
    assert (step.reward, step.metrics["ungraded"], step.done) == (0.1, 1.0, True)
