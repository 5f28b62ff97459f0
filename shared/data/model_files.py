"""A model directory is data: what in it would be code, or a format that holds code, is refused before a loader sees it.

Looked at without loading, by the scheduler when a job is submitted and by every process that loads a model.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

import orjson

CONFIGS = (
    *("config.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "adapter_config.json"),
)
CODE_KEYS = ("auto_map", "auto_mapping", "custom_pipelines", "custom_generate", "trust_remote_code")
"""Names of entries by which transformers and peft find Python files to import, at any depth."""
UNSAFE = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")
INDEX = "*.safetensors.index.json"
MAX_BYTES = 64 << 20
"""Largest file that is read here."""
LENGTH_BYTES = 8
"""Size of a safetensors file's first field: the length of its header."""
POINTER = b"version https://git-lfs"[:LENGTH_BYTES]


def parameters_in(directory: Path) -> float:
    """Return the number of parameters of a model, by the size of its weights; 0 where there are none. Blocking."""
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    if not weights:
        return 0.0
    halves = {"bfloat16", "float16"} & set(re.findall(r"\w+", (directory / "config.json").read_text()))
    return weights / (2 if halves else 4)


def weight_files(directory: Path) -> list[Path]:
    """Return the files with the weights of a model or an adapter: where there is an index, or one file for all, others
    repeat them in another layout. Raises OSError, and ValueError, KeyError or TypeError for an index that is none."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return [directory / name for name in sorted(_named_in(index))]
    whole = directory / "model.safetensors"
    return [whole] if whole.exists() else sorted(directory.glob("*.safetensors"))


def code_in(directory: Path) -> str | None:
    """Return why the configuration in a directory is refused; None if it is not. Blocking."""
    for name in CONFIGS:
        if isinstance(found := _read(directory / name), str):
            return found
        if found is not None and (key := _code_key(found)) is not None:
            return (
                f"brings its own code ({key} in {name}), which is never run here: take the entry out, if it needs none"
            )
    return None


def pickled_in(directory: Path) -> str | None:
    """Return why a directory is refused if its weights are only in formats that can contain code."""
    others = sorted(path.name for pattern in UNSAFE for path in directory.glob(pattern))
    if not others or any(directory.glob("*.safetensors")):
        return None
    some = ", ".join(others[:3])
    return (
        f"has no *.safetensors file, only {some}: such files may hold code and are not loaded; save it as safetensors"
    )


def unsafe_weights_in(directory: Path) -> str | None:
    """Return why the weights in a directory are refused; None if they are not. Blocking."""
    if not any(directory.glob("*.safetensors")):
        return pickled_in(directory) or "has no *.safetensors file"
    for index in directory.glob(INDEX):
        if isinstance(found := _read(index), str):
            return found
        files = found.get("weight_map") if isinstance(found, dict) else None
        for file in set(files.values()) if isinstance(files, dict) else [None]:
            plain = isinstance(file, str) and PurePosixPath(file).name == file and file.endswith(".safetensors")
            if not plain:
                return f"names {str(file)[:100]!r} in {index.name}, which is not a safetensors file next to it"
    return None


def unloadable(directory: Path) -> str | None:
    """Return why no loader accepts the model in a directory that has a config.json; None if one may."""
    config = _read(directory / "config.json")
    if isinstance(config, str):
        return config
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        return "has a config.json that names no model_type: take a whole Hugging Face model directory"
    return code_in(directory) or unsafe_weights_in(directory) or _torn_weights_in(directory)


def _torn_weights_in(directory: Path) -> str | None:
    """Return the first file of an index whose length differs from its header."""
    for index in directory.glob(INDEX):
        if lacking := sorted(name for name in _named_in(index) if not (directory / name).exists()):
            return f"lacks {', '.join(lacking[:3])}, of {len(lacking)} that {index.name} names: copy it once more"
    return next((why for file in sorted(directory.glob("*.safetensors")) if (why := _torn(file))), None)


def _named_in(index: Path) -> set[str]:
    return set(orjson.loads(index.read_bytes())["weight_map"].values())


def _torn(path: Path) -> str:
    """Empty: it is whole, as far as its header tells."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(LENGTH_BYTES)
        length = int.from_bytes(first, "little")
        if first == POINTER:
            return f"holds a pointer of Git LFS in the place of {path.name}: `git lfs pull` fetches it"
        header = file.read(length) if length <= min(size, MAX_BYTES) else b""
    try:
        entries = orjson.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        whole = LENGTH_BYTES + length + max(ends, default=0)
    except (orjson.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError):
        return f"has a {path.name} that is no safetensors file"
    return "" if size == whole else f"has a {path.name} of {size} bytes, of {whole}: copy it once more"


def _read(path: Path) -> Any:
    """Return the file's parsed content; None if it is absent, a string with the error if it cannot be read."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return f"has a {path.name} of more than {MAX_BYTES >> 20} MiB"
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, orjson.JSONDecodeError) as error:
        return f"has a {path.name} that cannot be read: {error}"


def _code_key(value: Any) -> str | None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in CODE_KEYS and inner:
                return str(key)
            if (found := _code_key(inner)) is not None:
                return found
    if isinstance(value, list):
        return next((found for inner in value if (found := _code_key(inner)) is not None), None)
    return None
