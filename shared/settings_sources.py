"""Reads settings: defaults, then a TOML file, then `OPENTINKER_*` environment variables."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from opentinker.shared.config import Settings
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.mistakes import mistake

PREFIX = "OPENTINKER_"


def load_settings(path: str | None = None, environ: dict[str, str] | None = None) -> Settings:
    """Raises SpecError naming every wrong setting and where it came from."""
    environ = dict(os.environ) if environ is None else environ
    path = path or environ.get(PREFIX + "CONFIG")
    values, origin = _named(path, environ)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SpecError(
            [
                mistake(
                    ".".join(map(str, item["loc"])),
                    item.get("input"),
                    item["msg"].removeprefix("Value error, ") + _where(item["loc"], values, origin, path),
                )
                for item in error.errors(include_url=False)
            ]
        ) from None


def names(name: str, environ: dict[str, str]) -> bool:
    """Return whether the setting `name` is given, in the environment or in the settings file. Raises SpecError."""
    return name in _named(environ.get(PREFIX + "CONFIG"), environ)[0]


def _named(path: str | None, environ: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings as they are written, and the variables that those of the environment come from. Raises SpecError."""
    values: dict[str, Any] = {}
    if path:
        try:
            values = tomllib.loads(Path(path).read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SpecError.of("(settings file)", path, str(error)) from None
    origin = {name: variable for name in Settings.model_fields if (variable := PREFIX + name.upper()) in environ}
    return values | {name: environ[variable] for name, variable in origin.items()}, origin


def _where(loc: tuple[int | str, ...], values: dict[str, Any], origin: dict[str, str], path: str | None) -> str:
    if not loc:  # several settings together
        return ""
    name = str(loc[0])
    return f" (set in {origin.get(name, path)})" if name in values else " (its default)"
