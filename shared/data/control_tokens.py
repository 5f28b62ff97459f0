"""Control tokens in the contents of messages stay text: the chat template alone writes real ones.

    defuse(chat) -> the chat template renders it -> encode(text)

Contents without the text of a control token are left alone, and the rendering is encoded as a whole by the tokenizer.
Otherwise stand-ins replace these texts while the template renders, and the rendering is encoded by a copy of the
tokenizer whose control tokens have other names under the same ids. The names are put where the template wrote a control
token; the texts that were replaced are put back, and to the copy they are texts like any other.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import orjson
from tokenizers import Tokenizer

from opentinker.shared.types.errors import JobFailed

T = TypeVar("T")
Mode = Literal["split", "parse"]
NEUTRAL = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
DIGITS = 5
"""Digits of a stand-in's number."""
MIN_LENGTH = 3
"""Characters of a control token that is not flagged as a special one."""


class Renamed(NamedTuple):
    """A tokenizer whose control tokens have other names."""

    core: Any
    prefix: str
    """How all names begin."""
    names: dict[str, str]
    """By the control token's own text."""


class ControlTokens:
    """Those of one tokenizer: its special tokens, and the added ones that its chat template writes around messages.

    `tokenizer`: of transformers, or a LightTokenizer. `mode` "parse": contents may hold control tokens. `templated`:
    the chat template is used. Raises JobFailed if contents are to be split and the tokenizer cannot do it.
    """

    def __init__(self, tokenizer: Any, mode: Mode, *, templated: bool) -> None:
        self._tokenizer = tokenizer
        tokens = [] if mode == "parse" else _control_tokens(tokenizer, templated)
        self._texts = [str(token.content) for token in tokens]
        self._pattern = re.compile(_pattern(tokens))
        self._beginnings = {text[:n] for text in self._texts for n in range(1, len(text))}
        self._longest = max(map(len, self._texts), default=0)
        self._always = any(token.normalized for token in tokens)
        """Such a token has many spellings, which the tokenizer alone knows."""
        self._renamed = _renamed(tokenizer, self._texts) if tokens else None

    def defuse(self, value: T) -> tuple[T, str]:
        """`value`, strings in lists and dicts, as the template is to be given it; and a word for `encode`, which is
        empty if nothing had to be replaced."""
        if not self._texts:
            return value, ""
        if not (self._always or any(self._pattern.search(text) or self._begins_one(text) for text in _strings(value))):
            return value, ""
        word = absent_from(value)
        return _mapped(value, lambda text: self._replaced(text, word)), word

    def encode(self, text: str, word: str = "") -> list[int]:
        """Ids of a rendering. `word`: that of `defuse`."""
        if not word:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        assert self._renamed is not None
        if self._renamed.prefix in text:
            self._renamed = _renamed(self._tokenizer, self._texts)
            return self.encode(text, word)
        core, _, names = self._renamed
        first, *others = (self._pattern.sub(lambda found: names[found[0]], part) for part in text.split(word))
        held = [*self._texts, ""]
        if not all(len(part) >= DIGITS and part[:DIGITS].isdigit() for part in others):
            raise JobFailed(
                "the model's chat template cuts contents in the middle, so that control tokens in them cannot be kept "
                'apart: set model.special_tokens_in_content = "parse" if you trust all contents'
            )
        whole = first + "".join(held[int(part[:DIGITS])] + part[DIGITS:] for part in others)
        return list(core.encode(whole, add_special_tokens=False).ids)

    def _begins_one(self, text: str) -> bool:
        """Return whether the text ends with the beginning of a control token, which the following content could
        complete."""
        return any(text[-n:] in self._beginnings for n in range(1, min(self._longest, len(text) + 1)))

    def _replaced(self, text: str, word: str) -> str:
        """Replace each control token's text with a stand-in, the word and a number; also a beginning of such a text at
        the end."""
        found = self._pattern.sub(lambda found: f"{word}{self._texts.index(found[0]):0{DIGITS}}", text)
        return f"{found}{word}{len(self._texts):0{DIGITS}}" if self._begins_one(text) else found


def absent_from(value: Any) -> str:
    """Return a word of letters and digits that occurs in no string of `value` and is unpredictable for its authors."""
    while True:
        word = f"x{secrets.token_hex(8)}"
        if not any(word in text for text in _strings(value)):
            return word


def _control_tokens(tokenizer: Any, templated: bool) -> list[Any]:
    """Raises JobFailed."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        if not getattr(tokenizer, "all_special_tokens", None):
            return []
        raise JobFailed(
            "the model's tokenizer has no tokenizer.json, and without one control tokens in the contents of messages "
            "cannot be told from those of the chat template: convert it to a fast tokenizer, or set "
            'model.special_tokens_in_content = "parse" if you trust all contents'
        )
    added = core.get_added_tokens_decoder().values()
    between = _written_around(tokenizer) if templated else ""
    return [token for token in added if token.special or (_is_markup(token.content) and token.content in between)]


def _is_markup(text: str) -> bool:
    return len(text.strip()) >= MIN_LENGTH and not text.isalnum()


def _written_around(tokenizer: Any) -> str:
    """Return the text that the chat template writes around messages; empty if it rejects such a chat."""
    try:
        return str(tokenizer.apply_chat_template(NEUTRAL, tokenize=False, add_generation_prompt=False))
    except Exception:  # noqa: BLE001 - a template is the model's code: with any exception, it reveals nothing
        return ""


def _renamed(tokenizer: Any, texts: list[str]) -> Renamed:
    """Raises JobFailed for a tokenizer of parts that cannot be copied."""
    core = tokenizer.backend_tokenizer
    try:
        said = orjson.loads(core.to_str())
        prefix = absent_from(core.to_str())
        names = {text: f"{prefix}{number:0{DIGITS}}" for number, text in enumerate(texts)}
        for token in said["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        said |= {"truncation": None, "padding": None, "post_processor": None}
        _rename_model(said["model"], names)
        copy = Tokenizer.from_str(orjson.dumps(said).decode())
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        raise _uncopied(str(error)) from None
    if moved := [text for text, name in names.items() if copy.token_to_id(name) != core.token_to_id(text)]:
        raise _uncopied(f"{moved[0]} gets another id")
    return Renamed(copy, prefix, names)


def _rename_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename entries in the vocabulary of a tokenizer's model, so that no text is ever looked up as a control token
    there."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if _merged(pair) not in names]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def _merged(pair: str | list[str]) -> str:
    return pair.replace(" ", "", 1) if isinstance(pair, str) else "".join(pair)


def _uncopied(why: str) -> JobFailed:
    return JobFailed(
        f"the model's tokenizer cannot keep control tokens in the contents of messages apart: {why}. Set "
        'model.special_tokens_in_content = "parse" if you trust all contents'
    )


def _pattern(tokens: list[Any]) -> str:
    """Finds the longest of those that begin at a place."""
    alone = [rf"(?<!\w){re.escape(token.content)}(?!\w)" for token in tokens if token.single_word]
    return "|".join([*alone, _any_of([token.content for token in tokens if not token.single_word])])


def _any_of(texts: list[str]) -> str:
    """Return a regular expression with common prefixes merged, so that matching is linear regardless of the number of
    texts."""
    rests: dict[str, list[str]] = {}
    for text in filter(None, texts):
        rests.setdefault(text[0], []).append(text[1:])
    branches = "|".join(re.escape(first) + _any_of(rest) for first, rest in rests.items())
    return f"(?:{branches}){'?' if '' in texts else ''}" if rests else ""


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _strings(inner)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy, with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(each, change) for each in value]
    return value
