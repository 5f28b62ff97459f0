"""Tools of a job (`environment.tools`): programs of the policy, MCP servers, functions; around any environment."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.envs.runtime.tools import functions
from opentinker.envs.runtime.tools.python_monty import MontyInterpreters
from opentinker.envs.runtime.tools.refcounted_pool import RefcountedPool
from opentinker.envs.runtime.tools.tool_factory import ToolFactory, Tools
from opentinker.envs.tools import RESULT_BYTES, NoTools, OfferedTool, Outcome, run_tool
from opentinker.shared.config import Settings
from opentinker.shared.types.core import Ending, Message, StopReason, ToolCall
from opentinker.shared.types.env_protocol import OpenSession, StepSession
from tests.conftest import free_port, until
from tests.samples import env_samples, tool_samples
from tests.unit.envs.env_worker.requests import opening

MONTY = {"type": "python", "timeout_s": 1.0, "memory_mb": 32}
SANDBOX = {"type": "python", "backend": "sandbox", "timeout_s": 20.0}
FUNCTIONS = {"type": "functions", "module": "tests.samples.tool_samples:FUNCTIONS", "timeout_s": 20.0}
STUCK = {"type": "functions", "module": "tests.samples.tool_samples:stuck", "timeout_s": 0.2}
MCP = {"type": "mcp", "command": [sys.executable, "-m", "tests.samples.tool_samples"], "timeout_s": 30.0}
SETTINGS = Settings(env_modules=True, env_tool_commands=True, sandbox_memory_mb=512, sandbox_disk_mb=32)


@pytest.fixture
async def shop(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ToolFactory]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.getcwd(), *sys.path])))
    tool_samples.LET_GO.clear()
    shop = ToolFactory(SETTINGS)
    yield shop
    tool_samples.LET_GO.set()
    await shop.close()


@pytest.fixture
async def monty(shop: ToolFactory) -> AsyncIterator[Tools]:
    tools = await shop.open("j", [MONTY])
    yield tools
    await tools.close()


@pytest.fixture
async def sandbox(shop: ToolFactory) -> AsyncIterator[Tools]:
    tools = await shop.open("j", [SANDBOX])
    yield tools
    await tools.close()


async def use(tools: Tools, name: str, **arguments: Any) -> Outcome:
    offered: dict[str, OfferedTool] = {one.tool.name: one for one in tools.offered}
    return await run_tool(offered, ToolCall(id="c", name=name, arguments=arguments))


async def said(tools: Tools, code: str) -> str:
    return (await use(tools, "python", code=code)).text


# --- programs -----------------------------------------------------------------------------------------------------


async def test_monty_says_what_is_printed_and_the_last_value_and_keeps_variables(
    shop: ToolFactory, monty: Tools
) -> None:
    other = await shop.open("j", [MONTY])
    assert await said(monty, "x = 20\nprint('hello')\nx + 1") == "hello\n21"
    assert await said(monty, "x *= 2\nx") == "40"
    assert "NameError" in await said(other, "x")
    assert await said(monty, "x = 3") == "(no output: print what you want to see)"
    assert "ZeroDivisionError" in await said(monty, "x = 4\n1 / 0")
    assert await said(monty, "x") == "3"  # a program that fails leaves all as it was
    await other.close()


async def test_monty_has_the_modules_that_its_description_names(monty: Tools) -> None:
    named = ["math", "re", "json", "random", "datetime", "itertools", "functools", "collections", "decimal"]
    named += ["dataclasses", "typing"]
    assert all(module in monty.offered[0].tool.description for module in named)
    imports = "\n".join(f"import {module}" for module in named)
    assert await said(monty, f"{imports}\nmath.factorial(20)") == "2432902008176640000"


async def test_episodes_take_turns_at_fewer_interpreters_and_keep_their_variables(shop: ToolFactory) -> None:
    many = [await shop.open("j", [MONTY]) for _ in range(2 * (os.cpu_count() or 1) + 1)]
    for turn in range(3):
        answers = await asyncio.gather(*(said(tools, f"x = {n + turn}") for n, tools in enumerate(many)))
        assert set(answers) == {"(no output: print what you want to see)"}
        assert [await said(tools, "x") for tools in many] == [str(n + turn) for n in range(len(many))]
    for tools in many:
        await tools.close()
    interpreters, back = await shop._interpreters.borrow("monty", MontyInterpreters.open)
    assert interpreters.held == 0
    back()


async def test_a_program_reaches_only_its_own_host_functions(monty: Tools) -> None:
    asks = "n = 0\nfor _ in range({}):\n    try: missing\n    except NameError: n += 1\nprint(n)"
    for _ in range(3):
        assert await said(monty, asks.format(600)) == "600\n"
    assert "suspension limit 1000 exceeded" in await said(monty, asks.format(1001))
    assert await said(monty, "n") == "600"


async def test_a_call_that_nobody_waits_for_any_more_leaves_the_variables_as_they_were(shop: ToolFactory) -> None:
    tools = await shop.open("j", [{**MONTY, "timeout_s": 60.0}])
    assert await said(tools, "x = 1\nx") == "1"
    interpreters, back = await shop._interpreters.borrow("monty", MontyInterpreters.open)
    call = asyncio.create_task(said(tools, "x = 2\nwhile True: pass"))
    await until(lambda: not interpreters._waiting)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await said(tools, "x") == "1"
    await tools.close()
    back()


ATTACKS = {
    "while True: pass": "TimeoutError",
    "x = []\nwhile True: x.append('a' * 1000)": "MemoryError",
    "10 ** 10 ** 9": "MemoryError",
    "open('/etc/passwd').read()": "PermissionError",
    "import os\nos.listdir('/')": "PermissionError",
    "import socket": "ModuleNotFoundError",
    "import subprocess": "ModuleNotFoundError",
    "while True: print('x' * 1000)": "MemoryError",
    "def f(n): return f(n + 1)\nf(0)": "RecursionError",
    "def f(:": "SyntaxError",
    "(" * 5000: "",
    "import time\ntime.sleep(1000)\n3": "",
}


async def test_what_hostile_programs_try_in_monty_ends_with_them(monty: Tools) -> None:
    for program, error in ATTACKS.items():
        outcome = await use(monty, "python", code=program)
        assert error in outcome.text, program
        assert len(outcome.text.encode()) <= RESULT_BYTES + 100
    assert await said(monty, "1 + 1") == "2"


async def test_variables_that_take_too_much_are_not_kept(monty: Tools) -> None:
    assert "are forgotten" in await said(monty, "x = 'a' * 3000000\n1")
    assert "NameError" in await said(monty, "x")
    assert (await said(monty, "list(range(3000))")).endswith("...]")
    assert "too long to be shown" in await said(monty, "10 ** 9000")


async def test_the_sandbox_has_numpy_and_sympy_and_forgets_everything(sandbox: Tools) -> None:
    solved = await said(sandbox, "import sympy\nx = sympy.Symbol('x')\nprint(sympy.solve(x**2 - 4))\n3")
    assert solved == "[-2, 2]\n3\n"
    assert await said(sandbox, "import numpy\nnumpy.ones(3).sum()") == "np.float64(3.0)\n"
    assert "NameError: name 'x' is not defined" in await said(sandbox, "x")
    assert await said(sandbox, "open('/tmp/left', 'w').write('secret')") == "6\n"
    assert await said(sandbox, "import os\nos.listdir('/tmp')") == "[]\n"
    failed = await use(sandbox, "python", code="def f():\n    return 1 / 0\nf()")
    assert failed.failed
    assert "line 3, in <module>" in failed.text and "sandbox_runner.py" not in failed.text
    assert (await use(sandbox, "python", code="import sys; sys.exit(2)")).failed


SANDBOX_ATTACKS = {
    "x = [bytearray(64 << 20) for _ in range(64)]": "MemoryError",
    "print('x' * 30_000_000)": "ended: it printed more than 100000 bytes",
    "open('/etc/shadow').read()": "FileNotFoundError",
    "import socket\nsocket.create_connection(('127.0.0.1', 4222), 1)": "Error",
    "import os\nprint(os.environ)": "'HOME': '/tmp'",
    "import os\nos.write(7, b'x')": "OSError",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nprint(os.getpid())": "",
}


async def test_what_hostile_programs_try_in_the_sandbox_ends_with_them(shop: ToolFactory, sandbox: Tools) -> None:
    for program, error in SANDBOX_ATTACKS.items():
        outcome = await use(sandbox, "python", code=program)
        assert error in outcome.text, program
        assert "OPENTINKER" not in outcome.text
        assert len(outcome.text.encode()) <= RESULT_BYTES + 100
    short = await shop.open("j", [{**SANDBOX, "timeout_s": 0.5}])
    assert "ended: it took longer than 0.5 s" in await said(short, "while True: pass")
    await short.close()
    left = "import os\nsum(name.isdigit() for name in os.listdir('/proc'))"
    assert int(await said(sandbox, left)) <= 4  # the sandbox's first, the interpreter, this program


async def test_a_program_that_says_it_has_ended_harms_itself_alone(sandbox: Tools) -> None:
    early = "import os, time\nprint('first', flush=True)\nos.write(3, b'\\1')\ntime.sleep(1000)\nprint('second')"
    outcome = await use(sandbox, "python", code=early)
    assert (outcome.failed, outcome.text) == (False, "first\n")
    odd = await use(sandbox, "python", code="import os\nos.write(3, b'odd')\nwhile True: pass")
    assert odd.failed
    held = "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nos.kill(os.getpid(), 9)"
    killed = await use(sandbox, "python", code=held)
    assert killed.failed and "killed by SIGKILL" in killed.text
    closed = await use(sandbox, "python", code="import os\nos.close(3)\nprint('x')")
    assert (closed.failed, closed.text) == (False, "x\n")
    assert await said(sandbox, "1 + 1") == "2\n"


async def test_a_program_that_kills_its_interpreter_has_failed_and_the_next_one_runs(sandbox: Tools) -> None:
    for program in ("import os\nos.kill(os.getppid(), 9)", "import os\nos.kill(-1, 9)"):
        killed = await use(sandbox, "python", code=program)
        assert killed.failed and "the program ended the interpreter" in killed.text
        assert await said(sandbox, "1 + 1") == "2\n"


async def test_without_a_sandbox_there_is_no_tool_and_nothing_in_its_place() -> None:
    shop = ToolFactory(Settings(sandbox_bwrap="/nowhere/bwrap"))
    (mistake,) = await shop.check([SANDBOX])
    assert mistake["field"] == "environment.tools.0.backend"
    assert "no program here" in mistake["problem"]
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=True), tool_factory=shop)
    refused = await sessions.open(with_tools(SANDBOX))
    assert refused.failure == Ending.ENV_ERROR
    assert "no program here" in refused.error
    await shop.close()


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


def with_tools(*tools: dict[str, Any], session: str = "s", environment: str = "", **config: Any) -> OpenSession:
    request = opening(session, environment or "tests.samples.env_samples:Counting", **config)
    return msgspec.structs.replace(request, tools=list(tools), tool_turns=3)


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
    opened = await sessions.open(with_tools(MONTY, environment="tests.samples.env_samples:Race"))
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
    opened = await sessions.open(with_tools(MONTY, environment="tests.samples.env_samples:Relay"))
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
