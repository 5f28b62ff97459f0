"""Settings of jobs that serve the Tinker API: clients drive training themselves, with one adapter each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from opentinker.shared.spec.base import SpecPart
from opentinker.shared.spec.serving import nothing_trained
from opentinker.shared.types.mistakes import fill, mistake, unused

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

KIND = "tinker"
USED = {"engine", "toy", "context_length", "tensor_parallel"}
"""Fields of [rollout] that are used: each request brings its sampling parameters."""
ANYBODY = "*"


class TinkerSpec(SpecPart):
    max_rank: Annotated[int, Field(ge=1, le=64)] = 32
    """Largest rank of a client's adapter. Rollout workers reserve the room of this rank for each of max_adapters."""
    full_weights: bool = False
    """Clients train all weights of models instead of adapters: create_model without a lora_config, or with rank 0. The
    shared trainer has no adapters and holds one model at a time, and a rollout worker samples from one at a time."""
    max_adapters: Annotated[int, Field(ge=1, le=64)] = 8
    """Adapters that one batch of a rollout worker samples with; others wait for their turn."""
    max_concurrent: Annotated[int, Field(ge=1, le=256)] = 64
    """Samples that one rollout worker draws at the same time; further ones wait in the queue."""
    open_to: Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(max_length=100)] = []
    """Other tenants whose clients may use the job, by name; ["*"]: all. They cannot see the job, and each sees its own
    models alone. The job's own tenant may always."""
    tokens_per_minute: Annotated[int, Field(ge=1000, le=10**12)] | None = None
    """Tokens that the requests of one tenant may have in a minute, trained and sampled together; further ones are
    answered with 429. Default: no limit."""

    def allows(self, owner: str, tenant: str) -> bool:
        """Return whether clients of `tenant` may use a job of the tenant `owner`."""
        return tenant == owner or tenant in self.open_to or ANYBODY in self.open_to


def settle_tinker(spec: JobSpec) -> list[dict[str, Any]]:
    """Return mistakes in a job that serves the Tinker API; its trainer is a shared one."""
    usual = type(spec.rollout)()
    ignored = unused(spec.rollout, usual, set(type(usual).model_fields) - USED, f"kind = {KIND!r}")
    found = [{**one, "field": f"rollout.{one['field']}"} for one in ignored]
    by = f"does not apply to kind = {KIND!r}"
    if spec.start is not None:
        problem = f"{by}: clients create their models from checkpoints themselves"
        found.append(mistake("start.from", spec.start.checkpoint, problem))
    if spec.model.lora is not None:
        problem = f"{by}: clients choose rank and layers; tinker.max_rank bounds them"
        found.append(mistake("model.lora", spec.model.lora.model_dump(), problem))
    if spec.tinker.full_weights:
        default = TinkerSpec()
        found += [
            mistake(f"tinker.{name}", value, "does not apply with tinker.full_weights: there are no adapters")
            for name in ("max_rank", "max_adapters")
            if (value := getattr(spec.tinker, name)) != getattr(default, name)
        ]
    if spec.model.fp32_head:
        found.append(mistake("model.fp32_head", True, f"{by}: the base is shared with other jobs"))
    apart = ("model.lora", "start.optimizer", "resources.trainer_gpus")
    found += [one for one in nothing_trained(spec) if one["field"] not in apart]
    if (gpus := spec.resources.trainer_gpus) > 1:
        problem = "must be 0 or 1: the clients' models train together, on the first GPU of a shared trainer"
        found.append(mistake("resources.trainer_gpus", gpus, problem))
    fill(spec, {"resources": spec.resources.model_copy(update={"trainer": "shared"})})
    return found
