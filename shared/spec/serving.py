"""Of jobs that answer requests and train nothing: how many at once, how long, and when they have nothing more to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from opentinker.shared.spec.mistakes import fill, unused
from opentinker.shared.spec.part import Part

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

KIND = "inference"
USED = {"engine", "toy", "context_length"}
"""Of [rollout]: how to sample is said by each request."""


class ServingSpec(Part):
    max_concurrent: Annotated[int, Field(ge=1, le=256)] = 64
    """Requests that one rollout worker answers at the same time."""
    max_waiting: Annotated[int, Field(ge=0, le=10_000)] = 256
    """Requests that wait in one rollout worker beyond those; of more it takes none, and who asks is told to try again
    (429)."""
    request_timeout_s: Annotated[float, Field(gt=0.0, le=86_400.0)] = 600.0
    """Wall clock of one request, its waiting included."""
    idle_s: Annotated[float, Field(gt=0.0)] | None = None
    """The job succeeds when nobody has asked it anything for so long; default: it goes on until it is completed or
    cancelled."""
    sleep_s: Annotated[float, Field(gt=0.0)] | None = None
    """The job's rollout workers are given back when nobody has asked it anything for so long, and come back, by the
    queue, with the next request; default: it keeps them."""
    wake_s: Annotated[float, Field(gt=0.0, le=3600.0)] | None = None
    """With sleep_s: a request waits so long for a rollout worker, then it is told to come again (503, Retry-After),
    while the job goes on waking. Default: 60."""

    def settle(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.sleep_s is None and self.wake_s is not None:
            found.append({"field": "wake_s", "value": self.wake_s, "problem": "needs sleep_s: it never sleeps"})
        if self.sleep_s is not None and self.idle_s is not None and self.idle_s <= self.sleep_s:
            problem = f"is not larger than sleep_s={self.sleep_s:g}: the job would be over before it sleeps"
            found.append({"field": "idle_s", "value": self.idle_s, "problem": problem})
        if self.sleep_s is not None:
            fill(self, {"wake_s": self.wake_s or 60.0})
        return found


def settle_serving(spec: JobSpec) -> list[dict[str, Any]]:
    """What is wrong between the parts of an inference job."""
    usual = type(spec.rollout)()
    ignored = unused(spec.rollout, usual, set(type(usual).model_fields) - USED, f"kind = {KIND!r}")
    found = [{**mistake, "field": f"rollout.{mistake['field']}"} for mistake in ignored]
    return found + nothing_trained(spec)


def nothing_trained(spec: JobSpec) -> list[dict[str, Any]]:
    """What is wrong in a job that generates with weights as they are."""
    found: list[dict[str, Any]] = []
    by = f"does not apply to kind = {spec.kind!r}: nothing is trained"
    if spec.model.lora is not None and spec.start is None:
        problem = "needs start.from: the checkpoint that holds the adapter, which says all about it"
        found.append({"field": "model.lora", "value": spec.model.lora.model_dump(), "problem": problem})
    if spec.start is not None and spec.start.optimizer:
        found.append({"field": "start.optimizer", "value": True, "problem": by})
    gpus, ranks = spec.resources.trainer_gpus, spec.resources.ranks
    if gpus or ranks > 1:
        field = "resources.trainer_gpus" if gpus else "resources.trainer_ranks"
        found.append({"field": field, "value": gpus or ranks, "problem": by})
    return found
