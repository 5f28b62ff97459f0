"""The packages of `pip install opentinker`, and the features that work with them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.cluster import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST = 15

HIDING = """
import sys
from importlib.machinery import PathFinder

hidden = set(sys.stdin.readline().split())

class Seeing(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if path is None and name in hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Seeing
"""
PLAYS = """
import asyncio, opentinker

class One(opentinker.Environment):
    async def open(self, row, seed):
        return []

    async def step(self, action):
        return opentinker.Step(reward=1.0, done=True)

assert asyncio.run(One(None).step(None)).done
"""
ASKS = """
import opentinker

try:
    opentinker.Client("http://127.0.0.1:1", wait_s=0.0).submit({"name": "x"})
except opentinker.ApiError as error:
    print("refused:", error)
"""


def packages_of(*extras: str) -> set[str]:
    """Everything that pip would install beside opentinker on this machine, by the metadata of what is installed."""
    wanted = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    found: set[str] = set()
    left = [(Requirement(line), "") for line in wanted]
    while left:
        requirement, extra = left.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found.add(name)
        for line in requires(name) or []:
            left += [(Requirement(line), asked) for asked in ("", *requirement.extras)]
    return found


def with_packages_of(*extras: str, run: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that sees no other installed packages than these."""
    seen = packages_of(*extras) | {"opentinker"}
    modules = packages_distributions().items()
    hidden = [module for module, homes in modules if not seen & {canonicalize_name(home) for home in homes}]
    command = [sys.executable, "-c", HIDING + run]
    return subprocess.run(
        command, input=" ".join(hidden) + "\n", capture_output=True, text=True, timeout=120, check=False
    )


def test_the_client_alone_is_a_small_install() -> None:
    found = packages_of()
    assert len(found) < MOST, sorted(found)
    assert not found & {"redis", "nats-py", "uv", "simpy", "pynacl", "torch"}


def test_the_client_asks_a_server_with_its_own_packages_alone() -> None:
    done = with_packages_of(run=ASKS)
    assert done.stdout.startswith("refused: "), done.stderr


def test_environments_and_the_command_line_need_one_extra() -> None:
    done = with_packages_of("cli", run=PLAYS)
    assert done.returncode == 0, done.stderr
    spec = ROOT / "examples" / "copy_digits.toml"
    typed = "sys.argv = {!r}\nfrom opentinker.command import main\nmain()"
    done = with_packages_of("cli", run=typed.format(["opentinker", "validate", "--quick", str(spec)]))
    assert done.stdout.startswith("ok: "), done.stderr
    done = with_packages_of("cli", run=typed.format(["opentinker", "env", "check", "copy_digits", "--episodes", "1"]))
    assert "ready for training" in done.stdout, done.stderr


def test_published_scripts_need_one_extra() -> None:
    (own,) = [line for line in PROJECT["optional-dependencies"]["published"] if line.startswith("opentinker[")]
    extras = Requirement(own).extras
    imports = "import opentinker.client.utils.http_training_client, opentinker.environment.math, pyarrow.parquet\n"
    done = with_packages_of(
        *extras,
        run=imports + "import sys\nsys.argv = ['', 'script', 'x.py']\nfrom opentinker.command import main\nmain()",
    )
    assert "x.py: there is no such file" in done.stderr, done.stderr
    graded = (
        "from opentinker.client.utils.utils import math_reward_function as f\nprint(f('math', '\\\\boxed{1/2}', '0.5'))"
    )
    done = with_packages_of(*extras, run=graded)
    assert done.stdout == "1.0\n", done.stderr


def test_the_command_line_without_its_extra_says_what_to_install() -> None:
    done = with_packages_of(run="from opentinker.command import main\nmain()")
    assert done.returncode == 1
    assert done.stderr == "opentinker: the command line needs more packages: pip install 'opentinker[cli]'\n"


@pytest.mark.parametrize("extra", ["scheduler", "env-worker", "reference", "trainer", "rollout"])
def test_every_service_has_what_services_need(extra: str) -> None:
    assert any("server" in Requirement(line).extras for line in PROJECT["optional-dependencies"][extra])
