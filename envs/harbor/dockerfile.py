"""Reads the Dockerfiles that can be built without Docker: FROM, then RUN, COPY, ENV and WORKDIR.

LABEL says nothing about files. CMD is read and not run: the programs of a task are the agent's and the verifier's.
Everything else is refused with its line.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import msgspec

from opentinker.shared.types.errors import SpecError

MAX_STEPS = 200
KNOWN = "FROM, RUN, COPY, ENV, WORKDIR, LABEL, CMD and USER root"
_REASONS = {
    "ADD": "use COPY: there is no network, and archives are not unpacked",
    "ARG": "write the value itself, or use ENV",
    "ENTRYPOINT": "nothing but the agent's commands and the verifier runs in a sandbox",
    "EXPOSE": "sandboxes have no network",
    "HEALTHCHECK": "sandboxes run no services",
    "SHELL": "commands run in bash, or in sh where there is none",
    "VOLUME": "every episode has a separate file system anyway",
}
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_NAME = re.compile(r"[A-Za-z_]\w*")


class Instruction(msgspec.Struct, frozen=True, kw_only=True):
    """One instruction, with its variables replaced."""

    kind: str
    """`run`, `copy`, `env` or `workdir`."""
    line: int
    command: str = ""
    """The command of a `run` step."""
    sources: list[str] = []
    """Patterns below the environment folder; for `copy`."""
    target: str = ""
    """Absolute path; for `copy` and `workdir`."""
    directory: bool = False
    """The target of `copy` is a directory."""
    variables: dict[str, str] = {}
    """Variables that an `env` step sets."""


class Dockerfile(msgspec.Struct, frozen=True, kw_only=True):
    image: str
    steps: list[Instruction]


def parse(text: str) -> Dockerfile:
    """Raises SpecError with every mistake."""
    reading = _Reading()
    for line, words in _instructions(text):
        keyword, _, rest = words.partition(" ")
        try:
            reading.take(keyword.upper(), rest.strip(), line)
        except ValueError as error:
            reading.mistakes.append(
                {"field": f"environment/Dockerfile:{line}", "value": None, "problem": f"{keyword[:20]}: {error}"}
            )
    if not reading.image and not reading.mistakes:
        reading.mistakes.append({"field": "environment/Dockerfile", "value": None, "problem": "has no FROM"})
    if reading.mistakes:
        raise SpecError(reading.mistakes)
    return Dockerfile(image=reading.image, steps=reading.steps)


def _instructions(text: str) -> list[tuple[int, str]]:
    """Return the instructions with their first lines; a backslash at a line's end continues it."""
    found: list[tuple[int, str]] = []
    pending, began = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        began = began or number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1]
            continue
        found.append((began, (pending + line).strip().replace("\t", " ")))
        pending, began = "", 0
    if pending.strip():
        found.append((began, pending.strip()))
    return found


class _Reading:
    def __init__(self) -> None:
        self.image = ""
        self.steps: list[Instruction] = []
        self.mistakes: list[dict[str, Any]] = []
        self._variables: dict[str, str] = {}
        self._cwd = "/"

    def take(self, keyword: str, rest: str, line: int) -> None:
        """Raises ValueError."""
        if keyword == "FROM":
            self._from(rest)
            return
        if not self.image:
            raise ValueError("stands before FROM")
        if len(self.steps) >= MAX_STEPS:
            raise ValueError(f"a Dockerfile has at most {MAX_STEPS} instructions")
        if keyword in ("LABEL", "CMD"):
            return
        if keyword == "USER":
            if rest not in ("root", "0"):
                raise ValueError("programs of a sandbox run as root: other users are not supported")
            return
        steps = {"RUN": self._run, "COPY": self._copy, "ENV": self._env, "WORKDIR": self._workdir}
        if keyword not in steps:
            raise ValueError(f"is not supported: {_REASONS.get(keyword, f'known are {KNOWN}')}")
        if not rest:
            raise ValueError("says nothing")
        self.steps.append(steps[keyword](rest, line))

    def _from(self, rest: str) -> None:
        words = rest.split()
        if self.image:
            raise ValueError("stands there twice: builds of several stages are not supported")
        if len(words) != 1 or words[0].startswith("-") or "$" in words[0]:
            raise ValueError("must name one image, without AS, --platform and variables")
        self.image = words[0]

    def _run(self, rest: str, line: int) -> Instruction:
        if rest.startswith("--"):
            raise ValueError(f"{rest.split(maxsplit=1)[0]} is not supported")
        if re.search(r"<<-?['\"]?[A-Za-z_]", rest):
            raise ValueError("here-documents are not supported: COPY a file")
        return Instruction(kind="run", line=line, command=shlex.join(_words(rest)) if rest.startswith("[") else rest)

    def _copy(self, rest: str, line: int) -> Instruction:
        while rest.startswith("--"):
            flag, _, rest = rest.partition(" ")
            if flag not in ("--chown=root", "--chown=root:root", "--chown=0:0"):
                raise ValueError(f"{flag} is not supported")
        words = _words(rest) if rest.startswith("[") else rest.split()
        if len(words) < 2:
            raise ValueError("needs a source and a target")
        *sources, target = [self._replaced(word) for word in words]
        for source in sources:
            if ".." in source.split("/"):
                raise ValueError(f"{source} leaves the environment folder")
        whole = target.endswith("/") or target in (".", "..") or len(sources) > 1
        return Instruction(
            kind="copy", line=line, sources=[source.lstrip("/") or "." for source in sources],
            target=self._absolute(target), directory=whole,
        )  # fmt: skip

    def _env(self, rest: str, line: int) -> Instruction:
        words = shlex.split(rest)
        if "=" not in words[0]:  # the older form: ENV NAME the value
            name, _, value = rest.partition(" ")
            pairs = [(name, value.strip())]
        else:
            pairs = [(name, value) for name, _, value in (word.partition("=") for word in words)]
        added = {name: self._replaced(value) for name, value in pairs}
        for name in added:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r:.50} is no name of a variable")
        self._variables |= added
        return Instruction(kind="env", line=line, variables=added)

    def _workdir(self, rest: str, line: int) -> Instruction:
        self._cwd = self._absolute(self._replaced(rest.strip("\"'")))
        return Instruction(kind="workdir", line=line, target=self._cwd)

    def _absolute(self, path: str) -> str:
        parts: list[str] = []
        for part in (path if path.startswith("/") else f"{self._cwd}/{path}").split("/"):
            if part == "..":
                parts = parts[:-1]
            elif part not in ("", "."):
                parts.append(part)
        return "/" + "/".join(parts)

    def _replaced(self, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            if name == "PATH":
                return self._variables.get(name, PATH)
            if name not in self._variables:
                raise ValueError(f"${name} is not set by an ENV above")
            return self._variables[name]

        return _VARIABLE.sub(value, text)


PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Value of PATH that images begin with."""


def _words(text: str) -> list[str]:
    """The words of the JSON form. Raises ValueError."""
    try:
        words = json.loads(text)
    except json.JSONDecodeError:
        raise ValueError("begins with [ and is not JSON") from None
    if not (isinstance(words, list) and words and all(isinstance(word, str) for word in words)):
        raise ValueError("must be a list of words")
    return words
