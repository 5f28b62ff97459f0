"""Several policies in one game: `[policies.NAME]`, and `[seats]`, which says who plays which seat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from opentinker.shared.spec.algorithm import AlgorithmSpec
from opentinker.shared.spec.base import Ranks, SpecPart, Steps
from opentinker.shared.spec.metric_names import taken_names
from opentinker.shared.spec.model import ModelSpec
from opentinker.shared.spec.pools import PoolName, pool_player, pools_in, settle_pools
from opentinker.shared.spec.schedules import DEFAULT_GROWTH, ScheduleName, settle_schedule, steps_may_differ
from opentinker.shared.spec.start import PUBLISHED, SAVED
from opentinker.shared.spec.train import TrainSpec
from opentinker.shared.spec.url_seats import UrlSettings, checked_url, settle_url, url_mistakes
from opentinker.shared.types.core import POLICY_TABLES
from opentinker.shared.types.mistakes import Mistakes, fill, mistakes_of

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

Mistake = dict[str, Any]
MAX_POLICIES = 16
"""Policies, frozen checkpoints and pools of one job: at worst, each has an engine in every rollout worker."""
MAX_SEATS = 64
"""Entries of [seats]."""
PolicyName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
"""Part of directories, subjects and metric names."""
SeatName = Annotated[str, Field(min_length=1, max_length=100)]
SHARED_OPTIONS = ("group_size", "groups_per_batch", "max_staleness")
"""Settings of the job's [algorithm] that a policy inherits even if it names a preset."""
PLAYERS = ("policy", "bot", "frozen", "url", "pool")
"""Settings of a seat that name its player."""
INHERITED: dict[str, type[SpecPart]] = dict(zip(POLICY_TABLES, (ModelSpec, AlgorithmSpec, TrainSpec), strict=True))
"""Tables of the job that a policy completes its own with."""
MAX_MISTAKES = 50
"""Mistakes between [seats] and the environment that are reported."""
SHOWN_SEATS = 20
"""Seats of an environment that a mistake names."""


class PolicySpec(SpecPart):
    """Settings that differ from the job's; all others are inherited."""

    model: ModelSpec
    """[model] of this policy: its base, its adapter. Setting by setting, the job's where it says nothing."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """[algorithm] of this policy. With a `name` it inherits only group_size, groups_per_batch and
    max_staleness of the job."""
    train: TrainSpec = TrainSpec()
    """[train] of this policy."""
    trainer_ranks: Ranks | None = None
    """Ranks of this policy alone; default: resources.trainer_ranks."""

    STAND_INS = {"model": {"base": "x"}}


class SeatSpec(UrlSettings):
    """Who plays a seat: exactly one of policy, bot, frozen, url and pool."""

    policy: PolicyName | None = None
    """One of [policies]; `seat = "NAME"` is short for `seat = { policy = "NAME" }`."""
    bot: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """A scripted player that the environment has."""
    frozen: str | None = None
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

    @property
    def player(self) -> str | None:
        """Name of the model that plays: a policy, a checkpoint, `MODEL@URL`, or `POOL@`; None: a bot plays."""
        if self.url is not None:
            return f"{self.model}@{self.url}"
        return pool_player(self.pool) if self.pool is not None else self.policy or self.frozen

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

    @field_validator("frozen")
    @classmethod
    def _saved(cls, value: str | None) -> str | None:
        if value is not None and not SAVED.fullmatch(value) and not PUBLISHED.fullmatch(value):
            raise ValueError(
                "must be JOB@STEP or JOB@latest (of one policy JOB~POLICY@STEP), as in j-0123456789@50, or a published "
                "name"
            )
        return value

    def resolve(self) -> list[Mistake]:
        if found := one_player(self, PLAYERS) or settle_url(self):
            return found
        if self.frozen is not None and isinstance(self.model, str):
            return [_mistake("model", self.model, "is a table, which the server fills in: leave it out")]
        if self.model is not None and self.frozen is None and self.url is None:
            problem = "belongs to a checkpoint (frozen) or a url; a policy has its model in [policies]"
            return [_mistake("model", self.model if isinstance(self.model, str) else self.model.base, problem)]
        return []


def one_player(part: SpecPart, names: Sequence[str]) -> list[Mistake]:
    given = [name for name in names if getattr(part, name) is not None]
    if len(given) == 1:
        return []
    problem = f"must name one player ({', '.join(names)}), not {len(given)}"
    return [_mistake(given[-1] if given else "policy", {name: getattr(part, name) for name in given}, problem)]


class OpponentSpec(SpecPart):
    """Who plays, in an evaluation, the seats that the evaluated policy does not: exactly one of these."""

    policy: PolicyName | None = None
    """One of [policies], with the weights that it has at that time. A policy is not evaluated against itself."""
    bot: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """A scripted player that the environment has."""

    @property
    def name(self) -> str:
        return self.policy or self.bot or ""

    def resolve(self) -> list[Mistake]:
        return one_player(self, tuple(type(self).model_fields))


class MatchSpec(SpecPart):
    """Settings of games with several seats."""

    rotate: bool = False
    """Move the players of the seats by one place with each sample of a group, and with each group, so that every policy
    plays every seat equally often. group_size must be a multiple of the number of seats; [seats] names each of them."""
    max_opponent_lag: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Largest number of versions that another policy may have moved since it played a match, when a batch with that
    match is assembled. Matches beyond it are discarded and replaced. Without it, opponents are not bounded."""
    schedule: ScheduleName = "wait"
    """How policies that learn at different speeds are kept together. `wait`: the faster ones wait. `drop`: the slower
    ones discard matches beyond max_staleness. `grow`: the slower ones take all waiting matches as one larger batch.
    `alternate`: one policy learns at a time. `lockstep`: new versions become visible together; needs max_staleness 0.
    """
    alternate_steps: Steps | None = None
    """alternate: steps that a policy makes before it is the next one's turn."""
    max_growth: Annotated[int, Field(ge=2, le=64)] | None = None
    """grow: most batches that one step takes; default 8. What exceeds it is discarded."""

    def resolve(self) -> list[Mistake]:
        found = []
        if self.schedule == "alternate" and self.alternate_steps is None:
            problem = "is needed with schedule = 'alternate', e.g. alternate_steps = 20"
            found.append(_mistake("alternate_steps", None, problem))
        if self.schedule != "alternate" and self.alternate_steps is not None:
            found.append(_mistake("alternate_steps", self.alternate_steps, "needs schedule = 'alternate'"))
        if self.schedule == "grow":
            fill(self, {"max_growth": self.max_growth or DEFAULT_GROWTH})
        elif self.max_growth is not None:
            found.append(_mistake("max_growth", self.max_growth, "needs schedule = 'grow'"))
        return found


def with_job_settings(data: dict[str, Any]) -> dict[str, Any]:
    """Return the spec as written, with each policy completed by the job's settings; without the policies if there are
    too many (`too_many_policies`)."""
    if too_many_policies(data):
        return {name: value for name, value in data.items() if name not in ("policies", "seats")}
    policies, seats = data.get("policies"), data.get("seats")
    if isinstance(policies, dict) and policies:
        job = {table: _valid_settings(table, data.get(table)) for table in INHERITED}
        merged = {name: _merge(job, own) if isinstance(own, dict) else own for name, own in policies.items()}
        data = {**data, "policies": merged}
    if isinstance(seats, dict):
        full = {seat: {"policy": player} if isinstance(player, str) else player for seat, player in seats.items()}
        data = {**data, "seats": full}
    return data


def too_many_policies(data: Mapping[str, Any]) -> list[Mistake]:
    """Refuse more policies than a job may have, before each of them is completed by the job's settings."""
    policies = data.get("policies")
    if not isinstance(policies, dict) or len(policies) <= MAX_POLICIES:
        return []
    return [_mistake("policies", len(policies), f"must have {MAX_POLICIES} policies at most")]


def _valid_settings(table: str, written: Any) -> Any:
    """Return the job's table without settings that are wrong: they are reported there, and not for every policy."""
    if not isinstance(written, dict):
        return written
    try:
        INHERITED[table].model_validate(written)
    except ValidationError as error:
        found = (mistake for item in error.errors(include_url=False) for mistake in mistakes_of(item))
        wrong = {mistake["field"].partition(".")[0] for mistake in found}
        return {name: value for name, value in written.items() if name not in wrong}
    return written


def _merge(job: Mapping[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    merged = dict(policy)
    for table in INHERITED:
        base, own = job[table], policy.get(table, {})
        if not isinstance(base, dict) or not isinstance(own, dict):
            continue
        if table == "algorithm" and "name" in own:
            base = {name: value for name, value in base.items() if name in SHARED_OPTIONS}
        merged[table] = {**base, **own}
        if table == "model" and isinstance(base.get("lora"), dict) and isinstance(own.get("lora"), dict):
            merged[table]["lora"] = {**base["lora"], **own["lora"]}
    return merged


def unknown_policies(data: Mapping[str, Any]) -> list[Mistake]:
    """Return the seats that a policy plays in a spec, as written, that has no [policies]."""
    seats = data.get("seats")
    if data.get("policies") or not isinstance(seats, dict):
        return []
    problem = "names a policy, and the job has no [policies]"
    named = {seat: player.get("policy") if isinstance(player, dict) else player for seat, player in seats.items()}
    return [_mistake(f"seats.{seat}", policy, problem) for seat, policy in named.items() if isinstance(policy, str)]


def spec_of(spec: JobSpec, policy: str) -> JobSpec:
    """Return the job's spec with the settings of one policy; itself for the empty name."""
    if not policy:
        return spec
    own = spec.policies[policy]
    ranks = own.trainer_ranks or spec.resources.ranks
    tables = {table: getattr(own, table) for table in INHERITED}
    return spec.model_copy(update={**tables, "resources": spec.resources.model_copy(update={"trainer_ranks": ranks})})


def frozen_in(seats: Mapping[str, SeatSpec]) -> list[str]:
    """Return the frozen checkpoints that play, each once."""
    return list(dict.fromkeys(player.frozen for player in seats.values() if player.frozen is not None))


def frozen_spec_of(spec: JobSpec, checkpoint: str) -> JobSpec:
    """Return the spec by which a frozen checkpoint plays in a stored job: with its own model, and unscored."""
    (model, *_) = (player.model for player in spec.seats.values() if player.frozen == checkpoint)
    assert isinstance(model, ModelSpec), "submission fills it in"
    return spec.model_copy(update={"model": model, "reward_models": []})


def pool_spec_of(spec: JobSpec, pool: str) -> JobSpec:
    """Return the spec by which the members of a pool play: with the model of their policy, and unscored."""
    own = spec_of(spec, spec.pools[pool].policy or "")
    return own.model_copy(update={"reward_models": []})


def player_at(seats: Mapping[str, SeatSpec], seat: str) -> SeatSpec | None:
    """Return who plays a seat: the entry with its name, else the first pattern that matches, else None."""
    if seat in seats:
        return seats[seat]
    return next((player for pattern, player in seats.items() if fnmatchcase(seat, pattern)), None)


def bots_of(seats: Mapping[str, SeatSpec]) -> dict[str, str]:
    """Return the bot of each entry, as `OpenSession.bots` has it: an empty name for a policy's. Empty without bots."""
    bots = {seat: player.bot or "" for seat, player in seats.items()}
    return bots if any(bots.values()) else {}


def mistakes_in_seats(spec: JobSpec, there: Sequence[str]) -> list[Mistake]:
    """Return what is wrong between [seats] and the seats that the environment has with this config, the first
    MAX_MISTAKES. Blocking: every pattern is compared with every seat."""
    names = ", ".join(map(repr, there[:SHOWN_SEATS]))
    names += f" and {len(there) - SHOWN_SEATS} more" if len(there) > SHOWN_SEATS else ""
    named = [(f"seats.{entry}", entry) for entry in spec.seats]
    jobs_own = dict.fromkeys(spec.algorithm.seats_named)
    named += [(f"algorithm.{field}", entry) for field, entry in jobs_own]
    for name, policy in spec.policies.items():
        own = [one for one in policy.algorithm.seats_named if one not in jobs_own]
        named += [(f"policies.{name}.algorithm.{field}", entry) for field, entry in own]
    own_names = set(there)
    absent_entries = (
        _mistake(field, entry, f"{spec.environment.name} has no such seat with this config; its seats are: {names}")
        for field, entry in named
        if entry not in own_names and not any(fnmatchcase(seat, entry) for seat in there)
    )
    found = list(islice(absent_entries, MAX_MISTAKES))
    players = {seat: player_at(spec.seats, seat) for seat in there}
    if not found and not spec.policies and spec.seats and None not in players.values():
        problem = f"leaves no seat to the job's policy; seats of {spec.environment.name}: {names}"
        return [_mistake("seats", list(spec.seats), problem)]
    if found or not spec.policies:
        return found
    if absent := [seat for seat, player in players.items() if player is None]:
        unplayed = ", ".join(map(repr, absent[:SHOWN_SEATS]))
        problem = f"leave nobody to play {unplayed}; seats of {spec.environment.name}: {names}"
        return [_mistake("seats", list(spec.seats), problem)]
    played = {player.policy for player in players.values() if player is not None}
    problem = f"plays no seat: other entries of [seats] come first; seats of {spec.environment.name}: {names}"
    return [_mistake(f"policies.{name}", name, problem) for name in spec.policies if name not in played]


def rotated(seats: Sequence[str], players: Sequence[SeatSpec], by: int) -> dict[str, SeatSpec]:
    """Return the player of each seat after moving all players on by `by` places."""
    return {seat: players[(place - by) % len(players)] for place, seat in enumerate(seats)}


def opposed(seats: Mapping[str, SeatSpec], policy: str, opponent: OpponentSpec, place: int = 0) -> dict[str, SeatSpec]:
    """Return the players of an evaluation of a policy: the opponent takes every seat of [seats] that it does not play.
    A policy that plays all of them keeps one, by `place`."""
    mine = [seat for seat, player in seats.items() if policy and player.policy == policy]
    if len(mine) == len(seats):
        mine = [mine[place % len(mine)]]
    other = SeatSpec(policy=opponent.policy, bot=opponent.bot)
    return {seat: player if seat in mine else other for seat, player in seats.items()}


def settle_policies(spec: JobSpec) -> list[Mistake]:
    """Return what contradicts itself in [policies], [seats] and [match]."""
    found = _seat_mistakes(spec)
    found += settle_schedule(spec) + settle_pools(spec) + taken_names(spec.policies)
    if not spec.policies:
        return found
    named = {player.policy for player in spec.seats.values() if player.policy is not None}
    for name in spec.policies:
        if name not in named:
            found.append(_mistake("seats", list(spec.seats), f"gives policy {name!r} no seat"))
    for name, policy in spec.policies.items():
        found += _policy_mistakes(spec, name, policy)
    return found + _absent_parts(spec)


def _seat_mistakes(spec: JobSpec) -> list[Mistake]:
    found = []
    for seat, player in spec.seats.items():
        if spec.policies and player.policy is not None and player.policy not in spec.policies:
            known = f"its policies are: {', '.join(spec.policies)}"
            found.append(_mistake(f"seats.{seat}", player.policy, f"is no policy of this job; {known}"))
    if spec.seats and not spec.policies and all("*" in s or "?" in s for s in spec.seats) and "*" in spec.seats:
        found.append(_mistake("seats", list(spec.seats), "leaves no seat to the job's policy"))
    found += url_mistakes(spec)
    fixed = [*frozen_in(spec.seats), *pools_in(spec.seats)]
    if fixed and max(1, len(spec.policies)) + len(fixed) > MAX_POLICIES:
        problem = f"name {len(fixed)} checkpoints and pools; with the policies, {MAX_POLICIES} may play in a job"
        found.append(_mistake("seats", fixed, problem))
    if spec.match is not None and spec.match.rotate:
        found += _rotation_mistakes(spec)
    return found


def _rotation_mistakes(spec: JobSpec) -> list[Mistake]:
    patterns = [seat for seat in spec.seats if any(sign in seat for sign in "*?[")]
    bots = any(player.bot is not None for player in spec.seats.values())
    if not spec.policies or patterns or bots or len(spec.seats) < 2:
        problem = (
            "needs [seats] with two seats or more, each by its own name, all of them played by [policies], frozen "
            "checkpoints, urls or [pools]"
        )
        return [_mistake("match.rotate", True, problem)]
    if spec.rollout.oversample:
        problem = "must be 0 with match.rotate: what is cut off would unbalance who plays which seat"
        return [_mistake("rollout.oversample", spec.rollout.oversample, problem)]
    size, seats = spec.algorithm.group_size, len(spec.seats)
    if size % seats or size < 2 * seats:
        problem = f"must be a multiple of the {seats} seats, twice at least: match.rotate gives each policy every seat"
        return [_mistake("algorithm.group_size", size, problem)]
    return []


def _policy_mistakes(spec: JobSpec, name: str, policy: PolicySpec) -> list[Mistake]:
    at, algorithm, train = f"policies.{name}", policy.algorithm, policy.train
    checks = [
        (
            f"{at}.algorithm.group_size",
            algorithm.group_size,
            algorithm.group_size == spec.algorithm.group_size,
            f"must be the job's, {spec.algorithm.group_size}: all policies play the same matches",
        ),
        (
            f"{at}.train.learner",
            train.learner,
            train.learner == spec.train.learner,
            f"must be the job's, {spec.train.learner!r}",
        ),
        (
            f"{at}.train.steps",
            train.steps,
            steps_may_differ(spec)
            or train.steps * algorithm.groups_per_batch == spec.train.steps * spec.algorithm.groups_per_batch,
            f"times groups_per_batch = {algorithm.groups_per_batch} must be "
            f"{spec.train.steps * spec.algorithm.groups_per_batch}, as for the job: a match is for all policies "
            f"(not with match.schedule = 'drop', 'grow' or 'alternate')",
        ),
        (
            f"{at}.train.deterministic",
            train.deterministic,
            train.deterministic == spec.train.deterministic,
            f"must be the job's, {str(spec.train.deterministic).lower()}: policies play the same matches",
        ),
        (
            f"{at}.algorithm.kl_coef",
            algorithm.kl_coef,
            not algorithm.kl_coef,
            "must be 0 in a job with several policies: reference-forward serves one reference model per job",
        ),
        (
            f"{at}.algorithm.distill_coef",
            algorithm.distill_coef,
            not algorithm.distill_coef,
            "must be 0 in a job with several policies: there is no teacher",
        ),
    ]
    return [_mistake(field, value, problem) for field, value, holds, problem in checks if not holds]


def _absent_parts(spec: JobSpec) -> list[Mistake]:
    """Return parts of the job that only a single policy can have."""
    by = "does not apply to a job with several policies"
    parts = {
        "start": spec.start and spec.start.checkpoint,
        "teacher": spec.teacher and spec.teacher.base,
        "value_model": spec.value_model and spec.value_model.base,
        "reward_models": [model.base for model in spec.reward_models] or None,
        "algorithm.kl_coef": spec.algorithm.kl_coef or None,
        "algorithm.distill_coef": spec.algorithm.distill_coef or None,
    }
    return [_mistake(part, value, by) for part, value in parts.items() if value is not None]


def _mistake(field: str, value: object, problem: str) -> Mistake:
    return {"field": field, "value": value, "problem": problem}
