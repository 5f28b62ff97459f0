"""Packages to push: small ones made on the spot, and one whose environment attacks."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Set
from pathlib import Path

from opentinker.services.scheduler.environments.upload import Uploads, Version
from opentinker.shared.data.uploads import Package
from tests.samples import attacks

PARITY = Path(__file__).resolve().parents[2] / "examples" / "environments" / "parity"
HOSTILE = '''
"""Plays one attack of attacks.py in its first step; `quiet` plays along."""

import asyncio, ctypes, os, socket, struct, sys

import attacks
from opentinker import Environment, Step
from opentinker.envs.base import EnvironmentConfig, user


class Hostile(Environment):
    class Config(EnvironmentConfig):
        attack: str = "quiet"
        known: dict[str, str] = {}

    async def open(self, row, seed):
        return [user(str(os.getpid()))]

    async def step(self, action):
        match self.config.attack:
            case "quiet":
                return Step(messages=[user(f"{os.getpid()} {os.getuid()} {sorted(os.environ)}")], reward=1.0)
            case "die":
                os.kill(os.getpid(), 9)
            case "forge":
                with socket.socket(fileno=os.dup(int(sys.argv[1]))) as worker:
                    worker.sendall(struct.pack("<I", 2**31))
                    await asyncio.sleep(60)
            case "hang_up":
                os.close(int(sys.argv[1]))
                await asyncio.sleep(60)
            case name:
                return Step(messages=[user(attacks.outcome(name, self.config.known))])
'''
NO_LOCK = "# nothing but the standard library\n"


def package(directory: Path, **files: str) -> Path:
    """A small package; `files` replace or add some, `__` for a dot in a name; an empty one is left out."""
    usual = {
        "environment.toml": 'name = "small"\nclass = "small:Small"\n',
        "requirements.lock": NO_LOCK,
        "small.py": "from opentinker import Environment\nclass Small(Environment):\n    pass\n",
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (usual | {name.replace("__", "."): text for name, text in files.items()}).items():
        if text:
            (directory / name).write_text(text)
    return directory


def numbered(directory: Path, number: int, extra: int = 0) -> Path:
    """Another content each time, with `extra` bytes more."""
    place = package(directory / str(number))
    (place / "number.txt").write_text(f"{number}")
    (place / "extra.bin").write_bytes(b"x" * extra)
    return place


def hostile(directory: Path) -> Path:
    described = 'name = "hostile"\nclass = "hostile:Hostile"\n'
    source = Path(attacks.__file__).read_text()
    return package(directory, environment__toml=described, hostile__py=HOSTILE, attacks__py=source, small__py="")


def tar_of(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member in members:
            if isinstance(member, tuple):
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
            else:
                tar.addfile(member)
    return out.getvalue()


def receive(
    held: Uploads, tar: bytes, tenant: str = "default", name: str = "", used: Set[str] = frozenset()
) -> tuple[Package, Version, bool]:
    """As the scheduler does with what comes over HTTP."""
    with held.incoming() as file:
        file.write(tar)
        file.seek(0)
        return held.store(file, tenant, name, used)
