"""Messages of the Tinker API: commands of clients to their models, requests for samples, and the answers to both.

gateway --COMMAND--> trainer, gateway --SAMPLE--> rollout worker; both keep the answer in Redis (`state/tinker`) and
send ANSWERED, for which gateways wait.

A *model* is an adapter of the base of a job of kind `tinker`, or all weights of it. The client numbers its commands
(`seq`, dense, from 0, which creates it), and they are carried out in that order. Arrays are little-endian bytes: N
tokens of a datum, K targets of each of its positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

ALPHA = 32.0
"""LoRA alpha of every model: the API has no such setting."""
LARGEST_OPTION = 1e30
"""Of a loss: passes compute with float32, and one that fails by it costs the other models of the pass time."""
SMALLEST_EPS = 1e-30
"""Of an optimizer step: with 0, as float32 has it for 1e-46, a weight without a gradient so far becomes 0 / 0."""


CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
ANSWER_KEPT_S = 6 * 3600
"""Seconds for which an answer can be read."""


def tinker_place(data_dir: Path, model: str) -> Path:
    """Return the directory of a model: KIND/NAME for its checkpoints, `state` for its trainer, `samplers/ID` for
    sampler weights without a name."""
    return data_dir / "tinker" / model


class LoraShape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of the adapter of a model, or all of its weights."""

    rank: int
    """0: there is no adapter, and all weights are trained."""
    seed: int = 0
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def is_full(self) -> bool:
        """Whether all weights are trained."""
        return self.rank == 0

    def __str__(self) -> str:
        return "all weights" if self.is_full else f"rank {self.rank}"


class Datum(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence: position n sees `tokens[: n + 1]` and is scored on `targets[n]`, usually the next token."""

    tokens: bytes
    """int32 [N]."""
    targets: bytes
    """int32 [N, K], rows one after another."""
    width: int = 1
    """K."""
    weights: bytes = b""
    """float32 [N, K]; empty: all 1. Loss cross_entropy alone."""
    logprobs: bytes = b""
    """float32 [N, K]: log-probabilities when it was sampled. Other losses need them."""
    advantages: bytes = b""
    """float32 [N, K]. Other losses need them."""
    mask: bytes = b""
    """float32 [N, K]: factor of each position, of losses other than cross_entropy; empty: all 1."""


class Create(msgspec.Struct, frozen=True, kw_only=True, tag="create"):
    """A new model. `start`: directory of a checkpoint that it begins with, whose shape `lora` repeats; empty: fresh."""

    lora: LoraShape
    start: str = ""
    optimizer: bool = False
    """Whether the optimizer's state of `start` is taken over too."""


class ForwardBackward(msgspec.Struct, frozen=True, kw_only=True, tag="forward_backward"):
    data: list[Datum]
    loss: str
    options: dict[str, float] = {}
    backward: bool = True
    """False: log-probabilities and loss alone."""


class OptimStep(msgspec.Struct, frozen=True, kw_only=True, tag="optim_step"):
    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    clip: float = 0.0
    """Largest norm of the gradient; 0: any."""


class Save(msgspec.Struct, frozen=True, kw_only=True, tag="save"):
    """`kind`: `weights` (with the optimizer's state), `sampler_weights`, or `external_weights`, the same for download.
    `name` empty: sampler weights for `sampler` alone, without a name."""

    kind: CheckpointKind
    name: str = ""
    sampler: str = ""
    ttl_s: float = 0.0
    """0: kept until it is deleted."""
    overwrite: bool = False
    follows: bool = False
    """Whether `sampler` takes later sampler weights of the model that have no name."""
    metadata: dict[str, str] = {}
    """The checkpoint's."""


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Replace the weights by those of a checkpoint. `path`: as the client wrote it; `directory`: where it lies."""

    path: str
    directory: str
    optimizer: bool = False


class Unload(msgspec.Struct, frozen=True, kw_only=True, tag="unload"):
    """Forget the model; its checkpoints stay."""


class Skip(msgspec.Struct, frozen=True, kw_only=True, tag="skip"):
    """A command that the gateway refused. It holds its place in the order, and its answer is Failed with this text."""

    error: str


class Command(msgspec.Struct, frozen=True, kw_only=True):
    request: str
    """Id of the answer."""
    model: str
    tenant: str
    seq: int
    body: Create | ForwardBackward | OptimStep | Save | Load | Unload | Skip


class Forwarded(msgspec.Struct, frozen=True, kw_only=True, tag="forwarded"):
    logprobs: list[bytes]
    """float32 [N, K] for each datum."""
    widths: list[int]
    """K of each datum."""
    metrics: Mapping[str, float | None]
    """NAME:REDUCTION -> value; `loss:sum` is always there. JSON has null for a number that is not finite."""


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag="stepped"):
    metrics: Mapping[str, float | None]


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag="saved"):
    path: str = ""
    """tinker://MODEL/KIND/NAME, of a named one."""
    sampler: str = ""


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """Result of Create, Load and Unload."""

    path: str = ""
    """tinker://MODEL/KIND/NAME, of a Load."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """`lost`: the request was not carried out and may be sent again, a command under a new number (HTTP 410 where it is
    awaited)."""

    error: str
    category: Literal["user", "server"] = "user"
    lost: bool = False


class SampleParams(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: int | None = None
    """None: as many as the context holds."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: list[str] | None = None
    stop_ids: list[int] | None = None
    """Both None: the model's end-of-turn tokens end a sample. `stop_ids` empty: nothing does."""


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`directory`: PEFT adapter to sample with; empty: the base. `version` differs for different contents of it."""

    request: str
    tenant: str
    model: str = ""
    directory: str = ""
    version: str = ""
    rank: int = 0
    follows: bool = False
    """Sent again, the request gets the model's newest weights."""
    prompt: bytes
    """int32 token ids."""
    count: int = 1
    params: SampleParams = SampleParams()
    prompt_logprobs: bool = False
    last_prompt: int = 0
    """Log-probabilities and likeliest tokens are given for this number of tokens at the end of the prompt, with NaN and
    empty cells before them; 0: for all."""
    likely_prompt: int = 0
    """Number of likeliest tokens at each place of the prompt."""
    likely: int = 0
    """Likewise of each sample."""


MAX_CELLS = 4_000_000
"""Largest number of values in the arrays of an answer to a request for samples."""


def too_many_cells(request: SampleRequest, max_tokens: int) -> str:
    """Return that the arrays of the answer may be too large, and what to do; empty if they are not. `max_tokens`: that
    a sample may have."""
    cells = _cells(request, max_tokens)
    if cells <= MAX_CELLS:
        return ""
    return (
        f"the answer may have {cells} values, num_samples x max_tokens x (1 + topk_sample_logprobs) and "
        f"topk_prompt_logprobs of each token of the prompt, and {MAX_CELLS} are the most: ask for fewer samples at a "
        "time, set a lower max_tokens, or ask for fewer of the likeliest tokens"
    )


def most_bytes(request: SampleRequest, max_tokens: int) -> int:
    """Return how many bytes the arrays of the answer may have."""
    return 8 * min(_cells(request, max_tokens), MAX_CELLS) + len(request.prompt) * request.prompt_logprobs


def _cells(request: SampleRequest, max_tokens: int) -> int:
    """Return how many pairs of a token and its log-probability the answer may have."""
    prompt = len(request.prompt) // 4 * request.likely_prompt
    return prompt + request.count * max_tokens * (1 + request.likely)


def prompt_too_long(tokens: int, context: int) -> str:
    return (
        f"has {tokens} tokens, and the context of {context} must hold it and at least one more: shorten it, or start "
        "the server's job with a larger rollout.context_length"
    )


class Likely(msgspec.Struct, frozen=True, kw_only=True):
    """The `k` likeliest tokens at each of `length` places, likeliest first; cells without one have token 0 and logprob
    -99999."""

    ids: bytes
    """int32 [length, k]."""
    logprobs: bytes
    """float32 [length, k]."""
    k: int
    length: int


class SampleSequence(msgspec.Struct, frozen=True, kw_only=True):
    stop: Literal["stop", "length"]
    tokens: bytes
    """int32; the stop token, or those of the stop string, included."""
    logprobs: bytes
    """float32, of the distribution that was sampled from."""
    likely: Likely | None = None


class Sampled(msgspec.Struct, frozen=True, kw_only=True, tag="sampled"):
    sequences: list[SampleSequence]
    prompt_logprobs: bytes = b""
    """float32 of each token of the prompt, at temperature 1; the first is NaN."""
    likely_prompt: Likely | None = None


Result = Forwarded | Stepped | Saved | Loaded | Sampled | Failed
SMALL_RESULT = 1 << 18
"""Bytes of arrays of a result that is encoded and decoded in the event loop."""


def bytes_in(result: Result) -> int:
    """Return the bytes of a result's arrays."""
    if isinstance(result, Forwarded):
        return sum(map(len, result.logprobs))
    if not isinstance(result, Sampled):
        return 0
    likely = [result.likely_prompt, *(one.likely for one in result.sequences)]
    arrays = sum(len(one.tokens) + len(one.logprobs) for one in result.sequences) + len(result.prompt_logprobs)
    return arrays + sum(len(one.ids) + len(one.logprobs) for one in likely if one is not None)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    request: str
    result: Result


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """`request` has its answer in Redis."""

    request: str


# --- records in Redis ------------------------------------------------------------------------------------------------


class TinkerSession(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    created: float
    sdk_version: str = ""
    tags: list[str] = []
    metadata: dict[str, str] = {}
    project: str = ""
    name: str = ""
    key: str = ""
    """Id of the API key that opened it."""


class TinkerModel(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """SESSION:train:NUMBER."""
    tenant: str
    job: str
    """Job of kind `tinker` whose workers train and sample it."""
    base: str
    lora: LoraShape
    created: float
    start: str = ""
    """Path of the checkpoint that it began with."""
    metadata: dict[str, str] = {}
    ended: bool = False
    """It was unloaded, and its record stays for its checkpoints."""


class TinkerCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A named save. Its files lie in `tinker_place(data_dir, model)/KIND/PLACE`."""

    model: str
    tenant: str
    kind: CheckpointKind
    name: str
    base: str
    lora: LoraShape
    created: float
    size: int
    step: int
    expires: float = 0.0
    seq: int = -1
    """Number of the command that saved it."""
    place_name: str = ""
    """NAME@SEQ: what reads earlier weights with this name keeps them. Empty: the name."""
    public: bool = False
    metadata: dict[str, str] = {}

    @property
    def place(self) -> str:
        """Name of the directory."""
        return self.place_name or self.name

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"


class Sampler(msgspec.Struct, frozen=True, kw_only=True):
    """A sampling session: what its samples are drawn with."""

    id: str
    tenant: str
    session: str
    job: str
    base: str
    model: str = ""
    path: str = ""
    """Path of the checkpoint; empty for weights without a name."""
    directory: str = ""
    version: str = ""
    rank: int = 0
    follows: bool = False
    """Whether it takes later weights of the model that are saved without a name (kind `inflight`)."""


class ModelProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How a model learns. Its trainer writes it, about once a second while the model has commands."""

    passes: int = 0
    """Commands `forward_backward`, with the backward pass and without it."""
    steps: int = 0
    """Optimizer steps."""
    tokens: int = 0
    """Tokens of the passes."""
    queue_s: float = 0.0
    """Mean seconds that the newest passes waited for those of others."""
    loss: float | None = None
    """Mean of a token in the newest passes; None: no pass has had one yet."""
    curve: list[float] = []
    """Losses so far, oldest first, as some dozens of values."""
