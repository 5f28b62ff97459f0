"""Programs of the policy as a tool of a job: both interpreters, their variables and limits, and hostile programs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.envs.runtime.tools.python_monty import MontyInterpreters
from opentinker.envs.runtime.tools.tool_factory import ToolFactory, Tools
from opentinker.envs.tools import RESULT_BYTES
from opentinker.shared.config import Settings
from opentinker.shared.types.core import Ending
from tests.conftest import until
from tests.integration.rollout_worker.job_tools import MONTY, use, with_tools

SANDBOX = {"type": "python", "backend": "sandbox", "timeout_s": 20.0}


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


async def said(tools: Tools, code: str) -> str:
    return (await use(tools, "python", code=code)).text


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
