"""All weights of a model in the place of an adapter: the base computes with them in the passes of their own model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn

from opentinker.services.trainer.bank.adapter import FullShape


@contextmanager
def computing_with(causal: nn.Module, shape: FullShape, weights: Tensor, gradient: Tensor | None) -> Iterator[None]:
    """Let the model compute with these weights. `gradient`: flat vector that the backward pass adds to."""
    own, sums = shape.named(weights), {} if gradient is None else shape.named(gradient)
    parameters = dict(causal.named_parameters())
    before = {name: parameter.data for name, parameter in parameters.items()}
    with ExitStack() as held:
        held.callback(_give_back, parameters, before)
        for name, parameter in parameters.items():
            parameter.data = own[name].to(parameter.dtype)
            if name in sums:
                parameter.requires_grad_(True)
                hook = parameter.register_post_accumulate_grad_hook(partial(_add_to, sums[name]))
                held.callback(hook.remove)
        yield


def _add_to(sum_: Tensor, parameter: Tensor) -> None:
    """Add a parameter's gradient, which is complete, and free its memory."""
    assert parameter.grad is not None
    sum_.add_(parameter.grad)
    parameter.grad = None


def _give_back(parameters: dict[str, nn.Parameter], before: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.requires_grad_(False)
        parameter.data, parameter.grad = before[name], None
