"""Tokens become text while they are sampled: never a part of a character, never the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from opentinker.services.rollout_worker.detokenizer import Detokenizer, TextOffsets
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.shared.openai.answers import cut


class Bytes:
    """A byte-level tokenizer with some merges, as most models have one."""

    chat_template = None
    eos_token_id = 0

    def __init__(self) -> None:
        self.core = Tokenizer(models.BPE())
        self.core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
        )
        self.core.train_from_iterator(["the cat, the hat ## the end ###"], trainer)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self.core.encode(text).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return str(self.core.decode(ids, skip_special_tokens=skip_special_tokens))


RENDERER = Renderer(Bytes(), "plain", frozenset({0}))


def unfolded(ids: list[int], cuts: list[int], stops: list[str]) -> str:
    edges = sorted({0, len(ids), *(at % (len(ids) + 1) for at in cuts)})
    unfolding = Detokenizer(RENDERER, stops)
    out = ""
    for start, end in pairwise(edges):
        out += unfolding.add(ids[start:end])
        assert "\ufffd" not in out
        assert not any(stop in out for stop in stops)
        assert cut(RENDERER.text(ids), stops).startswith(out)
    return out


@given(st.text(st.sampled_from("the cat#é漢🐈 \n"), max_size=30), st.lists(st.integers(0, 200), max_size=20))
def test_every_beginning_is_one_of_the_whole_and_nothing_is_missing_in_the_end(text: str, cuts: list[int]) -> None:
    ids = RENDERER.plain(text, first=True)
    assert unfolded(ids, cuts, []) == text
    assert unfolded(ids, [*range(len(ids))], []) == text


@given(st.text(st.sampled_from("the#é"), max_size=30), st.lists(st.integers(0, 200), max_size=20))
def test_what_may_become_a_stop_string_is_held_back(text: str, cuts: list[int]) -> None:
    stops = ["##e", "th"]
    out = unfolded(RENDERER.plain(text, first=True), cuts, stops)
    rest = cut(text, stops)[len(out) :]
    assert not rest or any(stop.startswith(rest) for stop in stops)


@pytest.mark.parametrize(("text", "out"), [("the end ###", "the end "), ("a ## b", "a ## b"), ("a ##", "a ")])
def test_stops(text: str, out: str) -> None:
    ids = RENDERER.plain(text, first=True)
    assert unfolded(ids, [*range(len(ids))], ["###"]) == out


def test_half_a_character_waits_for_its_other_half() -> None:
    ids = RENDERER.plain("🐈", first=True)
    assert len(ids) == 4
    unfolding = Detokenizer(RENDERER, [])
    assert [unfolding.add([id]) for id in ids] == ["", "", "", "🐈"]


class Noted(Renderer):
    """Knows how many tokens were decoded at once."""

    widest = 0

    def text(self, ids: Sequence[int]) -> str:
        self.widest = max(self.widest, len(ids))
        return super().text(ids)


@pytest.mark.parametrize("filler", ["specials", "bytes that are no character", "the first byte of a character"])
def test_tokens_that_never_become_a_text_are_not_decoded_again_and_again(filler: str) -> None:
    byte = {byte: RENDERER.plain(bytes([byte]).decode("latin-1"), first=True)[-1] for byte in (0xA9, 0xC3)}
    many = {"specials": [0], "bytes that are no character": [byte[0xA9]], "the first byte of a character": [byte[0xC3]]}
    ids = [*RENDERER.plain("the é ", first=True), *many[filler] * 400, *RENDERER.plain("🐈 end", first=True)]
    renderer = Noted(Bytes(), "plain", frozenset({0}))
    unfolding = Detokenizer(renderer, [])
    assert "".join(unfolding.add([id]) for id in ids) == RENDERER.text(ids)
    assert renderer.widest < 100
    assert TextOffsets(RENDERER).add(ids)[-1] == len(RENDERER.text(ids)) - len(RENDERER.piece(ids[-1]))


def test_a_long_piece_that_ends_within_a_character_is_out_up_to_it() -> None:
    ids = RENDERER.plain("漢" * 40 + "🐈", first=True)
    unfolding = Detokenizer(RENDERER, [])
    assert [unfolding.add(ids[:-1]), unfolding.add(ids[-1:])] == ["漢" * 40, "🐈"]


def test_a_token_begins_where_its_character_does() -> None:
    ids = [*RENDERER.plain("é🐈#", first=True), 0]
    assert TextOffsets(RENDERER).add(ids) == [0, 0, 1, 1, 1, 1, 2, 3]
    parts = TextOffsets(RENDERER)
    assert [place for start in range(0, len(ids), 3) for place in parts.add(ids[start : start + 3])] == [
        0, 0, 1, 1, 1, 1, 2, 3,
    ]  # fmt: skip
