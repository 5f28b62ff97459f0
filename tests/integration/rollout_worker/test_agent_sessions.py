"""Agents as sessions of an env worker, in its loop, in a child process or as programs; and what is trained on."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import AsyncOpenAI

from opentinker.envs.agents.program import AgentProgram
from opentinker.envs.registry import check, find
from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.services.rollout_worker.episode import Episode
from opentinker.services.rollout_worker.seat_map import SeatMap
from opentinker.shared.types.core import Ending, StopReason
from opentinker.shared.types.env_protocol import CloseSession, OpenSession, Policy, StepSession
from opentinker.shared.types.errors import SpecError
from tests.conftest import until
from tests.support import playing
from tests.support.agents.agent_talk import Direct, Scripted, chat, generate
from tests.support.factories import make_spec, make_ticket
from tests.unit.rollout_worker.scripted_episode import Chars, Script, renderer, say

# --- as trajectories ------------------------------------------------------------------------------------------------


async def test_every_context_of_an_agent_becomes_a_trajectory_of_the_sampled_tokens() -> None:
    async def talk(model: AsyncOpenAI) -> None:
        await model.chat.completions.create(**chat("a"))
        await model.chat.completions.create(**chat("summary"))
        await model.chat.completions.create(**chat("a", "xy", "b"))
        await generate(model, [5, 6])

    engine = Script([say("xy$"), say("z$"), say("w$"), say("q$")])
    spec = make_spec(rollout__max_turns=9, rollout__max_tokens=50)
    seats = SeatMap.single(spec, engine, renderer())  # type: ignore[arg-type]
    played = Episode(spec, make_ticket(), 0, seats, Direct(Scripted(talk)))
    first, second, third = await played.run()
    assert first.ids.tolist() == Chars().encode("<u>a$\n<a>xy$\n<u>b$\n<a>w$")
    assert "".join(c for c, m in zip("<u>a$\n<a>xy$\n<u>b$\n<a>w$", first.mask, strict=True) if m) == "xy$w$"
    assert first.logprobs[first.mask == 1].tolist() == [-0.5] * 5
    assert second.ids.tolist() == Chars().encode("<u>summary$\n<a>z$")
    assert third.ids.tolist() == [5, 6, *Chars().encode("q$")]
    assert [t.stream for t in (first, second, third)] == ["", "1", "2"]
    assert (first.reward, second.reward, third.reward) == (0.0, 0.0, 1.0)
    for trajectory in (first, second, third):
        trajectory.check()


# --- in an env worker -----------------------------------------------------------------------------------------------


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    host = ChildPool(children=1, per_child=4, modules=True)
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=True), host=host)
    yield sessions
    await sessions.drain(0.01)
    await host.close()


def opening(sample: str, session: str = "s", deadline_s: float = 30.0, **config: Any) -> OpenSession:
    name = sample if sample == "agent_program" else f"tests.samples.agent_samples:{sample}"
    asked = playing.opening(name, session, row=3, seed=4, deadline_s=deadline_s, **config)
    return msgspec.structs.replace(asked, policy=Policy(model="the-model", context_length=64))


def turn(text: str, turn: int = 0, session: str = "s") -> StepSession:
    return StepSession(session=session, turn=turn, text=text, stop=StopReason.EOS, ids=[1], logprobs=[-1.0])


async def test_an_agent_is_an_ordinary_session(sessions: Sessions) -> None:
    opened = await sessions.open(opening("Echo"))
    assert (opened.messages[0].text, opened.wants_tokens) == ("row 3 seed 4 turn 0=", True)
    first = await sessions.step(turn("yes"))
    assert (first.messages[0].text, first.reward, first.done) == ("row 3 seed 4 turn 1=", 0.0, False)
    last = await sessions.step(turn("no", 1))
    assert (last.reward, last.components, last.metrics, last.done) == (1.0, {"right": 1.0}, {"exact": 1.0}, True)


@pytest.mark.parametrize(
    ("how", "said"), [("raise 0", "the agent is tired"), ("exit 0", "SystemExit"), ("raise -1", "tired")]
)
async def test_an_agent_that_fails_costs_its_own_episode(sessions: Sessions, how: str, said: str) -> None:
    other = await sessions.open(opening("Echo", "other"))
    reply = await sessions.open(opening("Echo", how=how))
    if reply.failure is None:
        reply = await sessions.step(turn("yes"))
    assert reply.failure == Ending.ENV_ERROR and said in reply.error
    assert other.failure is None and (await sessions.step(turn("x", session="other"))).failure is None


async def test_an_agent_that_hangs_ends_at_the_deadline(sessions: Sessions) -> None:
    await sessions.open(opening("Echo", deadline_s=0.5, how="hang 0"))
    assert (await sessions.step(turn("yes"))).failure == Ending.ENV_TIMEOUT


async def test_an_agent_must_give_a_result(sessions: Sessions) -> None:
    await sessions.open(opening("Nothing"))
    reply = await sessions.step(turn("yes"))
    assert "must return a Result, not float" in reply.error


async def test_agents_that_block_run_in_a_child_beside_each_other(sessions: Sessions) -> None:
    names = ["a", "b", "c"]
    for name in names:
        assert (await sessions.open(opening("BlockingEcho", name, block_s=0.05))).messages[0].text == "row 3="
    replies = await asyncio.gather(*(sessions.step(turn("yes", session=name)) for name in names))
    assert [(reply.reward, reply.done) for reply in replies] == [(1.0, True)] * 3
    opened = await sessions.open(opening("BlockingEcho", "left"))
    await sessions.close(CloseSession(session="left"))  # its agent waits for an answer, and must not hold the child
    assert opened.failure is None
    assert (await sessions.open(opening("BlockingEcho", "next"))).failure is None


# --- any program ----------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys, urllib.request
url, how = os.environ["OPENAI_BASE_URL"], sys.argv[1]
if how == "silent":
    sys.exit()
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": os.environ["OPENTINKER_ROW"]}]}
request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode())
if how == "anthropic":
    request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode())
    how = "work"
with urllib.request.urlopen(request) as reply:
    said = json.load(reply)
    answer = said["choices"][0]["message"]["content"] if "choices" in said else said["content"][0]["text"]
print("some log line")
if how == "crash":
    sys.exit("it went wrong")
if how == "secrets":
    print(sorted(name for name in os.environ if "REDIS" in name or "NATS" in name))
    how = "work"
if how == "work":
    print(json.dumps({"reward": float(answer == "yes"), "metrics": {"seed": float(os.environ["OPENTINKER_SEED"])}}))
"""


def program(tmp_path: Path, how: str) -> dict[str, Any]:
    script = tmp_path / "agent.py"
    script.write_text(PROGRAM)
    return {"command": [sys.executable, str(script), how]}


@pytest.mark.parametrize("how", ["work", "anthropic"])
async def test_any_program_is_an_environment(sessions: Sessions, tmp_path: Path, how: str) -> None:
    opened = await sessions.open(opening("agent_program", **program(tmp_path, how)))
    assert opened.messages[0].text == "3"
    last = await sessions.step(turn("yes"))
    assert (last.reward, last.done, last.metrics) == (1.0, True, {"seed": 4.0})


@pytest.mark.parametrize(
    ("how", "said"), [("silent", "printed no reward"), ("crash", "exit status 1: it went wrong"), ("log", "last line")]
)
async def test_a_program_that_fails_says_why(sessions: Sessions, tmp_path: Path, how: str, said: str) -> None:
    reply = await sessions.open(opening("agent_program", **program(tmp_path, how)))
    if reply.failure is None:
        reply = await sessions.step(turn("yes"))
    assert reply.failure == Ending.ENV_ERROR and said in reply.error


async def test_a_program_is_ended_with_its_session(sessions: Sessions, tmp_path: Path) -> None:
    script, left = tmp_path / "agent.sh", tmp_path / "pid"
    script.write_text(f"echo $$ > {left}\nsleep 600 &\nwait\n")
    waiting = asyncio.create_task(sessions.open(opening("agent_program", command=["sh", str(script)])))
    await until(lambda: left.exists() and left.read_text().strip())
    await sessions.close(CloseSession(session="s"))
    await waiting
    group = int(left.read_text())
    await until(lambda: not alive(group))


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_programs_are_for_operators() -> None:
    with pytest.raises(SpecError, match="env_modules"):
        find("agent_program")
    assert find("agent_program", modules=True) is AgentProgram
    with pytest.raises(SpecError, match="env_modules"):
        find("agent_program")
    with pytest.raises(SpecError, match="no program 'not-there'"):
        check("agent_program", {"command": ["not-there"]}, modules=True)
