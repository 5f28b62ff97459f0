"""What several ranks can share and what they cannot; and GPUs that would stay unused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec


def settle_parallel(spec: JobSpec) -> list[dict[str, Any]]:
    """Mistakes in `train.parallel`."""
    parallel = spec.train.parallel
    if parallel == "data":
        return []
    found = []
    if spec.resources.ranks == 1:
        found.append("needs resources.trainer_ranks > 1: a single rank shares with nobody")
    if spec.algorithm.advantage == "gae" and spec.value_model is None:
        found.append("does not go with algorithm.advantage = 'gae', whose critic is whole on every rank; take 'data'")
    return [{"field": "train.parallel", "value": parallel, "problem": problem} for problem in found]


def shared_ranks(spec: JobSpec) -> list[dict[str, Any]]:
    """Mistakes in the ranks of a job with several policies, whose learners are all in one trainer process."""
    ranks = spec.resources.ranks
    if len(spec.policies) < 2 or ranks == 1:
        return []
    field = "trainer_gpus" if spec.resources.trainer_gpus else "trainer_ranks"
    problem = "must be 1 in a job with several policies: one trainer process holds them all, and joins no two groups"
    return [{"field": f"resources.{field}", "value": ranks, "problem": f"{problem} of ranks"}]


def unused_gpus(spec: JobSpec) -> list[dict[str, Any]]:
    """Mistakes in `resources.rollout_gpus`."""
    if not spec.resources.rollout_gpus or spec.rollout.engine == "vllm":
        return []
    problem = f"does not apply with rollout.engine = {spec.rollout.engine!r}, which has no use for a GPU"
    return [{"field": "resources.rollout_gpus", "value": spec.resources.rollout_gpus, "problem": problem}]
