"""Saves and restores, bit for bit, a learner's state apart from its weights: moments, random state, step count.

`trainer/optimizer.safetensors`: `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME` per trained parameter, `rng/cpu`,
`rng/cuda`, and `master/NAME` where the saved model or adapter is narrower than the float32 weights.
`trainer/state.json`: the step count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import orjson
import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from opentinker.shared.data.safetensors_header import difference
from opentinker.shared.nn.lora import causal_lm, put_adapter
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import ADAPTER, OPTIMIZER

Parameters = dict[str, nn.Parameter]
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save_model(directory: Path, model: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Save `weights` in plain Hugging Face layout, or as a PEFT adapter directory."""
    if isinstance(model, PeftModel):
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / ADAPTER)
        model.peft_config["default"].save_pretrained(str(directory))
        return
    causal_lm(model).save_pretrained(directory, state_dict=weights, save_original_format=False)
    config = directory / "config.json"
    config.write_bytes(
        orjson.dumps(
            orjson.loads(config.read_bytes()) | {"dtype": str(dtype).removeprefix("torch.")}, option=orjson.OPT_INDENT_2
        )
    )


def rng_state(*, cuda: bool) -> dict[str, Tensor]:
    return {"rng/cpu": torch.get_rng_state(), **({"rng/cuda": torch.cuda.get_rng_state()} if cuda else {})}


def set_rng_state(tensors: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(tensors["rng/cpu"])
    if "rng/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng/cuda"])


def save(directory: Path, state: dict[str, Tensor], steps: int, *, cuda: bool) -> None:
    """Save `state` (moments and masters) with the current random state."""
    tensors = {**state, **rng_state(cuda=cuda)}
    (directory / "trainer").mkdir(exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / OPTIMIZER)
    (directory / "trainer" / "state.json").write_bytes(orjson.dumps({"steps": steps}))


def load(directory: Path, model: nn.Module, parameters: Parameters, optimizer: torch.optim.Optimizer) -> int:
    """Put a checkpoint's adapter, masters, moments and random state in place; returns its step count.

    Full weights were loaded with the model itself. Raises JobFailed, naming tensors, if the checkpoint does not fit.
    """
    tensors = start(directory, model, parameters, optimizer)
    try:
        state = orjson.loads((directory / "trainer" / "state.json").read_bytes())
    except (OSError, ValueError) as error:
        raise JobFailed(f"checkpoint {directory} cannot be resumed: {error}") from error
    set_rng_state(tensors)
    return int(state["steps"])


def start(
    directory: Path, model: nn.Module, parameters: Parameters, optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """Restore adapter and masters, and the moments if an optimizer is passed. Returns all the trainer's tensors.

    Raises JobFailed, naming tensors, if the checkpoint does not fit.
    """
    try:
        tensors: dict[str, Tensor] = load_file(directory / OPTIMIZER)
        if isinstance(model, PeftModel):
            put_adapter(model, directory)
    except (OSError, ValueError, SafetensorError) as error:
        raise JobFailed(f"checkpoint {directory} cannot be resumed: {error}") from error
    _check_fits(directory, tensors, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if f"master/{name}" in tensors:
                parameter.copy_(tensors[f"master/{name}"])
    if optimizer is not None:
        load_moments(tensors, parameters, optimizer)
    return tensors


def moments(parameters: Parameters, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{moment}/{name}": optimizer.state[parameter][moment]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def load_moments(tensors: dict[str, Tensor], parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in parameters.items():
        if f"step/{name}" in tensors:
            optimizer.state[parameter] = {m: tensors[f"{m}/{name}"].to(parameter.device) for m in MOMENTS}


def _check_fits(directory: Path, tensors: dict[str, Tensor], parameters: Parameters) -> None:
    saved = {name.removeprefix("exp_avg/"): t.shape for name, t in tensors.items() if name.startswith("exp_avg/")}
    if saved and (odd := difference(saved, {name: p.shape for name, p in parameters.items()})):
        raise JobFailed(f"checkpoint {directory} does not fit the job's model: trained tensors: {odd}")


def rollback_point(parameters: Parameters, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Copy weights and moments. Returns a function that undoes all later steps: the first of a batch, if a later one is
    refused."""
    copies = [
        (p, p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()} if p in optimizer.state else {})
        for p in parameters.values()
    ]

    def undo() -> None:
        with torch.no_grad():
            for parameter, weights, moments in copies:
                parameter.copy_(weights)
                if moments:
                    optimizer.state[parameter] = moments
                else:
                    optimizer.state.pop(parameter, None)

    return undo
