"""Seats that an OpenAI-compatible model behind a URL plays: `seats.NAME = { url = "https://...", model = "..." }`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from opentinker.shared.security.egress import Egress, EgressRefused
from opentinker.shared.spec.base import Count, SpecPart
from opentinker.shared.types.mistakes import fill, mistake

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec, SeatSpec

KEY_NAME = re.compile("[a-z][a-z0-9_]{0,31}")
DEFAULTS: dict[str, Any] = {"timeout_s": 60.0, "answer_tokens": 1024, "tokens_field": "max_tokens", "concurrency": 64}
MODEL_NAME_CHARACTERS = 200


class UrlSettings(SpecPart):
    """Settings of a seat with a `url`; other players have none of them."""

    key: str | None = None
    """url: name of a key that the operator keeps for it (setting model_keys_file). Never the key itself: specs are
    stored and shown."""
    timeout_s: Annotated[float, Field(ge=1.0, le=3600.0)] | None = None
    """url: time limit of one try, from the connection to the last byte of the answer; default 60. A try that fails is
    repeated twice; then the episode fails."""
    answer_tokens: Annotated[int, Field(gt=0, le=131_072)] | None = None
    """url: tokens of one answer, as the server counts them; default 1024. rollout.max_tokens does not count them."""
    tokens_field: Literal["max_tokens", "max_completion_tokens"] | None = None
    """url: the field of a request with that number; default `max_tokens`. Some servers know only the other one."""
    temperature: Annotated[float, Field(ge=0.0, le=10.0)] | None = None
    """url: sent with each request; default: the server's own."""
    concurrency: Annotated[Count, Field(le=4096)] | None = None
    """url: concurrent requests of each rollout worker; others wait. Default 64."""

    @field_validator("key")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        if value is not None and not KEY_NAME.fullmatch(value):
            raise ValueError("must be the name of a key that the operator keeps, e.g. 'lab'; never the key itself")
        return value


def checked_url(url: str) -> str:
    """Return the URL without a slash at its end. Raises ValueError, saying why requests cannot go there."""
    try:
        parts = Egress().split(url)
    except EgressRefused as error:
        raise ValueError(str(error)) from None
    if parts.scheme not in ("http", "https") or "?" in url:
        raise ValueError("must be http(s)://HOST[:PORT]/PATH without a query; /chat/completions is appended")
    return url.rstrip("/")


def settle_url(seat: SeatSpec) -> list[dict[str, Any]]:
    """Fill in the defaults of a seat with a URL; return what it lacks, or what only such a seat may have."""
    if seat.url is None:
        given = [name for name in UrlSettings.model_fields if getattr(seat, name) is not None]
        return [mistake(name, getattr(seat, name), "belongs to a url") for name in given]
    fill(seat, {name: default for name, default in DEFAULTS.items() if getattr(seat, name) is None})
    if isinstance(seat.model, str) and 0 < len(seat.model) <= MODEL_NAME_CHARACTERS and seat.model.isprintable():
        return []
    problem = f"is needed with a url: the model's name at the server, up to {MODEL_NAME_CHARACTERS} characters"
    return [mistake("model", seat.model if isinstance(seat.model, str) else None, problem)]


def urls_in(seats: dict[str, SeatSpec]) -> list[SeatSpec]:
    """Return the models behind URLs that play, each once."""
    return list({player.player: player for player in seats.values() if player.url is not None}.values())


def url_mistakes(spec: JobSpec) -> list[dict[str, Any]]:
    """Return what contradicts itself between the seats with a URL, or between them and the rest of the spec."""
    found = []
    first: dict[str, SeatSpec] = {}
    for name, player in spec.seats.items():
        if player.url is not None and player != first.setdefault(str(player.player), player):
            problem = "plays another seat with other settings: the same model at the same url has the same settings"
            found.append(mistake(f"seats.{name}.model", player.model, problem))
    if first and spec.environment.tools:
        problem = f"do not go with a seat of a url ({', '.join(first)}), which cannot call them"
        found.append(mistake("environment.tools", len(spec.environment.tools), problem))
    return found
