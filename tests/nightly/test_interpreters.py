"""Environments played by another Python: one with other pins than ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from uv import find_uv_bin

from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.interpreters import Interpreters
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.services.env_worker.service import check_environment
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.types.env_protocol import EnvCheck, SessionReply
from opentinker.shared.types.errors import SpecError
from tests.support.playing import opening, step


class Worker:
    """The sessions of an env worker whose environments have interpreters of their own."""

    def __init__(self, **paths: Path) -> None:
        self.host = ChildPool(children=1, per_child=8, modules=False, interpreters=Interpreters(paths))
        self.resolver = Resolver(modules=False)
        self.sessions = Sessions("w", limit=8, resolver=self.resolver, host=self.host)

    async def open(self, session: str, name: str, **config: Any) -> SessionReply:
        reply = await self.sessions.open(opening(name, session, deadline_s=300.0, **config))
        assert reply.failure is None, reply.error
        return reply

    async def step(self, session: str, turn: int, text: str) -> SessionReply:
        reply = await self.sessions.step(step(turn, text, session))
        assert reply.failure is None, reply.error
        return reply

    async def mistakes(self, name: str, **config: Any) -> str:
        reply = await check_environment(EnvCheck(name=name, config=config), self.resolver, self.host)
        return " ".join(str(error["problem"]) for error in reply.errors)


@pytest.fixture
async def other(tmp_path: Path) -> AsyncIterator[tuple[Worker, Path]]:
    """Its Python leaves a trace, and is otherwise ours."""
    python, trace = tmp_path / "python", tmp_path / "trace"
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH" >> {trace}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    worker = Worker(gymnasium=python)
    yield worker, trace
    await worker.host.close()


async def test_the_named_interpreter_plays_and_sees_our_package_alone(other: tuple[Worker, Path]) -> None:
    worker, trace = other
    await worker.open("s", "gymnasium", id="CartPole-v1")
    assert (await worker.step("s", 0, "left")).reward == 1.0
    (beside,) = trace.read_text().split()
    assert os.listdir(beside) == ["opentinker"]


async def test_configs_are_checked_where_they_are_played(other: tuple[Worker, Path]) -> None:
    worker, trace = other
    assert "did you mean CartPole-v1" in await worker.mistakes("gymnasium", id="CartPol-v1")
    assert len(trace.read_text().split()) == 1
    assert await worker.mistakes("gymnasium", id="CartPole-v1") == ""
    assert "no such environment" in await worker.mistakes("gymnasiun")
    assert len(trace.read_text().split()) == 2


async def test_what_another_interpreter_plays_costs_what_it_says(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{os.getcwd()}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    costly = "tests.samples.env_samples:Costly"
    host = ChildPool(children=1, per_child=8, modules=True, interpreters=Interpreters({costly: python}))
    worker = Worker()
    worker.host, worker.sessions = host, Sessions("w", limit=8, resolver=Resolver(modules=True), host=host)
    try:
        for name in "abc":
            await worker.open(name, costly)
        assert worker.sessions.load == 7.5
        assert (await worker.sessions.open(opening(costly, "d"))).busy
    finally:
        await worker.sessions.drain(0.01)
        await host.close()


def test_an_interpreter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is not a program on this machine") as caught:
        Interpreters({"gem": tmp_path})
    assert caught.value.mistakes[0]["field"] == "env_interpreters.gem"


def test_interpreters_are_settings(tmp_path: Path) -> None:
    environ = {"OPENTINKER_ENV_INTERPRETERS": "gem=/a/python, openenv=/b/python"}
    expected = {"gem": Path("/a/python"), "openenv": Path("/b/python")}
    assert load_settings(None, environ).env_interpreters == expected
    file = tmp_path / "settings.toml"
    file.write_text('env_interpreters = { gem = "/a/python", openenv = "/b/python" }\n')
    assert load_settings(str(file), {}).env_interpreters == expected
    with pytest.raises(SpecError, match="must be NAME=PATH"):
        load_settings(None, {"OPENTINKER_ENV_INTERPRETERS": "/a/python"})


@pytest.fixture(scope="module")
def gem_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with GEM's own pins: another msgspec than ours, among others."""
    venv = tmp_path_factory.mktemp("gem") / "venv"
    for command in (
        ["venv", "--quiet", "--no-project", "--python", sys.executable, str(venv)],
        ["pip", "install", "--quiet", "--python", str(venv), "gem-llm==0.1.0", "numpy", "pydantic>=2.11,<3"],
    ):
        subprocess.run([find_uv_bin(), *command], check=True, timeout=500)
    return venv / "bin" / "python"


@pytest.mark.slow
async def test_gem_is_played_in_a_virtual_environment_of_its_own(gem_python: Path) -> None:
    worker = Worker(gem=gem_python)
    try:
        await worker.open("number", "gem", id="game:GuessTheNumber-v0-easy")
        low, high, turn, reply = 1, 10, 0, SessionReply(worker="")
        while not reply.done:
            guess = (low + high) // 2
            reply = await worker.step("number", turn, f"\\boxed{{{guess}}}")
            seen = "".join(message.text for message in reply.messages)
            low, high, turn = (guess + 1, high, turn + 1) if "is higher" in seen else (low, guess - 1, turn + 1)
        assert reply.reward == 1.0
        sudoku = await worker.open("sudoku", "gem", id="game:Sudoku-v0-easy")
        assert "R1" in sudoku.messages[0].text
        assert "out of bounds" in (await worker.step("sudoku", 0, "\\boxed{1 1 9}")).messages[0].text
        tower = await worker.open("tower", "gem", id="game:TowerofHanoi-v0-easy")
        assert "A: [3, 2, 1]" in tower.messages[0].text
        assert "C: [1]" in (await worker.step("tower", 0, "\\boxed{A C}")).messages[0].text
    finally:
        await worker.host.close()
