"""Information about a worker's process and machine."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from opentinker.shared.types.core import Pool
from opentinker.shared.types.workers import WorkerInfo

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def worker_info(id: str, pool: Pool, **fields: Any) -> WorkerInfo:
    """Describes this process as a new incarnation of the worker `id`."""
    return WorkerInfo(
        id=id,
        incarnation=uuid.uuid4().hex[:12],
        pool=pool,
        host=socket.gethostname(),
        pid=os.getpid(),
        cores=os.cpu_count() or 0,
        machine=machine_id(),
        **fields,
    )


def machine_id() -> str:
    """The same in all containers of one machine until it boots again; empty where the kernel does not say.

    A hash of the kernel's boot id: host names differ from container to container.
    """
    with suppress(OSError):
        return hashlib.sha256(BOOT_ID.read_bytes().strip()).hexdigest()[:12]
    return ""
