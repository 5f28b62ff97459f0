"""Describes the setting of an evaluation, which decides what its results may be compared with: environment and config,
the players of the other seats, sampling; or the rows of [data]. Evaluations with equal texts have equal settings."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

MAX_CHARACTERS = 200
"""Longer texts end with a digest of the whole."""
PLAYERS = ("policy", "bot", "frozen", "pool")
WORD = re.compile(r"(?!(true|false|null)$)[A-Za-z][\w./@-]*")
Table = Mapping[str, Any]


def setting_of(spec: Table) -> str:
    """Return the setting of a job's evaluations, e.g. `gsm8k split=test; temperature 0.8; 512 tokens; 8 samples`.

    `spec`: as stored; of a job of kind eval, or of one that is evaluated while it trains."""
    if spec.get("data"):
        return _short("; ".join(_rows(spec["data"], spec.get("train") or {})))
    exam = (spec.get("evaluation") if spec.get("kind") == "eval" else spec.get("validation")) or {}
    environment = spec.get("environment") or {}
    config = {**(environment.get("config") or {}), **(exam.get("config") or {})}
    named = [f"{name}={_value(value)}" for name, value in sorted(config.items())]
    parts = [" ".join([environment.get("name") or "", *named]), *_players(spec, exam)]
    return _short("; ".join([*parts, *_sampling(exam, spec.get("rollout") or {})]))


def _players(spec: Table, exam: Table) -> Iterator[str]:
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
    if (samples := exam.get("samples", 1)) > 1:
        yield f"{samples} samples"
    if (solved_at := exam.get("solved_at", 1.0)) != 1.0:
        yield f"solved at {solved_at:g}"


def _rows(data: Table, train: Table) -> Iterator[str]:
    """Rows on which sft and dpo jobs are evaluated."""
    validation = data.get("validation")
    whole = " ".join(str(part) for part in (data.get("path"), data.get("subset"), data.get("split")) if part)
    if isinstance(validation, float):
        yield f"{validation:g} of the rows of {whole}"
        yield f"seed {train.get('seed', 0)}"
    else:
        yield " ".join(str(part) for part in ("rows of", validation, data.get("validation_split")) if part)
    if (length := data.get("max_length")) is not None:
        yield f"at most {length} tokens, longer ones: {data.get('longer')}"


def _value(value: Any) -> str:
    if isinstance(value, str) and WORD.fullmatch(value):
        return value
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _short(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[: MAX_CHARACTERS - len(digest) - 2]}… {digest}"
