"""Virtual environments of uploads: installed once from the lock, only inside of a sandbox, within limits."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import shutil
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from opentinker.envs.runtime.packages import Packages
from opentinker.shared.data import uploads
from opentinker.shared.types.errors import SpecError
from tests.integration.access.sandboxes.sandbox_worker import Worker
from tests.samples.upload_samples import package

WHEEL = "games_kit-1.0-py3-none-any.whl"


def wheel(directory: Path, trap: Path) -> str:
    """A wheel whose .pth file makes `trap` in every interpreter that starts with it; gives its line of a lock."""
    place = directory / WHEEL
    files = {
        "games_kit.py": "LARGEST = 7\n",
        "games_kit.pth": f"import pathlib; pathlib.Path({str(trap)!r}).touch()\n",
        "games_kit-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: games-kit\nVersion: 1.0\n",
        "games_kit-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    with zipfile.ZipFile(place, "w") as archive:
        for name, text in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            lines.append(f"{name},sha256={digest},{len(text)}")
            archive.writestr(name, text)
        archive.writestr("games_kit-1.0.dist-info/RECORD", "\n".join([*lines, "games_kit-1.0.dist-info/RECORD,,", ""]))
    return f"games-kit==1.0 --hash=sha256:{hashlib.sha256(place.read_bytes()).hexdigest()}\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where uv finds wheels, and nowhere else."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("UV_FIND_LINKS", str(directory))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return directory


USES = """
import games_kit
from opentinker import Environment, Step
from opentinker.envs.base import user

class Small(Environment):
    async def open(self, row, seed):
        return [user("go")]

    async def step(self, action):
        return Step(messages=[user(f"{games_kit.LARGEST} {games_kit.__file__}")])
"""


async def test_the_lock_is_installed_once_and_only_inside(worker: Worker, tmp_path: Path, index: Path) -> None:
    trap = tmp_path / "trap"
    place = package(tmp_path / "x", requirements__lock=wheel(index, trap), small__py=USES)
    name = worker.push(place)
    others = [Packages(worker.data), Packages(worker.data)]
    found = await asyncio.gather(*(packages.find(name) for packages in others))
    assert found[0].venv == found[1].venv
    assert [path.name for path in found[0].venv.parent.iterdir() if path.is_dir()] == [found[0].venv.name]
    made = found[0].venv.stat().st_ino
    assert (await worker.said(name)).startswith("7 /venv/lib/")
    assert found[0].venv.stat().st_ino == made
    assert not trap.exists()


async def test_a_package_pushed_again_is_installed_again(worker: Worker, tmp_path: Path, index: Path) -> None:
    """The scheduler takes away what nobody names any more, also what this worker has played."""
    place = package(tmp_path / "x", requirements__lock=wheel(index, tmp_path / "trap"), small__py=USES)
    name = worker.push(place)
    packages = Packages(worker.data)
    first = await packages.find(name)
    shutil.rmtree(first.venv.parent)
    again = await packages.find(name)
    assert again.venv == first.venv and again.venv.is_dir()
    assert await packages.find(name) is again


async def test_a_virtual_environment_has_a_limit_and_says_its_size(
    worker: Worker, tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = worker.push(package(tmp_path / "x", requirements__lock=wheel(index, tmp_path / "trap"), small__py=USES))
    removing: list[threading.Thread] = []
    remove = shutil.rmtree

    def noted(*args: Any, **options: Any) -> None:
        removing.append(threading.current_thread())
        remove(*args, **options)

    with monkeypatch.context() as patched, pytest.raises(SpecError, match=r"takes more than 0 MB \(upload_venv_mb\)"):
        patched.setattr(shutil, "rmtree", noted)
        await Packages(worker.data, 0).find(name)
    assert removing and threading.main_thread() not in removing, "it may be large, and the event loop must go on"
    lock = uploads.load(worker.data, uploads.parse(name).digest).lock_digest
    assert uploads.venv_bytes(worker.data, lock) == 0
    assert not [path for path in uploads.venvs_dir(worker.data, lock).iterdir() if path.is_dir()]
    await Packages(worker.data, 64).find(name)
    assert uploads.venv_bytes(worker.data, lock) > 1000


async def test_a_uv_lock_is_installed_too(worker: Worker, tmp_path: Path, index: Path) -> None:
    digest = wheel(index, tmp_path / "trap").rpartition("=")[2].strip()
    lock = f"""
version = 1
requires-python = ">=3.11"

[[package]]
name = "small"
version = "1"
source = {{ virtual = "." }}
dependencies = [{{ name = "games-kit" }}]

[package.metadata]
requires-dist = [{{ name = "games-kit" }}]

[[package]]
name = "games-kit"
version = "1.0"
source = {{ registry = "https://example.org/simple" }}
wheels = [{{ url = "https://example.org/{WHEEL}", hash = "{digest}" }}]
"""
    project = (
        '[project]\nname = "small"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["games-kit"]\n'
        f'[tool.uv]\ncache-dir = "{tmp_path / "trap"}"\n[tool.opentinker]\nclass = "small:Small"\n'
    )
    files = {"environment__toml": "", "requirements__lock": "", "pyproject__toml": project, "uv__lock": lock}
    name = worker.push(package(tmp_path / "x", **files, small__py=USES))
    assert (await worker.said(name)).startswith("7 /venv/lib/")
    assert not (tmp_path / "trap").exists()  # nor does uv do what the package tells it


async def test_failed_installs_show_uv_errors_and_are_retried(worker: Worker, tmp_path: Path, index: Path) -> None:
    line = wheel(index, tmp_path / "trap")
    made = index / WHEEL
    content = made.read_bytes()
    made.unlink()
    name = worker.push(package(tmp_path / "x", requirements__lock=line, small__py=USES))
    with pytest.raises(SpecError, match=r"its virtual environment cannot be made: `uv pip` says:(?s:.*)games-kit"):
        await worker.sandboxes.program(name)
    wheel(index, tmp_path / "another trap")
    with pytest.raises(SpecError, match=r"Hash mismatch"):
        await worker.sandboxes.program(name)
    made.write_bytes(content)
    assert (await worker.said(name)).startswith("7 ")


async def test_nothing_is_built_from_source(worker: Worker, tmp_path: Path, index: Path) -> None:
    source = index / "games_kit-1.0.tar.gz"
    source.write_bytes(b"nobody looks into it")
    line = f"games-kit==1.0 --hash=sha256:{hashlib.sha256(source.read_bytes()).hexdigest()}\n"
    with pytest.raises(SpecError, match="no usable wheels"):
        await worker.sandboxes.program(worker.push(package(tmp_path / "x", requirements__lock=line)))
