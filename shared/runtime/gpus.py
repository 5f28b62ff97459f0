"""GPUs of this machine as their driver describes them, through NVML and its official binding (nvidia-ml-py); and who of
the processes here gets which. Without the binding or a driver there are none."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from opentinker.shared.types.workers import Gpu

log = structlog.get_logger()

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Makes CUDA number GPUs as NVML does."""


def visible(environ: Mapping[str, str] | None = None) -> list[Gpu]:
    """Blocking. Those that CUDA_VISIBLE_DEVICES leaves to a process of this environment (default: our own), in its
    order."""
    wanted = (os.environ if environ is None else environ).get(VISIBLE)
    found = _all()
    if wanted is None or not found:
        return found
    chosen: list[Gpu] = []
    for name in (part.strip() for part in wanted.split(",")):
        match = [gpu for gpu in found if name == str(gpu.index) or (name.startswith("GPU-") and name in gpu.uuid)]
        if not match:
            break  # as CUDA does: what follows something unknown is not there
        chosen += match[:1]
    return chosen


def _all() -> list[Gpu]:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.debug("no_gpus", why=str(error))
        return []
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [_described(nvml, handles, index) for index in range(len(handles))]
    except nvml.NVMLError as error:
        log.warning("gpus_unknown", why=str(error))
        return []
    finally:
        nvml.nvmlShutdown()


def _described(nvml: Any, handles: list[Any], index: int) -> Gpu:
    handle = handles[index]
    return Gpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        model=nvml.nvmlDeviceGetName(handle),
        memory=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        numa=_numa(nvml, handle),
        links=[other for other, peer in enumerate(handles) if other != index and _linked(nvml, handle, peer)],
    )


def _numa(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetNumaNodeId(handle))
    except nvml.NVMLError:  # older drivers, and machines with one node, do not say
        return -1


def _linked(nvml: Any, one: Any, other: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def nearest(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The first, those that NVLink joins with it, those of its NUMA node, the others."""
    if not gpus:
        return []
    first = gpus[0]
    return sorted(gpus, key=lambda gpu: (gpu is not first, gpu.index not in first.links, gpu.numa != first.numa))


def parted(gpus: Sequence[Gpu], workers: Sequence[str]) -> dict[str, list[Gpu]]:
    """Divide the GPUs among workers: equal numbers, the first workers one more, neighbours together. The last workers
    get none if there are fewer GPUs than workers."""
    each, more = divmod(len(gpus), len(workers)) if workers else (0, 0)
    parts, start = {}, 0
    for place, worker in enumerate(workers):
        count = each + (place < more)
        parts[worker] = list(gpus[start : start + count])
        start += count
    return parts


def shares(gpus: Sequence[Gpu], workers: Sequence[str]) -> dict[str, list[Gpu]]:
    """Divide the GPUs among workers. Where there are fewer GPUs than workers, several share one."""
    parts = parted(gpus, workers)
    return {w: parts[w] or [gpus[place % len(gpus)]] for place, w in enumerate(workers)} if gpus else parts


def used_bytes(uuid: str) -> int | None:
    """Blocking. Return the memory in use on a GPU, by all processes together; None where the driver does not say."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return None
    except nvml.NVMLError:
        return None
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)).used)
    except nvml.NVMLError as error:
        log.warning("gpu_memory_unknown", gpu=uuid, why=str(error))
        return None
    finally:
        nvml.nvmlShutdown()


def pin_of(gpus: Sequence[Gpu]) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for these GPUs."""
    return ",".join(str(gpu.index) for gpu in gpus)


def pinned(gpus: Sequence[Gpu], workers: Sequence[str]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES of each of the workers, by `shares`; nothing without GPUs."""
    return {worker: pin_of(part) for worker, part in shares(gpus, workers).items()} if gpus else {}
