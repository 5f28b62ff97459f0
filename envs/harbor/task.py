"""A Harbor task: a folder with `task.toml`, `instruction.md`, `environment/`, `tests/` and perhaps `solution/`.

Reading one runs nothing of it. What a task asks for and sandboxes cannot give (network, several containers, other
users, GPUs) is refused here, with all mistakes together.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from opentinker.envs.harbor.dockerfile import Dockerfile, parse
from opentinker.shared.config import Settings
from opentinker.shared.data import bounded_toml
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.mistakes import mistake, mistakes_of

CONFIG, INSTRUCTION, DOCKERFILE = "task.toml", "instruction.md", "Dockerfile"
ENVIRONMENT, TESTS, SOLUTION = "environment", "tests", "solution"
TEST_SCRIPT, SOLVE_SCRIPT = "test.sh", "solve.sh"
PARTS = {CONFIG, INSTRUCTION, ENVIRONMENT, TESTS, SOLUTION, "README.md", "LICENSE"}
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
MAX_FILES, MAX_BYTES = 2000, 64 << 20
MAX_TOML, MAX_INSTRUCTION, MAX_DOCKERFILE = 1 << 16, 100_000, 1 << 16
"""Characters."""
MAX_TIMEOUT_S = 24 * 3600.0
NO_NETWORK = "is not supported: sandboxes have no network; leave it out or set false"
NO_USER = "is not supported: programs of a sandbox run as root"
_SIZE = re.compile(r"(\d{1,6})([MG])i?B?", re.IGNORECASE)
Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
Variables = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=100)]


class TaskTable(BaseModel):
    """Refuses unknown keys: what is not read might be what the task depends on."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("env", check_fields=False)
    @classmethod
    def _plain(cls, env: dict[str, str]) -> dict[str, str]:
        if wrong := [name for name, value in env.items() if "${" in value or "\0" in value or "=" in name or not name]:
            raise ValueError(f"{wrong[0]} is not a plain value: variables of this machine are not given to tasks")
        return env

    @field_validator("user", check_fields=False)
    @classmethod
    def _root(cls, user: str | int | None) -> str | int | None:
        if user not in (None, "root", 0, "0"):
            raise ValueError(NO_USER)
        return user


class Verifier(TaskTable):
    timeout_sec: Seconds = 600.0
    env: Variables = {}
    user: str | int | None = None


class Agent(TaskTable):
    timeout_sec: Seconds = 600.0
    user: str | int | None = None


class TaskMachine(TaskTable):
    """The table `environment`."""

    build_timeout_sec: Seconds = 600.0
    docker_image: Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")] | None = None
    """The image where there is no Dockerfile; otherwise its prebuilt form, which is built here instead."""
    cpus: Annotated[int, Field(ge=1, le=1024)] = 1
    memory_mb: Annotated[int, Field(ge=64, le=1 << 20)] = 2048
    storage_mb: Annotated[int, Field(ge=1, le=1 << 24)] = 10240
    gpus: Literal[0] = 0
    allow_internet: bool = False
    os: Literal["linux"] = "linux"
    env: Variables = {}

    @model_validator(mode="before")
    @classmethod
    def _sizes(cls, given: Any) -> Any:
        """`memory = "2G"` is the older spelling of `memory_mb = 2048`."""
        if not isinstance(given, dict):
            return given
        given = dict(given)
        for old, name in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if old in given:
                found = _SIZE.fullmatch(str(given.pop(old)))
                if found is None or name in given:
                    raise ValueError(f'{old} must be a size such as "2G" or "512M", and {name} not given as well')
                given[name] = int(found[1]) * (1024 if found[2].upper() == "G" else 1)
        return given

    @field_validator("allow_internet")
    @classmethod
    def _closed(cls, allowed: bool) -> bool:
        if allowed:
            raise ValueError(NO_NETWORK)
        return allowed


class Solution(TaskTable):
    env: Variables = {}


class TaskConfig(TaskTable):
    version: Literal["1.0", "1.1"] = "1.0"
    schema_version: Literal["1.0", "1.1"] = "1.0"
    source: Annotated[str, Field(max_length=1000)] = ""
    task: dict[str, Any] = {}
    """Name, authors and keywords; they change nothing."""
    metadata: dict[str, Any] = {}
    verifier: Verifier = Verifier()
    agent: Agent = Agent()
    environment: TaskMachine = TaskMachine()
    solution: Solution = Solution()


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A task that has been read."""

    name: str
    folder: Path
    digest: str
    environment_digest: str
    config: TaskConfig
    instruction: str
    dockerfile: Dockerfile | None
    """None: Docker builds it."""

    @property
    def has_solution(self) -> bool:
        return (self.folder / SOLUTION / SOLVE_SCRIPT).is_file()


def read_task(folder: Path, name: str, settings: Settings) -> Task:
    """Read a task. Blocking. Raises SpecError with every mistake, OSError."""
    mistakes = [mistake(name, None, problem) for problem in _strange(folder)]
    if mistakes:
        raise SpecError(mistakes)
    digest, problems = _digest(folder)
    mistakes += [mistake(name, None, problem) for problem in problems]
    config = TaskConfig()
    given: dict[str, Any] = {}
    try:
        given = bounded_toml.loads(_text(folder / CONFIG, MAX_TOML), MAX_TOML)
        config = TaskConfig.model_validate(given)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            mistakes += [{**one, "field": f"{name}/{CONFIG}: {one['field']}"} for one in mistakes_of(item, given)]
    except ValueError as error:
        mistakes.append(mistake(f"{name}/{CONFIG}", None, str(error)))
    instruction, dockerfile = "", None
    try:
        instruction = _text(folder / INSTRUCTION, MAX_INSTRUCTION).strip()
        dockerfile = _dockerfile(folder, config, settings)
    except ValueError as error:
        mistakes.append(mistake(name, None, str(error)))
    except SpecError as error:
        mistakes += [{**one, "field": f"{name}/{one['field']}"} for one in error.mistakes]
    for field, asked, most in (
        ("memory_mb", config.environment.memory_mb, settings.harbor_memory_mb),
        ("storage_mb", config.environment.storage_mb, settings.harbor_disk_mb),
    ):
        if asked > most:
            limit = "harbor_memory_mb" if field == "memory_mb" else "harbor_disk_mb"
            problem = f"is more than this server gives a task: {most} ({limit})"
            mistakes.append(mistake(f"{name}/{CONFIG}: environment.{field}", asked, problem))
    if not instruction and not mistakes:
        mistakes.append(mistake(f"{name}/{INSTRUCTION}", None, "is empty: the policy needs a prompt"))
    if mistakes:
        raise SpecError(mistakes)
    environment_digest = _digest(folder / ENVIRONMENT)[0]
    return Task(
        name=name,
        folder=folder,
        digest=digest,
        environment_digest=environment_digest,
        config=config,
        instruction=instruction,
        dockerfile=dockerfile,
    )


def _strange(folder: Path) -> list[str]:
    """Return what the folder lacks, and what does not belong in it."""
    there = {entry.name for entry in os.scandir(folder)}
    needed = [CONFIG, INSTRUCTION, f"{TESTS}/{TEST_SCRIPT}"]
    found = [f"has no {part}" for part in needed if not (folder / part).is_file()]
    if "steps" in there:
        found.append("has several steps (steps/), which is not supported: make a task of each")
    elif strange := sorted(there - PARTS):
        found.append(f"holds {strange[0]!r:.100}, which is no part of a task; parts are {', '.join(sorted(PARTS))}")
    for place in (folder / ENVIRONMENT, folder / TESTS):
        for name in COMPOSE:
            if (place / name).exists():
                found.append(f"needs {place.name}/{name}: several containers are not supported, only one Dockerfile")
    return found


def _digest(folder: Path) -> tuple[str, list[str]]:
    """Return a digest of all files with their names and whether they are programs, and what is wrong with them."""
    told, count, size = hashlib.sha256(), 0, 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted([*names, *(one for one in folders if os.path.islink(os.path.join(place, one)))]):
            path = Path(place, name)
            shown = path.relative_to(folder).as_posix()
            if path.is_symlink() or not path.is_file():
                return "", [f"holds {shown!r:.200}, which is a link or a device: only plain files are taken"]
            about = path.stat()
            count, size = count + 1, size + about.st_size
            if count > MAX_FILES or size > MAX_BYTES:
                return "", [f"is too large: a task has at most {MAX_FILES} files and {MAX_BYTES >> 20} MB"]
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            told.update(f"{shown}\0{about.st_mode & 0o100}\0".encode(errors="surrogateescape") + content)
    return told.hexdigest()[:20], []


def _text(path: Path, most: int) -> str:
    """Raises ValueError."""
    if path.stat().st_size > 4 * most:
        raise ValueError(f"{path.name} is too long: at most {most} characters")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is not UTF-8 text") from None
    if len(text) > most:
        raise ValueError(f"{path.name} has {len(text)} characters; at most {most} are taken")
    return text


def _dockerfile(folder: Path, config: TaskConfig, settings: Settings) -> Dockerfile | None:
    """Raises ValueError, SpecError."""
    path, image = folder / ENVIRONMENT / DOCKERFILE, config.environment.docker_image
    if not path.is_file() and image is None:
        raise ValueError("has neither environment/Dockerfile nor environment.docker_image in task.toml")
    if settings.harbor_sandbox == "docker":
        return None
    if not path.is_file():
        return Dockerfile(image=image or "", steps=[])
    if (path.parent / ".dockerignore").exists():
        raise ValueError("environment/.dockerignore is not supported: remove what COPY should not take")
    return parse(_text(path, MAX_DOCKERFILE))
