"""Every noun survives the wire; bytes that are no noun raise WireError and nothing else."""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opentinker.shared.messaging import subjects
from opentinker.shared.types import core, telemetry, trajectories, workers
from opentinker.shared.types.codec import WireError, decode, encode, from_json, to_json
from tests.support.factories import make_group

NOUNS = [
    kind
    for module in (core, workers, trajectories, telemetry)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
]
BINARY = {trajectories.Trajectory, trajectories.Group}
"""Nouns with arrays: msgpack only."""
small = st.integers(-(2**40), 2**40)
plain = st.recursive(
    st.none() | st.booleans() | small | st.text(max_size=5), lambda x: st.lists(x, max_size=2), max_leaves=4
)
finite = st.floats(allow_nan=False, allow_infinity=False)
st.register_type_strategy(float, finite)


def nouns(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    fields = {name: values(hint) for name, hint in hints.items() if name in kind.__struct_fields__}
    return st.builds(kind, **fields)


def values(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(hint), list(get_args(hint))
    if inspect.isclass(hint) and issubclass(hint, msgspec.Struct):
        return st.deferred(lambda: nouns(hint))
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is dict:
        keys = small if arguments[0] is int else st.text(max_size=4)
        return st.dictionaries(keys, values(arguments[1]), max_size=3)
    if origin is tuple:
        items = st.lists(values(arguments[0]), max_size=3).map(tuple)
        return items if arguments[-1] is ... else st.tuples(*map(values, arguments))
    if arguments:  # a union
        return st.one_of(*map(values, arguments))
    return {Any: plain, int: small}.get(hint, st.from_type(hint))


KINDS = pytest.mark.parametrize("kind", NOUNS, ids=lambda kind: kind.__name__)
quick = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


@KINDS
@quick
@given(data=st.data())
def test_noun_survives_the_wire(kind: type[Any], data: st.DataObject) -> None:
    noun = data.draw(nouns(kind))
    assert decode(kind, encode(noun)) == noun
    if kind not in BINARY:
        assert from_json(kind, to_json(noun)) == noun


@KINDS
@quick
@given(data=st.data())
def test_garbage_raises_only_wire_errors(kind: type[Any], data: st.DataObject) -> None:
    noise = data.draw(st.binary(max_size=64))
    good = bytearray(encode(data.draw(nouns(kind))))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(good[: data.draw(st.integers(0, len(good)))])
    for payload in (noise, bytes(good), cut):
        for read in (decode, from_json):
            try:
                assert isinstance(read(kind, payload), kind)
            except WireError as error:
                assert kind.__name__ in str(error)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
     b"[" * 100_000, b"{" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"1e999", b"9" * 5000, b'"\xed\xa0\x80"'],
    ids=lambda payload: repr(payload[:6]),
)  # fmt: skip
@pytest.mark.parametrize("kind", [*NOUNS, dict], ids=lambda kind: kind.__name__)
def test_hostile_payloads_raise_only_wire_errors(kind: type[Any], payload: bytes) -> None:
    for read in (decode, from_json):
        with pytest.raises(WireError):
            read(kind, payload)


def test_text_that_is_not_unicode_raises_a_wire_error() -> None:
    with pytest.raises(WireError):
        from_json(core.Lease, "\ud800")


def test_arrays_of_a_decoded_group_are_views_with_the_values_sent() -> None:
    group = make_group(output=(3, 4, 5, 1), logprob=-0.25)
    again = decode(trajectories.Group, encode(group))
    for sent, got in zip(group.trajectories, again.trajectories, strict=True):
        np.testing.assert_array_equal(got.ids, sent.ids)
        np.testing.assert_array_equal(got.logprobs, np.asarray([0, 0, 0, -0.25, -0.25, -0.25, -0.25]))
    again.check()


def test_fields_of_a_later_release_are_skipped() -> None:
    lease = {"job": "j", "worker": "w", "incarnation": "1", "epoch": 2, "pool": "env", "later": [1]}
    assert decode(core.Lease, encode(lease)).epoch == 2


@pytest.mark.parametrize("name", ["a", "A-b_9", "with.dot", "", "a b", ">", "*", "x" * 65, "é", "a\r\nPUB"])
def test_any_name_becomes_one_subject_token(name: str) -> None:
    one = subjects.token(name)
    assert one and not set(one) & set(". *>\t\r\n") and len(one) <= 64
    assert subjects.token("a") == "a" and subjects.token("a b") != subjects.token("a  b")


def test_every_subject_is_covered_by_at_most_one_stream() -> None:
    firsts = [subject.split(".")[0] for stream in subjects.STREAMS for subject in stream.subjects or []]
    assert len(set(firsts)) == len(firsts)
    assert subjects.METRIC.at(job="j.1", source="*").split(".")[2] == "*"
