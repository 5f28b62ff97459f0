"""Names and shapes of tensors, compared; and read from the headers of safetensors files, for those who do not compute.

Format: eight bytes little-endian length, then JSON of that length, {name: {dtype, shape, data_offsets}}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

Shapes = dict[str, tuple[int, ...]]
NAMED = 3
"""Tensors that a difference names; of all of them it gives the number."""
MAX_HEADER_BYTES = 100_000_000
"""Bytes of a header; the format's own bound."""


def difference(have: Mapping[str, Sequence[int]], want: Mapping[str, Sequence[int]]) -> str:
    """Describe which tensors differ from those wanted, with both shapes; empty if none do."""

    def told(shapes: Mapping[str, Sequence[int]], name: str) -> str:
        return str(list(shapes[name])) if name in shapes else "absent"

    odd = sorted(name for name in have.keys() | want.keys() if told(have, name) != told(want, name))
    some = ", ".join(f"{name} ({told(have, name)} instead of {told(want, name)})" for name in odd[:NAMED])
    return f"{len(odd)} tensors differ, such as {some}" if odd else ""


class _Entry(msgspec.Struct):
    shape: tuple[int, ...]


def shapes_in(*files: Path) -> Shapes:
    """Return the shapes of all tensors in the files. Raises OSError, and ValueError for other files."""
    found: Shapes = {}
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length) if length <= MAX_HEADER_BYTES else b""
        try:
            if len(raw) != length:
                raise msgspec.DecodeError(f"its header of {length} bytes is not there")
            entries = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            found |= {
                name: msgspec.json.decode(entry, type=_Entry).shape
                for name, entry in entries.items()
                if name != "__metadata__"
            }
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path.name} is no safetensors file: {error}") from None
    return found
