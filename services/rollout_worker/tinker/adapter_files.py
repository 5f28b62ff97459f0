"""Looks at the files of an adapter, or of all weights, before an engine loads them: a damaged one must not reach those
that share the engine. Blocking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson

from opentinker.services.rollout_worker.engines.base import EngineError
from opentinker.shared.data.model_files import LENGTH_BYTES, code_in, unsafe_weights_in, weight_files
from opentinker.shared.data.safetensors_header import MAX_HEADER_BYTES
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.manifest import ADAPTER

CONFIG = "adapter_config.json"
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
BF16_EXPONENT = 0x7F80
"""Bits of a bfloat16 that are all set in infinities and NaN."""

NOT_FINITE = (
    "has values that are not finite, such as in {}: go back to an earlier checkpoint, and train with a smaller "
    "learning rate"
)


class AdapterGone(EngineError):
    """The directory is not there any longer."""


class AdapterRefused(EngineError):
    """The directory holds no adapter that this engine can serve."""


def check_adapter(directory: Path, max_rank: int) -> None:
    """Raises AdapterGone, AdapterRefused."""
    if not directory.is_dir():
        raise AdapterGone("the weights of this sampler were removed")
    if why := code_in(directory) or unsafe_weights_in(directory):
        raise AdapterRefused(f"the adapter {why}")
    try:
        rank = int(orjson.loads((directory / CONFIG).read_bytes())["r"])
        if rank > max_rank:  # before the weights are read
            raise AdapterRefused(
                f"the adapter has rank {rank}, and this server takes {max_rank} at most (tinker.max_rank)"
            )
        spoiled = _spoiled_in(directory / ADAPTER)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterRefused(f"the adapter cannot be read: {first_line(error)}; save it again") from None
    if spoiled:
        raise AdapterRefused(f"the adapter {NOT_FINITE.format(spoiled)}")


def check_full(directory: Path) -> None:
    """Likewise, of a model with all its weights."""
    if not directory.is_dir():
        raise AdapterGone("the weights of this sampler were removed")
    if why := code_in(directory) or unsafe_weights_in(directory):
        raise AdapterRefused(f"the model {why}")
    try:
        spoiled = next((name for path in weight_files(directory) if (name := _spoiled_in(path))), "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterRefused(f"the weights cannot be read: {first_line(error)}; save them again") from None
    if spoiled:
        raise AdapterRefused(f"the model {NOT_FINITE.format(spoiled)}")


def _spoiled_in(path: Path) -> str:
    """Return the first tensor with infinities or NaN; empty if all are finite. Raises OSError, ValueError, KeyError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = file.read(length) if length <= MAX_HEADER_BYTES else b""
        entries: dict[str, Any] = orjson.loads(header)
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            file.seek(LENGTH_BYTES + length + start)
            raw = file.read(end - start)
            if len(raw) != end - start:
                raise ValueError(f"{path.name} ends before {name}")
            values = np.frombuffer(raw, DTYPES[entry["dtype"]])
            if not _are_finite(values):
                return name
    return ""


def _are_finite(values: np.ndarray[Any, Any]) -> bool:
    if values.dtype == np.uint16:  # bfloat16, which numpy lacks
        return not bool(((values & BF16_EXPONENT) == BF16_EXPONENT).any())
    return bool(np.isfinite(values).all())
