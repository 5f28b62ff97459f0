"""MCP servers in a whole job: a model that calls tools trains, and its transcripts have calls, results
and times. One of the servers is silent, which costs its call alone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.models.make_tiny import make_tiny
from opentinker.shared.spec import parse_spec
from tests.conftest import free_port, until
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
SAMPLES = Path(__file__).parents[1] / "samples"
TEMPLATE = """{%- if tools %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}
calls: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<tool_response>
{{ message.content }}
</tool_response>
{% else %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call><function={{ call.function.name }}>
{%- for key, value in call.function.arguments.items() %}<parameter={{ key }}>{{ value }}</parameter>{% endfor -%}
</function></tool_call>{% endfor %}{{ "<eos>" if message.role == "assistant" else "" }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
KEEP = "<tool_call><function=keep><parameter=word>a</parameter></function></tool_call>"
ASK = "<tool_call><function=ask></function></tool_call>"
NAMES = ("keep", "die", "fail", "variables", "ask")
SILENT = {"type": "mcp", "command": [sys.executable, str(SAMPLES / "mcp_hostile.py"), "silence"], "timeout_s": 1.0}
STEPS, SIZE, GROUPS = 2, 2, 2


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that calls both tools in its first turn, whatever it is asked."""
    directory = make_tiny(tmp_path_factory.mktemp("caller") / "model")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    tools: list[Any] = [{"type": "function", "function": {"name": name}} for name in NAMES]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{digit}="}], tools=tools, add_generation_prompt=True, tokenize=False
        )
        for digit in range(10)
    ]
    batch = tokenizer([prompt + KEEP + ASK + "<eos>" for prompt in prompts], return_tensors="pt").input_ids
    labels = batch.clone()
    labels[:, : len(tokenizer(prompts[0]).input_ids)] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(200):
        loss = model(input_ids=batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 3e-3:
            break
    assert loss.item() < 1e-2, loss
    model.save_pretrained(directory)
    return directory


@asynccontextmanager
async def keeping(where: str) -> AsyncIterator[dict[str, Any]]:
    """The tool table of a server with the tool `keep`."""
    command = [sys.executable, str(SAMPLES / "tool_samples.py")]
    if where == "stdio":
        yield {"type": "mcp", "command": command, "timeout_s": 30.0}
        return
    port = free_port()
    process = await asyncio.create_subprocess_exec(*command, str(port))
    try:
        await until(lambda: answers(port), timeout_s=30.0)
        yield {"type": "mcp", "url": f"http://127.0.0.1:{port}/mcp", "timeout_s": 30.0}
    finally:
        process.kill()
        await process.wait()


async def answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@pytest.mark.parametrize("where", ["stdio", "http"])
async def test_calls_of_a_job_are_kept_with_their_time_and_a_silent_server_costs_its_call(
    caller: Path, tmp_path: Path, where: str
) -> None:
    settings: dict[str, Any] = {"env_tool_commands": "true", "env_egress_allow": "127.0.0.0/8"}
    async with keeping(where) as server, Cluster(tmp_path, heavy=True, **settings) as cluster:
        job = await cluster.run(
            parse_spec(
                {
                    "name": "mcp",
                    "model": {"base": str(caller)},
                    "environment": {"name": "copy_digits", "config": {"digits": 1}, "tools": [server, SILENT]},
                    "algorithm": {"group_size": SIZE, "groups_per_batch": GROUPS},
                    "rollout": {"max_tokens": 400, "max_tokens_per_turn": 160, "max_turns": 2, "temperature": 0.1},
                    "train": {"steps": STEPS, "lr": 1e-6},
                }
            ),
            600.0,
        )
        assert (await cluster.ledger(job)).failed == {}
        points = await cluster.client.metrics(job, names=["rollout/env_s", "rollout/tool_s"])
        tools, environment = (
            max(p["values"].get(f"rollout/{name}_s", 0.0) for p in points) for name in ("tool", "env")
        )
        assert SIZE <= tools <= environment, "the silent calls alone take a second each"
        kept = (await cluster.client.rollouts(job))["rollouts"]
        shown = (await cluster.client.rollouts(job, 1))["rollouts"]
    results = [message for rollout in [*kept, *shown] for message in said(rollout) if message["role"] == "tool"]
    own = [message for message in results if message["tool"] == "keep"]
    silent = [message for message in results if message["tool"] == "ask"]
    assert len(own) == len(silent) == len(kept) + len(shown) > 0
    for message in own:
        assert set(message["content"].split()) == {"a"} and 0.0 < message["call_ms"] < 30_000.0
    for message in silent:
        assert message["content"].startswith("error: ") and 990.0 <= message["call_ms"] < 10_000.0


def said(rollout: Any) -> list[dict[str, Any]]:
    """The messages of an episode of one seat."""
    (view,) = rollout["views"]
    return list(view["messages"])
