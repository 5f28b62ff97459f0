"""Translates between our requests and completions and those of vLLM."""

from __future__ import annotations

import math
from collections.abc import Collection

from opentinker.services.rollout_worker.engines import vllm_startup
from opentinker.services.rollout_worker.engines.base import Completion, EngineError, Likely, Progress, Sampling
from opentinker.shared.types.core import StopReason, WeightVersion
from opentinker.shared.types.trajectories import Span

vllm_startup.prepare()

from vllm import SamplingParams  # noqa: E402 - vLLM reads its environment when it is imported
from vllm.logprobs import FlatLogprobs  # noqa: E402
from vllm.outputs import CompletionOutput, RequestOutput  # noqa: E402
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams  # noqa: E402

from opentinker.services.rollout_worker.engines.vllm_process import Adapter  # noqa: E402


def vllm_params(
    sampling: Sampling, room: int, eos_ids: Collection[int], vocab_size: int, *, whole: bool
) -> SamplingParams:
    """`room`: tokens that the prompt leaves of the context. `whole`: the completion comes in one piece."""
    forced = StructuredOutputsParams(structural_tag=sampling.structure) if sampling.structure else None
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=min(sampling.max_tokens, room),
        seed=sampling.seed,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        structured_outputs=forced,
        stop=sampling.stop or None,
        stop_token_ids=sorted(eos_ids if sampling.stop_ids is None else sampling.stop_ids),
        ignore_eos=True,  # the tokenizer's idea of it; stop_token_ids has the model's
        logprobs=min(sampling.likely, vocab_size),
        prompt_logprobs=None if sampling.likely_prompt is None else min(sampling.likely_prompt, vocab_size),
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=not sampling.stop_in_special,
        output_kind=RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.CUMULATIVE,
    )


def completion_of(request: str, final: RequestOutput | None, sampling: Sampling, adapter: Adapter | None) -> Completion:
    """Return the completion of a request from its last output. Raises EngineError."""
    output = final.outputs[0] if final is not None else None
    if final is None or output is None or output.finish_reason not in ("stop", "length"):
        raise EngineError(f"request {request} ended with {output.finish_reason if output else 'nothing'}")
    ids = list(output.token_ids)
    if not isinstance(output.logprobs, FlatLogprobs) or len(output.logprobs) != len(ids):
        raise EngineError(f"request {request} came without a logprob for every token")
    logprobs, likely = _logprobs(output.logprobs, slice(0, len(ids)))
    prompt_logprobs, likely_prompt = _of_prompt(request, final, sampling)
    if adapter is not None:
        spans = [Span(0, len(ids), adapter.version)]
    else:
        spans = [Span(s.start, s.end, WeightVersion.parse(s.version)) for s in output.weight_versions or []]
    if output.finish_reason == "length":
        stop = StopReason.LENGTH if len(ids) == sampling.max_tokens else StopReason.CONTEXT
    else:
        stop = StopReason.STOP if isinstance(output.stop_reason, str) else StopReason.EOS
    return Completion(
        ids=ids,
        logprobs=logprobs,
        spans=spans,
        stop=stop,
        likely=likely if sampling.likely else [],
        prompt_logprobs=prompt_logprobs,
        likely_prompt=likely_prompt if sampling.likely_prompt else [],
    )


def tell_progress(progress: Progress, told: int, output: CompletionOutput, sampling: Sampling) -> int:
    """Report the tokens beyond the first `told` ones; return the new count. vLLM's lists grow in place."""
    ids = output.token_ids
    if isinstance(output.logprobs, FlatLogprobs) and len(ids) > told:
        logprobs, likely = _logprobs(output.logprobs, slice(told, len(ids)))
        progress(list(ids[told:]), logprobs, likely if sampling.likely else [])
    return len(ids)


def _of_prompt(request: str, final: RequestOutput, sampling: Sampling) -> tuple[list[float], list[Likely]]:
    if sampling.likely_prompt is None:
        return [], []
    found = final.prompt_logprobs
    if not isinstance(found, FlatLogprobs) or len(found) != len(final.prompt_token_ids or ()):
        raise EngineError(f"request {request} came without a logprob for every token of its prompt")
    return _logprobs(found, slice(1, len(found)))


def _logprobs(found: FlatLogprobs, places: slice) -> tuple[list[float], list[Likely]]:
    """Return log-probabilities of the sampled tokens at these places, and of the likeliest there: vLLM lists the
    sampled one first, and again where it is among the likeliest, which follow in order."""
    ranges = list(zip(found.start_indices[places], found.end_indices[places], strict=True))
    likely = [
        [(found.token_ids[at], found.logprobs[at]) for at in range(start + 1, end) if found.logprobs[at] > -math.inf]
        for start, end in ranges
    ]
    return [found.logprobs[start] for start, _ in ranges], likely
