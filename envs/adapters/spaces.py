"""Converts Gymnasium's spaces to and from text: observations, the notation of actions, and the action in a text.

Imports gymnasium, so adapters import it only when they open an episode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from gymnasium import spaces

from opentinker.envs.adapters.library import Illegal, action_text
from opentinker.envs.png import png
from opentinker.shared.types.core import Image

MASK = "action_mask"
"""Key of an observation or an info that holds the mask of allowed discrete actions."""
LISTED = 40
"""Largest number of unnamed discrete actions, or of allowed actions, that is listed."""
PLANES = 4
PRINTED = 10_000
"""Maximum numbers of an array that are shown."""
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?(?!\w|\.\d)", re.IGNORECASE)


def mask_of(observation: Any, info: Mapping[str, Any]) -> Any:
    """Return the action mask from the info or the observation; None if every action is allowed."""
    return info.get(MASK, observation.get(MASK) if isinstance(observation, dict) else None)


# --- observations ---------------------------------------------------------------------------------------------------


def show(space: Any, value: Any) -> str:  # noqa: PLR0911 - one per kind of space
    """Return an observation as text."""
    match space:
        case spaces.Discrete():
            return str(int(value))
        case spaces.Text():
            return str(value)
        case spaces.Box() if _is_board(space):
            return _board(np.asarray(value))
        case spaces.Dict():
            shown = {name: show(part, value[name]) for name, part in space.spaces.items() if name != MASK}
            return "\n".join(f"{name}:{_join_text(text)}" for name, text in shown.items())
        case spaces.Tuple():
            return ", ".join(show(part, item) for part, item in zip(space.spaces, value, strict=True))
        case spaces.Sequence():
            return "\n".join(show(space.feature_space, item) for item in value)
        case spaces.OneOf():
            return show(space.spaces[value[0]], value[1])
        case spaces.Graph():
            return "\n".join(f"{part}:{_join_text(_numbers(getattr(value, part)))}" for part in _GRAPH)
    return _numbers(value)


_GRAPH = ("nodes", "edges", "edge_links")


def picture(space: Any, value: Any) -> Image | None:
    """Return an observation that is a picture (height, width and three bytes of colour), otherwise None."""
    shape = list(getattr(space, "shape", None) or ())
    if not (isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(shape) == 3 and shape[-1] == 3):
        return None
    return Image(data=png(np.asarray(value)))


def _is_board(space: Any) -> bool:
    """Return whether it is a board: height, width and a few planes of zeros and ones."""
    if len(space.shape) != 3 or space.shape[2] > PLANES or space.dtype.kind not in "iub":
        return False
    return bool(np.all(space.low == 0) and np.all(space.high == 1))


def _board(planes: Any) -> str:
    """Draw a board: `.` if no plane has a one, otherwise the number of the first plane that has, from 1."""
    first = np.where(planes.any(axis=2), planes.argmax(axis=2) + 1, 0)
    return "\n".join(" ".join(str(cell) if cell else "." for cell in row) for row in first)


def _numbers(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return str(value)
    return np.array2string(value, precision=4, suppress_small=True, separator=", ", threshold=PRINTED)


def _join_text(text: str) -> str:
    return f"\n{text}" if "\n" in text else f" {text}"


# --- actions --------------------------------------------------------------------------------------------------------


def describe_action(space: Any, names: list[str]) -> str:  # noqa: PLR0911 - one per kind of space
    """Return how an action is written. Raise ValueError if the space has no text form."""
    match space:
        case spaces.Discrete() if names:
            return f"one of: {', '.join(names)}"
        case spaces.Discrete():
            return f"a number from {int(space.start)} to {int(space.start + space.n - 1)}"
        case spaces.Text():
            return f"a text of {space.min_length} to {space.max_length} characters"
        case spaces.Box() if space.shape in ((), (1,)):
            return f"a number from {space.low.min():g} to {space.high.max():g}"
        case spaces.Box():
            return (
                f"a JSON array of shape {list(space.shape)}, numbers from {space.low.min():g} to {space.high.max():g}"
            )
        case spaces.MultiDiscrete():
            least, most = space.start, space.start + space.nvec - 1
            limits = ", ".join(f"{a} to {b}" for a, b in zip(least.flat, most.flat, strict=True))
            return f"a JSON array of whole numbers: {limits}"
        case spaces.MultiBinary():
            return f"a JSON array of {space.n} zeros and ones"
        case spaces.Dict():
            parts = "; ".join(f'"{name}": {describe_action(part, [])}' for name, part in space.spaces.items())
            return f"a JSON object with {parts}"
        case spaces.Tuple():
            return f"a JSON array of: {'; '.join(describe_action(part, []) for part in space.spaces)}"
        case spaces.Sequence():
            return f"a JSON array, each item {describe_action(space.feature_space, [])}"
    raise ValueError(f"an action space of kind {type(space).__name__} cannot be said in text")


def hint(space: Any, names: list[str]) -> str:
    return f"Each turn, say your action: {describe_action(space, names)}. What stands after the last `Action:` counts."


def read(space: Any, text: str, names: list[str], mask: Any = None) -> Any:
    """Return the action in a text. Raise Illegal.

    In a discrete space the last name counts, or the last number if there is no name.
    """
    text = action_text(text)
    match space:
        case spaces.Discrete():
            action: Any = _choice(space, text, names)
            if mask is not None and not mask[action - space.start]:
                raise Illegal(f"{_find_name(space, action, names)} is not possible now")
            return action
        case spaces.Text():
            action = text
        case spaces.Dict() | spaces.Tuple() | spaces.Sequence():
            action = _value(space, _json(text))
        case _:
            action = _array(space, text)
    if not space.contains(action):
        raise Illegal(f"it must be {describe_action(space, names)}")
    return action


def allowed(space: Any, mask: Any, names: list[str]) -> str:
    """Return the allowed actions for the prompt; empty if there is no mask, it allows everything, or the list is too
    long."""
    if mask is None or not isinstance(space, spaces.Discrete):
        return ""
    left = [int(index + space.start) for index in np.flatnonzero(mask)]
    if len(left) in (0, int(space.n)) or len(left) > LISTED:
        return ""
    return ", ".join(_find_name(space, action, names) for action in left)


def _find_name(space: Any, action: Any, names: list[str]) -> str:
    return names[int(action - space.start)] if names else str(int(action))


def _choice(space: Any, text: str, names: list[str]) -> np.int64:
    if names:
        longest_first = sorted(names, key=len, reverse=True)
        named = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", text, re.IGNORECASE)
        if named:
            return np.int64([name.lower() for name in names].index(named[-1].lower()) + space.start)
    numbers = _NUMBER.findall(text)
    if not numbers:
        raise Illegal(f"it must be {describe_action(space, names)}")
    number = float(numbers[-1])
    if not (number.is_integer() and space.start <= number < space.start + space.n):
        raise Illegal(f"{numbers[-1]} is none of them: it must be {describe_action(space, names)}")
    return np.int64(number)


def _array(space: Any, text: str) -> Any:
    """Parse a JSON array, or exactly the required number of numbers."""
    opened, closed = text.find("["), text.rfind("]")
    plain = _json(text[opened : closed + 1]) if 0 <= opened < closed else [float(n) for n in _NUMBER.findall(text)]
    return _value(space, plain)


def _value(space: Any, plain: Any) -> Any:
    """Convert JSON to a value of the space. Raise Illegal."""
    match space:
        case spaces.Discrete():
            return np.int64(_check(plain, int, space))
        case spaces.Text():
            return _check(plain, str, space)
        case spaces.Dict():
            given = _check(plain, dict, space)
            if set(given) != set(space.spaces):
                raise Illegal(f"it must have {', '.join(space.spaces)} and nothing else")
            return {name: _value(part, given[name]) for name, part in space.spaces.items()}
        case spaces.Tuple():
            items = _check(plain, list, space)
            if len(items) != len(space.spaces):
                raise Illegal(f"it must have {len(space.spaces)} items")
            return tuple(_value(part, item) for part, item in zip(space.spaces, items, strict=True))
        case spaces.Sequence():
            return tuple(_value(space.feature_space, item) for item in _check(plain, list, space))
    try:
        numbers = np.asarray(plain, dtype=np.float64).reshape(space.shape)
    except (TypeError, ValueError, OverflowError):
        raise Illegal(f"it must be {describe_action(space, [])}") from None
    if space.dtype.kind in "iub" and not _whole(numbers, space.dtype):
        raise Illegal(f"it must be whole numbers: {describe_action(space, [])}")
    with np.errstate(over="ignore"):
        return numbers.astype(space.dtype)


def _whole(numbers: Any, dtype: Any) -> bool:
    """Return whether the cast preserves all values."""
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return bool(np.all((numbers >= least) & (numbers <= most) & (numbers == np.round(numbers))))


def _check(plain: Any, kind: type, space: Any) -> Any:
    if type(plain) is not kind:
        raise Illegal(f"it must be {describe_action(space, [])}")
    return plain


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise Illegal(f"it is not JSON ({error})") from None
