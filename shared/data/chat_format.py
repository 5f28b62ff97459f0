"""Messages and tools as chat templates take them."""

from __future__ import annotations

from typing import Any

from opentinker.shared.types.core import Image, Message, Tool

Chat = list[dict[str, Any]]
"""Messages, or tools, as chat templates take them."""


def as_chat(message: Message, in_parts: bool = False) -> dict[str, Any]:
    """Convert a message for chat templates; images only if `in_parts`."""
    chat: dict[str, Any] = {"role": message.role, "content": _parts(message) if in_parts else message.text}
    if message.tool_calls:
        chat["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        chat["tool_call_id"] = message.tool_call_id
    if message.name:
        chat["name"] = message.name
    return chat


def as_function(tool: Tool) -> dict[str, Any]:
    """Convert a tool for chat templates."""
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": described}


def _parts(message: Message) -> list[dict[str, str]]:
    if isinstance(message.content, str):
        return [{"type": "text", "text": message.content}]
    return [{"type": "image"} if isinstance(p, Image) else {"type": "text", "text": p.text} for p in message.content]
