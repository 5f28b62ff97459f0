"""Spaces of environment libraries: actions are read from words, observations become words."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces as gs

from opentinker.envs.adapters import library, spaces
from opentinker.envs.adapters.env_notes import plain_colours
from opentinker.shared.types.core import Image

DICT = gs.Dict({"n": gs.Discrete(3), "x": gs.Box(-1.0, 1.0, (2,), np.float64)})


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (gs.Discrete(4), "2", 2),
        (gs.Discrete(4), "I think of 1, no: 3.", 3),
        (gs.Discrete(4), "Reasoning about 17 things.\nAction: 3", 3),
        (gs.Discrete(3, start=-1), "-1", -1),
        (gs.Box(-2.0, 2.0, (1,), np.float32), "1.5", [1.5]),
        (gs.Box(-2.0, 2.0, (), np.float32), "action: -.5", -0.5),
        (gs.Box(-2.0, 2.0, (2, 2), np.float32), "[[1, 2], [0, -1]]", [[1, 2], [0, -1]]),
        (gs.Box(-2.0, 2.0, (2,), np.float32), "1 and 1e-1", [1, 0.1]),
        (gs.Box(0, 5, (2,), np.int32), "[1, 5]", [1, 5]),
        (gs.MultiDiscrete([2, 5]), "[1, 4]", [1, 4]),
        (gs.MultiBinary(3), "1, 0, 1", [1, 0, 1]),
        (gs.Text(8), "Action: abc", "abc"),
        (gs.Tuple((gs.Discrete(3), gs.Text(8))), '[2, "abc"]', (2, "abc")),
        (gs.Sequence(gs.Discrete(3)), "[0, 2, 2]", (0, 2, 2)),
        (DICT, '{"n": 1, "x": [0.5, -0.5]}', {"n": 1, "x": [0.5, -0.5]}),
    ],
)
def test_action_is_read_by_its_space(space: Any, text: str, action: Any) -> None:
    found = spaces.read(space, text, [])
    assert space.contains(found)
    np.testing.assert_equal(found, np.array(action, np.float32) if space.dtype == np.float32 else action)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (gs.Discrete(4), ""),
        (gs.Discrete(4), "4"),
        (gs.Discrete(4), "1.5"),
        (gs.Discrete(4), "-1"),
        (gs.Discrete(4), "9" * 400),
        (gs.Box(-2.0, 2.0, (1,), np.float32), "2.5"),
        (gs.Box(-2.0, 2.0, (1,), np.float32), "nan"),
        (gs.Box(-2.0, 2.0, (1,), np.float32), "1e999"),
        (gs.Box(-2.0, 2.0, (2,), np.float32), "[1, 1, 1]"),
        (gs.Box(-2.0, 2.0, (2,), np.float32), '["a", {}]'),
        (gs.Box(0, 5, (2,), np.int32), "[1, 2.5]"),
        (gs.Box(0, 255, (1,), np.uint8), "257"),
        (gs.MultiDiscrete([2, 5]), "[1, 5]"),
        (gs.MultiBinary(3), "[1, 0, 2]"),
        (gs.Text(3), "too long"),
        (gs.Tuple((gs.Discrete(3), gs.Text(8))), "[2]"),
        (gs.Sequence(gs.Discrete(3)), "[3]"),
        (DICT, '{"n": 1}'),
        (DICT, '{"n": true, "x": [0, 0]}'),
        (DICT, "[" * 5000),
        (DICT, "\ud800"),
    ],
)
def test_what_is_no_action_is_refused_with_a_reason(space: Any, text: str) -> None:
    with pytest.raises(library.Illegal, match="it "):
        spaces.read(space, text, [])


@pytest.mark.parametrize(
    ("text", "index"),
    [("left", 0), ("Go LEFT", 0), ("not left, right!", 2), ("Action: left up", 1), ("2 steps left", 0), ("1", 1)],
)
def test_the_last_name_counts(text: str, index: int) -> None:
    assert spaces.read(gs.Discrete(3), text, ["left", "left up", "right"]) == index


def test_mask_forbids_and_is_listed() -> None:
    names, mask = ["a", "b", "c"], np.array([1, 0, 1], np.int8)
    assert spaces.allowed(gs.Discrete(3), mask, names) == "a, c"
    assert spaces.allowed(gs.Discrete(3), None, names) == ""
    with pytest.raises(library.Illegal, match="b is not possible now"):
        spaces.read(gs.Discrete(3), "b", names, mask)


@pytest.mark.parametrize("space", [gs.Graph(gs.Discrete(2), None), gs.OneOf((gs.Discrete(2),))])
def test_an_action_space_without_words_is_an_error(space: Any) -> None:
    with pytest.raises(ValueError, match="cannot be said in text"):
        spaces.describe_action(space, [])


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (gs.Discrete(5), np.int64(3), "3"),
        (gs.Text(5), "abc", "abc"),
        (gs.Tuple((gs.Discrete(2), gs.Discrete(9))), (1, 8), "1, 8"),
        (gs.Box(-1.0, 1.0, (3,)), np.array([0.5, 1, -0.25], np.float32), "[ 0.5 ,  1.  , -0.25]"),
        (gs.Box(0, 1, (2, 2, 2), np.int8), np.array([[[1, 0], [0, 0]], [[0, 1], [0, 0]]]), "1 .\n2 ."),
        (gs.Dict({"a": gs.Discrete(2), "action_mask": gs.MultiBinary(2)}), {"a": 1, "action_mask": [1, 1]}, "a: 1"),
        (gs.OneOf((gs.Discrete(2), gs.Text(3))), (1, "hm"), "hm"),
        (gs.Sequence(gs.Discrete(5)), (1, 2), "1\n2"),
    ],
)
def test_observation_becomes_text_by_its_space(space: Any, value: Any, text: str) -> None:
    assert spaces.show(space, value) == text


def test_a_picture_is_sent_as_one() -> None:
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    image = spaces.picture(gs.Box(0, 255, (2, 3, 3), np.uint8), pixels)
    assert isinstance(image, Image) and image.data.startswith(b"\x89PNG")
    begin = image.data.index(b"IDAT") + 4
    rows = np.frombuffer(zlib.decompress(image.data[begin:]), np.uint8).reshape(2, 10)
    assert (rows[:, 0] == 0).all() and (rows[:, 1:].reshape(2, 3, 3) == pixels).all()
    assert spaces.picture(gs.Box(0, 1, (2, 3, 3), np.int8), pixels) is None


def test_colours_of_a_terminal_become_brackets() -> None:
    text = "\x1b[41mS\x1b[0mF \x1b[34;1mR\x1b[0m \x1b[35mG\x1b[0m \x1b[35m\x1b[43mY\x1b[0m\x1b[0m"
    assert plain_colours(text) == "[S]F <R> (G) ([Y])"
