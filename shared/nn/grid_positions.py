"""Three-dimensional positions (M-RoPE) of a packed stream: https://arxiv.org/abs/2409.12191, section 2.1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opentinker.shared.nn.layout import SEEN, Layout

Grid = tuple[int, int]
"""Height and width of an image in tokens."""


def grid_positions(plan: Layout, grids: Sequence[Grid]) -> Tensor:
    """int64 [3, N]: position of each stream token in time, height and width; `grids`: of `plan.shown`, in order.

    The token in row r and column c of an image that begins at position s has (s, s + r, s + c); text has the same
    number three times and continues after an image of h x w tokens at s + max(h, w).
    """
    device = plan.ids_N.device
    offsets, savings = zip(*(_of_image(grid) for grid in grids), strict=True)
    offset_3F, saving_F = torch.cat(offsets, 1).to(device), torch.cat(savings).to(device)
    seen_N = plan.ids_N >= SEEN
    image_row_N = (plan.ids_N - SEEN).clamp(min=0)
    saving_N = saving_F[image_row_N].where(seen_N, 0)
    saved_N = torch.zeros_like(plan.positions_N)
    lengths = iter(plan.lengths)
    for bucket in plan.buckets:
        ends = torch.tensor([next(lengths) for _ in bucket], device=device)
        real = torch.arange(bucket.shape[1], device=device) < ends[:, None]
        saving = saving_N[bucket]
        saved_N[bucket[real]] = (saving.cumsum(1) - saving)[real]
    return plan.positions_N - saved_N + offset_3F[:, image_row_N].where(seen_N, 0)


def _of_image(grid: Grid) -> tuple[Tensor, Tensor]:
    """Return by token of an image the difference between its position and its place in the sequence [3, tokens], and
    how many positions fewer than tokens precede what follows it [tokens]: all of them are counted at the last token."""
    height, width = grid
    place = torch.arange(height * width)
    offset = torch.stack([-place, place // width - place, place % width - place])
    saving = torch.zeros_like(place)
    saving[-1] = height * width - max(height, width)
    return offset, saving
