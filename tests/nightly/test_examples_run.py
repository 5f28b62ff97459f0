"""Examples are run, not read alone: with a simulated engine and learner, and as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.sweeps.children import first_job
from tests.support.cluster import PYTHONPATH, ROOT, Toys, shared_fixture, toy_cluster
from tests.unit.client.test_docs_toml import OTHER_MACHINES

EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.toml"))}


def read(name: str) -> dict[str, Any]:
    return first_job(tomllib.loads(EXAMPLES[name].read_text()))


def is_frozen(told: dict[str, Any], seat: str) -> bool:
    """Return whether a checkpoint of another job plays the seat."""
    return isinstance(told["seats"][seat], dict) and "frozen" in told["seats"][seat]


SIMULATED_IGNORES = ("temperature", "top_p", "top_k", "stop", "context_length")
COMMANDS = {
    "runs/models/tiny": ["examples.models.make_tiny"],
    "runs/models/kuhn": ["examples.models.make_kuhn"],
    "runs/models/pennies": ["examples.models.make_pennies"],
    "runs/models/tictactoe": ["examples.models.make_tictactoe"],
    "runs/models/gomoku": ["examples.models.make_gomoku"],
    "runs/models/smollm2-135m-instruct": ["examples.models.make_smollm2"],
    "runs/models/smollm2-tools": ["examples.models.make_smollm2", "--tools"],
    "runs/models/seeing": ["examples.models.make_seeing"],
    "runs/models/seeing-qwen": ["examples.models.make_seeing", "--family", "qwen2_5_vl"],
}
"""Modules that make the models that examples name."""
WITHOUT_WORDS = OTHER_MACHINES | {"agent_program", "colours", "phone_page", "proposed_sums", "tool_calc"}
"""Environments that a simulated engine does not play: tools, images, programs, problems that it must propose."""
RUN = [
    name
    for name in EXAMPLES
    if not {"inference", "sweep"} & set(name.split("_"))
    and not any(is_frozen(read(name), seat) for seat in read(name).get("seats", {}))
    and read(name).get("environment", {}).get("name") not in OTHER_MACHINES
]
"""Those that end by themselves, with what this machine has; sweeps and those with a frozen seat have tests of their
own."""


def plays(name: str) -> bool:
    """Return whether it plays an environment that is on this machine, and with words alone."""
    environment = read(name).get("environment")
    if environment is None or "images" in environment.get("config", {}):
        return False
    return environment["name"] not in WITHOUT_WORDS and "tools" not in environment


def simulated(told: dict[str, Any], model: Path) -> dict[str, Any]:
    """The example with a few small groups of a simulated model; its environment as it stands."""
    rollout = {name: value for name, value in told.get("rollout", {}).items() if name not in SIMULATED_IGNORES}
    changed = {**told, "model": {"base": str(model), "chat_template": "plain"}, "rollout": {**rollout, "engine": "toy"}}
    if told.get("kind") == "eval":
        return {**changed, "evaluation": {**told["evaluation"], "episodes": 2, "samples": 2}}
    if "seats" in told:
        changed["seats"] = {
            seat: {"bot": "random"} if is_frozen(told, seat) else told["seats"][seat] for seat in told["seats"]
        }
    if "validation" in told:
        changed["validation"] = {**told["validation"], "episodes": 2}
    if "pools" in told:
        changed["pools"] = {name: {**pool, "every": 1} for name, pool in told["pools"].items()}
    size = {"group_size": 4 if "match" in told else 2, "groups_per_batch": 2}
    return {**changed, "algorithm": size, "train": {"learner": "simulated", "steps": 2 if "pools" in told else 1}}


toys = shared_fixture(toy_cluster)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", [name for name in EXAMPLES if plays(name)])
async def test_an_example_s_environment_is_played(name: str, toys: Toys) -> None:
    cluster, model = toys
    await cluster.run(parse_spec(simulated(read(name), model)))


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like a checkout, for models of its own."""
    home = tmp_path_factory.mktemp("reader")
    for folder in ("examples", "envs"):
        (home / folder).symlink_to(ROOT / folder)
    return home


def typed(home: Path, *arguments: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENTINKER_")}
    environ = {**kept, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=home, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RUN)
def test_an_example_runs_as_it_stands(name: str, reader: Path) -> None:
    told = read(name)
    base = told["model"]["base"]
    if not (reader / base).exists():
        module, *options = COMMANDS[base]
        typed(reader, module, base, *options)
    steps = [] if told.get("kind") == "eval" else ["--steps", "2" if "pools" in told else "1"]
    for pool in told.get("pools", {}):
        steps += ["--set", f"pools.{pool}.every=1"]
    typed(reader, "opentinker.cli", "run", f"examples/{name}.toml", "--data-dir", f"runs/{name}", *steps)
