"""Settings of inference jobs: how many requests run at the same time, and when the job sleeps or ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator

from opentinker.shared.spec.base import Seconds, SpecPart
from opentinker.shared.spec.start import PUBLISHED, Origin, SavedCheckpoint
from opentinker.shared.types.mistakes import fill, mistake, unused

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

KIND = "inference"
USED = {"engine", "toy", "context_length", "lora", "tensor_parallel"}
"""Fields of [rollout] that are used: each request brings its sampling parameters."""
MAX_ADAPTERS = 32
MAX_LORA_RANK = 512
"""Largest adapter rank that vLLM serves."""


class AdapterSpec(Origin):
    name: Annotated[str, Field(max_length=63)]
    """Name in requests (`model`): lower-case letters, digits, dots, dashes and underscores."""
    checkpoint: SavedCheckpoint = Field(alias="from")
    """`JOB@STEP`, `JOB@latest` or a published name: a checkpoint of your jobs with an adapter of model.base, trained
    with the same model.chat_template."""

    @field_validator("name")
    @classmethod
    def _callable(cls, value: str) -> str:
        if not PUBLISHED.fullmatch(value):
            raise ValueError(
                "must begin with a letter or digit, continue with letters, digits, dots, dashes or underscores, all in "
                "lower case, 63 at most, and be no job's id"
            )
        return value


class ServingSpec(SpecPart):
    max_concurrent: Annotated[int, Field(ge=1, le=256)] = 64
    """Requests that one rollout worker answers at the same time."""
    max_waiting: Annotated[int, Field(ge=0, le=10_000)] = 256
    """Requests that wait in one rollout worker in addition to those; further ones are answered with 429."""
    request_timeout_s: Annotated[float, Field(gt=0.0, le=86_400.0)] = 600.0
    """Wall-clock limit of a request, including its waiting time."""
    idle_s: Seconds | None = None
    """The job ends, succeeded, after this time without requests; default: the operator's inference_idle_s, otherwise it
    runs until it is completed or cancelled."""
    sleep_s: Seconds | None = None
    """Idle time after which the job's rollout workers are released; the next request brings them back through the
    queue. Default: the job keeps them unless another job waits for them (inference_lend_s, a setting of the
    operator)."""
    wake_s: Annotated[float, Field(gt=0.0, le=3600.0)] | None = None
    """Time that a request to a sleeping job waits for a rollout worker before it is answered with 503 and Retry-After,
    while the job continues to wake. Default: 60."""
    adapters: Annotated[list[AdapterSpec], Field(max_length=MAX_ADAPTERS)] = []
    """Adapters of model.base served by the same engine in addition to model.base itself; a request's `model` selects
    one. Not together with [start]."""

    def resolve(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.sleep_s is not None and self.idle_s is not None and self.idle_s <= self.sleep_s:
            problem = f"is not larger than sleep_s={self.sleep_s:g}: the job would be over before it sleeps"
            found.append(mistake("idle_s", self.idle_s, problem))
        fill(self, {"wake_s": self.wake_s or 60.0})
        names = [adapter.name for adapter in self.adapters]
        for i, name in enumerate(names):
            if name in names[:i]:
                found.append(mistake(f"adapters.{i}.name", name, "is the name of another one too: give it another"))
        return found


def settle_serving(spec: JobSpec) -> list[dict[str, Any]]:
    """Return mistakes between the parts of an inference job."""
    usual = type(spec.rollout)()
    ignored = unused(spec.rollout, usual, set(type(usual).model_fields) - USED, f"kind = {KIND!r}")
    found = [{**mistake, "field": f"rollout.{mistake['field']}"} for mistake in ignored]
    return found + _settle_adapters(spec) + nothing_trained(spec)


def _settle_adapters(spec: JobSpec) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if spec.serving.adapters and spec.start is not None:
        problem = (
            "does not apply with serving.adapters, which are adapters of model.base itself: give an adapter as one of "
            "them, and serve full weights or a live policy with a separate job"
        )
        found.append(mistake("start.from", spec.start.checkpoint, problem))
    for i, adapter in enumerate(spec.serving.adapters):
        if adapter.name in (spec.model.base, spec.name):
            problem = "is what the base is called here, by model.base or the job's name: give it another"
            found.append(mistake(f"serving.adapters.{i}.name", adapter.name, problem))
    return found


def nothing_trained(spec: JobSpec) -> list[dict[str, Any]]:
    """Return mistakes of a job that generates without training."""
    found: list[dict[str, Any]] = []
    by = f"does not apply to kind = {spec.kind!r}: nothing is trained"
    if spec.model.lora is not None and spec.start is None:
        several = " (or serving.adapters: several of them)" if spec.kind == KIND else ""
        problem = f"needs start.from: the checkpoint that holds the adapter, which says all about it{several}"
        found.append(mistake("model.lora", spec.model.lora.model_dump(), problem))
    if spec.start is not None and spec.start.optimizer:
        found.append(mistake("start.optimizer", True, by))
    if spec.model.train_vision:
        found.append(mistake("model.train_vision", True, by))
    gpus, ranks = spec.resources.trainer_gpus, spec.resources.ranks
    if gpus or ranks > 1:
        field = "resources.trainer_gpus" if gpus else "resources.trainer_ranks"
        found.append(mistake(field, gpus or ranks, by))
    return found
