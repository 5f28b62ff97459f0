"""Chats -> token ids with a mask of learned tokens: the assistant's words and the token that ends its turn.

The chat template renders the text. The positions of the assistant's turns are determined exactly, or the chat is
refused:

    generation tags     the template marks them itself: {% generation %}...{% endgeneration %}
    turn by turn        render(turns before, with generation prompt) and render(turns up to here) must both be
                        prefixes of the whole chat; the text between them is the turn

Each stretch of text is tokenised separately, as in generation: the prompt first, the answer after it. Control tokens in
contents stay text (`shared/data/control_tokens.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from opentinker.shared.data.control_tokens import ControlTokens, Mode
from opentinker.shared.types.core import I32
from opentinker.shared.types.errors import JobFailed

Bools = npt.NDArray[np.bool_]
Chat = list[dict[str, Any]]
TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Tokens(msgspec.Struct, frozen=True):
    """Shape suffix T: tokens."""

    ids_T: I32
    learned_T: Bools
    """The first token is never learned: nothing predicts it."""

    def __len__(self) -> int:
        return len(self.ids_T)


class Unrenderable(ValueError):
    """A chat that cannot be converted to tokens; the message says why."""


class ChatEncoder:
    """`mode` and `special_tokens` are the spec's model.chat_template and model.special_tokens_in_content. Raises
    JobFailed if the tokenizer does not support them."""

    def __init__(self, tokenizer: Any, mode: str, special_tokens: Mode = "split") -> None:
        self._tokenizer = tokenizer
        self._plain = mode == "plain"
        if self._plain and tokenizer.eos_token_id is None:
            raise JobFailed(
                "the model's tokenizer has no end-of-sequence token, which ends the assistant's turns with "
                'model.chat_template = "plain"'
            )
        if not self._plain and not tokenizer.chat_template:
            raise JobFailed(
                "the model's tokenizer has no chat template; add one to the model directory, "
                'or set model.chat_template = "plain" to join message contents without markup'
            )
        self._control = ControlTokens(tokenizer, special_tokens, templated=not self._plain)
        ids = self._control.encode
        if tokenizer.decode(ids("a") + ids("b")) != tokenizer.decode(ids("ab")):
            raise JobFailed(
                "the model's tokenizer adds a prefix to every text, so that the parts of a chat cannot be tokenised "
                "one by one; take a model with another tokenizer"
            )
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = tuple({*map(str, tokenizer.all_special_tokens), *added})
        self._tagged = not self._plain and bool(TAGS.search(tokenizer.get_chat_template()))

    def encode(self, chat: Chat, learned: Sequence[int]) -> Tokens:
        """Return the tokens of a chat. `learned`: numbers of the assistant's turns to learn. Raises Unrenderable."""
        chat, word = self._control.defuse(chat)
        cut = self._plain_stretches if self._plain else self._stretches
        stretches = cut(chat, learned, word)
        ids = [part for part, _ in stretches]
        ids_T = np.array([i for part in ids for i in part], dtype=np.int32)
        learned_T = np.repeat([flag for _, flag in stretches], [len(part) for part in ids]).astype(bool)
        learned_T[:1] = False
        return Tokens(ids_T, learned_T)

    def _plain_stretches(self, chat: Chat, learned: Sequence[int], word: str) -> list[tuple[list[int], bool]]:
        """Concatenate contents; an end-of-sequence token ends each of the assistant's turns."""
        stretches = []
        for number, message in enumerate(chat):
            end = [self._tokenizer.eos_token_id] if message["role"] == "assistant" else []
            stretches.append((self._control.encode(message["content"], word) + end, number in learned))
        return stretches

    def _stretches(self, chat: Chat, learned: Sequence[int], word: str) -> list[tuple[list[int], bool]]:
        text, spans = self._tagged_spans(chat, learned) if self._tagged else self._spans_by_turn(chat, learned)
        cuts = [0, *(edge for span in spans for edge in span), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        return [(self._control.encode(piece, word), number % 2 == 1) for number, piece in enumerate(pieces) if piece]

    def _tagged_spans(self, chat: Chat, learned: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, found = self._call_template(
            render_jinja_template,
            conversations=[chat],
            chat_template=self._tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        spans: list[tuple[int, int]] = [(int(a), int(b)) for a, b in found[0]]
        turns = [number for number, message in enumerate(chat) if message["role"] == "assistant"]
        if len(spans) != len(turns):
            raise Unrenderable(
                f"the chat template marks {len(spans)} stretches as generated, the chat has {len(turns)} turns of the "
                "assistant"
            )
        return texts[0], [span for span, turn in zip(spans, turns, strict=True) if turn in learned]

    def _spans_by_turn(self, chat: Chat, learned: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        text = self._render(chat)
        spans = []
        for turn in learned:
            before = self._render(chat[:turn], add_generation_prompt=True)
            through = self._render(chat[: turn + 1])
            if not (text.startswith(through) and through.startswith(before)):
                why = (
                    "renders it differently when other turns follow"
                    if not text.startswith(through)
                    else "does not begin it with its own generation prompt"
                )
                raise Unrenderable(
                    f"turn {turn + 1} of {len(chat)} cannot be found exactly: the chat template has no generation tags "
                    f"and {why}"
                )
            spans.append((len(before), len(before) + len(self._strip_trailing(through[len(before) :]))))
        return text, spans

    def _strip_trailing(self, turn: str) -> str:
        """Strip the whitespace that the template puts after the end-of-turn token: the model never generates it."""
        words = turn.rstrip()
        return words if words.endswith(self._special) else turn

    def _render(self, chat: Chat, **options: Any) -> str:
        return str(self._call_template(self._tokenizer.apply_chat_template, chat, tokenize=False, **options))

    def _call_template(self, render: Any, *values: Any, **options: Any) -> Any:
        try:
            return render(*values, **options)
        except Exception as error:  # noqa: BLE001 - a template is the model's code: any exception refuses the row
            raise Unrenderable(f"the model's chat template refused it: {error}") from None
