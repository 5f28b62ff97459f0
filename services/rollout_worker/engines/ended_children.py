"""The end of an engine whose processes are killed because they did not end in time.

vLLM 0.32 asks each child for its name before it kills it. A child that has just ended raises `NoSuchProcess`: the
other children and the engine's process would stay, with their memory.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import psutil  # a dependency of vLLM
import vllm.v1.utils


@cache
def repair() -> None:
    """Make vLLM list its children again if one of them ends while it kills them."""
    kill_tree = vllm.v1.utils.kill_process_tree

    def kill_process_tree(pid: int) -> None:
        while True:
            with suppress(psutil.NoSuchProcess):
                kill_tree(pid)
                return

    vllm.v1.utils.kill_process_tree = kill_process_tree
