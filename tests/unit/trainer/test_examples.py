"""Rows, wherever they are: what becomes of them, what is wrong with them and where, and in which order they come."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import orjson
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker.services.trainer.data.examples import (
    Example,
    ExampleBuilder,
    Examples,
    fingerprint,
    load_examples,
    places,
    split_validation,
)
from opentinker.shared.types.errors import JobFailed
from tests.samples.row_samples import END, chat_model, chat_tokenizer, copies, row_spec, turns, write_rows

ROWS = [{"messages": turns("1+1?", "2", f"{n}?", str(n))} for n in range(3)]


def make(path: object, kind: Any = "sft", longest: Any = 100, mode: Any = "model", **data: Any) -> Examples:
    spec = row_spec("x", path, kind, model={"chat_template": mode}, data=data)
    return ExampleBuilder(spec, chat_tokenizer(), longest).make()


def said(examples: list[Example]) -> list[str]:
    """What is learned of each part."""
    tokenizer = chat_tokenizer()
    return [str(tokenizer.decode(part.ids_T[part.learned_T])) for example in examples for part in example.parts]


def whole(example: Example) -> list[str]:
    return [str(chat_tokenizer().decode(part.ids_T)) for part in example.parts]


# --- where rows are ---------------------------------------------------------------------------------------------------


def saved_everywhere(directory: Path) -> dict[str, Path]:
    directory.mkdir()
    text = b"\n" + b"\n\n".join(map(orjson.dumps, ROWS))  # blank lines are no rows
    (directory / "a.jsonl").write_bytes(text)
    (directory / "a.jsonl.gz").write_bytes(gzip.compress(text))
    (directory / "a.jsonl.xz").write_bytes(lzma.compress(text))
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, directory / "a.parquet")
    (directory / "parts").mkdir()
    for n in range(3):
        pyarrow.parquet.write_table(table.slice(n, 1), directory / "parts" / f"{n}.parquet")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(directory / "saved")
    datasets.DatasetDict({"train": whole, "odd": whole.select([1])}).save_to_disk(directory / "splits")
    return {path.name: path for path in directory.iterdir()}


def test_the_same_rows_are_the_same_wherever_they_are(tmp_path: Path) -> None:
    found = saved_everywhere(tmp_path / "data")
    assert len(found) == 7
    expected = make(found["a.jsonl"])
    assert said(expected.train) == [f"{n}{END}" for n in range(3)]
    for name, path in found.items():
        assert fingerprint(make(path).train) == fingerprint(expected.train), name
    assert said(make(found["splits"], split="odd").train) == [f"1{END}"]


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = saved_everywhere(tmp_path / "data")
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    (tmp_path / "cut.jsonl.xz").write_bytes(lzma.compress(b'{"messages": 1}\n' * 99)[:-9])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "nothing").mkdir()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for path, split, why in (
        (tmp_path / "none.jsonl", None, "does not exist"),
        (tmp_path / "empty.jsonl", None, "has no rows"),
        (tmp_path / "cut.jsonl.xz", None, "cannot be read"),
        (tmp_path / "bad.parquet", None, "cannot be read"),
        (tmp_path / "nothing", None, "neither a .jsonl"),
        (found["splits"], "validation", r"no split 'validation'; there are: train, odd"),
        (found["saved"], "train", "has no splits"),
        (found["parts"], "train", "has no splits"),
        ("no-such-owner/no-such-set", None, "is not a path on this machine, and as a data set of the hub"),
    ):
        with pytest.raises(JobFailed, match=why):
            make(path, **({"split": split} if split else {}))


def test_hub_ids_are_loaded_by_subset_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Builder:
        def __init__(self, id: str, subset: str | None) -> None:
            self.names = (id, subset)
            files = {"train": ["/etc/passwd"] if id == "thief/set" else ["zip://a.csv::hf://datasets/owner/set/a.zip"]}
            self.config = SimpleNamespace(data_files=files)

        def download_and_prepare(self) -> None: ...

        def as_dataset(self, split: str) -> datasets.Dataset:
            asked.append((*self.names, split))
            return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset_builder", Builder)
    examples = make("owner/set", subset="main", split="test", validation="owner/set")
    assert said(examples.train) == said(examples.validation) == [f"{n}{END}" for n in range(3)]
    assert asked == [("owner/set", "main", "test"), ("owner/set", "main", "validation")]
    with pytest.raises(JobFailed, match="files of this machine"):
        make("thief/set")
    with pytest.raises(JobFailed, match="only hub ids have subsets"):
        make(tmp_path, subset="main")


# --- what becomes of a row --------------------------------------------------------------------------------------------


def test_masks_of_chats(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS[2:])
    assert said(make(path).train) == [f"2{END}"]
    assert said(make(path, mask="assistant").train) == [f"2{END}2{END}"]


def test_prompts_and_completions_are_texts_or_messages(tmp_path: Path) -> None:
    text = {"prompt": "1+1?", "completion": "2", "source": "school"}
    chat = {"prompt": turns("1+1?"), "completion": turns("2", first="assistant"), "source": None}
    long = {"prompt": turns("a", "b", "c"), "completion": turns("d", "e", "f", first="assistant")}
    same = make(write_rows(tmp_path / "a.jsonl", [text, chat]))
    assert whole(same.train[0]) == whole(same.train[1])
    assert said(same.train) == [f"2{END}"] * 2
    path = write_rows(tmp_path / "b.jsonl", [long])
    assert said(make(path).train) == [f"d{END}f{END}"]
    assert said(make(path, mask="assistant").train) == [f"b{END}d{END}f{END}"]


def test_plain_texts_stay_as_they_are(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", copies(1))
    examples = make(path, mode="plain")
    assert whole(examples.train[0]) == [f"00=00{END}"] and said(examples.train) == [f"00{END}"]


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"question": "1+1?", "answer": "2"}])
    examples = make(path, columns={"prompt": "question", "completion": "answer"})
    assert said(examples.train) == [f"2{END}"]
    with pytest.raises(JobFailed, match=r"line 1: answer\[0\]\.content must be a text, it is 5"):
        write_rows(path, [{"question": "1+1?", "answer": [{"role": "assistant", "content": 5}]}])
        make(path, columns={"prompt": "question", "completion": "answer"})


def test_preferences_with_and_without_a_prompt(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
        {"prompt": turns("1+1?"), "chosen": turns("2", first="assistant"), "rejected": turns("3", first="assistant")},
        {"chosen": turns("1+1?", "2"), "rejected": turns("1+1?", "3")},
    ]
    examples = make(write_rows(tmp_path / "a.jsonl", rows), kind="dpo")
    assert said(examples.train) == [f"2{END}", f"3{END}"] * 3
    assert len({tuple(whole(example)) for example in examples.train}) == 1


@pytest.mark.parametrize(
    ("kind", "row", "why"),
    [
        ("sft", {"messages": "hi"}, "messages must be a list of messages, it is 'hi'"),
        ("sft", {"messages": []}, "messages must be a list of messages"),
        ("sft", {"messages": ["hi"]}, r"messages\[0\] must be a message with role and content, it is 'hi'"),
        ("sft", {"messages": [{"role": "user"}]}, r"messages\[0\]\.content must be a text, it is missing"),
        ("sft", {"messages": turns("hi")}, "messages: the last turn is of 'user'"),
        ("sft", {"other": 1}, "messages must be a list of messages, it is missing"),
        ("dpo", {"prompt": "1", "chosen": "2", "rejected": "2"}, "rejected: is the same as chosen"),
        ("dpo", {"chosen": "1", "rejected": "2"}, "prompt: is needed where chosen and rejected are texts"),
        ("dpo", {"chosen": turns("1", "2"), "rejected": turns("1")}, "rejected: does not end with a turn of the"),
        ("dpo", {"prompt": "1", "chosen": "2", "rejected": None}, "rejected must be a text or a list of messages"),
    ],
)
def test_row_that_cannot_be_rendered_names_file_line_and_field(tmp_path: Path, kind: str, row: Any, why: str) -> None:
    good = ROWS[0] if kind == "sft" else {"prompt": "1", "chosen": "2", "rejected": "3"}
    path = write_rows(tmp_path / "a.jsonl", [good, row])
    with pytest.raises(JobFailed, match=rf"a\.jsonl, line 2: {why}"):
        make(path, kind=kind)


def test_lines_that_are_no_rows_are_named(tmp_path: Path) -> None:
    for bad, why in ((b"{", "line 2: is not JSON"), (b"[1]", "line 2: is not an object")):
        (tmp_path / "a.jsonl").write_bytes(orjson.dumps(ROWS[0]) + b"\n" + bad)
        with pytest.raises(JobFailed, match=why):
            make(tmp_path / "a.jsonl")


def test_row_of_a_table_is_named_by_its_number(tmp_path: Path) -> None:
    rows = [ROWS[0], {"messages": [{"role": "user", "content": None}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(JobFailed, match=r"a\.parquet, row 2: messages\[0\]\.content must be a text"):
        make(tmp_path / "a.parquet")


def test_columns_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    both = {"messages": turns("a", "b"), "prompt": "a", "completion": "b"}
    path = write_rows(tmp_path / "a.jsonl", [both])
    with pytest.raises(JobFailed, match=r"data\.format: must be given"):
        make(path)
    assert said(make(path, format="messages").train) == said(make(path, format="prompt_completion").train)
    with pytest.raises(JobFailed, match=r"chosen and rejected; the columns are: messages, prompt, completion"):
        make(path, kind="dpo")
    with pytest.raises(JobFailed, match=r"data\.columns: prompt: not a column that messages rows use"):
        make(path, format="messages", columns={"prompt": "question"})
    with pytest.raises(JobFailed, match=r"prompt_completion needs prompt and completion"):
        make(write_rows(path, ROWS), format="prompt_completion")


def test_a_row_with_tools_or_images_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [ROWS[0], {**ROWS[1], "tools": [], "image": None}])
    assert len(make(path).train) == 2, "an empty column says nothing"
    write_rows(path, [*ROWS, {**ROWS[0], "tools": [{"name": "f"}], "images": ["x.png"]}])
    with pytest.raises(JobFailed, match=r"a\.jsonl, line 4: tools, images: rows with this cannot be trained on"):
        make(path)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(
            [{**row, "tools": tools} for row, tools in zip(ROWS, (None, [], ["f"]), strict=True)]
        ),
        tmp_path / "a.parquet",
    )
    with pytest.raises(JobFailed, match=r"a\.parquet, row 3: tools: "):
        make(tmp_path / "a.parquet")


# --- rows that are too long -------------------------------------------------------------------------------------------


def test_longer_rows_are_refused_dropped_or_cut_and_counted(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1", "completion": "2"},
        {"prompt": "1", "completion": "23456"},
        {"prompt": "1" * 9, "completion": "2"},
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(JobFailed, match=r"2 of 3 rows are longer than 4 tokens, the longest has 11 \(.*line 3\)"):
        make(path, mode="plain", max_length=4)
    dropped = make(path, mode="plain", max_length=4, longer="drop")
    assert said(dropped.train) == [f"2{END}"] and dropped.longest == 11
    assert dropped.counts == {"rows": 3, "longer": 2, "dropped": 2}
    cut = make(path, mode="plain", max_length=4, longer="cut")
    assert said(cut.train) == [f"2{END}", "234"], "of the third nothing is left that could be learned"
    assert cut.counts == {"rows": 3, "longer": 2, "cut": 1, "dropped": 1}
    with pytest.raises(JobFailed, match="all 3 rows are longer than 1 tokens"):
        make(path, mode="plain", max_length=1, longer="drop")
    with pytest.raises(JobFailed, match="the model takes at most 100 tokens"):
        make(path, max_length=101)


def test_rows_that_outgrow_a_sliding_window_are_refused_before_training(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "m", context_length=64)
    config = orjson.loads((model / "config.json").read_bytes())
    kinds = ["sliding_attention"] * config["num_hidden_layers"]
    config |= {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0, "layer_types": kinds}
    (model / "config.json").write_bytes(orjson.dumps(config))
    rows = [{"prompt": "1" * length, "completion": "2"} for length in (1, 20)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(JobFailed, match=r"looks back 32 tokens.*data\.max_length to at most 32"):
        load_examples(row_spec(model, path))
    kept = load_examples(row_spec(model, path, data={"max_length": 32, "longer": "drop"}))
    assert kept.counts["dropped"] == 1 and len(kept.train) == 1


def test_the_default_length_is_the_models(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "m", context_length=16)
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "1" * 20, "completion": "2"}])
    with pytest.raises(JobFailed, match="longer than 16 tokens"):
        load_examples(row_spec(model, path))


# --- validation and order ---------------------------------------------------------------------------------------------


def test_a_share_for_validation_is_drawn_by_the_seed_and_never_trained_on(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "m")
    path = write_rows(tmp_path / "a.jsonl", copies(40))
    found = [load_examples(row_spec(model, path, data={"validation": 0.2}, train={"seed": s})) for s in (0, 0, 1)]
    for examples in found:
        assert len(examples.validation) == 8
        assert sorted(said(examples.train) + said(examples.validation)) == sorted(f"{n:02d}{END}" for n in range(40))
    held = [said(examples.validation) for examples in found]
    assert held[0] == held[1] != held[2]
    with pytest.raises(JobFailed, match="1 row cannot be divided"):
        split_validation(Examples(found[0].train[:1], []), 0.5, 0)


def test_validation_rows_of_a_file_of_their_own(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", copies(4))
    other = write_rows(tmp_path / "b.jsonl", copies(9)[7:])
    examples = make(path, validation=str(other))
    assert said(examples.validation) == [f"07{END}", f"08{END}"] and len(examples.train) == 4


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 9), max_size=12),
    seed=st.integers(0, 2**32 - 1),
    shuffle=st.booleans(),
)
def test_every_epoch_has_every_row_once(rows: int, sizes: list[int], seed: int, shuffle: bool) -> None:
    found: list[int] = []
    for size in sizes:
        found += places(len(found), size, rows, seed=seed, shuffle=shuffle)
    assert len(found) == sum(sizes)
    epochs = [found[start : start + rows] for start in range(0, len(found), rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs if len(epoch) == rows)
    assert shuffle or all(epoch == list(range(len(epoch))) for epoch in epochs)
    assert found == places(0, len(found), rows, seed=seed, shuffle=shuffle)


def test_epochs_and_seeds_differ_in_order() -> None:
    first, second = places(0, 50, 50, seed=1, shuffle=True), places(50, 50, 50, seed=1, shuffle=True)
    assert first != second != places(50, 50, 50, seed=2, shuffle=True)
