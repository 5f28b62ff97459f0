"""`[seats]`: who plays which seat of a game."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from opentinker.shared.security.egress import Egress, EgressRefused
from opentinker.shared.spec.algorithm_parts import GROUP_BASELINES
from opentinker.shared.spec.base import Count, SpecPart
from opentinker.shared.spec.matches.pools import PoolName, pool_player, pools_in
from opentinker.shared.spec.matches.seat_lists import is_pattern
from opentinker.shared.spec.model import ModelSpec
from opentinker.shared.spec.start import SavedCheckpoint
from opentinker.shared.types.mistakes import (
    Mistake,
    Mistakes,
    fill,
    mistake,
    mistakes_of,
    nearest,
    right_parts,
    written,
)

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

MAX_POLICIES = 16
"""Policies, frozen checkpoints and pools of one job: at worst, each has an engine in every rollout worker."""
MAX_SEATS = 64
"""Entries of [seats]."""
PolicyName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
"""Part of directories, subjects and metric names."""
SEAT_CHARACTERS = 100
SeatName = Annotated[str, Field(min_length=1, max_length=SEAT_CHARACTERS)]
PLAYERS = ("policy", "bot", "frozen", "url", "pool")
"""Settings of a seat that name its player."""
MAX_MISTAKES = 50
"""Mistakes between [seats] and the environment that are reported."""
SHOWN_SEATS = 20
"""Seats of an environment that a mistake names."""
KEY_NAME = re.compile("[a-z][a-z0-9_]{0,31}")
URL_DEFAULTS: dict[str, Any] = {
    "timeout_s": 60.0,
    "answer_tokens": 1024,
    "tokens_field": "max_tokens",
    "concurrency": 64,
}
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


class SeatSpec(UrlSettings):
    """The player of a seat: exactly one of policy, bot, frozen, url and pool."""

    policy: PolicyName | None = None
    """One of [policies]; `seat = "NAME"` is short for `seat = { policy = "NAME" }`."""
    bot: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """A scripted player that the environment has."""
    frozen: SavedCheckpoint | None = None
    """`JOB@STEP`, `JOB@latest`, `JOB~POLICY@STEP` or a published name: a checkpoint of your jobs, which plays and does
    not learn. The job keeps a copy of it."""
    url: Annotated[str, Field(max_length=2000)] | None = None
    """Base URL of an OpenAI-compatible server, `https://HOST/v1`: `model` there plays, over chat completions, and does
    not learn. Rollout workers connect to public addresses and to networks in env_egress_allow alone."""
    pool: PoolName | None = None
    """One of [pools]: past versions of a policy of this job, which play and do not learn."""
    model: ModelSpec | str | None = None
    """frozen: [model] of the checkpoint, which the server fills in. url: the model's name at the server, which is
    needed."""

    STAND_INS = {"url": "http://x", "frozen": "j-0123456789@1", "model": "x"}
    MAY_PLAY: ClassVar[tuple[str, ...]] = PLAYERS

    @property
    def player(self) -> str | None:
        """Name of the model that plays: a policy, a checkpoint, `MODEL@URL`, or `POOL@`; None: a bot plays."""
        if self.url is not None:
            return f"{self.model}@{self.url}"
        return pool_player(self.pool) if self.pool is not None else self.policy or self.frozen

    @property
    def is_fixed(self) -> bool:
        """Whether it always plays alike: a bot, a checkpoint or a model behind a URL."""
        return self.policy is None and self.pool is None

    @field_validator("model", mode="wrap")
    @classmethod
    def _table_or_name(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Report mistakes in a table as those of a table alone."""
        try:
            return ModelSpec.model_validate(value) if isinstance(value, dict) else handler(value)
        except ValidationError as error:
            if not isinstance(value, dict):
                raise
            raise Mistakes([one for item in error.errors() for one in mistakes_of(item, value)]) from None

    @field_validator("url")
    @classmethod
    def _reachable(cls, value: str | None) -> str | None:
        return None if value is None else checked_url(value)

    def resolve(self) -> list[Mistake]:
        if found := one_player(self, self.MAY_PLAY) or settle_url(self):
            return found
        if self.frozen is not None and isinstance(self.model, str):
            return [mistake("model", self.model, "is a table, which the server fills in: leave it out")]
        if self.model is not None and self.frozen is None and self.url is None:
            problem = "belongs to a checkpoint (frozen) or a url; a policy has its model in [policies]"
            return [mistake("model", self.model if isinstance(self.model, str) else self.model.base, problem)]
        return []


def checked_url(url: str) -> str:
    """Return the URL without a slash at its end. Raises ValueError, saying why requests cannot go there."""
    try:
        parts = Egress().split(url)
    except EgressRefused as error:
        raise ValueError(str(error)) from None
    if parts.scheme not in ("http", "https") or "?" in url:
        raise ValueError("must be http(s)://HOST[:PORT]/PATH without a query; /chat/completions is appended")
    return url.rstrip("/")


def settle_url(seat: SeatSpec) -> list[Mistake]:
    """Fill in the defaults of a seat with a URL; return what it lacks, or what only such a seat may have."""
    if seat.url is None:
        given = [name for name in UrlSettings.model_fields if getattr(seat, name) is not None]
        return [mistake(name, getattr(seat, name), "belongs to a url") for name in given]
    fill(seat, {name: default for name, default in URL_DEFAULTS.items() if getattr(seat, name) is None})
    if isinstance(seat.model, str) and 0 < len(seat.model) <= MODEL_NAME_CHARACTERS and seat.model.isprintable():
        return []
    problem = f"is needed with a url: the model's name at the server, up to {MODEL_NAME_CHARACTERS} characters"
    return [mistake("model", seat.model if isinstance(seat.model, str) else None, problem)]


def all_players(spec: JobSpec) -> dict[str, SeatSpec]:
    """Return the players of a job by the setting that names them: of its seats, then opponents of its evaluations."""
    against = spec.validation.against if spec.validation is not None else []
    seats = {f"seats.{seat}": player for seat, player in spec.seats.items()}
    return seats | {f"validation.against.{place}": opponent for place, opponent in enumerate(against)}


def urls_in(players: Mapping[str, SeatSpec]) -> list[SeatSpec]:
    """Return the models behind URLs that play, each once."""
    return list({player.player: player for player in players.values() if player.url is not None}.values())


def url_mistakes(spec: JobSpec) -> list[Mistake]:
    """Return what contradicts itself between the players with a URL, or between them and the rest of the spec."""
    found = []
    first: dict[str, dict[str, Any]] = {}
    for name, player in all_players(spec).items():
        if player.url is not None and (own := player.model_dump(exclude={"name"})) != first.setdefault(
            str(player.player), own
        ):
            problem = "also plays with other settings: the same model at the same url has the same settings"
            found.append(mistake(f"{name}.model", player.model, problem))
    if first and spec.environment.tools:
        problem = f"do not go with a player behind a url ({', '.join(first)}), which cannot call them"
        found.append(mistake("environment.tools", len(spec.environment.tools), problem))
    return found


def one_player(part: SpecPart, names: Sequence[str]) -> list[Mistake]:
    given = [name for name in names if getattr(part, name) is not None]
    if len(given) == 1:
        return []
    problem = f"must name one player ({', '.join(names)}), not {len(given)}"
    return [mistake(given[-1] if given else "policy", {name: getattr(part, name) for name in given}, problem)]


def unknown_policies(data: Mapping[str, Any]) -> list[Mistake]:
    """Return the seats that a policy plays in a spec, as written, that has no [policies]."""
    seats = data.get("seats")
    if data.get("policies") or not isinstance(seats, dict):
        return []
    problem = "names a policy, and the job has no [policies]"
    named = {seat: player.get("policy") if isinstance(player, dict) else player for seat, player in seats.items()}
    return [mistake(f"seats.{seat}", policy, problem) for seat, policy in named.items() if isinstance(policy, str)]


def frozen_in(players: Mapping[str, SeatSpec]) -> list[str]:
    """Return the frozen checkpoints that play, each once."""
    return list(dict.fromkeys(player.frozen for player in players.values() if player.frozen is not None))


def player_at(seats: Mapping[str, SeatSpec], seat: str) -> SeatSpec | None:
    """Return who plays a seat: the entry with its name, else the first pattern that matches, else None."""
    if seat in seats:
        return seats[seat]
    return next((player for pattern, player in seats.items() if fnmatchcase(seat, pattern)), None)


def bots_of(seats: Mapping[str, SeatSpec]) -> dict[str, str]:
    """Return the bot of each entry, as `OpenSession.bots` has it: an empty name for a policy's. Empty without bots."""
    bots = {seat: player.bot or "" for seat, player in seats.items()}
    return bots if any(bots.values()) else {}


@dataclass(frozen=True)
class SeatTable:
    """The seats of an environment as a spec gives them to players."""

    environment: str
    seats: Mapping[str, SeatSpec]
    policies: Collection[str]
    """Names in [policies]."""
    named: Sequence[tuple[str, str]] = ()
    """Setting and entry of each seat or pattern that a list of [algorithm] names."""

    @classmethod
    def of(cls, spec: JobSpec) -> SeatTable:
        jobs_own = dict.fromkeys(spec.algorithm.seats_named)
        named = [(f"algorithm.{field}", entry) for field, entry in jobs_own]
        for name, policy in spec.policies.items():
            own = [one for one in policy.algorithm.seats_named if one not in jobs_own]
            named += [(f"policies.{name}.algorithm.{field}", entry) for field, entry in own]
        return cls(spec.environment.name, spec.seats, spec.policies, named)

    @classmethod
    def as_written(cls, data: Any) -> SeatTable | None:
        """Return [seats] of a spec that is wrong somewhere, without the lists of [algorithm]; None without [seats]. An
        entry that is wrong in itself has no player."""
        entries, policies = written(data, "seats"), written(data, "policies") or {}
        if not isinstance(entries, dict) or not isinstance(policies, dict):
            return None
        if not 0 < len(entries) <= MAX_SEATS or len(policies) > MAX_POLICIES:
            return None
        if any(not isinstance(seat, str) or not 0 < len(seat) <= SEAT_CHARACTERS for seat in entries):
            return None  # they become patterns, which take time
        full = {seat: {"policy": player} if isinstance(player, str) else player for seat, player in entries.items()}
        right = right_parts(SeatSpec, full)
        seats = {seat: right.get(seat, SeatSpec.model_construct()) for seat in full}
        return cls(str(written(data, "environment", "name")), seats, [*policies])


def mistakes_in_seats(table: SeatTable, there: Sequence[str]) -> list[Mistake]:
    """Return what is wrong between [seats] and the seats that the environment has with this config, the first
    MAX_MISTAKES. Blocking: every pattern is compared with every seat."""
    where = table.environment
    names = _listed(there)
    named = [*((f"seats.{entry}", entry) for entry in table.seats), *table.named]
    own_names = set(there)
    players = {seat: player_at(table.seats, seat) for seat in there}
    unplayed = [seat for seat, player in players.items() if player is None]
    found = []
    for field, entry in named:
        if entry in own_names or any(fnmatchcase(seat, entry) for seat in there):
            continue
        one = mistake(field, entry, f"{where} has no such seat with this config; its seats are: {names}")
        meant = nearest(entry, unplayed) if field.startswith("seats.") else None
        if meant is not None:
            unplayed.remove(meant)
            one |= {"problem": f"{one['problem']}; did you mean {meant!r}?", "suggestion": meant}
        found.append(one)
        if len(found) == MAX_MISTAKES:
            return found
    if not table.policies:
        if not found and table.seats and None not in players.values():
            problem = f"leaves no seat to the job's policy; seats of {where}: {names}"
            found.append(mistake("seats", list(table.seats), problem))
        return found
    if unplayed:
        problem = f"assign no player to {_listed(unplayed)}; seats of {where}: {names}"
        found.append(mistake("seats", list(table.seats), problem))
    played = {player.policy for player in players.values() if player is not None}
    misnamed = {one["field"].removeprefix("seats.") for one in found}
    entered = {player.policy for entry, player in table.seats.items() if entry not in misnamed}
    problem = f"plays no seat: other entries of [seats] come first; seats of {where}: {names}"
    found += [mistake(f"policies.{name}", name, problem) for name in table.policies if name in entered - played]
    return found


def _listed(seats: Sequence[str]) -> str:
    names = ", ".join(map(repr, seats[:SHOWN_SEATS]))
    return names + (f" and {len(seats) - SHOWN_SEATS} more" if len(seats) > SHOWN_SEATS else "")


def rotated(seats: Sequence[str], players: Sequence[SeatSpec], by: int) -> dict[str, SeatSpec]:
    """Return the player of each seat after moving all players on by `by` places."""
    return {seat: players[(place - by) % len(players)] for place, seat in enumerate(seats)}


def seat_mistakes(spec: JobSpec) -> list[Mistake]:
    found = []
    for seat, player in spec.seats.items():
        if spec.policies and player.policy is not None and player.policy not in spec.policies:
            known = f"its policies are: {', '.join(spec.policies)}"
            found.append(mistake(f"seats.{seat}", player.policy, f"is not a policy of this job; {known}"))
    if spec.seats and not spec.policies and all("*" in s or "?" in s for s in spec.seats) and "*" in spec.seats:
        found.append(mistake("seats", list(spec.seats), "leaves no seat to the job's policy"))
    found += url_mistakes(spec)
    found += _too_many(spec)
    if spec.match is not None and spec.match.rotate:
        found += _rotation_mistakes(spec)
    return found


def _too_many(spec: JobSpec) -> list[Mistake]:
    """Return a mistake if more checkpoints and pools play than a job may have, in seats or as opponents."""
    fixed = [*frozen_in(spec.seats), *pools_in(spec.seats)]
    room = MAX_POLICIES - max(1, len(spec.policies))
    if len(fixed) > room and fixed:
        problem = f"name {len(fixed)} checkpoints and pools; with the policies, {MAX_POLICIES} may play in a job"
        return [mistake("seats", fixed, problem)]
    more = [name for name in frozen_in(all_players(spec)) if name not in fixed]
    if (many := len(fixed) + len(more) - room) <= 0 or not more:
        return []
    problem = (
        f"names {len(more)} checkpoints that play no seat; with the policies and those of [seats], {MAX_POLICIES} may "
        f"play in a job: leave out {many} of {', '.join(more)}"
    )
    return [mistake("validation.against", more, problem)]


def _rotation_mistakes(spec: JobSpec) -> list[Mistake]:
    patterns = [seat for seat in spec.seats if is_pattern(seat)]
    if not spec.policies or patterns or len(spec.seats) < 2:
        problem = "needs [policies], and [seats] with two seats or more, each by its own name"
        return [mistake("match.rotate", True, problem)]
    if spec.rollout.oversample:
        problem = "must be 0 with match.rotate: what is cut off would unbalance who plays which seat"
        return [mistake("rollout.oversample", spec.rollout.oversample, problem)]
    if not any(policy.algorithm.advantage in GROUP_BASELINES for policy in spec.policies.values()):
        return []  # they take turns from group to group
    size, seats = spec.algorithm.group_size, len(spec.seats)
    if size % seats or size < 2 * seats:
        problem = f"must be a multiple of the {seats} seats, twice at least: match.rotate gives each policy every seat"
        return [mistake("algorithm.group_size", size, problem)]
    return []
