"""Round figures of hardware and the sizes of models: what estimates assume where nothing was measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from opentinker.shared.data.model_files import parameters_in

NAMED_SIZE = re.compile(r"(\d+(?:\.\d+)?)([bm])(?![a-z])", re.IGNORECASE)


class Machine(NamedTuple):
    """Computing hardware, in round figures."""

    name: str
    bytes_per_s: float
    """Weights read from memory, once for every token."""
    operations_per_s: float
    token_s: float
    """Seconds per token in addition to reading the weights."""


CPU = Machine("a CPU: 10 GB/s, 0.1 TFLOP/s", 1e10, 1e11, 0.01)
GPU = Machine("a GPU: 1 TB/s, 100 TFLOP/s", 1e12, 1e14, 0.005)


def known_parameters(base: str) -> tuple[float, str]:
    """Return a model's number of parameters, and its source; 0 if neither its files nor its name tell. Blocking."""
    if count := parameters_in(Path(base).expanduser()):
        return count, "its files"
    if found := NAMED_SIZE.search(base.rpartition("/")[2]):
        return float(found[1]) * (1e9 if found[2].lower() == "b" else 1e6), "its name"
    return 0.0, ""


def parameters_text(count: float) -> str:
    """Return `600 M parameters`, or `1.5 B parameters`."""
    return f"{count / 1e9:.3g} B parameters" if count >= 1e9 else f"{count / 1e6:.3g} M parameters"
