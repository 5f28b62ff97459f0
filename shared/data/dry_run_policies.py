"""The part of `validate` for jobs with several policies: the model of each, what it trains, and the memory of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opentinker.shared.api_types import Check
from opentinker.shared.data.dry_run import NOT_LOOKED_AT, check, is_served, loads_weights
from opentinker.shared.data.model_files import parameters_in
from opentinker.shared.durable_files import local_path
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.engines import engines
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.spec.model import ModelSpec

TRAINED_BYTES = 16
"""Bytes in the trainer per trained parameter: weights, gradient, two moments, in float32; with bfloat16 weights and
gradients there is a copy of the weights in float32."""


def of_policies(spec: JobSpec, looked_at: Callable[[JobSpec], Check]) -> list[Check]:
    """Return what is found of the job or, of one with several policies, of each. Policies of which the same is found
    share a check."""
    if not spec.policies:
        return [looked_at(spec)]
    found: list[tuple[Check, list[str]]] = []
    for name in spec.policies:
        one = looked_at(spec_of(spec, name))
        same = next((names for other, names in found if other == one), None)
        if same is None:
            found.append((one, [name]))
        else:
            same.append(name)
    return [{**one, "what": f"{one['what']} of {', '.join(names)}"} for one, names in found]


def policies(spec: JobSpec) -> list[Check]:
    """Return what each policy of a job with several trains, and the memory that all need. Blocking."""
    if not spec.policies:
        return []
    found = [check(f"policy {name}", _training(spec, name)) for name in spec.policies]
    return [*found, memory(spec)] if any(loads_weights(spec_of(spec, name)) for name in spec.policies) else found


def _training(spec: JobSpec, policy: str) -> str:
    """`grpo on all weights, 24 steps of 4 groups of 2; plays speaker`"""
    own = spec_of(spec, policy)
    lora, algorithm = own.model.lora, own.algorithm
    weights = f"an adapter of rank {lora.rank}" if lora else "all weights"
    seats = ", ".join(seat for seat, player in spec.seats.items() if player.policy == policy)
    batch = f"{algorithm.groups_per_batch} groups of {algorithm.group_size}"
    return f"{algorithm.name} on {weights}, {own.train.steps} steps of {batch}; plays {seats}"


def memory(spec: JobSpec) -> Check:
    """Weights of all policies together: one trainer holds them all, an engine and a shared trainer those of a base
    once. A pool has those of its policy, and a frozen checkpoint those of its job, once the server has looked it up.
    Blocking."""
    owns = [spec_of(spec, name) for name in spec.policies or ("",)]
    held = [players[0].model for players in engines(spec)] if is_served(spec) else []
    unknown = "the engines of frozen checkpoints, " if None in held else ""
    served = [model for model in held if model is not None]
    sizes = {model.base: _parameters(model) for model in [*(own.model for own in owns), *served]}
    if absent := [base for base, count in sizes.items() if not count]:
        return check("memory", f"{NOT_LOOKED_AT}the size of {absent[0]} is not known here", "note")
    trained = [_weights(own.model, sizes) if own.model.lora else sizes[own.model.base] * TRAINED_BYTES for own in owns]
    shared = spec.resources.trainer == "shared"
    parts = [f"the trainer about {_size(trained[-1] if shared else sum(trained))} for weights and optimizers"]
    if served:
        plural = "s" if len(served) > 1 else ""
        weights = _size(sum(_weights(model, sizes) for model in served))
        parts.insert(0, f"each rollout worker holds {weights} of weights in {len(served)} engine{plural}")
    hint = f"{unknown}contexts, activations and what adapters need come on top"
    return check("memory", ", ".join(parts), hint=hint)


def _parameters(model: ModelSpec) -> float:
    path = local_path(model.base)
    return 0.0 if path is None else parameters_in(path)


def _weights(model: ModelSpec, sizes: Mapping[str, float]) -> float:
    """Return the bytes of a model's weights. `sizes`: parameters by base."""
    return sizes[model.base] * (4 if model.dtype == "float32" else 2)


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"
