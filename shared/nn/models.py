"""Causal language models and classifiers: from a path or hub id into memory, safely, ready for the packed forward pass.

Used by the trainer and by reference-forward. Everything that is wrong with the user's model is a `JobFailed` that says
what to do about it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.utils import logging as transformers_logging

from opentinker.shared.data.model_families import VISION_FAMILIES, unsupported_family
from opentinker.shared.data.model_files import code_in, unsafe_weights_in
from opentinker.shared.data.safetensors_header import difference
from opentinker.shared.nn.attention import PACKED
from opentinker.shared.nn.forward import VISION_ATTENTION, token_scores, token_values
from opentinker.shared.nn.layout import Layout, layout
from opentinker.shared.nn.vision import VisionProcessor
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.errors import JobFailed

transformers_logging.disable_progress_bar()
_LOADING = threading.Lock()
"""transformers switches process-wide flags while it loads: two concurrent loads lose tied weights."""
HEADS: dict[str, Any] = {
    "language": AutoModelForCausalLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}
"""Model classes by head."""


def torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def autocast(device: str, dtype: torch.dtype) -> Any:
    """Return a context in which a forward pass over float32 weights computes in `dtype`."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=dtype)


def load_model(
    base: str, dtype: torch.dtype, device: torch.device | str = "cpu", *, train_vision: bool = False
) -> nn.Module:
    """Load a causal language model in eval mode, with packed attention, proven to agree with its own plain forward.

    In a vision model only the language model has gradients, unless `train_vision`. Safetensors only, no remote code.
    Raises JobFailed for a path that is not such a model, and for an architecture that the packed forward pass cannot
    compute.
    """
    config = config_of(base)
    if why := unsupported_family(config.to_dict(), served=False):
        raise JobFailed(f"model {base!r} {why}")
    model = _from_pretrained(_language_auto(config), base, config, dtype, attn_implementation="sdpa")
    model.to(device).eval()
    if _language_auto(config) is AutoModelForImageTextToText:
        sight = VisionProcessor.of(base)
        sight.trained = train_vision
        setattr(model, VISION_ATTENTION, sight)
        if not train_vision:
            _freeze_vision(model)
    elif train_vision:
        raise JobFailed(f"model.train_vision: model {base!r} ({type(model).__name__}) has no vision tower here")

    def plain(ids_1T: Tensor) -> Tensor:
        logprobs_TV = model(input_ids=ids_1T, use_cache=False).logits[0].float().log_softmax(-1)
        return logprobs_TV[:-1].gather(-1, ids_1T[0, 1:, None])[:, 0]

    tolerance = 1e-3 if dtype == torch.float32 else 0.5
    apart, _ = _packed_difference(base, model, plain, lambda plan: token_scores(model, plan, temperature=1.0)[0])
    if not apart <= tolerance:
        raise JobFailed(
            f"model {base!r} ({type(model).__name__}) cannot be trained here: its packed logprobs differ from its "
            f"plain forward by {apart:.3g} (attention or output head of a kind that is not supported)"
        )
    return model


def _language_auto(config: Any) -> Any:
    """Return the class that loads the model. Vision models of unknown families are loaded as text models
    (`TEXT_OF_VISION`)."""
    return AutoModelForImageTextToText if config.model_type in VISION_FAMILIES else AutoModelForCausalLM


def _freeze_vision(model: Any) -> None:
    trained = [*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()]
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)


def load_classifier(base: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Module:
    """A sequence classifier in eval mode. Raises JobFailed for a path that is no such model."""
    model = _from_pretrained(HEADS["sequence"], base, _headed_config(base, "sequence"), dtype)
    return model.to(device).eval()


def load_value_model(
    base: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[nn.Module, nn.Module, nn.Linear]:
    """A token classifier with one label in eval mode, its decoder and its head, for `token_values`.

    Proven to agree with its own plain forward. Raises JobFailed for a path that is no such model, and for one that is
    not causal.
    """
    model = _from_pretrained(HEADS["token"], base, _headed_config(base, "token"), dtype, attn_implementation="sdpa")
    model.to(device).eval()
    decoder = cast(Any, model).base_model
    head = next((child for child in model.children() if isinstance(child, nn.Linear)), None)
    if head is None or head.out_features != 1:
        raise JobFailed(f"value model {base!r} ({type(model).__name__}) does not end in one linear layer of one number")

    def plain(ids_1T: Tensor) -> Tensor:
        return cast(Tensor, model(input_ids=ids_1T).logits[0, :-1, 0].float())

    apart, largest = _packed_difference(base, model, plain, lambda plan: token_values(decoder, head, plan))
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    if not apart <= tolerance * max(1.0, largest):
        raise JobFailed(
            f"value model {base!r} ({type(model).__name__}) cannot be used here: its packed values differ from its "
            f"plain forward by {apart:.3g} (it looks ahead, or has attention of a kind that is not supported)"
        )
    return model, decoder, head


_HEADED = {
    "sequence": "a reward model is an AutoModelForSequenceClassification with one label, or several of which one is "
    "named",
    "token": "a value model is an AutoModelForTokenClassification with one label",
}


def _headed_config(base: str, head: str) -> Any:
    """Raises JobFailed unless the model ends with that."""
    config = config_of(base)
    if head == "language":
        return config
    architectures = config.architectures or ["nothing"]
    if not any(name.endswith(f"For{head.title()}Classification") for name in architectures):
        raise JobFailed(
            f"model {base!r} is no {head} classifier (its config.json says {', '.join(architectures)}): {_HEADED[head]}"
        )
    if head == "token" and config.num_labels != 1:
        raise JobFailed(f"value model {base!r} has {config.num_labels} labels: it must have one, the value")
    return config


def _from_pretrained(auto: Any, base: str, config: Any, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Load a model onto the CPU. Raises JobFailed."""
    try:
        with _LOADING:
            model, info = auto.from_pretrained(
                base,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except Exception as error:
        raise JobFailed(f"model {base!r} could not be loaded: {first_line(error)}. {_ADVICE}") from error
    lacking = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if lacking:
        raise JobFailed(
            f"model {base!r} lacks {len(lacking)} tensors that its config asks for, such as {lacking[0]}: "
            "its weight files do not belong to its config.json"
        )
    return cast(nn.Module, model)


def model_bytes(base: str, dtype: torch.dtype, *, head: str = "language") -> int:
    """Return the memory that the weights will take, from the config alone. Raises JobFailed as loading does."""
    config = _headed_config(base, head)
    try:
        with _LOADING, torch.device("meta"):
            auto = _language_auto(config) if head == "language" else HEADS[head]
            empty = auto.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:
        raise JobFailed(f"model {base!r} could not be measured: {first_line(error)}. {_ADVICE}") from error
    return sum(p.numel() * p.element_size() for p in empty.parameters())


def refuse_other_model(base: str, wanted: str) -> None:
    """Raise JobFailed, naming tensors or settings, unless both configs make the same model. Loads no weights."""
    shapes, settings = [], []
    for name in (base, wanted):
        config = config_of(name)
        with _LOADING, torch.device("meta"):
            model = _language_auto(config).from_config(config, trust_remote_code=False)
        shapes.append({name: p.shape for name, p in model.named_parameters()})
        plain = config.get_text_config().to_dict()
        settings.append({name: value for name, value in plain.items() if name not in _NO_PART_OF_THE_MODEL})
    if odd := difference(*shapes):
        raise JobFailed(f"{base!r} is not of the model {wanted!r}: {odd}")
    have, want = settings
    others = sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))
    if others:
        some = ", ".join(f"{n} ({have.get(n, 'absent')} instead of {want.get(n, 'absent')})" for n in others[:3])
        raise JobFailed(f"{base!r} is not of the model {wanted!r}: {len(others)} settings differ, such as {some}")


_NO_PART_OF_THE_MODEL = {"_name_or_path", "architectures", "dtype", "initializer_range", "max_position_embeddings"} | {
    *("transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id")
}
"""Entries of a configuration that may differ where the weights mean the same."""


def load_tokenizer(base: str) -> Any:
    """Load the model's fast tokenizer. Raises JobFailed for a model without one."""
    try:
        if why := code_in(Path(base).expanduser()):
            raise JobFailed(f"model {base!r} {why}")
        return AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    except JobFailed:
        raise
    except Exception as error:
        raise JobFailed(f"model {base!r} has no usable tokenizer: {first_line(error)}") from error


def longest_context(base: str) -> int:
    """Tokens that the model has positions for. Raises JobFailed if it has no readable config."""
    return int(getattr(config_of(base).get_text_config(), "max_position_embeddings", None) or 2**31)


_ADVICE = (
    "Give a directory in Hugging Face layout (config.json, *.safetensors, tokenizer) that this machine can read, "
    "or a hub id that it can reach."
)


def config_of(base: str) -> Any:
    directory = Path(base).expanduser()
    if directory.exists() and not (directory / "config.json").is_file():
        raise JobFailed(f"model {base!r} has no config.json. {_ADVICE}")
    if (directory / "config.json").is_file():
        try:
            raw = json.loads((directory / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise JobFailed(f"model {base!r}: config.json cannot be read: {first_line(error)}") from error
        _refuse_remote_code(base, raw)
        if why := code_in(directory) or unsafe_weights_in(directory):
            raise JobFailed(f"model {base!r} {why}")
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    except Exception as error:
        raise JobFailed(
            f"model {base!r} was not found or has no valid config: {first_line(error)}. {_ADVICE}"
        ) from error
    _refuse_remote_code(base, config.to_dict())
    return config


def _refuse_remote_code(base: str, config: dict[str, Any]) -> None:
    if config.get("auto_map"):
        raise JobFailed(f"model {base!r} brings its own code (auto_map in config.json), which is never run here")


def check_window(base: str, config: Any, context_length: int, setting: str = "rollout.context_length") -> None:
    """Raises JobFailed if trajectories may outgrow a sliding window that the model's attention uses.

    The packed forward pass has no windows. Asked before training: where the context length is decided.
    """
    text = config.get_text_config()
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    in_use = kinds is None or "sliding_attention" in kinds
    if window is not None and in_use and context_length > window:
        raise JobFailed(
            f"model {base!r} cannot be trained here on trajectories of {context_length} tokens: its attention looks "
            f"back {window} tokens (sliding window), which is not supported. Set {setting} to at most "
            f"{window}, or take another model"
        )


def _packed_difference(
    base: str, model: Any, plain: Callable[[Tensor], Tensor], packed: Callable[[Layout], Tensor]
) -> tuple[float, float]:
    """Return how far both are apart for a few tokens at most, and the largest number of `plain`; the model stays in
    packed mode.

    `plain`: [1, T] token ids -> [T - 1] what the model says of the tokens after the first.
    """
    vocabulary = model.config.get_text_config().vocab_size
    rows = [[i * 7919 % vocabulary for i in range(1, 7)], [i * 7919 % vocabulary for i in (1, 2, 3, 11)]]
    device = next(model.parameters()).device
    with torch.no_grad():
        expected_M = torch.cat([plain(torch.tensor([row], device=device)) for row in rows])
        try:
            model.set_attn_implementation({"text_config": PACKED} if hasattr(model, VISION_ATTENTION) else PACKED)
            plan = layout(rows, [[0] + [1] * (len(row) - 1) for row in rows])
            found_M = packed(plan.to(device))
        except (TypeError, ValueError, KeyError, AttributeError, NotImplementedError) as error:
            raise JobFailed(
                f"model {base!r} ({type(model).__name__}) cannot be trained here: {first_line(error)}"
            ) from error
    return (found_M - expected_M).abs().max().item(), expected_M.abs().max().item()
