"""One and the same agent in the three dialects: it asks, runs the tool that is called, tells its result, and ends with
the first answer that calls none."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.support.agents.agent_talk import root_of

SYSTEM = "Add with the tool."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Adds."}

Loop = Callable[[AsyncOpenAI, str], Awaitable[str]]


def add(arguments: dict[str, Any]) -> str:
    return str(arguments["a"] + arguments["b"])


async def chat_loop(model: AsyncOpenAI, question: str, *, stream: bool = False, name: str = "m") -> str:
    tools: Any = [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]
    said: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    while True:
        asked: dict[str, Any] = {"model": name, "messages": said, "tools": tools}
        if stream:
            async with model.chat.completions.stream(**asked) as events:
                message: Any = (await events.get_final_completion()).choices[0].message
        else:
            message = (await model.chat.completions.create(**asked)).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        calls = [{"id": c.id, "type": "function", "function": c.function.model_dump(include={"name", "arguments"})}
                 for c in message.tool_calls]  # fmt: skip
        said.append({"role": "assistant", "content": message.content, "tool_calls": calls})
        for call in message.tool_calls:
            result = add(json.loads(call.function.arguments))
            said.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def responses_loop(model: AsyncOpenAI, question: str, *, stream: bool = False, name: str = "m") -> str:
    tools: Any = [{"type": "function", **TOOL, "parameters": SCHEMA, "strict": True}]
    said: list[Any] = [{"role": "user", "content": question}]
    while True:
        asked: dict[str, Any] = {"model": name, "instructions": SYSTEM, "input": said, "tools": tools}
        if stream:
            async with model.responses.stream(**asked) as events:
                response: Any = await events.get_final_response()
        else:
            response = await model.responses.create(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_text)
        said += [item.model_dump(exclude={"parsed_arguments"}) for item in response.output]
        for call in calls:
            result = add(json.loads(call.arguments))
            said.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


async def messages_loop(model: AsyncOpenAI, question: str, *, stream: bool = False, name: str = "m") -> str:
    tools: Any = [{**TOOL, "input_schema": SCHEMA}]
    said: list[Any] = [{"role": "user", "content": question}]
    asked: dict[str, Any] = {"model": name, "system": SYSTEM, "max_tokens": 1000, "tools": tools}
    async with AsyncAnthropic(base_url=root_of(model), auth_token=model.api_key, api_key=None, max_retries=0) as client:
        while True:
            if stream:
                async with client.messages.stream(**asked, messages=said) as events:
                    message: Any = await events.get_final_message()
            else:
                message = await client.messages.create(**asked, messages=said)
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in message.content)
            said.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": add(c.input)} for c in calls]
            said.append({"role": "user", "content": results})


LOOPS: dict[str, Any] = {"chat": chat_loop, "responses": responses_loop, "messages": messages_loop}
