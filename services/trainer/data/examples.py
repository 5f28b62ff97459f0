"""Rows -> training examples of sft and dpo: token sequences, one per row (sft) or two (dpo: chosen and rejected).

All rows are rendered before the first step: a row that cannot be rendered fails the job immediately, with its file,
line and field.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opentinker.services.trainer.data.chat import Chat, ChatEncoder, Tokens, Unrenderable
from opentinker.shared.data.dataset import Rows, Source, open_rows, sources
from opentinker.shared.data.jsonl import RowError
from opentinker.shared.spec import DataSpec, JobSpec
from opentinker.shared.spec.data import Format, NoFormat, format_of, renamed
from opentinker.shared.types.errors import JobFailed

DEFAULT_LENGTH = 4096
UNSUPPORTED = ("tools", "images", "image", "videos")
"""Columns that would change the meaning of a row and are not supported."""


@dataclass
class Example:
    parts: tuple[Tokens, ...]
    """(row,) for sft, (chosen, rejected) for dpo."""
    reference: tuple[float, ...] = ()
    """dpo: log-probability of each part's learned tokens under the reference, once it is known."""

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)


@dataclass
class Examples:
    train: list[Example]
    validation: list[Example]
    counts: Counter[str] = field(default_factory=Counter)
    """`rows`, `longer`, `dropped`, `cut`: totals of both sets."""
    longest: int = 0
    """Tokens of the longest row, before it is dropped or cut."""


def fingerprint(examples: Sequence[Example]) -> str:
    """Return a hash of the examples' tokens, in order."""
    hashed = hashlib.sha256()
    for example in examples:
        for tokens in example.parts:
            hashed.update(len(tokens).to_bytes(8, "little") + tokens.ids_T.tobytes() + tokens.learned_T.tobytes())
    return hashed.hexdigest()[:16]


class ExampleBuilder:
    """Builds examples from one job's rows. Raises JobFailed, with place and reason, for rows that it cannot convert."""

    def __init__(
        self, spec: JobSpec, tokenizer: Any, longest: int, check_interrupt: Callable[[], None] = lambda: None
    ) -> None:
        """`longest`: context length of the model. `check_interrupt` is called before each row, and raises to stop."""
        self._go_on = check_interrupt
        assert spec.data is not None
        self.data: DataSpec = spec.data
        self.kind = spec.kind
        self.encoder = ChatEncoder(tokenizer, spec.model.chat_template, spec.model.special_tokens_in_content)
        self.counts: Counter[str] = Counter()
        self.longest = 0
        if self.data.max_length is not None and self.data.max_length > longest:
            raise JobFailed(f"data.max_length = {self.data.max_length}: the model takes at most {longest} tokens")
        self.limit = self.data.max_length or min(longest, DEFAULT_LENGTH)

    def make(self) -> Examples:
        made, *validation = [self.all_of(_rows(source)) for source in sources(self.data)]
        return Examples(made, [example for part in validation for example in part], self.counts, self.longest)

    def all_of(self, rows: Rows) -> list[Example]:
        try:
            format = format_of(rows.columns, self.kind, self.data)
        except NoFormat as error:
            raise JobFailed(f"data.{error.field}: {error}") from None
        made, longer = [], []
        try:
            for where, row in rows:
                self._go_on()
                try:
                    _refuse_unsupported(row)
                    example = self.example(renamed(row, self.data, format), format)
                except Unrenderable as error:
                    raise JobFailed(f"data: {where}: {error}") from None
                self.counts["rows"] += 1
                tokens = max(len(part) for part in example.parts)
                self.longest = max(self.longest, tokens)
                if tokens <= self.limit:
                    made.append(example)
                    continue
                longer.append((tokens, where))
                if (shorter := self._shorter(example)) is not None:
                    made.append(shorter)
        except RowError as error:
            raise JobFailed(f"data: {error}") from None
        self._refuse_longer(longer, len(rows))
        if not made:
            raise JobFailed(f"data: all {len(rows)} rows are longer than {self.limit} tokens")
        return made

    def _shorter(self, example: Example) -> Example | None:
        """Return a row that is too long, cut to the limit; None if it is dropped or has no learned token left."""
        self.counts["longer"] += 1
        cut = tuple(Tokens(part.ids_T[: self.limit], part.learned_T[: self.limit]) for part in example.parts)
        if self.data.longer != "cut" or not all(part.learned_T.any() for part in cut):
            self.counts["dropped"] += 1
            return None
        self.counts["cut"] += 1
        return Example(cut)

    def _refuse_longer(self, longer: Sequence[tuple[int, str]], rows: int) -> None:
        if longer and self.data.longer == "refuse":
            tokens, where = max(longer)
            raise JobFailed(
                f"data: {len(longer)} of {rows} rows are longer than {self.limit} tokens, the longest has {tokens} "
                f"({where}). Raise data.max_length, or set data.longer = 'drop' or 'cut'"
            )

    # --- one row ------------------------------------------------------------------------------------------------

    def example(self, row: dict[str, Any], format: Format) -> Example:
        """Convert a row. Raises Unrenderable, naming the field."""
        match format:
            case "messages":
                chat = self._chat(row["messages"], "messages")
                if self.data.mask == "completion" and chat[-1]["role"] != "assistant":
                    raise self._wrong("messages", f"the last turn is of {chat[-1]['role']!r}, not of the assistant")
                return Example((self._encoded(chat, len(chat) - 1, "messages"),))
            case "prompt_completion":
                prompt = self._chat(row["prompt"], "prompt", "user")
                completion = self._chat(row["completion"], "completion", "assistant")
                return Example((self._completed(prompt, completion, "completion"),))
            case "preference":
                return self._pair(row)

    def _pair(self, row: dict[str, Any]) -> Example:
        chosen, rejected = (self._chat(row[name], name, "assistant") for name in ("chosen", "rejected"))
        if row["prompt"] is not None:
            prompt = self._chat(row["prompt"], "prompt", "user")
        elif isinstance(row["chosen"], str) or isinstance(row["rejected"], str):
            raise self._wrong("prompt", "is needed where chosen and rejected are texts, not lists of messages")
        else:
            alike = 0
            while alike < min(len(chosen), len(rejected)) and chosen[alike] == rejected[alike]:
                alike += 1
            prompt, chosen, rejected = chosen[:alike], chosen[alike:], rejected[alike:]
        if chosen == rejected:
            raise self._wrong("rejected", "is the same as chosen: there is no preference to learn")
        return Example((self._completed(prompt, chosen, "chosen"), self._completed(prompt, rejected, "rejected")))

    def _completed(self, prompt: Chat, completion: Chat, field: str) -> Tokens:
        if not completion or completion[-1]["role"] != "assistant":
            raise self._wrong(field, "does not end with a turn of the assistant")
        return self._encoded([*prompt, *completion], len(prompt), field)

    def _encoded(self, chat: Chat, completion: int, field: str) -> Tokens:
        """Encode a chat. `completion`: number of the first turn of the completion."""
        first = 0 if self.data.mask == "assistant" else completion
        learned = [n for n in range(first, len(chat)) if chat[n]["role"] == "assistant"]
        if not learned:
            raise self._wrong(field, "has no turn of the assistant")
        try:
            tokens = self.encoder.encode(chat, learned)
        except Unrenderable as error:
            raise self._wrong(field, str(error)) from None
        if not tokens.learned_T.any():
            raise self._wrong(field, "has no token to learn: the assistant's turns are empty")
        return tokens

    def _chat(self, value: Any, field: str, role: str = "") -> Chat:
        """Return messages for the template. `role`: role of a plain text; empty: the value must be a list."""
        name = self.data.column(field)
        if isinstance(value, str) and role:
            return [{"role": role, "content": value}]
        if not isinstance(value, list) or not value:
            wanted = "a text or a list of messages" if role else "a list of messages"
            raise Unrenderable(f"{name} must be {wanted}, it is {_describe(value)}")
        chat = []
        for number, message in enumerate(value):
            if not isinstance(message, dict):
                raise Unrenderable(
                    f"{name}[{number}] must be a message with role and content, it is {_describe(message)}"
                )
            for part in ("role", "content"):
                if not isinstance(message.get(part), str):
                    raise Unrenderable(f"{name}[{number}].{part} must be a text, it is {_describe(message.get(part))}")
            chat.append({key: part for key, part in message.items() if part is not None})
        return chat

    def _wrong(self, field: str, problem: str) -> Unrenderable:
        return Unrenderable(f"{self.data.column(field)}: {problem}")


def _rows(source: Source) -> Rows:
    try:
        return open_rows(*source)
    except RowError as error:
        raise JobFailed(f"data: {error}") from None


def _refuse_unsupported(row: dict[str, Any]) -> None:
    """Raise Unrenderable for unsupported columns. Rows of one file may differ, and an empty column is ignored."""
    if odd := [name for name in UNSUPPORTED if row.get(name)]:
        raise Unrenderable(f"{', '.join(odd)}: rows with this cannot be trained on; take it out of the data")


def _describe(value: Any) -> str:
    text = repr(value)
    return "missing" if value is None else text if len(text) <= 80 else text[:80] + "..."


def split_validation(examples: Examples, share: float, seed: int) -> Examples:
    """Split off a share of the rows as validation set: at least one, never all."""
    count = len(examples.train)
    if count < 2:
        raise JobFailed(f"data.validation = {share}: {count} row cannot be divided")
    taken = min(count - 1, max(1, round(share * count)))
    held = set(np.random.default_rng([seed, 0]).permutation(count)[:taken].tolist())
    train = [example for n, example in enumerate(examples.train) if n not in held]
    validation = [example for n, example in enumerate(examples.train) if n in held]
    return Examples(train, validation, examples.counts, examples.longest)


def load_examples(spec: JobSpec, check_interrupt: Callable[[], None] = lambda: None) -> Examples:
    """Load all examples that a job trains and validates on. Blocking while it tokenises. Raises JobFailed, and any
    exception of `check_interrupt`, which is called before each row."""
    from opentinker.shared.nn.models import check_window, config_of, load_tokenizer, longest_context

    assert spec.data is not None
    maker = ExampleBuilder(spec, load_tokenizer(spec.model.base), longest_context(spec.model.base), check_interrupt)
    examples = maker.make()
    longest = min(examples.longest, maker.limit)
    check_window(spec.model.base, config_of(spec.model.base), longest, "data.max_length")
    if isinstance(spec.data.validation, float):
        examples = split_validation(examples, spec.data.validation, spec.train.seed)
    return examples


def places(start: int, count: int, rows: int, *, seed: int, shuffle: bool) -> list[int]:
    """Return rows number `start` to `start + count - 1` of an endless series of epochs: each has every row once.

    Epoch e is a permutation drawn from (seed, e) alone, so that a position determines the order.
    """
    found: list[int] = []
    position, end = start, start + count
    while position < end:
        epoch, first = divmod(position, rows)
        last = min(rows, first + end - position)
        order = np.random.default_rng([seed, 1 + epoch]).permutation(rows) if shuffle else np.arange(rows)
        found += order[first:last].tolist()
        position += last - first
    return found
