"""Keys for models behind URLs that play seats (`seats.NAME.key`). The operator keeps them in a file, the setting
`model_keys_file`; a spec names them.

    [lab]
    key = "sk-..."                          # sent as `Authorization: Bearer ...`
    url = "https://models.lab.example/v1"   # to this URL and no other: jobs name URLs
    tenants = ["default"]                   # whose jobs may use it; "*": all
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opentinker.shared.types.errors import SpecError

SETTING = "model_keys_file"
MAX_BYTES = 1024**2
MODEL_KEY_SERVICES = ("scheduler", "rollout-worker")
"""Services that read the file; no other may need to."""


class ModelKey(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    key: Annotated[str, Field(pattern=r"^[!-~]{8,4096}$", repr=False)]
    url: Annotated[str, Field(pattern=r"^https?://[^\s?#@]+$")]
    tenants: Annotated[list[str], Field(min_length=1)]

    def problem(self, url: str, tenant: str) -> str:
        """Return why a job of the tenant may not send the key to this URL; empty if it may."""
        if not {tenant, "*"} & set(self.tenants):
            return NO_KEY
        return "" if url.rstrip("/") == self.url.rstrip("/") else f"belongs to {self.url}, and is sent nowhere else"


NO_KEY = "is no key that your jobs may use here: the operator names them in model_keys_file"
ModelKeys = Mapping[str, ModelKey]


def read_model_keys(path: Path | None) -> dict[str, ModelKey]:
    """Return the keys by name; none without a file. Blocking. Raises SpecError, without anything of the contents."""
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        found = tomllib.loads(data.decode()) if len(data) <= MAX_BYTES else None
        if found is None:
            raise _wrong(path, f"must hold {MAX_BYTES:,} bytes at most")
        return {name: ModelKey.model_validate(key) for name, key in found.items()}
    except OSError as error:
        raise _wrong(path, str(error)) from None
    except ValidationError as error:
        places = ", ".join(sorted({".".join(map(str, item["loc"])) for item in error.errors(include_input=False)}))
        problem = f"each [NAME] must have key, url and a list of tenants, and nothing else; wrong: {places}"
        raise _wrong(path, problem) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _wrong(path, f"is no TOML: {error}") from None


def _wrong(path: Path, problem: str) -> SpecError:
    return SpecError.of(SETTING, str(path), problem)


def key_problem(keys: ModelKeys, name: str, url: str, tenant: str) -> str:
    """Return why a job of the tenant may not send the key of this name to this URL; empty if it may. Keys of other
    tenants look like missing ones."""
    return keys[name].problem(url, tenant) if name in keys else NO_KEY
