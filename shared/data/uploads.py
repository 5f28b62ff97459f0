"""Uploaded environments: how a job names one, what a package must hold, and where data_dir keeps it.

    data_dir/environments/names/{tenant}/{name}.json      its versions                    written by the scheduler
    data_dir/environments/packages/{digest}/files/        the package, read-only          written by the scheduler, once
    data_dir/environments/packages/{digest}/package.json  what was read of it
    data_dir/environments/venvs/{lock}/{interpreter}/     what the lock says, installed   made by env workers, once
    data_dir/environments/venvs/{lock}/{interpreter}.size how many bytes that is

Reading a package runs none of its code. `intact` compares its digest before anybody believes it.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from opentinker.shared.data import bounded_toml
from opentinker.shared.types import codec
from opentinker.shared.types.errors import SpecError

PREFIX = "upload:"
NAME = r"[a-z0-9][a-z0-9_-]{0,62}"
NAME_RULE = "must be lower case letters, digits, - and _, at most 63; give one with --name"
DESCRIPTION, PROJECT = "environment.toml", "pyproject.toml"
LOCKS = ("requirements.lock", "uv.lock")
MAX_TOML, MAX_LOCK = 1 << 16, 1 << 22
"""Characters of what a package says of itself; of its lock."""
MAX_MISTAKES = 50
"""That are told of one package."""
SIZE = ".size"
KEYS = {"name", "class", "lock", "python"}
HOW_TO_LOCK = (
    "make one with `uv lock`, or with `uv pip compile --universal --generate-hashes FILE -o requirements.lock`"
    " (without dependencies an empty requirements.lock will do)"
)
OWN_SOURCES = ({"virtual": "."}, {"editable": "."})
"""Sources of the project itself in a uv.lock."""
_REFERENCE = re.compile(rf"upload:({NAME})(?:@([1-9][0-9]{{0,8}})(?:\+([0-9a-f]{{20}}))?)?")
_CLASS = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_HASH = re.compile(r"\s--hash[= ]sha(?:256|384|512):[0-9a-f]{64,128}(?=\s|$)")


class Reference(msgspec.Struct, frozen=True):
    """`upload:NAME`, `upload:NAME@VERSION`, and as jobs keep it `upload:NAME@VERSION+DIGEST`."""

    name: str
    version: int | None = None
    """None: the newest."""
    digest: str = ""
    """Digest of the package's content; it completes the reference for env workers."""

    def __str__(self) -> str:
        version = "" if self.version is None else f"@{self.version}"
        return f"{PREFIX}{self.name}{version}{'+' if self.digest else ''}{self.digest}"


class Package(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    path: str
    """`module:Class`."""
    root: str
    """Directory for the module path: `` or `src`."""
    lock: str
    """File name of the lock."""
    lock_digest: str
    python: str = ""
    """Versions of Python it is for, e.g. `>=3.11`; empty: any."""
    files: int = 0
    bytes: int = 0


class Pin(msgspec.Struct, frozen=True):
    """One line of a lock of the requirements form."""

    name: str
    version: str
    marker: str
    """Where it applies; empty: everywhere."""
    hashes: tuple[str, ...] = ()
    """algorithm:digest of the files that may be installed."""

    def line(self) -> str:
        """Return the pin in the form of a requirements file."""
        marker = f" ; {self.marker}" if self.marker else ""
        return f"{self.name}=={self.version}{marker}" + "".join(f" --hash={digest}" for digest in self.hashes)


def is_upload(name: str) -> bool:
    return name.startswith(PREFIX)


def parse(name: str) -> Reference:
    """Raises SpecError for the field `environment.name`."""
    found = _REFERENCE.fullmatch(name)
    if found is None:
        problem = "is not of the form upload:NAME or upload:NAME@VERSION, e.g. upload:parity@3"
        raise SpecError.of("environment.name", name, problem)
    return Reference(found[1], int(found[2]) if found[2] else None, found[3] or "")


def home(data_dir: Path) -> Path:
    return data_dir / "environments"


def package_dir(data_dir: Path, digest: str) -> Path:
    return home(data_dir) / "packages" / digest


def venvs_dir(data_dir: Path, lock_digest: str) -> Path:
    return home(data_dir) / "venvs" / lock_digest


def venv_bytes(data_dir: Path, lock_digest: str) -> int:
    """Blocking. Of all virtual environments of a lock, as those who made them say; 0 of one that says nothing."""
    said = [path.read_text() for path in venvs_dir(data_dir, lock_digest).glob(f"*{SIZE}")]
    return sum(int(text) for text in said if text.isdecimal())


def load(data_dir: Path, digest: str) -> Package:
    """Blocking. Raises FileNotFoundError, WireError."""
    return codec.from_json(Package, (package_dir(data_dir, digest) / "package.json").read_bytes())


def intact(data_dir: Path, digest: str) -> Package:
    """The package, if its files still have its digest. Blocking. Raises FileNotFoundError; WireError, OSError if it is
    damaged, as by a power cut."""
    package = load(data_dir, digest)
    if digest_of(package_dir(data_dir, digest) / "files")[0] != digest:
        raise codec.WireError("its files are not those that were pushed")
    return package


def digest_of(files: Path) -> tuple[str, int, int]:
    """Blocking. Of names and contents of all files; how many they are, and their bytes."""
    total, count, size = hashlib.sha256(), 0, 0
    for path in sorted(path for path in files.rglob("*") if path.is_file()):
        content = path.read_bytes()
        name = path.relative_to(files).as_posix().encode()
        total.update(b"%d %d " % (len(name), len(content)) + name + hashlib.sha256(content).digest())
        count, size = count + 1, size + len(content)
    return total.hexdigest()[:20], count, size


def read_package(files: Path, name: str = "") -> Package:
    """Blocking. `name` goes before the one that the package gives itself. Raises SpecError with every mistake."""
    mistakes: list[dict[str, Any]] = []

    def wrong(field: str, value: Any, problem: str) -> None:
        mistakes.append({"field": field[:100], "value": _shown(value), "problem": problem})

    source, own, project = _described(files, wrong)
    for key in sorted(own.keys() - KEYS):
        wrong(f"{source}: {key}", own[key], f"is not known here; known are: {', '.join(sorted(KEYS))}")
    name = name or _text(own.get("name")) or canonicalize_name(_text(project.get("name")))
    if not re.fullmatch(NAME, name):
        wrong("name", name, NAME_RULE)
    path = own.get("class")
    root = "src" if (files / "src").is_dir() else ""
    if not isinstance(path, str) or not _CLASS.fullmatch(path):
        wrong(f"{source}: class", path, "must be given as module:Class, e.g. parity:Parity")
    elif not _module_there(files / root, path.partition(":")[0]):
        wrong(f"{source}: class", path, f"there is no such module in the {root or 'top'} directory of the package")
    python = _text(own.get("python")) or _text(project.get("requires-python"))
    try:
        SpecifierSet(python)
    except InvalidSpecifier:
        wrong(f"{source}: python", python, "is not a set of versions, e.g. >=3.11")
    lock, lock_digest = _lock(files, own.get("lock"), project, wrong)
    if mistakes:
        raise SpecError(mistakes[:MAX_MISTAKES])
    _, count, size = digest_of(files)
    return Package(name=name, path=str(path), root=root, lock=lock, lock_digest=lock_digest, python=python,
                   files=count, bytes=size)  # fmt: skip


def _described(files: Path, wrong: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the file that describes the package, its table for OpenTinker, and the [project] table."""
    read: dict[str, Any] = {}
    for name in (DESCRIPTION, PROJECT):
        try:
            read[name] = bounded_toml.loads((files / name).read_text(), MAX_TOML)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            wrong(name, None, f"cannot be read: {error}")
            read[name] = {}
    project = _table(read.get(PROJECT, {}).get("project"))
    if DESCRIPTION in read:
        return DESCRIPTION, read[DESCRIPTION], project
    tool = _table(read.get(PROJECT, {}).get("tool")).get("opentinker")
    if not isinstance(tool, dict):
        needed = f"needs {DESCRIPTION}, or [tool.opentinker] in {PROJECT}, with class = 'module:Class'"
        wrong("(package)", None, needed)
    return f"{PROJECT}: tool.opentinker", _table(tool), project


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _shown(value: Any) -> Any:
    """Return a value of a mistake in a readable form that JSON can represent."""
    if isinstance(value, str):
        return value[:200]
    return value if value is None or isinstance(value, bool) else f"({type(value).__name__})"


def _module_there(root: Path, module: str) -> bool:
    place = root.joinpath(*module.split("."))
    return place.with_suffix(".py").is_file() or place.is_dir()


def _lock(files: Path, named: Any, project: dict[str, Any], wrong: Any) -> tuple[str, str]:
    """File name and digest of the lock; everything that it leaves open is wrong."""
    there = [lock for lock in LOCKS if (files / lock).is_file()]
    if named is not None and named not in LOCKS:
        wrong("lock", named, f"must be {' or '.join(LOCKS)}, at the top of the package")
        return "", ""
    chosen = [named] if named in there else [] if named else there
    if len(chosen) != 1:
        several = "there are both; say which one counts: lock = 'uv.lock'"
        wrong(
            "lock",
            named,
            several if chosen else f"there is none, and what is not locked is not installed: {HOW_TO_LOCK}",
        )
        return "", ""
    try:
        locked, normal = _locked(files / chosen[0])
    except (OSError, ValueError) as error:
        wrong(chosen[0], None, f"{error}; {HOW_TO_LOCK}")
        return "", ""
    dependencies = project.get("dependencies", [])
    for dependency in dependencies if isinstance(dependencies, list) else [dependencies]:
        try:
            name = canonicalize_name(Requirement(_text(dependency)).name)
        except InvalidRequirement as error:
            wrong(f"{PROJECT}: project.dependencies", dependency, str(error))
            continue
        if name not in locked:
            wrong(f"{PROJECT}: project.dependencies", dependency, f"is not in {chosen[0]}: lock again")
    return chosen[0], hashlib.sha256(normal.encode()).hexdigest()[:20]


def _locked(lock: Path) -> tuple[set[str], str]:
    """Names of what it locks, and what is installed in its normal form. Raises OSError, ValueError."""
    text = lock.read_text(errors="replace")
    if lock.name == LOCKS[0]:
        if len(text) > MAX_LOCK:
            raise ValueError(f"it has {len(text)} characters, and at most {MAX_LOCK} are taken")
        found = pins(text)
        return {pin.name for pin in found}, normal_of(found)
    try:
        read = bounded_toml.loads(text, MAX_LOCK)
    except ValueError as error:
        raise ValueError(f"cannot be read: {error}") from None
    packages = read.get("package", [])
    if not isinstance(packages, list) or not all(_is_package(package) for package in packages):
        raise ValueError("its packages are not of the form that uv writes")
    return _locked_by_uv(packages), _normal_of_uv(read, packages)


def _is_package(package: Any) -> bool:
    """Return whether a uv.lock entry is a package to install."""
    if not isinstance(package, dict) or not isinstance(package.get("source", {}), dict):
        return False
    wheels = package.get("wheels", [])
    return isinstance(wheels, list) and all(isinstance(wheel, dict) for wheel in wheels)


def normal_of(found: list[Pin]) -> str:
    """Return a canonical form of the pins, independent of their order and of the lock's format."""
    lines = {Pin(pin.name, pin.version, pin.marker, tuple(sorted(set(pin.hashes)))).line() for pin in found}
    return "\n".join(sorted(lines))


def _normal_of_uv(read: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """The same of a uv.lock: its packages, without the project's own version, and without where files lie."""
    packages = []
    for package in found:
        own = package.get("source", {}) in OWN_SOURCES
        files = [sorted(str(file.get("hash")) for file in package.get("wheels", []))]
        left_out = {"wheels", "sdist", "metadata"} | ({"version"} if own else set())
        packages.append({key: value for key, value in package.items() if key not in left_out} | {"files": files})
    packages.sort(key=_sorted)
    wanted = {key: read.get(key) for key in ("requires-python", "resolution-markers", "supported-markers", "conflicts")}
    return _sorted({"packages": packages, **wanted})


def _sorted(table: dict[str, Any]) -> str:
    return json.dumps(table, sort_keys=True, default=str)


def pins(text: str) -> list[Pin]:
    """Parse pins of a lock in the form of a requirements file with hashes. Raises ValueError naming an invalid line.

    Installation uses these pins, never the text, so a different parser cannot read anything else into it.
    """
    found = []
    bare = "\n".join(re.sub(r"(^|\s)#.*$", "", line) for line in text.splitlines())
    for line in re.sub(r"\\\n", " ", bare).splitlines():
        stripped = line.strip()
        if not stripped:
            continue
        if "$" in stripped or "\\" in stripped:
            raise ValueError(f"{stripped[:80]!r} has a character that no pin has: $ or a backslash")
        plain = _HASH.sub(" ", f" {stripped} ").strip()
        if "--hash" not in stripped or plain.startswith("-"):
            raise ValueError(f"{stripped[:80]!r} has no hash: every line must pin one package by version and hash")
        try:
            required = Requirement(plain)
        except InvalidRequirement as error:
            raise ValueError(f"{plain[:80]!r} is not a pinned package: {error}") from None
        versions = [str(specifier.version) for specifier in required.specifier if specifier.operator == "=="]
        if required.url or len(required.specifier) != 1 or len(versions) != 1 or "*" in versions[0]:
            raise ValueError(f"{plain[:80]!r} must pin one version (name==1.2.3) of a package of the index")
        hashes = tuple(
            re.split("[= ]", found_hash.strip(), maxsplit=1)[1] for found_hash in _HASH.findall(f" {stripped} ")
        )
        found.append(Pin(canonicalize_name(required.name), versions[0], str(required.marker or ""), hashes))
    return found


def _locked_by_uv(packages: list[dict[str, Any]]) -> set[str]:
    """Raises ValueError for what comes from elsewhere than an index, or without a hash."""
    names: set[str] = set()
    for package in packages:
        name, source = _text(package.get("name"))[:100], package.get("source", {})
        if source in OWN_SOURCES:
            continue
        if "registry" not in source:
            shown = ", ".join(key[:100] for key in list(source)[:3])
            raise ValueError(f"{name} comes from elsewhere ({shown}): only packages of an index can be installed here")
        if not all("hash" in wheel for wheel in package.get("wheels", [])):
            raise ValueError(f"{name} has a wheel without a hash")
        names.add(canonicalize_name(name))
    return names
