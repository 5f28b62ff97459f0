"""Before and around the import of vLLM. Light: imports neither vllm nor torch until `preload` is called.

On a CPU the engine process is forked, not spawned: everything is imported already, so an engine starts in about a
second instead of ten. The forked process must give up what it got by accident: the parent's network connections and
its signal pipe.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

SMALL_MACHINE_CPUS = 4
OWN = "opentinker-engine-"
"""Prefix of our directories in the machine's temporary one; the pid follows."""

PRELOADED = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.layers.quantization.online.base",
    "opentinker.services.rollout_worker.engines.vllm_worker_extension",
)

_here = threading.local()


def environment() -> dict[str, str]:
    """Return the environment variables that vLLM needs; values that are already set win."""
    cpus = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": "1" if cpus <= SMALL_MACHINE_CPUS else str(cpus // 2),  # spinning pools starve each other
        "TORCHDYNAMO_DISABLE": "1",  # compiling costs 18 s at the first request and wins nothing on a CPU
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with the "uni" executor: one engine process, no worker process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # with several ranks vLLM would want a NUMA node for each
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }


def prepare() -> None:
    """Set the environment. Must run before the first import of torch or vllm to take full effect."""
    gpu = Path("/proc/driver/nvidia").exists()
    for name, value in environment().items():
        if gpu and name in ("TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
            continue
        os.environ.setdefault(name, value)


def is_installed() -> bool:
    """Return whether there is a vLLM. Jobs with the simulated engine need none."""
    return importlib.util.find_spec("vllm") is not None


def preload() -> None:
    """Import everything an engine needs, so that a job finds a warm process. Takes seconds: call it in a thread."""
    prepare()
    gc.disable()
    try:
        importlib.import_module("opentinker.services.rollout_worker.engines.vllm")
        if not importlib.import_module("torch").cuda.is_available():
            for name in PRELOADED:
                importlib.import_module(name)
    finally:
        gc.enable()
    settle_heap()


def settle_heap() -> None:
    """Keep the collector from walking the imports' million objects again: 0.3 s each time, here and in the fork."""
    gc.collect()
    gc.freeze()


def release_heap() -> None:
    """Let go of a closed engine, which `settle_heap` had made eternal."""
    gc.unfreeze()
    settle_heap()


@contextlib.contextmanager
def forked_engine() -> Iterator[None]:
    """Processes that this thread forks inside become engine processes."""
    before = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    _here.forks_engine = True
    try:
        yield
    finally:
        _here.forks_engine = False
        if before is None:
            del os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
        else:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = before


def _after_fork() -> None:
    if not getattr(_here, "forks_engine", False):
        return
    signal.set_wakeup_fd(-1)  # else our signals would wake the parent's event loop as if they were its own
    null = os.open(os.devnull, os.O_RDWR)
    for entry in os.listdir("/proc/self/fd"):
        if _network_socket(int(entry)):
            os.dup2(null, int(entry))  # the number stays taken: the parent's objects still name it


def _network_socket(number: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        copy = socket.socket(fileno=os.dup(number))
    except OSError:  # the descriptor of the directory listing itself is gone by now
        return False
    with copy:
        return copy.family in (socket.AF_INET, socket.AF_INET6)


os.register_at_fork(after_in_child=_after_fork)
