"""Decides, from the spec alone, which policies of a job share an engine: those that are adapters of one base; with
frozen checkpoints and pools. And which jobs may share a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from opentinker.shared.spec.matches.policies import pool_spec_of, spec_of
from opentinker.shared.spec.matches.pools import pool_player
from opentinker.shared.spec.matches.seats import all_players, frozen_in
from opentinker.shared.spec.model import ModelSpec
from opentinker.shared.spec.rollout import AdapterServing
from opentinker.shared.spec.train import engine_ranks
from opentinker.shared.types.mistakes import mistake

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

LIVE_VERSIONS = 6
"""Versions of another job's live policy that running requests may use at the same time."""
MAX_SHARED_RANK = 64
"""Largest rank of an adapter whose job shares a trainer."""
SHARED = "resources.trainer = 'shared'"
OWN = "take resources.trainer = 'own'"
EMBEDDINGS = ("lm_head", "embed_tokens")
"""Layers that share their weights in many models."""
MAX_ADAPTERS_AT_ONCE = 64
"""Adapters of an engine that policies share; each takes the room of the largest rank on the accelerator."""


class EnginePolicy(NamedTuple):
    """A policy, a frozen checkpoint or a pool, and what it needs of an engine."""

    name: str
    """Empty: the job's one policy."""
    model: ModelSpec | None
    """None: of a frozen checkpoint that the server has not looked up yet."""
    versions: int
    """That requests may be under way with at the same time."""
    is_frozen: bool = False
    pool: str = ""
    """The pool that it stands for, one member at a time."""

    @property
    def base(self) -> tuple[str, str, bool] | None:
        """Base model and engine settings of its adapter; None if it has full weights."""
        if self.model is None or self.model.lora is None:
            return None
        return self.model.base, self.model.dtype, self.model.fp32_head


def engines(spec: JobSpec) -> list[list[EnginePolicy]]:
    """Return the engines of a rollout worker of the job, each with its policies in their order. An engine with several
    has adapters of one base, MAX_ADAPTERS_AT_ONCE at most."""
    found: list[list[EnginePolicy]] = []
    for policy in engine_policies(spec):
        shared = (held for held in found if policy.base is not None and held[0].base == policy.base)
        room = (held for held in shared if adapters_at_once([*held, policy]) <= MAX_ADAPTERS_AT_ONCE)
        if (held := next(room, None)) is not None:
            held.append(policy)
        else:
            found.append([policy])
    return found


def adapters_at_once(policies: Sequence[EnginePolicy]) -> int:
    return sum(policy.versions for policy in policies)


def why_separate(policies: Sequence[EnginePolicy]) -> str:
    """Return why an engine with these policies cannot have its adapter merged into the base; empty if it can."""
    if len(policies) > 1:
        return f"{len(policies)} adapters of one base share the engine"
    lora = policies[0].model.lora if policies[0].model else None
    targets = () if lora is None or isinstance(lora.target_modules, str) else lora.target_modules
    if tied := [target for target in targets if target.rpartition(".")[2] in EMBEDDINGS]:
        return f"{tied[0]} has an adapter, and may share its weights with another layer"
    return ""


def adapter_serving(spec: JobSpec, policies: Sequence[EnginePolicy]) -> tuple[AdapterServing, str]:
    """Return how an engine with these policies may serve adapters, and the reason if it may not merge one."""
    if spec.rollout.lora == "adapter":
        return "adapter", "rollout.lora = 'adapter'"
    if why := why_separate(policies) or why_divided(spec):
        return "adapter", why
    if spec.rollout.lora == "auto" and spec.start is not None and spec.start.live:
        return "adapter", "requests to a live policy end with the adapter that they began with"
    return spec.rollout.lora, ""


def why_divided(spec: JobSpec) -> str:
    """Return why an engine of several ranks does not merge an adapter; empty if it has one rank."""
    ranks = engine_ranks(spec)
    return f"with {ranks} ranks (rollout.tensor_parallel), each would keep the whole base" if ranks > 1 else ""


def may_merge(spec: JobSpec) -> bool:
    """Return whether engines may merge the job's adapter, as far as a trainer knows it: the model and the device of an
    engine have a say too."""
    exact = spec.rollout.lora == "auto" and spec.model.dtype == "float32" and not why_divided(spec)
    return spec.model.lora is not None and (exact or spec.rollout.lora == "merged")


def settle_lora(spec: JobSpec) -> list[dict[str, Any]]:
    """Return mistakes in rollout.lora."""
    if spec.rollout.lora == "auto":
        return []
    shared = [held for held in engines(spec) if any(policy.base is not None for policy in held)]
    if not shared and (spec.start is None or spec.kind == "rl"):  # of a checkpoint the server knows whether it is one
        return [mistake("rollout.lora", spec.rollout.lora, "does not apply without an adapter (model.lora)")]
    why = next((why for held in shared if (why := why_separate(held) or why_divided(spec))), "")
    if spec.rollout.lora == "merged" and why:
        return [mistake("rollout.lora", "merged", f"does not work here: {why}; leave it at 'auto'")]
    return []


def versions_at_once(spec: JobSpec) -> int:
    """Return how many versions of a policy requests may be under way with at the same time."""
    if spec.start is not None and spec.start.live:
        return LIVE_VERSIONS
    return (spec.algorithm.max_staleness if spec.kind == "rl" else 0) + 2


def engine_policies(spec: JobSpec) -> list[EnginePolicy]:
    """Return the policies of a job, then frozen checkpoints, then pools, each in their order."""
    found = []
    for name in spec.policies or ("",):
        own = spec_of(spec, name)
        found.append(EnginePolicy(name, own.model, versions_at_once(own)))
    players = all_players(spec)
    models = {player.frozen: player.model for player in players.values() if isinstance(player.model, ModelSpec)}
    found += [EnginePolicy(name, models.get(name), 1, is_frozen=True) for name in frozen_in(players)]
    found += [EnginePolicy(pool_player(name), pool_spec_of(spec, name).model, 1, pool=name) for name in spec.pools]
    return found


def bank_of(spec: Mapping[str, Any]) -> str:
    """Return what jobs must have in common to share a trainer, from a stored spec; empty if its trainer is its own."""
    return bank_name(spec) if spec["resources"].get("trainer") == "shared" else ""


def bank_name(spec: Mapping[str, Any]) -> str:
    """Return the same for a job that may have either trainer."""
    full = (spec.get("tinker") or {}).get("full_weights", False)
    place = " on a GPU" if spec["resources"].get("trainer_gpus") else ""
    return base_of(spec) + place + (", all weights" if full else "")


def base_of(spec: Mapping[str, Any]) -> str:
    """Return how the base of a shared trainer for this stored spec is called."""
    return base_name(trained_models(spec)[0])


def base_name(model: Mapping[str, Any]) -> str:
    return f"{model['base']} in {model['dtype']}"


def trained_models(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return [model] of each policy of a stored spec, or of the job's one."""
    return [own["model"] for own in (spec.get("policies") or {}).values()] or [spec["model"]]


def may_share(spec: JobSpec) -> bool:
    """Return whether the job may have a shared trainer without asking for one, as far as its spec tells. Deterministic
    jobs ask: passes of others wait for their whole micro-batches."""
    return spec.kind != "tinker" and not spec.train.deterministic and not _unshareable(spec)


def settle_shared(spec: JobSpec) -> list[dict[str, Any]]:
    """Mistakes in what a job with a shared trainer cannot have."""
    return _unshareable(spec) if spec.resources.trainer == "shared" and spec.kind != "tinker" else []


def _unshareable(spec: JobSpec) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    """By setting: one that all policies have from the job is reported once."""
    own_specs = {name: spec_of(spec, name) for name in spec.policies or ("",)}
    (first, shared), *_ = own_specs.items()
    for name, own in own_specs.items():
        wrong = _unshareable_adapter(own)
        for setting in ("base", "dtype"):
            value, common = getattr(own.model, setting), getattr(shared.model, setting)
            if value != common:
                problem = f"must be {common!r}, as policy {first!r} has it, with which this one shares its base; {OWN}"
                wrong.append((f"model.{setting}", value, problem))
        for field, value, problem in wrong:
            of_policy = any(_setting(other, field) != _setting(spec, field) for other in own_specs.values())
            place = f"policies.{name}.{field.removeprefix('resources.')}" if of_policy else field
            found.setdefault(place, mistake(place, value, f"{problem} ({SHARED})"))
    return list(found.values())


def _setting(spec: JobSpec, field: str) -> Any:
    found: Any = spec
    for name in field.split("."):
        found = getattr(found, name, None)
    return found


def _unshareable_adapter(spec: JobSpec) -> list[tuple[str, Any, str]]:
    """Return field, value and problem of each mistake in a job with one policy."""
    model, train, lora, gpus = spec.model, spec.train, spec.model.lora, spec.resources.trainer_gpus
    critic = spec.kind == "rl" and spec.algorithm.advantage == "gae" and spec.value_model is None
    targets = [] if lora is None or isinstance(lora.target_modules, str) else lora.target_modules
    embeddings = [target for target in targets if target.rpartition(".")[2] in EMBEDDINGS]
    wrong: list[tuple[bool, str, Any, str]] = [
        (spec.kind not in ("rl", "sft", "dpo"), "resources.trainer", "shared", f"does not apply to kind {spec.kind!r}"),
        (lora is None, "model.lora", None, "is needed: jobs share the base model and train an adapter each"),
        (lora is not None and lora.rank > MAX_SHARED_RANK, "model.lora.rank", lora and lora.rank,
         f"is above {MAX_SHARED_RANK}, the most here; {OWN}"),
        (lora is not None and lora.dropout > 0, "model.lora.dropout", lora and lora.dropout, "must be 0"),
        (bool(embeddings), "model.lora.target_modules", embeddings, f"are embeddings, which jobs share; {OWN}"),
        (model.fp32_head, "model.fp32_head", True, f"would change the base of other jobs; {OWN}"),
        (train.gradient_checkpointing, "train.gradient_checkpointing", True, f"would change that of others; {OWN}"),
        (train.learner != "torch", "train.learner", train.learner, "trains no adapter"),
        (critic, "algorithm.advantage", "gae",
         f"trains a critic, which is a whole model; set [value_model], or {OWN}"),
        (gpus > 1, "resources.trainer_gpus", gpus, f"must be 0 or 1; {OWN}"),
        (gpus < 2 and spec.resources.ranks > 1, "resources.trainer_ranks", spec.resources.ranks, f"must be 1; {OWN}"),
    ]  # fmt: skip
    return [(field, value, problem) for bad, field, value, problem in wrong if bad]
