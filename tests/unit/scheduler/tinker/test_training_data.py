"""Bodies of the Tinker API that were not written by its clients: they are refused, and nothing else happens."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker.services.scheduler.tinker import bodies, training_data
from opentinker.services.scheduler.tinker.bodies import AdamBody, ForwardBody, Refused, SampleBody
from opentinker.services.scheduler.tinker.sampling_api import sample_of
from opentinker.services.scheduler.tinker.training_api import step_of
from opentinker.shared.types.errors import SpecError
from tests.integration.tinker.site import passes

WHOLE = passes("m", 1)
NUMBERS = (
    st.integers(-(2**70), 2**70) | st.floats() | st.none() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
)


def parsed(raw: bytes) -> None:
    with contextlib.suppress(SpecError):
        message = training_data.from_protobuf(raw)
        if isinstance(message, Refused):
            assert message.error
            return
        found = training_data.forward_of_protobuf(message)
        for datum in found.data:
            assert len(datum.targets) == len(datum.tokens) * datum.width
            assert np.all(np.frombuffer(datum.targets, "<i4") >= 0)
            assert np.all(np.isfinite(np.frombuffer(datum.weights, "<f4")))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=8), st.integers(0, len(WHOLE)))
def test_spoilt_protobuf_is_refused_or_whole(changes: list[tuple[int, int]], length: int) -> None:
    raw = bytearray(WHOLE)
    for at, byte in changes:
        raw[at] = byte
    parsed(bytes(raw))
    parsed(bytes(raw[:length]))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_refused(raw: bytes) -> None:
    parsed(raw)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(SampleBody.__struct_fields__)), NUMBERS))
def test_odd_requests_for_samples_are_refused(changes: dict[str, Any]) -> None:
    whole = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_session_id": "s", "seq_id": 0}
    with contextlib.suppress(SpecError):
        body = bodies.parse_body(msgspec.json.encode(whole | changes), SampleBody)
        asked = sample_of(body, "s#0", "t")
        assert 1 <= asked.count <= 256 and len(asked.prompt) >= 4


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["data", "shape", "sparse_crow_indices", "sparse_col_indices", "dtype"]), NUMBERS)
def test_odd_arrays_in_json_are_refused(field: str, value: Any) -> None:
    array = {"data": [2, 3], "dtype": "int64", field: value}
    datum = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": {"target_tokens": array}}
    given_ = {"data": [datum], "loss_fn": "cross_entropy"}
    with contextlib.suppress(SpecError):
        body = bodies.parse_body(msgspec.json.encode({"model_id": "m", "forward_backward_input": given_}), ForwardBody)
        training_data.forward_of_json(body, backward=True)


@pytest.mark.parametrize("raw", [b"", b"[", b"[]", b"{}", b'{"a":' * 5000, b'{"prompt": 1e999}', b"\xff"])
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    with pytest.raises(SpecError):
        bodies.parse_body(raw, SampleBody)


def test_sparse_rows_of_a_small_body_are_refused_before_they_fill_the_memory() -> None:
    """2**20 cells each, 4 MB of targets: two of them fit, and no third."""

    def widen(message: Any) -> None:
        wide = message.data.add()
        wide.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
        tensor = wide.loss_fn_inputs["target_tokens"]
        tensor.sparse_csr.values, tensor.dtype = np.ones(1, "<i8").tobytes(), 2
        tensor.sparse_csr.crow_indices = np.array([0, 1, 1], "<i8").tobytes()
        tensor.sparse_csr.col_indices = np.array([0], "<i8").tobytes()
        tensor.shape.extend([2, 1 << 19])
        message.data.extend([wide] * 200)

    raw = passes("m", 1, change=widen)
    assert len(raw) < 1 << 16
    tracemalloc.start()
    with pytest.raises(SpecError, match=r"data\[2\].target_tokens.*send fewer or shorter data"):
        training_data.forward_of_protobuf(training_data.from_protobuf(raw))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize(
    ("loss", "option"), [("ppo", "clip_high_threshold"), ("cispo", "clip_low_threshold"), ("dro", "beta")]
)
@pytest.mark.parametrize("value", [1e300, -1.0, float("inf"), float("nan")])
def test_options_of_a_loss_that_float32_does_not_hold_are_refused(loss: str, option: str, value: float) -> None:
    def change(message: Any) -> None:
        message.loss_fn_config_v2[option].number = value

    with pytest.raises(SpecError, match=rf"{option}.*must be a number, 0 to 1e\+30"):
        training_data.forward_of_protobuf(training_data.from_protobuf(passes("m", 1, loss, change)))


@pytest.mark.parametrize("name", ["learning_rate", "eps", "weight_decay"])
def test_settings_of_a_step_that_float32_does_not_hold_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match=rf"{name}.*0 to 1e\+06"):
        step_of(AdamBody(**{name: 1e300}))
    step_of(AdamBody(**{name: 1e6}))
