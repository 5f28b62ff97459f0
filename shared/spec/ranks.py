"""Checks what several ranks can share, and whether GPUs would stay unused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentinker.shared.spec.base import MAX_RANKS
from opentinker.shared.types.mistakes import mistake

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec


def settle_parallel(spec: JobSpec) -> list[dict[str, Any]]:
    """Mistakes in `train.parallel`."""
    parallel = spec.train.parallel
    if parallel == "data":
        return []
    found = []
    if spec.resources.ranks == 1:
        table = "" if spec.policies else "resources."
        found.append(f"needs {table}trainer_ranks > 1: a single rank shares with nobody")
    if spec.algorithm.advantage == "gae" and spec.value_model is None:
        found.append("does not go with algorithm.advantage = 'gae', whose critic is whole on every rank; take 'data'")
    return [mistake("train.parallel", parallel, problem) for problem in found]


def all_ranks(spec: JobSpec) -> int:
    """Return the number of processes that train: one or several for each policy."""
    return sum(own.trainer_ranks or spec.resources.ranks for own in spec.policies.values()) or spec.resources.ranks


def policy_ranks(spec: JobSpec) -> list[dict[str, Any]]:
    """Mistakes in the ranks of policies, whose learners are all in one trainer process."""
    found: list[tuple[str, Any, str]] = []
    gpus, several = spec.resources.trainer_gpus, len(spec.policies) > 1
    if several and gpus > 1:
        problem = "must be 0 or 1 in a job with several policies: with GPUs, each has one rank, on the first GPU"
        found.append(("resources.trainer_gpus", gpus, problem))
    for name, own in spec.policies.items():
        if gpus and own.trainer_ranks not in (None, spec.resources.ranks):
            problem = "must be left out with resources.trainer_gpus, which says how many ranks there are"
            found.append((f"policies.{name}.trainer_ranks", own.trainer_ranks, problem))
    if several and (total := all_ranks(spec)) > MAX_RANKS:
        problem = f"gives {total} ranks to {len(spec.policies)} policies; {MAX_RANKS} fit in a job"
        found.append(("resources.trainer_ranks", spec.resources.ranks, problem))
    partitioned = [name for name, own in spec.policies.items() if own.train.parallel != "data"]
    for name in partitioned[1:]:
        problem = f"must be 'data', as {partitioned[0]!r} has another: DeepSpeed joins one group of ranks per process"
        found.append((f"policies.{name}.train.parallel", spec.policies[name].train.parallel, problem))
    return [mistake(*one) for one in found]


def unused_gpus(spec: JobSpec) -> list[dict[str, Any]]:
    """Mistakes in `resources.rollout_gpus`."""
    if not spec.resources.rollout_gpus or spec.rollout.engine == "vllm":
        return []
    problem = f"does not apply with rollout.engine = {spec.rollout.engine!r}, which has no use for a GPU"
    return [mistake("resources.rollout_gpus", spec.resources.rollout_gpus, problem)]
