"""The nouns of inference jobs: what the scheduler, which has the HTTP endpoint, and rollout workers say to each other.

A request goes to one rollout worker of the job, by its address; the answer comes in pieces, numbered, on an inbox.
"""

from __future__ import annotations

from typing import Any

import msgspec

from opentinker.shared.openai.answers import Piece
from opentinker.shared.openai.requests import Question
from opentinker.shared.openai.sampling import SamplingParams
from opentinker.shared.types.core import StopReason, ToolCall, WeightVersion

BEAT_S = 2.0
"""A rollout worker that has nothing new to say of a request says so this often."""
SILENCE_S = 12.0
"""A worker that sends nothing for this time is lost."""


class GenerateRequest(Question, frozen=True, kw_only=True):
    """Scheduler -> one rollout worker of an inference job."""

    id: str
    asker: str
    """The scheduler that waits for the answer."""
    job: str
    model: str
    """One of the job's models: the first of `names_of`, or the name of one of its adapters."""
    manner: SamplingParams = SamplingParams()
    tokens: bool = False
    """The sampled tokens are wanted as text, one by one."""
    offsets: bool = False
    """And where each of them begins in the answer."""


class GenerateResult(Piece, frozen=True, kw_only=True):
    """The whole answer, without the stop string that ended it. `likely`: at the places that came with no piece."""

    stop: StopReason
    prompt_tokens: int
    version: WeightVersion
    """Version of the weights that sampled the last token."""
    tool_calls: list[ToolCall]
    words: str = ""
    """Text before the tool calls."""


class GenerateError(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of a request, with its HTTP status."""

    message: str
    status: int = 400
    param: str = ""
    code: str = ""
    elsewhere: bool = False
    """Another rollout worker of the job may answer."""


class GenerateChunk(Piece, frozen=True, kw_only=True):
    """Rollout worker -> the scheduler that asked. One with nothing in it says that the worker is at it. The chunks'
    texts are a prefix of the result's text."""

    seq: int
    """0, 1, 2...: a gap means that something was lost on the way."""
    reply: GenerateResult | None = None
    """The last piece has this or `refusal`."""
    refusal: GenerateError | None = None


class CancelGenerate(msgspec.Struct, frozen=True):
    """Scheduler -> the rollout worker with the request: no client waits for the answer any longer."""

    id: str


class InFlight(msgspec.Struct, frozen=True):
    """Rollout worker -> a scheduler: are these requests of yours still wanted? Answered with those that are."""

    ids: list[str]


def names_of(id: str, spec: dict[str, Any]) -> list[str]:
    """Return the names of a job's model in requests; the first is its id. `spec`: of an inference job, as stored."""
    start = spec.get("start")
    return list(dict.fromkeys([start["from"] if start else spec["model"]["base"], spec["name"], id]))


def adapters_in(spec: dict[str, Any]) -> dict[str, str]:
    """Return the checkpoint of each adapter served with the job's model, by name."""
    return {adapter["name"]: adapter["from"] for adapter in spec["serving"].get("adapters", [])}


def models_of(id: str, spec: dict[str, Any]) -> dict[str, str]:
    """Everything that `model` of a request may be -> what an Ask says for it. The first is the job's own model."""
    names = names_of(id, spec)
    return dict.fromkeys(names, names[0]) | {name: name for name in adapters_in(spec)}
