"""`opentinker validate` where no server is asked: what can be seen of a spec's model, rows, environment from here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson

from opentinker.shared.dataset import open_rows
from opentinker.shared.errors import OpenTinkerError
from opentinker.shared.paths import local_path
from opentinker.shared.rows import RowError
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.data import NoFormat, format_of
from opentinker.shared.types import Message

if TYPE_CHECKING:
    from opentinker.services.rollout_worker.light_tokenizer import LightTokenizer

ROWS = 1000
"""So many of a data set are looked at."""
TURNS = 4
ELSEWHERE = ("served:", "upload:", "http://", "https://", "ws://", "wss://")
PROGRAMS = ("agent_program", "verifiers", "openenv", "miniwob")
"""Environments that start programs, or ask other servers."""
Check = dict[str, str]


def check(what: str, found: str, result: str = "ok", hint: str = "") -> Check:
    return {"what": what, "found": found, "result": result, "hint": hint}


async def inspect(spec: JobSpec) -> list[Check]:
    """Each check: what, found, result (ok | note | bad), hint."""
    checks = model(spec.model.base)
    messages: list[Message] = []
    if spec.environment.name:
        found, messages = await episode(spec)
        checks.append(found)
    if spec.data is not None:
        checks += [rows(spec, name) for name in (spec.data.path, spec.data.validation) if isinstance(name, str)]
    return checks + tokenizer(spec, messages)


def model(base: str) -> list[Check]:
    path = local_path(base)
    if path is None:
        return [check("model", f"{base}, of a hub", "note", "it is fetched by the worker that loads it")]
    try:
        config = orjson.loads((path / "config.json").read_bytes())
        weights = sorted(file.name for file in path.glob("*.safetensors"))
    except OSError as error:
        hint = "model.base must be a directory with config.json and safetensors, or a hub id"
        return [check("model", f"{base}: {error.strerror or error}", "bad", hint)]
    except orjson.JSONDecodeError as error:
        return [check("model", f"{base}/config.json is not JSON: {error}", "bad", "take a whole model directory")]
    kind = ", ".join(map(str, config.get("architectures") or [])) or str(config.get("model_type", "no architecture"))
    if not weights:
        return [check("model", f"{base} has no *.safetensors", "bad", "weights of other formats are never loaded")]
    return [check("model", f"{kind}, {len(weights)} files of weights, in {base}")]


def tokenizer(spec: JobSpec, messages: Sequence[Message]) -> list[Check]:
    """Of a model on this machine: that it has a chat template, which renders what the environment says first."""
    path = local_path(spec.model.base)
    if path is None or not (path / "config.json").is_file():
        return []
    try:
        from opentinker.services.rollout_worker.light_tokenizer import LightTokenizer
    except ImportError as error:
        return [check("tokenizer", "not looked at", "note", f"{error.name} is not installed here")]
    try:
        loaded = LightTokenizer(path)
    except OpenTinkerError as error:
        return [check("tokenizer", str(error), "bad", "take a model directory with tokenizer.json")]
    return [_prompt(spec, loaded, messages)]


def _prompt(spec: JobSpec, loaded: LightTokenizer, messages: Sequence[Message]) -> Check:
    plain = spec.model.chat_template == "plain"
    if not plain and not loaded.chat_template:
        hint = 'use a tokenizer that has one, or model.chat_template = "plain"'
        return check("chat template", f"{spec.model.base} has none", "bad", hint)
    shown = list(messages) or [Message(role="user", content="Hello.")]
    chat = [{"role": said.role, "content": said.text} for said in shown]
    try:
        text = (
            "".join(said["content"] for said in chat)
            if plain
            else loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        )
    except Exception as error:  # noqa: BLE001 - a template is the model's code: whatever it raises is its answer
        roles = ", ".join(said["role"] for said in chat)
        return check("chat template", f"refuses messages of {roles}: {error}", "bad", "take one for these roles")
    count, room = len(loaded.encode(text)), spec.rollout.context_length
    if room is not None and count >= room:
        return check("prompt", f"{count} tokens", "bad", f"raise rollout.context_length, which is {room}")
    return check("prompt", f"{count} tokens" + (f" of {room}" if room else ""))


def rows(spec: JobSpec, name: str) -> Check:
    assert spec.data is not None
    count, at = 0, name
    try:
        for place, row in itertools.islice(open_rows(name, spec.data.split, "train", spec.data.subset), ROWS):
            at = place
            format_of(row, spec.kind, spec.data)
            count += 1
    except (RowError, NoFormat, OSError) as error:
        return check("rows", f"{at}: {error}", "bad", "see data.path and the names of columns in [data]")
    return check("rows", f"{count} rows of {name} are of a format" + (", the first ones" if count == ROWS else ""))


async def episode(spec: JobSpec) -> tuple[Check, list[Message]]:
    """The first start state, a few guesses."""
    from opentinker.trial import Guessing, play

    name = spec.environment.name
    if name.startswith(ELSEWHERE) or name in PROGRAMS or spec.environment.isolation == "sandbox":
        return check("episode", f"{name} is not played here", "note", "validate on a server plays it: --url"), []
    tried = await play(name, spec.environment.config, Guessing(0), row=0, seed=0, turns=TURNS)
    if tried.failure:
        return check("episode", tried.failure, "bad", f"opentinker env check {name} plays it alone"), []
    rewards = ", ".join(f"{reward:g}" for reward in tried.rewards.values())
    first = tried.replies[0].messages
    return check("episode", f"{len(first)} messages, {len(tried.said)} turns of guessing, reward {rewards or 0}"), first
