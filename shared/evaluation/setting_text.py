"""Describes the setting of an evaluation, which decides what its results may be compared with: environment, config and
tools, who is evaluated against whom, start states, sampling; or the rows of [data] and how they become tokens. Results
are compared where the texts are equal. Settings with a default are named where they differ from it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from opentinker.shared.spec.base import SpecPart
from opentinker.shared.spec.evaluation import EvaluationSpec
from opentinker.shared.spec.rollout import EnvironmentSpec, RolloutSpec

MAX_CHARACTERS = 200
"""Longer texts end with a digest of the whole."""
DIGEST_CHARACTERS = 8
PLAYERS = ("policy", "bot", "frozen", "pool")
EPISODE_LIMITS = {
    "max_tokens_per_turn": "{} tokens per turn",
    "max_turns": "{} turns",
    "context_length": "context {}",
    "stop": "stop {}",
}
"""Settings of [rollout] that evaluations share with training, and their words."""
START_STATES = {"episodes": "{} episodes", "seed": "seed {}"}
WORD = re.compile(r"(?!(true|false|null)$)[A-Za-z][\w./@-]*")
Table = Mapping[str, Any]


def setting_of(spec: Table, policy: str = "") -> str:
    """Return the setting of a job's evaluations, e.g. `gsm8k split=test; temperature 0.8; 512 tokens; 8 samples`.

    `spec`: as stored; of a job of kind eval, or of one that is evaluated while it trains. `policy`: which of its
    [policies] is evaluated."""
    if spec.get("data"):
        return _short("; ".join(_rows(spec["data"], spec.get("train") or {})))
    exam = (spec.get("evaluation") if spec.get("kind") == "eval" else spec.get("validation")) or {}
    environment = spec.get("environment") or {}
    config = {**(environment.get("config") or {}), **(exam.get("config") or {})}
    named = [f"{name}={_value(value)}" for name, value in sorted(config.items())]
    parts = [" ".join([environment.get("name") or "", *named]), *_tools(environment), *_players(spec, exam, policy)]
    return _short("; ".join([*parts, *_sampling(exam, spec.get("rollout") or {})]))


def _tools(environment: Table) -> Iterator[str]:
    if tools := environment.get("tools"):
        yield f"tools {_digest(_value(tools))}"
    yield from _changed(environment, EnvironmentSpec, {"tool_turns": "{} tool turns"})


def _players(spec: Table, exam: Table, policy: str) -> Iterator[str]:
    if policy:
        yield f"policy {policy}"
    if against := exam.get("against"):
        yield f"against {', '.join(_player(one) for one in against)}"
    elif seats := spec.get("seats"):
        yield f"seats {', '.join(f'{seat}={_player(one)}' for seat, one in sorted(seats.items()))}"


def _player(one: Table) -> str:
    known = next((one[name] for name in PLAYERS if one.get(name)), None)
    return str(known or one.get("name") or f"{one.get('model')} at {one.get('url')}")


def _sampling(exam: Table, rollout: Table) -> Iterator[str]:
    if not exam:  # evaluated by other means than [validation]
        return
    temperature = exam.get("temperature", 0.0)
    yield f"temperature {temperature:g}" if temperature else "greedy"
    for name, usual in (("top_p", 1.0), ("top_k", 0)):
        if (value := exam.get(name, usual)) != usual:
            yield f"{name} {value:g}"
    yield f"{exam.get('max_tokens') or rollout.get('max_tokens')} tokens"
    yield from _changed(rollout, RolloutSpec, EPISODE_LIMITS)
    if (samples := exam.get("samples", 1)) > 1:
        yield f"{samples} samples"
    if (solved_at := exam.get("solved_at", 1.0)) != 1.0:
        yield f"solved at {solved_at:g}"
    yield from _changed(exam, EvaluationSpec, START_STATES)


def _rows(data: Table, train: Table) -> Iterator[str]:
    """Rows on which sft and dpo jobs are evaluated."""
    path, subset, validation = data.get("path"), data.get("subset"), data.get("validation")
    if isinstance(validation, float):
        yield f"{validation:g} of the rows of {_source(path, subset, data.get('split'))}"
        yield f"seed {train.get('seed', 0)}"
    else:
        own = subset if validation == path else None  # as `shared.data.dataset.sources` reads them
        yield f"rows of {_source(validation, own, data.get('validation_split'))}"
    longer = data.get("longer")
    if (length := data.get("max_length")) is not None:
        yield f"at most {length} tokens, longer ones: {longer}"
    elif longer in ("drop", "cut"):
        yield f"longer rows: {longer}"
    if format := data.get("format"):
        yield f"format {format}"
    if columns := data.get("columns"):
        yield f"columns {_digest(_value(columns))}"
    if data.get("mask") == "assistant":
        yield "mask assistant"


def _source(path: Any, subset: Any, split: Any) -> str:
    named = [f"{name}={_value(value)}" for name, value in (("subset", subset), ("split", split)) if value]
    return " ".join([str(path), *named])


def _changed(table: Table, part: type[SpecPart], words: Mapping[str, str]) -> Iterator[str]:
    """Yield the words of each setting that is not the default of its part of the spec."""
    for name, text in words.items():
        usual = part.model_fields[name].default
        if (value := table.get(name, usual)) != usual:
            yield text.format(_value(value))


def _value(value: Any) -> str:
    if isinstance(value, str) and WORD.fullmatch(value):
        return value
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _short(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[: MAX_CHARACTERS - DIGEST_CHARACTERS - 2]}… {_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
