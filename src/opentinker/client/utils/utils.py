"""Small helpers of the published client."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opentinker.unsupported import refused

PATH_KEYS = ("tokenizer_path", "model_path", "processor_path", "data_path", "val_data_path", "output_path")
LISTS = ("data_paths", "val_data_paths")


def resolve_path(path: str, original_cwd: str | Path | None = None) -> str:
    """The absolute path of what exists below `original_cwd` (default: where the program was started); anything else,
    such as a hub id, as it is."""
    there = (Path(original_cwd or _started_in()) / Path(path).expanduser()).resolve()
    return str(there) if there.exists() else path


def _started_in() -> str:
    """The working directory, or the one before Hydra changed it."""
    if "hydra" in sys.modules:
        from hydra.utils import get_original_cwd  # type: ignore[import-not-found]

        with contextlib.suppress(ValueError):  # Hydra is imported, and does not run this program
            return str(get_original_cwd())
    return os.getcwd()


def resolve_paths_in_config(config: Any, original_cwd: str | Path | None = None) -> Any:
    """The same config, in which paths that exist are absolute."""
    for name in PATH_KEYS:
        if isinstance(value := config.get(name), str):
            config[name] = resolve_path(value, original_cwd)
    for name in LISTS:
        value = config.get(name)
        if value is not None and not isinstance(value, str):
            config[name] = [resolve_path(str(path), original_cwd) for path in value]
    return config


def find_free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tolerant_merge_dicts(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """`second` over `first`, dictionary by dictionary."""
    merged = dict(first)
    for name, value in second.items():
        own = merged.get(name)
        merged[name] = (
            tolerant_merge_dicts(own, value) if isinstance(own, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def verify_raw_prompt_format(rows: Any) -> None:
    """Raises ValueError unless every row's raw_prompt is a chat."""
    for number, row in enumerate(rows):
        chat = row.get("raw_prompt")
        if not isinstance(chat, list) or not all(
            isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in chat
        ):
            raise ValueError(f"row {number}: raw_prompt must be a list of {{role, content}}")


def math_reward_function(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 if the answer that `solution_str` gives is equal to `ground_truth` by value, else 0.0. Blocking."""
    from opentinker.environment.game_tools import graded  # most programs need no graders

    return float(graded(str(ground_truth), solution_str, data_source).right)


_BATCHES = "batches never leave the service here; `fit` trains, and rows are seen with StaticDatasetGenerator"
serialize_dataproto = refused("serialize_dataproto", _BATCHES)
deserialize_dataproto = refused("deserialize_dataproto", _BATCHES)
prepare_dataset = refused(
    "prepare_dataset", "give data_paths to MathGameEnvironment, or rows to StaticDatasetGenerator"
)


def say(sentence: str) -> None:
    """Print for the person at the terminal: this is their program's own process."""
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()
