"""The tokenizer of tiny models: a token per character, of one case or of both."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.models.make_tiny import make_tiny, tiny_tokenizer
from opentinker.envs.builtin.gomoku_cells import FREE, OWN, RIVAL


def test_upper_case_is_read_as_lower_case_unless_it_has_tokens() -> None:
    assert tiny_tokenizer()("Aa")["input_ids"] == tiny_tokenizer()("aa")["input_ids"]
    both = tiny_tokenizer(characters="aA")
    assert both("Aa")["input_ids"] == [4, 3] and both.decode([4, 3]) == "Aa"


def test_each_field_of_the_board_of_gomoku_is_a_token(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "model", hidden_size=32, layers=1, characters=f"{FREE}{OWN}{RIVAL}:")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(FREE + OWN + RIVAL)["input_ids"]
    assert len(set(ids)) == 75 and tokenizer.unk_token_id not in ids
    assert AutoModelForCausalLM.from_pretrained(directory).config.vocab_size == len(tokenizer) == 79
