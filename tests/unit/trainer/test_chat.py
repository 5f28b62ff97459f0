"""Chats as tokens: exactly the template's text, and exactly the assistant's own words are learned, or it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from opentinker.services.trainer.data.chat import ChatEncoder, Tokens, Unrenderable
from opentinker.shared.types.errors import JobFailed
from tests.samples.row_samples import CHATML, END, FORGETFUL, START, TAGGED, chat_tokenizer, turns

CHAT = [{"role": "system", "content": "be brief"}, *turns("what is 1+1?", "2.", "and 2+2?", " 4 \n")]
WORDS = ["what is the answer to life?", "it is 42, of course.", "are you sure?\n\n", "  yes -  quite sure  "]


def bpe_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE that merges whole words with the space before them, as real models have it."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[START, END])
    core.train_from_iterator([*WORDS, "assistant\nuser\nsystem\n"] * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, additional_special_tokens=[START])
    tokenizer.chat_template = template
    return tokenizer


def by_hand(tokenizer: Any, chat: list[dict[str, str]], learned: Sequence[int]) -> tuple[list[int], list[bool]]:
    """ChatML written out, piece by piece, without any template."""
    ids, mask = [], []
    for number, message in enumerate(chat):
        own = number in learned
        for text, flag in ((f"{START}{message['role']}\n", False), (message["content"] + END, own), ("\n", False)):
            part = tokenizer.encode(text, add_special_tokens=False)
            ids += part
            mask += [flag] * len(part)
    return ids, mask


def said(tokenizer: Any, tokens: Tokens) -> str:
    return str(tokenizer.decode(tokens.ids_T[tokens.learned_T]))


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["turn by turn", "generation tags"])
@pytest.mark.parametrize("learned", [(2,), (4,), (2, 4)])
def test_the_assistants_words_and_its_end_of_turn_are_learned(template: str, learned: tuple[int, ...]) -> None:
    tokenizer = chat_tokenizer(template)
    tokens = ChatEncoder(tokenizer, "model").encode(CHAT, learned)
    ids, mask = by_hand(tokenizer, CHAT, learned)
    assert tokens.ids_T.tolist() == ids and tokens.learned_T.tolist() == mask
    assert said(tokenizer, tokens) == "".join(CHAT[turn]["content"] + END for turn in learned)


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["turn by turn", "generation tags"])
def test_tokens_and_masks_are_those_of_transformers(template: str) -> None:
    """Of the whole text at once, with merges over several characters; its masks come from the generation tags."""
    chat = turns(*WORDS)
    tokens = ChatEncoder(bpe_tokenizer(template), "model").encode(chat, [1, 3])
    theirs = bpe_tokenizer(TAGGED).apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert len(tokens) < 90, "words must be merged for this to say anything"
    assert tokens.ids_T.tolist() == theirs["input_ids"]
    assert tokens.learned_T.astype(int).tolist() == theirs["assistant_masks"]


def test_template_that_forgets_can_teach_the_last_turn_only() -> None:
    tokenizer = chat_tokenizer(FORGETFUL)
    encoder = ChatEncoder(tokenizer, "model")
    chat = turns("1+1?", "easy#2", "2+2?", "hm#4")
    assert said(tokenizer, encoder.encode(chat, [3])) == f"hm#4{END}"
    assert tokenizer.decode(encoder.encode(chat, [3]).ids_T).count("easy") == 0
    with pytest.raises(Unrenderable, match=r"turn 2 of 4 .* differently when other turns follow"):
        encoder.encode(chat, [1, 3])


def test_template_without_generation_prompt_is_refused() -> None:
    """It renders the turn's beginning only with the turn: where the model would begin is not known."""
    template = CHATML.replace("<|im_start|>assistant", "<|im_start|>model")
    with pytest.raises(Unrenderable, match="its own generation prompt"):
        ChatEncoder(chat_tokenizer(template), "model").encode(turns("a", "b"), [1])


def test_tags_that_do_not_fit_the_chat_are_refused() -> None:
    template = TAGGED.replace("message['role'] == 'assistant' %}", "message['role'] == 'assistant' and loop.last %}")
    with pytest.raises(Unrenderable, match="marks 1 stretches as generated, the chat has 2 turns"):
        ChatEncoder(chat_tokenizer(template), "model").encode(turns("a", "b", "c", "d"), [3])


def test_template_that_raises_refuses_the_chat() -> None:
    template = "{{ raise_exception('only users may speak') }}"
    with pytest.raises(Unrenderable, match="only users may speak"):
        ChatEncoder(chat_tokenizer(template), "model").encode(turns("a", "b"), [1])


def test_plain_joins_contents_and_ends_turns() -> None:
    tokenizer = chat_tokenizer(None)
    tokens = ChatEncoder(tokenizer, "plain").encode(turns("7=", "7", "8=", "8"), [3])
    assert tokenizer.decode(tokens.ids_T) == f"7=7{END}8=8{END}"
    assert said(tokenizer, tokens) == f"8{END}"


def test_the_first_token_is_never_learned() -> None:
    """Nothing stands before it."""
    tokens = ChatEncoder(chat_tokenizer(), "plain").encode(turns("123", first="assistant"), [0])
    assert tokens.learned_T.tolist() == [False, True, True, True]
    assert tokens.learned_T.dtype == np.bool_


def test_tokenizers_that_cannot_do_it_are_refused() -> None:
    with pytest.raises(JobFailed, match="no chat template"):
        ChatEncoder(chat_tokenizer(None), "model")
    without_end = chat_tokenizer()
    without_end.eos_token = None
    with pytest.raises(JobFailed, match="no end-of-sequence token"):
        ChatEncoder(without_end, "plain")
    prefixing = bpe_tokenizer(CHATML)
    prefixing.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(JobFailed, match="adds a prefix to every text"):
        ChatEncoder(prefixing, "model")
