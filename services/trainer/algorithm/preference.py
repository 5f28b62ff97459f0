"""Preference losses: they decrease as the chosen completion becomes likelier than the rejected one.

P pairs. `chosen_P`, `rejected_P`: log pi(y|x) - log ref(y|x) of a completion y of the prompt x, summed over its learned
tokens; `..._tokens_P`: how many those are.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def sigmoid(chosen_P: Tensor, rejected_P: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), h = chosen - rejected; [P].

    Source: DPO, arXiv 2305.18290, equation 7; e > 0 assumes that a share e of the pairs is the wrong way round
    (conservative DPO: Mitchell, "A note on DPO with noisy preferences and relationship to IPO", 2023).
    """
    h_P = beta * (chosen_P - rejected_P)
    return -(1.0 - label_smoothing) * F.logsigmoid(h_P) - label_smoothing * F.logsigmoid(-h_P)


def ipo(
    chosen_P: Tensor, rejected_P: Tensor, chosen_tokens_P: Tensor, rejected_tokens_P: Tensor, *, beta: float
) -> Tensor:
    """(h - 1 / (2 beta))^2, h = chosen / chosen_tokens - rejected / rejected_tokens; [P].

    Source: IPO, arXiv 2310.12036, equation 17 (beta is its tau). There h is a sum over tokens, and the loss grows with
    the length of completions; means per token are what its authors recommend for language models, and what TRL uses.
    """
    h_P = chosen_P / chosen_tokens_P - rejected_P / rejected_tokens_P
    return (h_P - 1.0 / (2.0 * beta)) ** 2
