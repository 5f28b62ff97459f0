"""Checks a spec's model and rows for `validate`, before any worker loads them: on the server with its files, or on the
client with local ones. Blocking.

Checks that are impossible here are reported as `not looked at: ...`, never omitted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

from opentinker.shared.api_types import Check
from opentinker.shared.data.dataset import Source, open_rows, sources
from opentinker.shared.data.jsonl import RowError, lines, row_of, rows_path
from opentinker.shared.data.model_families import read_config, unsupported_family
from opentinker.shared.data.model_files import code_in, pickled_in, unloadable
from opentinker.shared.durable_files import local_path, not_on_hub
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.data import JSONL, DataSpec, NoFormat, format_of
from opentinker.shared.types.core import Message
from opentinker.shared.types.errors import OpenTinkerError, plural

if TYPE_CHECKING:
    from opentinker.shared.data.control_tokens import ControlTokens
    from opentinker.shared.data.light_tokenizer import LightTokenizer

NOT_LOOKED_AT = "not looked at: "
ROWS = 1000
"""So many of a data set are looked at."""


def check(what: str, found: str, result: Literal["ok", "note", "bad"] = "ok", hint: str = "") -> Check:
    return {"what": what, "found": found, "result": result, "hint": hint}


def loads_weights(spec: JobSpec) -> bool:
    """Simulated engines and learners need a tokenizer alone."""
    trains = spec.kind not in ("inference", "eval") and spec.train.learner == "torch"
    return trains or is_served(spec)


def is_served(spec: JobSpec) -> bool:
    """vLLM loads its model."""
    return spec.kind in ("rl", "inference", "eval", "tinker") and spec.rollout.engine == "vllm"


def mistake_in(path: Path, weights: bool) -> str | None:
    """Return why a job cannot use the model at this path; with `weights`, check its weight files too."""
    if not path.is_dir():
        what = "is a file" if path.exists() else f"does not exist on the server ({path.absolute()})"
        start = "" if path.is_absolute() else f"; relative paths begin at {Path.cwd()}"
        return f"{what}; give a directory with config.json and safetensors, or a hub id{start}"
    if not (path / "config.json").is_file():
        return "has no config.json: it is not a Hugging Face model directory"
    return unloadable(path) if weights else code_in(path) or pickled_in(path)


def model(spec: JobSpec) -> Check:
    base, weights = spec.model.base, loads_weights(spec)
    path = local_path(base)
    if path is None:
        if why := not_on_hub(base):
            return check("model", why, "bad", "model.base must be a directory with config.json, or a hub id")
        hint = "the worker that loads it fetches it, and looks at it then"
        return check("model", f"{NOT_LOOKED_AT}{base} is of a hub", "note", hint)
    try:
        if why := mistake_in(path, weights):
            hint = "model.base must be a directory with config.json and safetensors, or a hub id"
            return check("model", f"{base} {why}", "bad", hint)
        if weights and (why := unsupported_family(read_config(path), served=is_served(spec))):
            return check("model", f"{base} {why}", "bad", "docs/environments/images.md says which models see here")
        config = orjson.loads((path / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        return check("model", f"{base}: {error}", "bad", "take a whole model directory that this process may read")
    kind = ", ".join(map(str, config.get("architectures") or [])) or str(config.get("model_type", "no architecture"))
    files = f"{plural(len(list(path.glob('*.safetensors'))), 'weight file')}" if weights else "no weights are needed"
    return check("model", f"{kind}, {files}, in {base}")


def prompt(spec: JobSpec, messages: Sequence[Message]) -> Check:
    """Check that there is a tokenizer with a chat template, which renders the first messages of the environment.
    Reading a large one holds up all threads of the process: not for services."""
    path = local_path(spec.model.base)
    if path is None or not (path / "config.json").is_file():
        return check("prompt", f"{NOT_LOOKED_AT}the tokenizer of {spec.model.base} is not on this machine", "note")
    try:
        from opentinker.shared.data.control_tokens import ControlTokens
        from opentinker.shared.data.light_tokenizer import LightTokenizer
    except ImportError as error:
        hint = "validate --here on a machine with the model and pip install tokenizers jinja2 looks at it"
        return check("prompt", f"{NOT_LOOKED_AT}{error.name} is not installed here", "note", hint)
    if not (path / "tokenizer.json").exists() and spec.rollout.engine == "vllm":
        found = f"{NOT_LOOKED_AT}{spec.model.base} has no tokenizer.json"
        return check("prompt", found, "note", "its tokenizer is read by the worker that loads it")
    try:
        loaded = LightTokenizer(path)
        templated = spec.model.chat_template == "model"
        control = ControlTokens(loaded, spec.model.special_tokens_in_content, templated=templated)
    except OpenTinkerError as error:
        return check("tokenizer", str(error), "bad", "take a model directory with tokenizer.json")
    return _rendered(spec, loaded, control, messages)


def _rendered(spec: JobSpec, loaded: LightTokenizer, control: ControlTokens, messages: Sequence[Message]) -> Check:
    from jinja2 import TemplateSyntaxError

    plain = spec.model.chat_template == "plain"
    if not plain and not loaded.chat_template:
        hint = 'use a tokenizer that has one, or model.chat_template = "plain"'
        return check("chat template", f"{spec.model.base} has none", "bad", hint)
    shown = list(messages) or [Message(role="user", content="Hello.")]
    chat, word = control.defuse([{"role": said.role, "content": said.text} for said in shown])
    try:
        text = (
            "".join(said["content"] for said in chat)
            if plain
            else loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        )
    except TemplateSyntaxError as error:
        if spec.rollout.engine != "vllm":
            return check("chat template", f"cannot be read: {error}", "bad", "the simulated engine needs a plainer one")
        found = f"{NOT_LOOKED_AT}the chat template says what is not known here: {error}"
        return check("prompt", found, "note", "the worker that loads the model looks at it")
    except Exception as error:  # noqa: BLE001 - a template is the model's code: any exception is its answer
        roles = ", ".join(said["role"] for said in chat)
        return check("chat template", f"refuses messages of {roles}: {error}", "bad", "take one for these roles")
    count, room = len(control.encode(text, word)), spec.rollout.context_length
    if room is not None and count >= room:
        return check("prompt", f"{count} tokens", "bad", f"raise rollout.context_length, which is {room}")
    return check("prompt", f"{count} tokens" + (f" of {room}" if room else ""))


def rows(spec: JobSpec, *, here: bool) -> list[Check]:
    """The first of them. `here`: tables are loaded, and data sets fetched from a hub, as the trainer does."""
    if spec.data is None:
        return []
    return [_rows(spec, spec.data, source, here) for source in sources(spec.data)]


def _rows(spec: JobSpec, data: DataSpec, source: Source, here: bool) -> Check:
    name, path = source.path, rows_path(source.path)
    plain = path is not None and path.is_file() and path.name.endswith(JSONL)
    if not (plain or here):
        what = "is of a hub" if path is None else f"is read whole: only {', '.join(JSONL)} are looked at by a server"
        return check("rows", f"{NOT_LOOKED_AT}{name} {what}", "note", "the trainer looks at every row before it begins")
    count, at = 0, name
    try:
        found = _lines(path) if plain and path is not None else open_rows(*source)
        for place, row in itertools.islice(found, ROWS):
            at = place
            format_of(row, spec.kind, data)
            count += 1
        if plain and source.split is not None:
            raise RowError(f"split = {source.split!r}: {name} has no splits")
        if not count:
            raise RowError("there are none")
    except (RowError, NoFormat, OSError) as error:
        return check("rows", f"{at}: {error}", "bad", "see data.path and the names of columns in [data]")
    return check("rows", f"{count} rows of {name} are of a format" + (", the first ones" if count == ROWS else ""))


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in lines(path):
        yield f"{path}, line {number}", row_of(path, number, line)
