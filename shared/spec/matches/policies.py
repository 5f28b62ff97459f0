"""Several policies in one game: `[policies.NAME]`, and `[match]`; who plays which seat is in `seats.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from opentinker.shared.spec.algorithm import AlgorithmSpec
from opentinker.shared.spec.base import Ranks, SpecPart, Steps
from opentinker.shared.spec.frozen_models import TeacherSpec, ValueModelSpec, frozen_models_of
from opentinker.shared.spec.matches.pools import settle_pools
from opentinker.shared.spec.matches.schedules import DEFAULT_GROWTH, ScheduleName, settle_schedule, steps_may_differ
from opentinker.shared.spec.matches.seats import MAX_POLICIES, PolicyName, all_players, seat_mistakes
from opentinker.shared.spec.model import ModelSpec
from opentinker.shared.spec.start import StartSpec
from opentinker.shared.spec.train import TrainSpec
from opentinker.shared.types.core import POLICY_TABLES
from opentinker.shared.types.mistakes import Mistake, fill, mistake, mistakes_of, right_parts

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

SHARED_OPTIONS = ("group_size", "groups_per_batch", "max_staleness")
"""Settings of the job's [algorithm] that a policy inherits even if it names a preset."""
INHERITED: dict[str, type[SpecPart]] = dict(zip(POLICY_TABLES, (ModelSpec, AlgorithmSpec, TrainSpec), strict=True))
"""Tables of the job that a policy completes its own with."""
SAME_FOR_ALL = (
    ("algorithm", "group_size", ": all policies play the same matches"),
    ("train", "learner", ""),
    ("train", "deterministic", ": policies play the same matches"),
)
"""Table, setting and reason of what a policy must have as the job has it."""
# fmt: off
OWN_METRICS = frozenset({
    "alarm", "collapse", "critic", "drift", "dropped", "ending", "env", "failed", "histogram", "jobs", "logprobs",
    "loss", "masked", "mismatch", "models", "opponent_lag", "pool", "queue", "ratio", "reference", "response_length",
    "reward", "reward_model", "rewards", "rollout", "scheduler", "serving", "spans", "staleness", "stop", "swap",
    "teacher", "tokens", "trainer", "turns", "val", "value", "workers",
})
# fmt: on
"""First parts of metric names (docs/metrics.md). A policy cannot have such a name: its metrics are POLICY/METRIC, and
`val/reward/mean` could be the reward of an evaluation, or of a policy `val`."""


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
    start: StartSpec | None = None
    """Checkpoint that this policy starts from, e.g. of the policy with its name in an earlier job,
    `from = "JOB~NAME@latest"`. Without it the policy starts from its model.base."""
    teacher: TeacherSpec | None = None
    """[teacher] of this policy, in place of the job's, from which all others with algorithm.distill_coef above 0 learn.
    """
    value_model: ValueModelSpec | None = None
    """[value_model] of this policy, in place of the job's, which all others with advantage = "gae" use."""
    trains_critic: bool = False
    """advantage = "gae": train a critic of this policy although the job has a [value_model]. Without any value model it
    does so anyway."""

    STAND_INS = {"model": {"base": "x"}, "teacher": {"base": "x"}, "value_model": {"base": "x"}}


class MatchSpec(SpecPart):
    """Settings of games with several seats."""

    rotate: bool = False
    """Move the players of the seats by one place with each sample of a group, and with each group, so that every policy
    plays every seat equally often. group_size must be a multiple of the number of seats, twice at least, if an
    advantage compares the episodes of a group; [seats] names each of them."""
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
            found.append(mistake("alternate_steps", None, problem))
        if self.schedule != "alternate" and self.alternate_steps is not None:
            found.append(mistake("alternate_steps", self.alternate_steps, "needs schedule = 'alternate'"))
        if self.schedule == "grow":
            fill(self, {"max_growth": self.max_growth or DEFAULT_GROWTH})
        elif self.max_growth is not None:
            found.append(mistake("max_growth", self.max_growth, "needs schedule = 'grow'"))
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
    return [mistake("policies", len(policies), f"must have {MAX_POLICIES} policies at most")]


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


def right_policies(data: dict[str, Any]) -> dict[str, Any]:
    """Return the policies of a spec, as written, those that are wrong in themselves without their wrong settings, so
    that other parts that name them can be judged."""
    names, policies = TypeAdapter(PolicyName), with_job_settings(data).get("policies")
    found = {}
    for name, policy in policies.items() if isinstance(policies, dict) else ():
        with contextlib.suppress(ValidationError):
            found[names.validate_python(name)] = _right_policy(policy)
    return found


def _right_policy(policy: Any) -> dict[str, Any]:
    least = {"model": PolicySpec.STAND_INS["model"]}
    if not isinstance(policy, dict):
        return least
    found = {table: _valid_settings(table, policy[table]) for table in INHERITED if table in policy}
    others = {name: {**least, name: value} for name, value in policy.items() if name not in INHERITED}
    right = right_parts(PolicySpec, others)
    found |= {name: policy[name] for name in right}
    found |= {name: part for name, part in PolicySpec.STAND_INS.items() if name in others and name not in right}
    return found if right_parts(PolicySpec, {0: found}) else least


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


def spec_of(spec: JobSpec, policy: str) -> JobSpec:
    """Return the job's spec with the settings of one policy; itself for the empty name."""
    if not policy:
        return spec
    own = spec.policies[policy]
    ranks = own.trainer_ranks or spec.resources.ranks
    tables: dict[str, Any] = {table: getattr(own, table) for table in INHERITED}
    resources = spec.resources.model_copy(update={"trainer_ranks": ranks})
    judges = [judge for judge in spec.reward_models if judge.scores(policy)]
    tables |= {"resources": resources, "start": own.start, "reward_models": judges, **frozen_models_of(spec, own)}
    return spec.model_copy(update=tables)


def frozen_spec_of(spec: JobSpec, checkpoint: str) -> JobSpec:
    """Return the spec by which a frozen checkpoint plays in a stored job: with its own model, and unscored."""
    (model, *_) = (player.model for player in all_players(spec).values() if player.frozen == checkpoint)
    assert isinstance(model, ModelSpec), "submission fills it in"
    return spec.model_copy(update={"model": model, "reward_models": []})


def pool_spec_of(spec: JobSpec, pool: str) -> JobSpec:
    """Return the spec by which the members of a pool play: with the model of their policy, and unscored."""
    own = spec_of(spec, spec.pools[pool].policy or "")
    return own.model_copy(update={"reward_models": []})


def settle_policies(spec: JobSpec) -> list[Mistake]:
    """Return what contradicts itself in [policies], [seats] and [match]."""
    found = seat_mistakes(spec)
    found += settle_schedule(spec) + settle_pools(spec) + taken_names(spec.policies)
    if not spec.policies:
        return found
    named = {player.policy for player in spec.seats.values() if player.policy is not None}
    for name in spec.policies:
        if name not in named:
            found.append(mistake("seats", list(spec.seats), f"gives policy {name!r} no seat"))
    for name, policy in spec.policies.items():
        found += _policy_mistakes(spec, name, policy)
    return found + _absent_parts(spec)


def _policy_mistakes(spec: JobSpec, name: str, policy: PolicySpec) -> list[Mistake]:
    at, batch = f"policies.{name}", policy.algorithm.groups_per_batch
    found = []
    if policy.start is not None and policy.start.live:
        problem = "does not apply to a policy: it cannot follow a live one; take @latest"
        found.append(mistake(f"{at}.start.from", policy.start.checkpoint, problem))
    for table, field, why in SAME_FOR_ALL:
        own, job = (getattr(getattr(part, table), field) for part in (policy, spec))
        if own != job:
            found.append(mistake(f"{at}.{table}.{field}", own, f"must be the job's, {repr(job).lower()}{why}"))
    groups = spec.train.steps * spec.algorithm.groups_per_batch
    if not steps_may_differ(spec) and policy.train.steps * batch != groups:
        problem = (
            f"times groups_per_batch = {batch} must be {groups}, as for the job: a match is for all policies "
            f"(not with match.schedule = 'drop', 'grow' or 'alternate')"
        )
        found.append(mistake(f"{at}.train.steps", policy.train.steps, problem))
    return found


def _absent_parts(spec: JobSpec) -> list[Mistake]:
    """Return parts of the job that only a single policy can have."""
    by = "does not apply to a job with several policies"
    found = []
    if spec.start is not None:
        name = next(iter(spec.policies))
        problem = f'{by}: each has its own, e.g. [policies.{name}.start] from = "JOB~{name}@latest"'
        found.append(mistake("start", spec.start.checkpoint, problem))
    if spec.rollout.sleep == "always":
        found.append(mistake("rollout.sleep", spec.rollout.sleep, by))
    return found


def taken_names(policies: Iterable[str]) -> list[Mistake]:
    """Return mistakes in the names of policies."""
    problem = "is what metrics of every job begin with; give the policy another name"
    return [mistake(f"policies.{name}", name, problem) for name in policies if name in OWN_METRICS]
