"""A request for samples of the Tinker API, as an engine takes it, and the engine's completions as its result."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from opentinker.services.rollout_worker.engines.base import MAX_LIKELY, Completion, Sampling
from opentinker.services.rollout_worker.engines.base import Likely as LikelyHere
from opentinker.shared.openai.sampling import MAX_TEMPERATURE
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.tinker import (
    Likely,
    Sampled,
    SampleRequest,
    SampleSequence,
    prompt_too_long,
    too_many_cells,
)

MAX_COUNT = 1024
SEEDS = 2**63
NO_LOGPROB = -99999.0


def prompt_of(request: SampleRequest) -> list[int]:
    ids: list[int] = np.frombuffer(request.prompt, "<i4").tolist()
    return ids


def problem_of(
    request: SampleRequest, prompt: Sequence[int], *, context_length: int, vocab_size: int, simulated: bool
) -> str:
    """Return why the request cannot be carried out, and what to do; empty if it can."""
    params, likely = request.params, (request.likely, request.likely_prompt)
    odd = [id for id in (*prompt, *(params.stop_ids or ())) if not 0 <= id < vocab_size]
    checks = [
        (not prompt, "the prompt has no tokens: send at least one"),
        (len(prompt) >= context_length, f"the prompt {prompt_too_long(len(prompt), context_length)}"),
        (
            bool(odd),
            f"the model has token ids from 0 to {vocab_size - 1}, not {(odd or [0])[0]}: use the tokenizer of this "
            "base model",
        ),
        (
            not 1 <= request.count <= MAX_COUNT,
            f"num_samples is {request.count}: ask for 1 to {MAX_COUNT} at a time",
        ),
        (
            params.max_tokens is not None and params.max_tokens < 1,
            f"max_tokens is {params.max_tokens}: ask for at least 1",
        ),
        (
            not 0 <= params.temperature <= MAX_TEMPERATURE,
            f"temperature is {params.temperature}: it can be 0 (greedy) to {MAX_TEMPERATURE:g}",
        ),
        (not 0 < params.top_p <= 1, f"top_p is {params.top_p}: it can be above 0, and 1 at most"),
        (params.top_k < -1, f"top_k is {params.top_k}: it can be -1 (all tokens), or the number of tokens"),
        ("" in (params.stop or ()), "stop has an empty string, which would end every sample: leave it out"),
        (
            min(likely) < 0 or max(likely) > MAX_LIKELY,
            f"{min(likely) if min(likely) < 0 else max(likely)} of the likeliest tokens are asked for at each place: "
            f"ask for {MAX_LIKELY} at most",
        ),
        (
            simulated and bool(params.stop or max(likely)),
            "the simulated engine (rollout.engine = 'toy') has neither stop strings nor likeliest tokens: leave them "
            "out",
        ),
        (bool(large := too_many_cells(request, _most_tokens(request, context_length - len(prompt)))), large),
    ]
    return next((problem for bad, problem in checks if bad), "")


def _most_tokens(request: SampleRequest, room: int) -> int:
    """Return how many tokens a sample may have."""
    asked = request.params.max_tokens
    return max(0, room if asked is None else min(asked, room))


def sampling_of(request: SampleRequest, index: int, room: int, adapter: str) -> Sampling:
    """Return what sample `index` is drawn by. `room`: tokens that the prompt leaves of the context."""
    params = request.params
    asks_prompt = index == 0 and (request.prompt_logprobs or request.likely_prompt > 0)
    return Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        max_tokens=_most_tokens(request, room),
        stop=params.stop or [],
        stop_ids=params.stop_ids if params.stop is None else params.stop_ids or [],
        stop_in_special=True,
        seed=None if params.seed is None else (params.seed + index) % SEEDS,
        adapter=adapter,
        likely=request.likely,
        likely_prompt=request.likely_prompt if asks_prompt else None,
    )


def sampled_of(request: SampleRequest, completions: Sequence[Completion]) -> Sampled:
    """`completions`: one of each sample, in order."""
    first = completions[0]
    length = 1 + len(first.prompt_logprobs)
    hidden = max(1, length - request.last_prompt) if request.last_prompt else 1
    logprobs = [math.nan] * hidden + first.prompt_logprobs[hidden - 1 :]
    rows: list[LikelyHere] = [[]] * hidden + first.likely_prompt[hidden - 1 :]
    return Sampled(
        sequences=[_sequence(completion, request.likely) for completion in completions],
        prompt_logprobs=_floats(logprobs) if request.prompt_logprobs else b"",
        likely_prompt=_likely(rows, request.likely_prompt) if request.likely_prompt else None,
    )


def _sequence(completion: Completion, likely: int) -> SampleSequence:
    return SampleSequence(
        stop="length" if completion.stop in (StopReason.LENGTH, StopReason.CONTEXT) else "stop",
        tokens=np.asarray(completion.ids, "<i4").tobytes(),
        logprobs=_floats(completion.logprobs),
        likely=_likely(completion.likely, likely) if likely else None,
    )


def _likely(rows: Sequence[LikelyHere], k: int) -> Likely:
    padding = [(0, NO_LOGPROB)] * k
    cells = np.array([cell for row in rows for cell in [*row, *padding][:k]], [("id", "<i4"), ("logprob", "<f4")])
    return Likely(ids=cells["id"].tobytes(), logprobs=cells["logprob"].tobytes(), k=k, length=len(rows))


def _floats(values: Sequence[float]) -> bytes:
    return np.asarray(values, "<f4").tobytes()
