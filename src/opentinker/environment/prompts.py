"""The chat of a data set's row, with its images where they belong, as messages of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opentinker.shared.data.jsonl import RowError
from opentinker.shared.types.core import Image, Message, Text

PLACEHOLDER = "<image>"
"""Stands in a text for the next image of the row."""
IMAGES = "multi_modal_data"


def messages_of(sample: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a row like DynamicGameDataset's. Without marks for their places, images come before the
    first text of a user. Raises RowError if the texts name another number of images than there are."""
    images = list((sample.get(IMAGES) or {}).get("image", ()))
    chat = [
        (str(message["role"]), list(_parts(message.get("content"), bool(images)))) for message in sample["raw_prompt"]
    ]
    named = sum(part is None for _, parts in chat for part in parts)
    if images and not named:
        first = next((parts for role, parts in chat if role == "user"), None)
        if first is None:
            raise RowError(f"row {sample.get('index')}: has images, and no message of a user to show them in")
        first[:0] = [None] * len(images)
    elif named != len(images):
        raise RowError(f"row {sample.get('index')}: the prompt names {named} images, and the row has {len(images)}")
    coming = iter(images)
    return [_message(role, parts, coming) for role, parts in chat]


def _message(role: str, parts: list[str | None], coming: Iterator[Image]) -> Message:
    if None not in parts:
        return Message(role=role, content="".join(part for part in parts if part))
    return Message(role=role, content=[next(coming) if part is None else Text(part) for part in parts if part != ""])


def _parts(content: Any, placeholders: bool) -> Iterator[str | None]:
    """Texts, and None for an image. Without images a text that reads like a placeholder is a text."""
    if content is None or isinstance(content, str):
        yield from _texts(content or "", placeholders)
        return
    if not isinstance(content, Sequence):
        raise RowError(f"a message's content must be a text or a list of parts, not {type(content).__name__}")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            yield from _texts(str(part.get("text", "")), placeholders)
        elif kind in ("image", "image_url"):
            yield None
        else:
            raise RowError(f"parts of type text and image are understood, not {kind!r:.40}")


def _texts(text: str, placeholders: bool) -> Iterator[str | None]:
    pieces = text.split(PLACEHOLDER) if placeholders else [text]
    for number, piece in enumerate(pieces):
        if number:
            yield None
        yield piece
