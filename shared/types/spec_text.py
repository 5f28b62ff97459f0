"""Job specs as text: a file or a request becomes plain data. Nothing is validated here (`shared/spec`)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import orjson

from opentinker.shared.types.errors import SpecError


def load_spec(path: Path) -> Any:
    """Plain data of a .toml or .json file. Raises SpecError when it cannot be read; `parse_spec` validates it."""
    try:
        return parse_text(path.read_bytes().decode(), path.suffix)
    except OSError as error:
        raise SpecError.of(str(path), None, f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise SpecError.of(str(path), None, f"is not {kind}: {error}") from None


def parse_text(text: str, suffix: str) -> Any:
    """Plain data of a spec's text: JSON where the file ends in .json, else TOML. Raises ValueError with the place."""
    try:
        return orjson.loads(text) if suffix == ".json" else tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
