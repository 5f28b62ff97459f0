"""Requests for samples of the Tinker API: which are refused, how they are drawn, and their arrays."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from opentinker.services.rollout_worker.engines.base import Completion
from opentinker.services.rollout_worker.tinker.samples import (
    MAX_COUNT,
    NO_LOGPROB,
    problem_of,
    prompt_of,
    sampled_of,
    sampling_of,
)
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.tinker import SampleParams, SampleRequest

PROMPT = [3, 4, 5]
PARAMS = {name for name in SampleParams.__struct_fields__}


def asked(prompt: list[int] = PROMPT, **fields: Any) -> SampleRequest:
    """A request; fields of SampleParams go there."""
    params = SampleParams(**{name: value for name, value in fields.items() if name in PARAMS})
    others = {name: value for name, value in fields.items() if name not in PARAMS}
    ids = np.asarray(prompt, "<i4").tobytes()
    return SampleRequest(request="s#1", tenant="t", prompt=ids, params=params, **others)


def problem(request: SampleRequest, *, simulated: bool = False) -> str:
    return problem_of(request, prompt_of(request), context_length=8, vocab_size=32, simulated=simulated)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (asked([]), "no tokens"),
        (asked([1] * 8), "8 tokens, and the context of 8 must hold it and at least one more: shorten it"),
        (asked([1, 32]), "ids from 0 to 31, not 32"),
        (asked([1, -1]), "not -1"),
        (asked(stop_ids=[99]), "not 99"),
        (asked(count=0), "num_samples is 0"),
        (asked(count=MAX_COUNT + 1), "ask for 1 to"),
        (asked(max_tokens=0), "max_tokens is 0"),
        (asked(temperature=2.5), "temperature is 2.5"),
        (asked(temperature=float("nan")), "temperature is nan"),
        (asked(top_p=0.0), "top_p is 0"),
        (asked(top_k=-2), "top_k is -2"),
        (asked(stop=["a", ""]), "empty string"),
        (asked(likely=257), "256 at most"),
        (asked(likely_prompt=-1), "256 at most"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_advice(request_: SampleRequest, words: str) -> None:
    found = problem(request_)
    assert words in found and len(found) < 250


def test_a_request_at_every_limit_is_taken() -> None:
    full = asked([31] * 7, stop_ids=[31], count=MAX_COUNT, max_tokens=1, temperature=2.0, top_k=0, likely=256)
    assert problem(full) == "" and problem(asked(temperature=0.0, stop=["x"], likely_prompt=256)) == ""
    assert "toy" in problem(full, simulated=True) and "toy" in problem(asked(stop=["x"]), simulated=True)
    assert problem(asked(prompt_logprobs=True, stop_ids=[]), simulated=True) == ""


def test_a_request_with_too_large_an_answer_is_refused() -> None:
    def found(**fields: Any) -> str:
        request = asked([1] * 10, **fields)
        return problem_of(request, prompt_of(request), context_length=10_010, vocab_size=32, simulated=False)

    assert found(count=400) == "" and "4010000 values" in found(count=401) and "max_tokens" in found(count=401)
    assert found(count=401, max_tokens=9_000) == "" and "8000000 values" in found(count=400, likely=1)


def test_stops_are_those_of_the_request_alone() -> None:
    def stops(**fields: Any) -> tuple[list[str], list[int] | None]:
        sampling = sampling_of(asked(**fields), 0, 5, "")
        return sampling.stop, sampling.stop_ids

    assert stops() == ([], None), "the model's end-of-turn tokens"
    assert stops(stop_ids=[]) == ([], []), "nothing"
    assert stops(stop_ids=[7]) == ([], [7])
    assert stops(stop=["x"]) == (["x"], []), "not the end-of-turn tokens"
    assert stops(stop=["x"], stop_ids=[7]) == (["x"], [7])


def test_each_sample_has_its_own_seed_and_the_first_alone_looks_at_the_prompt() -> None:
    request = asked(seed=10, max_tokens=99, top_k=-1, prompt_logprobs=True, likely_prompt=2, likely=3)
    first, third = (sampling_of(request, index, 5, "mine") for index in (0, 2))
    assert (first.seed, third.seed) == (10, 12) and first.max_tokens == 5 and first.top_k == 0
    assert (first.likely_prompt, third.likely_prompt) == (2, None) and first.likely == third.likely == 3
    assert first.adapter == "mine" and sampling_of(asked(), 3, 5, "").seed is None
    assert sampling_of(asked(), 0, 5, "").max_tokens == 5 and sampling_of(asked(), 0, 5, "").likely_prompt is None
    assert 0 <= (sampling_of(asked(seed=2**63 - 1), 1, 5, "").seed or 0) < 2**63


DONE = Completion(
    ids=[7, 8],
    logprobs=[-0.5, -1.0],
    spans=[],
    stop=StopReason.CONTEXT,
    likely=[[(7, -0.5), (9, -2.0)], [(8, -1.0)]],
    prompt_logprobs=[-3.0, -4.0],
    likely_prompt=[[(1, -0.25)], [(2, -0.125)]],
)


def test_arrays_of_a_result() -> None:
    request = asked(count=2, prompt_logprobs=True, likely=2, likely_prompt=1)
    second = msgspec.structs.replace(DONE, stop=StopReason.STOP, prompt_logprobs=[], likely_prompt=[])
    result = sampled_of(request, [DONE, second])
    one, two = result.sequences
    assert (one.stop, two.stop) == ("length", "stop")
    assert np.frombuffer(one.tokens, "<i4").tolist() == [7, 8]
    assert np.frombuffer(one.logprobs, "<f4").tolist() == [-0.5, -1.0]
    assert one.likely is not None and (one.likely.k, one.likely.length) == (2, 2)
    assert np.frombuffer(one.likely.ids, "<i4").tolist() == [7, 9, 8, 0]
    assert np.frombuffer(one.likely.logprobs, "<f4").tolist() == [-0.5, -2.0, -1.0, NO_LOGPROB]
    prompt = np.frombuffer(result.prompt_logprobs, "<f4")
    assert np.isnan(prompt[0]) and prompt[1:].tolist() == [-3.0, -4.0]
    assert result.likely_prompt is not None and result.likely_prompt.length == 3
    assert np.frombuffer(result.likely_prompt.ids, "<i4").tolist() == [0, 1, 2]
    assert np.frombuffer(result.likely_prompt.logprobs, "<f4")[0] == np.float32(NO_LOGPROB)


@pytest.mark.parametrize(("last", "shown"), [(0, 2), (1, 1), (2, 2), (3, 2), (9, 2)])
def test_only_the_last_places_of_a_prompt_are_told(last: int, shown: int) -> None:
    result = sampled_of(asked(prompt_logprobs=True, likely_prompt=1, last_prompt=last), [DONE])
    prompt = np.frombuffer(result.prompt_logprobs, "<f4")
    assert len(prompt) == 3 and prompt[3 - shown :].tolist() == [-3.0, -4.0][2 - shown :]
    assert np.isnan(prompt[: 3 - shown]).all()
    assert result.likely_prompt is not None
    assert np.frombuffer(result.likely_prompt.ids, "<i4").tolist() == [0, 1, 2][:1] * (3 - shown) + [1, 2][2 - shown :]


def test_nothing_is_told_that_was_not_asked_for() -> None:
    result = sampled_of(asked(), [DONE])
    assert result.prompt_logprobs == b"" and result.likely_prompt is None and result.sequences[0].likely is None
