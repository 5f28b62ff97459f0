"""An adapter and the model it was trained on become one plain model directory, by peft, on this machine.

The only module of the public face that loads torch: `Client.download(..., merge=True)` imports it when it is needed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from opentinker.shared.types.manifest import MANIFEST

ADAPTER_FILES = ("adapter_*", MANIFEST)
ADVICE = "say with `base` (--base) where it is: a directory in Hugging Face layout or a hub id"


def merge(adapter: Path, target: Path, base: str | None = None) -> None:
    """Blocking. W + alpha / rank * B A, computed in float32 and saved in the base's dtype, with the job's tokenizer.

    `base`: instead of what the adapter's configuration names. Raises ValueError with what is missing or does not fit.
    """
    named = base or str(orjson.loads((adapter / "adapter_config.json").read_bytes())["base_model_name_or_path"])
    path = Path(named).expanduser()
    if path.is_absolute() and not path.is_dir():
        raise ValueError(f"the adapter's base model {named} is not on this machine; {ADVICE}")
    try:
        config = AutoConfig.from_pretrained(named, trust_remote_code=False)
        reads = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        model = (AutoModelForCausalLM if reads else AutoModelForImageTextToText).from_pretrained(
            named, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(
            f"the adapter's base model {named} cannot be loaded: {_first_line(error)}; {ADVICE}"
        ) from error
    try:
        adapted = PeftModel.from_pretrained(model, adapter)
    except (RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"the adapter does not fit {named}: {_first_line(error)}") from error
    _refuse_tied(adapted)
    merged = adapted.merge_and_unload(safe_merge=True).to(config.dtype or torch.float32)
    merged.save_pretrained(target)
    for file in adapter.iterdir():
        if not any(file.match(pattern) for pattern in ADAPTER_FILES):
            shutil.copyfile(file, target / file.name)


def _refuse_tied(adapted: PeftModel) -> None:
    """Refuse adapters of only one of two tied layers, which cannot be merged into the shared weights."""
    model = adapted.get_base_model()
    shared = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    if len(shared) == 1:
        for name, module in adapted.named_modules():
            if hasattr(module, "base_layer") and id(module.base_layer.weight) in shared:
                raise ValueError(
                    f"the adapter changes {name}, whose weights are those of another layer too (tied embeddings): it "
                    "cannot be merged; load it with peft.PeftModel"
                )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
