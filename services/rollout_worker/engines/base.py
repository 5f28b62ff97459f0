"""Interface of generation engines. Two implementations: `toy` and `vllm`.

Token ids in, token ids out. A weight swap may fall inside a generation: the spans say which version sampled what.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.core import StopReason, WeightVersion
from opentinker.shared.types.errors import OpenTinkerError
from opentinker.shared.types.swap import SwapCommand
from opentinker.shared.types.trajectories import Picture, Span

MAX_LIKELY = 256
"""Most of the likeliest tokens at a place that an engine tells."""


class EngineError(OpenTinkerError):
    """This request could not be generated; others continue."""


class EngineLost(EngineError):
    """The engine is gone or half loaded: no call can succeed, the worker should end and restart."""


class GuideRefused(EngineError):
    """A guide that the engine cannot enforce: a mistake in the request."""


class SwapError(OpenTinkerError):
    """Joining or receiving failed. The engine keeps its old weights and version and continues to generate."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    max_tokens: int
    stop: list[str] = []
    """Strings that end the completion; their tokens are part of it."""
    stop_ids: list[int] | None = None
    """Tokens that end the completion and are part of it; None: the model's end-of-turn tokens; empty: none."""
    stop_in_special: bool = False
    """Whether `stop` is looked for in the names of special tokens too."""
    seed: int | None = None
    """None: drawn by the engine."""
    adapter: str = ""
    """One that was added to the engine, by its name."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    structure: str = ""
    """A structural tag, in JSON, that the text must match; empty: any text. Log-probabilities are those among the
    tokens that fit."""
    likely: int = 0
    """So many of the likeliest tokens are told at each place; never for training."""
    likely_prompt: int | None = None
    """Likewise at each place of the prompt, with the logprobs of its tokens; None: neither."""


class Shown(NamedTuple):
    """An image of a prompt."""

    picture: Picture
    inputs: Any
    """Inputs of the model's vision tower: tensors by name, see `vision.ImageInputs`."""


Likely = list[tuple[int, float]]
"""At one place, the likeliest token first, with its logprob. Those that could not be drawn there are not among them."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    ids: list[int]
    """Sampled tokens, the end-of-turn token included."""
    logprobs: list[float]
    """Log-probability of each token under the distribution it was drawn from: after temperature, top_p and top_k."""
    spans: list[Span]
    """Over `ids`, in order, without gaps."""
    stop: StopReason
    likely: list[Likely] = []
    """At the place of each token, under the same distribution; empty unless asked for."""
    prompt_logprobs: list[float] = []
    """Log-probability of each token of the prompt but the first, at temperature 1; empty unless asked for."""
    likely_prompt: list[Likely] = []
    """At the place of each token of the prompt but the first, at temperature 1; empty unless asked for."""


class Scores(NamedTuple):
    version: WeightVersion | None
    """Version of the weights that sampled it."""
    logprobs: list[float]
    """Log-probability of each token but the first, at temperature 1."""


class LoraServing(NamedTuple):
    """How an engine serves the adapters of its base."""

    merged: bool
    """Its one adapter is merged into the base; otherwise vLLM applies adapters in its LoRA layers."""
    why: str
    """The reason if it is not merged."""


Progress = Callable[[list[int], list[float], list[Likely]], None]
"""Called with the tokens sampled since its last call, their logprobs, and what was likely, if that was asked for."""


class Engine(Protocol):
    """`version` is None, and nothing can be generated, until the first `receive` or `serve`."""

    version: WeightVersion | None

    @property
    def context_length(self) -> int:
        """Tokens of prompt and completion together; known after `start`."""

    @property
    def vocab_size(self) -> int:
        """Token ids are smaller; known after `start`."""

    @property
    def lora(self) -> LoraServing | None:
        """How adapters are served, known after `start`; None: there are none."""

    async def start(self) -> None: ...

    def sibling(self, eos_ids: Collection[int], lora: LoraSpec) -> Engine:
        """Return the engine of another policy, which is an adapter of the same base, in the same process and batch. It
        is started, has its own versions and weight group, and ends with this one. The caller has given the first engine
        room for all adapters."""

    async def generate(
        self,
        request: str,
        prompt_ids: list[int],
        sampling: Sampling,
        progress: Progress | None = None,
        shown: Sequence[Shown] = (),
    ) -> Completion:
        """Raises EngineError, EngineLost among them. Cancelling the caller frees the request's resources.

        `progress` hears of the completion's tokens as they come; of the last ones too. `shown`: the prompt's images.
        """

    async def score(self, ids: list[int]) -> Scores | None:
        """Compute log-probabilities of these tokens under the newest weights; None: the engine has no model. Raises
        EngineError."""

    async def abort(self, request: str) -> None:
        """End a running request: its `generate` raises EngineError. Unknown requests are ignored."""

    async def watch(self) -> None:
        """Never returns. Raises EngineLost when the engine dies, also while it is idle."""

    async def serve(self, version: WeightVersion, adapter: Path | None = None) -> None:
        """Generate with the weights it was started with, by this name; with `adapter`, a PEFT directory, on top of
        them. Raises EngineError. For jobs without a trainer: there is no weight group."""

    async def load(self, version: WeightVersion, directory: Path) -> None:
        """Replace the served weights by those of a checkpoint directory; of a LoRA job, the adapter. Nothing is being
        generated. Raises SwapError if nothing was loaded, EngineError, EngineLost among them. Not for engines whose
        weights come through a weight group."""

    async def add(self, name: str, version: WeightVersion, adapter: Path) -> None:
        """Load a PEFT directory next to the served weights, for requests that name it. Raises EngineError. Not for jobs
        whose weights are an adapter, or come through a weight group."""

    async def drop(self, name: str) -> None:
        """Unload an adapter that was added, which no request uses. Raises EngineLost."""

    async def join(self, command: SwapCommand) -> None:
        """Enter the job's weight group; the old one is left first. Raises SwapError, EngineLost."""

    async def receive(self, command: SwapCommand) -> dict[str, float]:
        """Take one version through the group. Returns seconds by phase: pause, transfer, load, resume.

        Receive weights. Raises SwapError if nothing was loaded, or EngineLost. Generation continues, except during
        pause, load and resume.
        """

    @property
    def sleeps(self) -> bool:
        """Whether the engine must give its memory to the trainer during a step."""

    @property
    def asleep_s(self) -> float:
        """Seconds in which it slept, the present ones included; time limits of requests do not count them."""

    async def sleep(self) -> None:
        """Give memory back, and generate nothing, until `wake`. Requests stay. Idempotent. Raises SwapError,
        EngineLost."""

    async def wake(self) -> None:
        """Take the memory again and continue with the requests. Idempotent. Raises EngineLost."""

    async def close(self) -> None: ...
