"""The house: what is light stays light, nothing runs code from data, and a wheel holds all of it. `make check` has the
import contracts."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LONG

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = {"services": ROOT / "services", "shared": ROOT / "shared", "envs": ROOT / "envs"}
TOO_HEAVY = ("torch", "vllm", "transformers", "peft", "deepspeed", "pyarrow", "datasets")
HEAVY = {
    f"opentinker.{package}.{name}"
    for package, names in {
        "sdk": "merge_adapter",
        "services.reference_forward": "rewards scorer",
        "services.rollout_worker.engines": "ended_children merged_adapter packed_layers prompt_logits "
        "seeded_prefill shards vllm vllm_config vllm_images vllm_process vllm_sampling vllm_worker_extension",
        "services.trainer.algorithm": "corrections losses objective preference",
        "services.trainer.bank": "adamw adapted_linear adapter adapter_bank adapter_files adapter_tensors "
        "bank_commands bank_loop base_model capacity full_files full_weights grouped_products job_adapter mixed_batch "
        "pass_part residency shared_learners sole_adapter",
        "services.trainer.batch": "micro_batch row_batch token_metrics",
        "services.trainer.distributed": "multi_rank_learner process_group rank_main zero",
        "services.trainer.tinker": "losses model_commands model_files model_runner tinker_job",
        "services.trainer.learners": "critic dpo optimizer_state policy_model rl sft supervised",
        "shared.nn": "attention buckets collective_link cuda_ipc forward grid_positions layers layout lora models "
        "shared_segment slot_link transport vision",
    }.items()
    for name in names.split()
}
"""The modules that may load what is too heavy for the others. They hold all of the heavy imports."""


def modules() -> list[str]:
    """Every module by its import name, `__main__` left out: importing it would run it."""
    files = {path: f"opentinker.{name}" for name, folder in FOLDERS.items() for path in _python(folder)}
    names = [_module(path, FOLDERS[prefix.split(".")[1]], prefix) for path, prefix in files.items()]
    face = ROOT / "src" / "opentinker"
    own = [path for path in _python(face) if not any(part in FOLDERS for part in path.relative_to(face).parts[:1])]
    names += [_module(path, face, "opentinker") for path in own]
    return sorted(name for name in names if not name.endswith("__main__"))


def _python(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.py") if "data" not in path.relative_to(folder).parts]


def _module(path: Path, folder: Path, prefix: str) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join([prefix, *parts]).removesuffix(".__init__")


def fresh(code: str, *arguments: str, **environ: str) -> str:
    """Standard output of a fresh interpreter outside the repository."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd="/",
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_opentinker_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; began = time.process_time(); import opentinker; print(time.process_time() - began);"
        f"print(*(set({TOO_HEAVY!r}) & set(sys.modules)))"
    )
    seconds, loaded = zip(*(fresh(code).split("\n")[:2] for _ in range(3)), strict=True)
    assert set(loaded) == {""}
    assert min(map(float, seconds)) < 0.5


def test_the_command_line_answers_quickly() -> None:
    """In a few times the processor time of two packages that it needs, so that a busy machine slows down both."""
    help_code = (
        "import sys; sys.argv = ['opentinker', '--help']; from opentinker.cli import main\n"
        "try: main()\n"
        "finally: print(*({'pydantic', 'aiohttp', 'rich', 'simpy'} & set(sys.modules)))"
    )

    def seconds(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        fresh(code)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert "submit" in fresh(help_code)
    assert fresh(help_code.replace("sys.stderr", "sys.stdout")).splitlines()[-1] == "", (
        "loaded where a command needs it"
    )
    own, needed = zip(*((seconds(help_code), seconds("import numpy, typer.main")) for _ in range(3)), strict=True)
    assert min(own) < 4 * min(needed)


def test_light_modules_load_nothing_heavy() -> None:
    light = [name for name in modules() if name not in HEAVY]
    assert len(light) > 30
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        f"    for heavy in {TOO_HEAVY!r}:\n"
        "        if heavy in sys.modules:\n"
        "            sys.exit(f'{name} loads {heavy}')\n"
        "print('all light')"
    )
    assert fresh(code, *light) == "all light\n"


def test_the_list_of_heavy_modules_has_no_stale_entry() -> None:
    assert set(modules()) >= HEAVY


def test_the_links_are_in_place() -> None:
    for name, folder in FOLDERS.items():
        link = ROOT / "src" / "opentinker" / name
        assert link.is_symlink() and link.resolve() == folder


def test_nobody_imports_the_folders_by_their_bare_names() -> None:
    """One module would exist twice, with two copies of every type."""
    bare = re.compile(r"^\s*(?:from|import)\s+(?:services|shared|envs)\b", re.MULTILINE)
    places = [path for top in ("src", "services", "shared", "envs", "tests", "loadtest", "examples")
              for path in (ROOT / top).rglob("*.py")]  # fmt: skip
    assert [str(path) for path in places if bare.search(path.read_text())] == []


def test_nothing_in_the_tree_runs_code_from_data() -> None:
    """But for what runs the policy's programs, in a sandbox (test_python_tool.py)."""
    runner = ROOT / "envs" / "runtime" / "tools" / "sandbox_runner.py"
    places = [path for top in ("src/opentinker", "services", "shared", "envs") for path in (ROOT / top).rglob("*.py")]
    found = [f"{path}:{line}" for path in places for line in _unsafe(ast.parse(path.read_text())) if path != runner]
    assert found == []
    assert runner in places


def _unsafe(tree: ast.Module) -> Iterator[int]:
    """Lines that unpickle, evaluate, or let a model bring its own code."""
    modules = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(name.name.split(".")[0] in modules for name in names):
                yield node.lineno
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in modules:
                yield node.lineno
            case ast.Call(func=ast.Name(id="eval" | "exec")):
                yield node.lineno
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                yield node.lineno
            case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                yield node.lineno


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=240)
    return next(out.glob("*.whl"))


def test_a_wheel_contains_every_module_and_the_server_settings(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {name.replace(".", "/") for name in modules()}
    missing = {file for file in files if f"{file}.py" not in names and f"{file}/__init__.py" not in names}
    assert missing == set()
    assert {"opentinker/_deploy/nats.conf", "opentinker/_deploy/valkey.conf", "opentinker/py.typed"} <= names
    assert not [name for name in names if name.split("/")[0] in FOLDERS]
    page = FOLDERS["services"] / "scheduler" / "page"
    assert {f"opentinker/services/scheduler/page/{path.name}" for path in page.glob("*")} <= names  # if it is built


def test_an_installed_wheel_starts_its_servers(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import pathlib, sys, opentinker\n"
        "from opentinker.local.embedded import EmbeddedServers, shipped_conf\n"
        "assert opentinker.__file__.startswith(sys.argv[1]), opentinker.__file__\n"
        "assert str(shipped_conf('nats.conf')).startswith(sys.argv[1])\n"
        "with EmbeddedServers(pathlib.Path(sys.argv[2]), default_ports={}) as servers:\n"
        "    print(sorted(servers.children))\n"
    )
    assert fresh(code, str(site), str(tmp_path / "data"), PYTHONPATH=str(site)) == "['nats', 'valkey']\n"


def test_files_that_begin_early_are_there() -> None:
    assert {*LONG} <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}
