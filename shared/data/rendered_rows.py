"""Renders rows as the policy gets them, for people to read, in a separate process with limits on memory and time.

    python -m opentinker.shared.data.rendered_rows < RowsToRender > RenderedRows

Reading a large tokenizer or data set would stop all threads of a service, and a chat template is code of the model. The
text and the tokens of a prompt are those of `services/rollout_worker/renderer.py`; images count as the text in their
place. A model whose tokenizer is not on this machine leaves prompts as plain messages, with the reason.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import structlog

from opentinker.shared.data.chat_format import as_chat, as_function
from opentinker.shared.data.dataset import open_rows, sources
from opentinker.shared.data.jsonl import RowError, rows_path
from opentinker.shared.durable_files import local_path
from opentinker.shared.spec.data import DataSpec, Format, NoFormat, format_of, renamed
from opentinker.shared.types import codec
from opentinker.shared.types.core import Message, Tool
from opentinker.shared.types.env_protocol import EnvRow
from opentinker.shared.types.errors import JobFailed

if TYPE_CHECKING:
    from opentinker.shared.data.light_tokenizer import LightTokenizer

GIB = 1 << 30
MEMORY = 4 * GIB
"""Address space of the process; tokenizers and tables map more than they use."""
CPU_S = 30
"""Processor time of the process."""
CHARACTERS = 20_000
"""Characters of a rendered text that are shown."""
MAX_SEARCHED = 100_000
"""Rows of a file, from the first, that are searched."""
STDERR_CHARACTERS = 2000
PASSED = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Environment variables of the process: none with a secret, because a chat template is code of the model."""
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
ANSWERS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("completion",),
    "preference": ("chosen", "rejected"),
}

log = structlog.get_logger()


class FileRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that a job learns from: a page of them."""

    kind: str
    """sft | dpo"""
    data: dict[str, Any]
    """`data` of the spec."""
    text: str
    """Only rows that contain it."""
    offset: int
    limit: int


class RowsToRender(msgspec.Struct, frozen=True, kw_only=True):
    base: str
    chat_template: str
    special_tokens: Literal["split", "parse"]
    tools: list[Tool] = []
    rows: list[EnvRow] = []
    """Rows of an environment."""
    file: FileRows | None = None
    """In place of `rows`."""


class RenderedRow(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    place: str
    prompt: str
    """The rendering, at most CHARACTERS of it."""
    left_out: int = 0
    """Characters after those."""
    tokens: int | None = None
    images: int = 0
    answers: dict[str, str] = {}
    """Turns that are learned, by column."""
    problem: str = ""


class RenderedRows(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[RenderedRow] = []
    count: int = 0
    """Rows of the file."""
    found: int = 0
    """Those that contain the text."""
    searched: int = 0
    note: str = ""
    """Why prompts are plain messages without a number of tokens."""
    problem: str = ""
    """Why there are no rows."""


def render(asked: RowsToRender, within_s: float = 60.0) -> RenderedRows:
    """Render in a separate process. Blocking; never raises because of the model or the rows."""
    # -P: nothing in the working directory is taken for a package of ours
    argv = [sys.executable, "-P", "-m", __name__]
    env = {name: os.environ[name] for name in PASSED if name in os.environ} | ONE_THREAD
    try:
        ended = subprocess.run(
            argv, input=codec.encode(asked), capture_output=True, timeout=within_s, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        return RenderedRows(problem=f"the rows could not be rendered within {within_s:g} s; ask for fewer with limit")
    if ended.returncode != 0:
        said = ended.stderr.decode(errors="replace")[-STDERR_CHARACTERS:]
        log.warning("rows_not_rendered", returncode=ended.returncode, stderr=said)
        bounds = f"{MEMORY // GIB} GiB of memory and {CPU_S} s of processor time"
        return RenderedRows(problem=f"the rows cannot be rendered with {bounds}; ask for fewer with limit")
    return codec.decode(RenderedRows, ended.stdout)


# --- in the process -------------------------------------------------------------------------------------------------


class PromptText:
    """A model's chat template and tokenizer. Raises JobFailed if it has none that can be used."""

    def __init__(self, tokenizer: LightTokenizer, asked: RowsToRender) -> None:
        from opentinker.shared.data.control_tokens import ControlTokens

        self._tokenizer, self._plain = tokenizer, asked.chat_template == "plain"
        if not self._plain and not tokenizer.chat_template:
            raise JobFailed("the model's tokenizer has no chat template")
        self._control = ControlTokens(tokenizer, asked.special_tokens, templated=not self._plain)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, int]:
        """Return the text and the number of its tokens."""
        given = ([as_chat(message) for message in messages], [as_function(tool) for tool in tools])
        (chat, offered), word = self._control.defuse(given)
        text = self._text(chat, offered)
        return self._text(*given) if word else text, len(self._control.encode(text, word))

    def _text(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        if self._plain:
            return "".join(message["content"] for message in chat)
        offered: dict[str, Any] = {"tools": tools} if tools else {}
        return self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **offered)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = codec.decode(RowsToRender, sys.stdin.buffer.read())
    sys.stdout.buffer.write(codec.encode(rendered(asked)))


def rendered(asked: RowsToRender) -> RenderedRows:
    try:
        prompts, note = load(asked), ""
    except JobFailed as error:
        prompts, note = None, str(error)
    if asked.file is None:
        return RenderedRows(rows=[_of_environment(row, prompts, asked.tools) for row in asked.rows], note=note)
    try:
        found = _of_file(asked.file, prompts)
    except (RowError, NoFormat) as error:
        return RenderedRows(problem=str(error))
    return msgspec.structs.replace(found, note=note)


def load(asked: RowsToRender) -> PromptText:
    """Raises JobFailed: the reason why prompts cannot be rendered here."""
    path = local_path(asked.base)
    if path is None or not path.is_dir():
        raise JobFailed(f"the tokenizer of {asked.base} is not on the server's machine")
    try:
        from opentinker.shared.data.light_tokenizer import LightTokenizer
    except ImportError as error:
        raise JobFailed(f"{error.name} is not installed on the server: pip install 'opentinker[scheduler]'") from None
    return PromptText(LightTokenizer(Path(path)), asked)


def _of_environment(row: EnvRow, prompts: PromptText | None, tools: Sequence[Tool]) -> RenderedRow:
    shown = RenderedRow(number=row.number, place=row.place, prompt="", images=row.images, problem=row.problem)
    return shown if row.problem else _with_prompt(shown, row.messages, prompts, tools)


def _with_prompt(
    row: RenderedRow, messages: Sequence[Message], prompts: PromptText | None, tools: Sequence[Tool] = ()
) -> RenderedRow:
    text, tokens, problem = "\n\n".join(f"{said.role}: {said.text}" for said in messages), None, ""
    if prompts is not None:
        try:
            text, tokens = prompts.render(messages, tools)
        except Exception as error:  # noqa: BLE001 - a template is the model's code: any exception is its answer
            problem = f"the model's chat template refused it: {error}"[:STDERR_CHARACTERS]
    return msgspec.structs.replace(
        row, prompt=text[:CHARACTERS], left_out=max(0, len(text) - CHARACTERS), tokens=tokens, problem=problem
    )


def _of_file(asked: FileRows, prompts: PromptText | None) -> RenderedRows:
    """Raises RowError, NoFormat."""
    data = DataSpec.model_validate(asked.data)
    if rows_path(data.path) is None:
        raise RowError(
            f"{data.path} is a data set of a hub, which the trainer alone reads: save it to a file to see it here"
        )
    rows = open_rows(*sources(data)[0])
    format = format_of(rows.columns, asked.kind, data)
    wanted, found, searched = asked.text.casefold(), 0, 0
    page: list[RenderedRow] = []
    for number, (place, row) in enumerate(rows):
        if wanted:
            if number == MAX_SEARCHED:
                break
            searched += 1
        elif len(page) == asked.limit:
            break
        if not wanted or any(wanted in text.casefold() for text in _texts(row)):
            found += 1
            if found > asked.offset and len(page) < asked.limit:
                page.append(_of_row(number, place, renamed(row, data, format), format, prompts))
    return RenderedRows(rows=page, count=len(rows), found=found if wanted else len(rows), searched=searched)


def _texts(value: Any) -> Iterable[str]:
    """Yield every text in a row."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _of_row(number: int, place: str, row: dict[str, Any], format: Format, prompts: PromptText | None) -> RenderedRow:
    """Return the prompt of a row, and the turns that are learned: of `messages` the last one."""
    shown = RenderedRow(number=number, place=place, prompt="")
    try:
        chats = {name: _chat(row.get(name), "assistant") for name in ANSWERS[format]}
        if format == "messages":
            messages = chats["messages"]
            chats = {"messages": messages[-1:]}
            prompt = messages[:-1]
        else:
            prompt = _chat(row.get("prompt"), "user")
    except ValueError as error:
        return msgspec.structs.replace(shown, problem=str(error))
    answers = {name: "\n\n".join(said.text for said in chat)[:CHARACTERS] for name, chat in chats.items()}
    return msgspec.structs.replace(_with_prompt(shown, prompt, prompts if prompt else None), answers=answers)


def _chat(value: Any, role: str) -> list[Message]:
    """Return a text, or messages of a row. Raises ValueError."""
    if value is None or isinstance(value, str):
        return [Message(role=role, content=value)] if value else []
    if not isinstance(value, list) or not all(
        isinstance(said, dict) and isinstance(said.get("role"), str) and isinstance(said.get("content"), str)
        for said in value
    ):
        raise ValueError("the row is neither a text nor a list of messages with role and content")
    return [Message(role=said["role"], content=said["content"]) for said in value]


if __name__ == "__main__":
    main()
