"""Tools of a job (`environment.tools`): MCP servers, functions; around any environment."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator

import pytest

from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.envs.runtime.tools import functions
from opentinker.envs.runtime.tools.refcounted_pool import RefcountedPool
from opentinker.envs.runtime.tools.tool_factory import ToolFactory
from opentinker.envs.tools import NoTools
from opentinker.shared.config import Settings
from opentinker.shared.types.core import Ending, Message, StopReason, ToolCall
from opentinker.shared.types.env_protocol import StepSession
from tests.conftest import free_port, until
from tests.integration.rollout_worker.job_tools import MONTY, use, with_tools
from tests.samples import env_samples, tool_samples

FUNCTIONS = {"type": "functions", "module": "tests.samples.tool_samples:FUNCTIONS", "timeout_s": 20.0}
STUCK = {"type": "functions", "module": "tests.samples.tool_samples:stuck", "timeout_s": 0.2}
MCP = {"type": "mcp", "command": [sys.executable, "-m", "tests.samples.tool_samples"], "timeout_s": 30.0}


# --- servers and functions ----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_an_mcp_server_is_an_episode_s_own_unless_it_is_shared(shop: ToolFactory) -> None:
    first, second = await shop.open("j", [MCP]), await shop.open("j", [MCP])
    assert [one.tool.name for one in first.offered] == ["keep", "die", "fail", "variables"]
    assert first.offered[0].tool.parameters["properties"]["word"]["type"] == "string"
    assert (await use(first, "keep", word="a")).text == "a"
    assert (await use(second, "keep", word="b")).text == "b"
    wrong = await use(first, "keep", word=[1])
    assert wrong.failed and "valid string" in wrong.text
    failed = await use(first, "fail")
    assert failed.failed and "not today" in failed.text
    assert "OPENTINKER" not in (await use(first, "variables")).text
    await asyncio.gather(first.close(), second.close())
    shared = {**MCP, "shared": True}
    first, second = await asyncio.gather(shop.open("j", [shared]), shop.open("j", [shared]))
    await use(first, "keep", word="a")
    assert (await use(second, "keep", word="b")).text == "a b"
    await asyncio.gather(first.close(), second.close())


async def test_calls_of_a_server_that_is_gone_are_errors_and_the_next_episode_gets_a_new_one(shop: ToolFactory) -> None:
    shared = {**MCP, "shared": True}
    tools = await shop.open("j", [shared])
    dead = await use(tools, "die")
    assert dead.failed
    gone = await use(tools, "keep", word="a")
    assert gone.failed
    await tools.close()

    async def anew() -> bool:
        again = await shop.open("j", [shared])
        try:
            return (await use(again, "keep", word="b")).text == "b"
        finally:
            await again.close()

    await until(anew)


@pytest.mark.slow
async def test_a_server_that_cannot_be_started_fails_the_episode_and_says_why(shop: ToolFactory) -> None:
    with pytest.raises(NoTools, match="No such file"):
        await shop.open("j", [{**MCP, "command": ["/nowhere/server"]}])
    with pytest.raises(NoTools, match=r"cannot be used.*no licence"):
        await shop.open("j", [{**MCP, "command": [sys.executable, "-c", "raise SystemExit('no licence')"]}])
    with pytest.raises(NoTools, match=r"did not answer within 0\.2 s"):
        await shop.open("j", [{**MCP, "command": ["sleep", "100"], "timeout_s": 0.2}])


@pytest.mark.slow
async def test_an_http_server_is_reached_through_the_guard(shop: ToolFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.samples.tool_samples", str(port))
    try:
        await until(lambda: _listens(port), timeout_s=30.0)
        tool = {"type": "mcp", "url": f"http://127.0.0.1:{port}/mcp", "timeout_s": 30.0}
        (mistake,) = await shop.check([tool])
        assert mistake["field"] == "environment.tools.0.url" and "a loopback address" in mistake["problem"]
        with pytest.raises(NoTools, match="a loopback address"):
            await shop.open("j", [tool])
        monkeypatch.setenv("OPENTINKER_ENV_EGRESS_ALLOW", "127.0.0.0/8")
        assert await shop.check([tool]) == []
        tools = await shop.open("j", [tool])
        assert (await use(tools, "keep", word="a")).text == "a"
        await tools.close()
    finally:
        process.kill()
        await process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_functions_are_tools_and_a_stuck_one_holds_up_nobody(shop: ToolFactory) -> None:
    tools = await shop.open("j", [FUNCTIONS, STUCK])
    assert [one.tool.name for one in tools.offered] == ["double", "slowly", "stuck"]
    assert (await use(tools, "double", number=21)).text == "42"
    assert (await use(tools, "slowly", number=3)).text == "3"
    assert (await use(tools, "stuck")).text == "error: the tool took too long: it had 0.2 s"
    await tools.close()


async def test_whatever_a_function_does_is_an_observation_and_one_that_goes_on_is_left_alone(shop: ToolFactory) -> None:
    hostile = {**FUNCTIONS, "module": "tests.samples.tool_samples:HOSTILE"}
    stubborn = {**STUCK, "module": "tests.samples.tool_samples:stubborn"}
    tools = await shop.open("j", [hostile, stubborn])
    said = {
        "leave": "error: SystemExit: gone",
        "leave_too": "error: KeyboardInterrupt: ",
        "stop": "error: StopIteration: stopped",
        "cancelled": "error: the tool raised CancelledError",
        "endless": "error: the function gave an iterator in place of a result",
        "secretly_async": "3",
        "stubborn": "error: the tool took too long: it had 0.2 s",
    }
    assert {name: (await use(tools, name)).text for name in said} == said
    huge = (await use(tools, "huge", size=50_000_000)).text
    assert len(huge) <= 20_000 and "(49,980,100 characters are left out)" in huge
    again = await shop.open("k", [{**stubborn, "timeout_s": 0.3}])  # another episode, of another job
    half = functions.MAX_RUNNING // 2
    calls = [asyncio.create_task(use(one, "stubborn")) for one in (tools, again) for _ in range(half)]
    assert "16 calls of it have not returned yet" in "".join([(await one).text for one in calls])
    tool_samples.LET_GO.set()
    await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name() == "tool"])
    await tools.close()
    await again.close()


async def test_what_the_operator_has_not_allowed_or_is_not_there_is_a_mistake_of_the_spec(shop: ToolFactory) -> None:
    strict = ToolFactory(Settings())
    found = await strict.check([MCP, FUNCTIONS, MONTY])
    assert [(one["field"], "operator setting" in one["problem"]) for one in found] == [
        ("environment.tools.0.command", True),
        ("environment.tools.1.module", True),
    ]
    with pytest.raises(NoTools, match="operator setting env_tool_commands"):
        await strict.open("j", [MCP])
    wrong = [{**FUNCTIONS, "module": f"tests.samples.tool_samples:{name}"} for name in ("MISSING", "NO_FUNCTION")]
    found = await shop.check([*wrong, {**FUNCTIONS, "module": "no_such_module:f"}, MONTY, MONTY, FUNCTIONS])
    assert [one["field"] for one in found] == [
        "environment.tools.0.module", "environment.tools.1.module", "environment.tools.2.module",
        "environment.tools.4.backend",
    ]  # fmt: skip
    assert "tool 'python' is there twice" in found[-1]["problem"]


async def test_a_thing_is_made_once_kept_for_a_while_and_made_anew_when_broken() -> None:
    class Thing:
        broken = False
        closed = False

        async def close(self) -> None:
            self.closed = True

    made: list[Thing] = []

    async def make() -> Thing:
        await asyncio.sleep(0)
        made.append(Thing())
        return made[-1]

    lending: RefcountedPool[Thing] = RefcountedPool(linger_s=0.01)
    (first, back), (second, back_too) = await asyncio.gather(lending.borrow("k", make), lending.borrow("k", make))
    assert first is second and len(made) == 1
    first.broken = True
    third, back_third = await lending.borrow("k", make)
    assert third is made[1]
    for give_back in (back, back_too, back_third):
        give_back()
    await until(lambda: all(thing.closed for thing in made))

    async def fail() -> Thing:
        raise OSError("no")

    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            await lending.borrow("f", fail)
    await lending.close()


# --- around environments ------------------------------------------------------------------------------------------


def step(turn: int, *calls: ToolCall, text: str = "x", seat: str = "", problem: str = "") -> StepSession:
    return StepSession(
        session="s", turn=turn, text=text, stop=StopReason.EOS, seat=seat, tool_calls=list(calls), problem=problem
    )


def run(code: str, id: str = "c") -> ToolCall:
    return ToolCall(id=id, name="python", arguments={"code": code})


@pytest.fixture
async def sessions(shop: ToolFactory) -> AsyncIterator[Sessions]:
    env_samples.Counting.calls.clear()
    host = ChildPool(children=1, per_child=2, modules=True)
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=True), host=host, tool_factory=shop)
    yield sessions
    await sessions.drain(0.01)
    await host.close()


@pytest.mark.parametrize("environment", ["Counting", "Blocking"])
async def test_the_worker_answers_calls_and_passes_on_the_rest(sessions: Sessions, environment: str) -> None:
    opened = await sessions.open(with_tools(MONTY, environment=f"tests.samples.env_samples:{environment}"))
    assert [tool.name for tool in opened.tools] == ["python"]
    answered = await sessions.step(step(0, run("x = 4"), run("x * 2", "d")))
    assert [(one.role, one.tool_call_id) for one in answered.messages] == [("tool", "c"), ("tool", "d")]
    assert answered.messages[1].text == "8"
    assert (answered.reward, answered.done) == (0.0, False)
    wrong = await sessions.step(step(1, problem="no valid JSON"))
    assert wrong.messages == [Message(role="user", content="no valid JSON")]
    played = await sessions.step(step(2))
    assert played.reward == 1.0 and played.tools == []
    assert played.metrics == {"tool_calls": 3.0, "tool_errors": 1.0}
    counts = sessions.meters.of("j").counts
    assert counts["env/tool_calls/python"] == 2 and counts["env/tool_errors/python"] == 0
    assert "env/tool_ms/python" in counts
    if environment == "Counting":
        assert env_samples.Counting.calls == [" open", " step 0"]


async def test_every_stream_of_every_seat_is_told_of_the_tools_once(sessions: Sessions) -> None:
    opened = await sessions.open(with_tools(MONTY, environment="tests.samples.seat_samples:Race"))
    assert (opened.seat, [tool.name for tool in opened.tools]) == ("first", ["python"])
    answered = await sessions.step(step(0, run("1"), seat="first"))
    assert (answered.seat, answered.stream, answered.max_tokens, answered.stop) == ("first", "s", 3, ["."])
    assert answered.tools == []
    refused = await sessions.step(step(1, run("1"), seat="second"))
    assert refused.failure == Ending.ENV_ERROR and "is for seat 'first'" in refused.error


async def test_tools_of_the_environment_and_of_the_job_are_called_side_by_side(sessions: Sessions) -> None:
    opened = await sessions.open(with_tools(MONTY, environment="tool_calc"))
    assert [tool.name for tool in opened.tools] == ["calculate", "python"]
    calculate = ToolCall(id="e", name="calculate", arguments={"expression": "2 + 2"})
    both = await sessions.step(step(0, run("1 + 1"), calculate))
    assert [(one.tool_call_id, one.text) for one in both.messages] == [("c", "2"), ("e", "4")]
    alone = await sessions.step(step(1, calculate))
    assert [one.text for one in alone.messages] == ["4"]
    done = await sessions.step(step(2, text="7"))
    assert done.done and done.metrics["tool_calls"] == 3.0 and done.metrics["exact"] == 0.0


async def test_results_wait_for_the_stream_that_called_where_another_one_acts_next(sessions: Sessions) -> None:
    opened = await sessions.open(with_tools(MONTY, environment="tests.samples.seat_samples:Relay"))
    assert opened.seat == "a"
    move = ToolCall(id="m", name="move", arguments={})
    first = await sessions.step(step(0, run("1 + 1"), move, seat="a"))
    assert (first.seat, [one.text for one in first.messages]) == ("b", ["after a"])
    second = await sessions.step(step(1, text="x", seat="b"))
    assert (second.seat, [one.text for one in second.messages]) == ("a", ["2", "after b"])


async def test_two_tools_of_one_name_fail_the_episode(sessions: Sessions) -> None:
    clash = {"type": "functions", "module": "opentinker.envs.builtin.tool_calc:value_of"}
    opened = await sessions.open(with_tools(clash, clash))
    assert opened.failure == Ending.ENV_ERROR and "a different name" in opened.error


@pytest.mark.slow
async def test_the_session_of_an_episode_that_ends_gives_its_tools_back(sessions: Sessions, shop: ToolFactory) -> None:
    opened = await sessions.open(with_tools(MCP, turns=1))
    assert opened.failure is None
    done = await sessions.step(step(0))
    assert done.done
    await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("mcp ")])
