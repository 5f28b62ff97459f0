"""Names and shapes in safetensors files, read from their headers alone: for those who compare and do not compute.

Format: eight bytes little-endian length, then so many bytes of JSON, {name: {dtype, shape, data_offsets}}.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

Shapes = dict[str, tuple[int, ...]]
LONGEST = 100_000_000
"""Bytes of a header; the format's own bound."""


class _Entry(msgspec.Struct):
    shape: tuple[int, ...]


def shapes_in(*files: Path) -> Shapes:
    """Of all tensors in the files. Raises OSError, and ValueError for what is no such file."""
    found: Shapes = {}
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length) if length <= LONGEST else b""
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
