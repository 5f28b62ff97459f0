"""An agent of each library, as its own documentation writes it: it asks for 1 + 2, offers a tool that adds, and prints
a reward of 1 if the answer is 3. Run as a program of `agent_program`, in an interpreter with the libraries.

    python agent_libraries.py [NAME]

Without a name, the row of the task names the library. CREWAI_PYTHON has crewai, whose pins are not those of the others.
An untrained policy makes some libraries give up: reward 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

MODEL = "any/model"
"""A name with a slash, as that of a hub's model is."""
QUESTION = "What is 1 + 2?"
OPENAI_URL, KEY = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def openai_agents() -> str:
    from agents import Agent, Runner, function_tool
    from agents.models.openai_responses import OpenAIResponsesModel
    from agents.tracing import set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIResponsesModel(model=MODEL, openai_client=AsyncOpenAI())
    agent = Agent(name="adder", instructions="Use the tool.", tools=[function_tool(add)], model=model)
    return str((await Runner.run(agent, QUESTION)).final_output)


async def smolagents() -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(model_id=MODEL, api_base=OPENAI_URL, api_key=KEY)
    agent = ToolCallingAgent(tools=[tool(add)], model=model, max_steps=3, verbosity_level=0)
    return str(agent.run(QUESTION))


async def langgraph() -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model=MODEL), [add], system_prompt="Use the tool.")
    found = await agent.ainvoke({"messages": [{"role": "user", "content": QUESTION}]})
    return str(found["messages"][-1].content)


async def pydantic_ai() -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel

    agent = Agent(AnthropicModel(MODEL), instructions="Use the tool.", tools=[add])
    return str((await agent.run(QUESTION)).output)


async def pydantic_ai_output() -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel(MODEL), output_type=int, tools=[add])
    return str((await agent.run(QUESTION)).output)


async def autogen() -> str:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {"vision": False, "function_calling": True, "json_output": False, "family": "unknown",
                 "structured_output": False}  # fmt: skip
    model = OpenAIChatCompletionClient(model=MODEL, model_info=info)
    agent = AssistantAgent("adder", model, tools=[add], reflect_on_tool_use=True)
    found: Any = (await agent.run(task=QUESTION)).messages[-1]
    return str(found.content)


async def litellm() -> str:
    from litellm import acompletion

    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": schema}}]
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        found: Any = await acompletion(model=f"openai/{MODEL}", messages=said, tools=tools)
        message = found.choices[0].message
        if not message.tool_calls:
            return str(message.content)
        said.append(message)
        for call in message.tool_calls:
            content = str(add(**json.loads(call.function.arguments)))
            said.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def anthropic() -> str:
    from anthropic import AsyncAnthropic

    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": schema}]
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    async with AsyncAnthropic() as client:
        while True:
            found = await client.messages.create(model=MODEL, max_tokens=200, messages=said, tools=tools)
            said.append({"role": "assistant", "content": found.content})
            calls: list[Any] = [block for block in found.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in found.content if block.type == "text")
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": str(add(**c.input))} for c in calls]
            said.append({"role": "user", "content": results})


async def openai_parse() -> str:
    """Ask freely, and then for the same in a JSON schema."""
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    class Sum(BaseModel):
        total: int

    async with AsyncOpenAI() as client:
        said: list[Any] = [{"role": "user", "content": QUESTION}]
        first = await client.chat.completions.create(model=MODEL, messages=said)
        said += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "JSON!"},
        ]
        found = await client.chat.completions.parse(model=MODEL, messages=said, response_format=Sum)
    parsed = found.choices[0].message.parsed
    return str(parsed.total if parsed is not None else None)


async def crewai() -> str:
    from crewai import LLM, Agent
    from crewai.tools import tool

    model = LLM(model=f"openai/{MODEL}", base_url=OPENAI_URL, api_key=KEY)
    agent = Agent(role="adder", goal="Add.", backstory="It adds.", tools=[tool("add")(add)], llm=model, max_iter=3)
    return str(await agent.kickoff_async(QUESTION))


async def mini_swe_agent() -> str:
    """The coding agent, with the settings that it comes with: it works by commands of a shell."""
    import yaml
    from minisweagent import package_dir
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    settings = yaml.safe_load((package_dir / "config" / "default.yaml").read_text())["agent"]
    model = LitellmModel(model_name=f"openai/{MODEL}", cost_tracking="ignore_errors")
    found = DefaultAgent(model, LocalEnvironment(), **{**settings, "step_limit": 3}).run(QUESTION)
    return str(found.get("submission", ""))


async def claude_code() -> str:
    """The coding agent, as CLAUDE_CODE names its program."""
    options = ("-p", QUESTION, "--model", "any", "--allowedTools", "Bash")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(os.environ["CLAUDE_CODE"], *options, stdout=pipe)
    out, _ = await process.communicate()
    return out.decode()


AGENTS: dict[str, Callable[[], Coroutine[Any, Any, str]]] = {
    agent.__name__: agent
    for agent in (
        openai_agents, smolagents, langgraph, pydantic_ai, pydantic_ai_output, autogen, litellm, anthropic, crewai,
        mini_swe_agent, openai_parse, claude_code,
    )
}  # fmt: skip


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else list(AGENTS)[int(os.environ["OPENTINKER_ROW"]) % len(AGENTS)]
    if name == "crewai" and os.environ["CREWAI_PYTHON"] != sys.executable:
        os.execv(os.environ["CREWAI_PYTHON"], [os.environ["CREWAI_PYTHON"], __file__, name])
    try:
        answer = asyncio.run(AGENTS[name]())
    except Exception as error:  # noqa: BLE001 - the test asks whether there is a reward
        sys.stderr.write(f"{name}: {error!r}\n")
        answer = ""
    result = {"reward": float("3" in answer), "metrics": {f"task/{name}": 1.0}}
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
