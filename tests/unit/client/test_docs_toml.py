"""Every TOML block of the documentation is what it looks like: a job that would be accepted, a part of one, what a
package says of itself, or settings of the services. A block with a `name` of its own is whole; others are laid over the
least job. Blocks and examples alike are looked at in the directory of a reader who has done what they say, by what the
scheduler asks of files.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from opentinker.envs.phones.chromium import PROGRAMS
from opentinker.envs.registry import check
from opentinker.services.scheduler.jobs.submit import _check_files
from opentinker.shared.config import Settings
from opentinker.shared.data import uploads
from opentinker.shared.security.egress import LOOPBACK, VARIABLE
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.spec.sweeps.children import first_job
from opentinker.shared.types.errors import SpecError
from tests.nightly.test_docs_site import PAGES, TUTORIAL, blocks
from tests.support.cluster import ROOT
from tests.support.factories import safetensors

TASKS = set((ROOT / "examples" / "data").glob("**/*.toml"))
EXAMPLES = sorted(
    path for path in (ROOT / "examples").glob("**/*.toml") if path.name != uploads.DESCRIPTION and path not in TASKS
)
BLOCKS = [
    pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
    for number, text in enumerate(blocks(page, "toml"))
]
LEAST: dict[str, dict[str, Any]] = {"rl": {"environment": {"name": "bandit"}, "train": {"steps": 1}}, "inference": {}}
FILES = {
    "rows.jsonl": '{"prompt": "2+2?", "reward_spec": {"ground_truth": "4"}}\n',
    "problems.jsonl": '{"problem": "2+2?", "answer": "4"}\n' * 20,
    "parity.py": "",
    "requirements.lock": "",
}
"""That pages speak of as the reader's own."""
MADE = re.compile(r"make_\w+(?:\.py)? (runs/models/[\w.-]+)")
"""A command that makes a model."""
MODELS = {
    "models/small": "Qwen3ForCausalLM",
    "models/large": "Qwen3ForCausalLM",
    "models/helpfulness": "Qwen3ForSequenceClassification",
    "models/toxicity": "Qwen3ForSequenceClassification",
    "models/values": "Qwen3ForTokenClassification",
}
"""The reader's own, by directory."""
NO_BROWSER = set() if any(map(shutil.which, PROGRAMS)) else {"phone_page"}
OTHER_MACHINES = {
    "alfworld",
    "android_world",
    "gem",
    "harbor",
    "harbor_agent",
    "miniwob",
    "openenv",
    "ors",
    "verifiers",
} | NO_BROWSER
"""Environments whose library, games, tasks, browser or server is elsewhere."""


@pytest.fixture
def readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of somebody who has done what the pages say."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "largest.py").write_text(blocks(TUTORIAL, "python")[0])
    for folder in ("examples", "envs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    made = {base for page in [*PAGES, *EXAMPLES] for base in MADE.findall(page.read_text())}
    for base, architecture in (MODELS | dict.fromkeys(made, "Qwen3ForCausalLM")).items():
        (tmp_path / base).mkdir(parents=True)
        (tmp_path / base / "config.json").write_text(f'{{"model_type": "qwen3", "architectures": ["{architecture}"]}}')
        (tmp_path / base / "model.safetensors").write_bytes(safetensors())
        (tmp_path / base / "chat_template.jinja").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, ",".join([*LOOPBACK, "10.0.0.0/8"]))
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: name if name.startswith("/opt/") else which(name))
    yield tmp_path
    sys.modules.pop("largest", None)


def over(least: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """What `part` says goes before, table by table."""
    both = {
        name for name in least.keys() & part.keys() if isinstance(least[name], dict) and isinstance(part[name], dict)
    }
    return {**least, **part, **{name: over(least[name], part[name]) for name in both}}


def accepted(told: dict[str, Any], folder: Path) -> str:
    """Return what it is. Raises SpecError, ValidationError: it is wrong."""
    if told.keys() <= Settings.model_fields.keys():
        Settings.model_validate(told)
        return "settings"
    if "class" in told:
        assert told.keys() <= uploads.KEYS
        assert uploads.read_package(folder).name == told["name"]
        return "package"
    kind = told.get("kind", "inference" if "serving" in told else "rl")
    of_jobs = told["sweep"].get("kind", "rl") if kind == "sweep" else kind
    whole = (
        told if "name" in told else over({"name": "x", "kind": kind, "model": {"base": "m"}, **LEAST[of_jobs]}, told)
    )
    spec = parse_spec(first_job(whole))
    files = _check_files(whole, spec)
    if mistakes := files.model + files.frozen + files.data:
        raise SpecError(mistakes)
    if "environment" in told:
        _environment_is_right(spec)
    return "job" if whole is told else "part"


def _environment_is_right(spec: JobSpec) -> None:
    """Its config, and what evaluations lay over that."""
    name, config = spec.environment.name, spec.environment.config
    if name.startswith("upload:"):
        return
    elsewhere = name in OTHER_MACHINES
    check(name, config, modules=True, elsewhere=elsewhere)
    if spec.validation is not None and spec.validation.config:
        check(name, {**config, **spec.validation.config}, modules=True, elsewhere=elsewhere)


@pytest.mark.parametrize("text", BLOCKS)
def test_every_block_would_be_accepted(text: str, readers: Path) -> None:
    (readers / uploads.DESCRIPTION).write_text(text)
    accepted(tomllib.loads(text), readers)


def test_there_are_blocks_of_every_kind_and_none_could_be_two(readers: Path) -> None:
    assert not Settings.model_fields.keys() & JobSpec.model_fields.keys()
    found = []
    for block in BLOCKS:
        text = str(block.values[0])
        (readers / uploads.DESCRIPTION).write_text(text)
        found.append(accepted(tomllib.loads(text), readers))
    assert set(found) == {"settings", "package", "job", "part"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_example_would_be_accepted_with_the_files_that_it_names(example: Path, readers: Path) -> None:
    assert accepted(tomllib.loads(example.read_text()), readers) == "job"


@pytest.mark.parametrize(
    "text",
    [
        "[train]\nsteps = 0",
        "[rollout]\nmax_turn = 2",
        'name = "x"\nmodel = { base = "m" }',
        '[model]\nbase = "models/tiny"',
        '[model]\nbase = "runs/models/none"',
        'kind = "sft"\nname = "x"\nmodel = { base = "m" }\ndata = { path = "none.jsonl" }\ntrain = { steps = 1 }',
        '[environment]\nname = "gomoku"\nconfig = { sizes = 3 }',
        '[environment]\nname = "gomoku"\n[validation]\nevery = 1\nconfig = { sizes = 3 }',
        '[tenants."*"]\nrunning_job = 4',
        'class = "parity:Parity"\nname = "Not A Name"',
    ],
)
def test_a_wrong_block_would_be_found(text: str, readers: Path) -> None:
    (readers / uploads.DESCRIPTION).write_text(text)
    with pytest.raises((SpecError, ValidationError)):
        accepted(tomllib.loads(text), readers)
