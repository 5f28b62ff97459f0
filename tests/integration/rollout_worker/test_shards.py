"""Weights of an engine whose model is divided among processes: the memory that they share, and their sums."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm

READER = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
print(mmap.mmap(file, 0)[:3].hex())
"""


def answer(part: torch.Tensor, whole: torch.Tensor, **more: Any) -> dict[str, Any]:
    from opentinker.services.rollout_worker.engines.shards import bit_sum

    return {"seconds": 0.1, "part": bit_sum([part]), "whole": bit_sum([whole]), **more}


def test_other_processes_read_the_buckets_that_one_holds() -> None:
    from opentinker.services.rollout_worker.engines.shards import SharedBuckets

    held = SharedBuckets()
    buckets = held.hold([3, 5000, 0])
    assert [bucket.numel() for bucket in buckets] == [3, 5000, 0]
    buckets[0].copy_(torch.tensor([1, 2, 255]))
    buckets[1][-1] = 7
    read = subprocess.run([sys.executable, "-c", READER, held.place], capture_output=True, text=True, check=True)
    assert read.stdout.strip() == "0102ff"
    reader = SharedBuckets()
    mapped = reader.map(held.place, [3, 5000, 0])
    assert mapped[0].tolist() == [1, 2, 255] and mapped[1][-1] == 7
    assert held.hold([3, 5000, 0]) is buckets and reader.map(held.place, [3, 5000, 0]) is mapped
    other = held.hold([8])
    other[0].fill_(9)
    (seen,) = reader.map(held.place, [8])
    assert seen.tolist() == [9] * 8 and mapped[0].tolist() == [1, 2, 255], "what is mapped stays"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_hold_together_what_was_sent(dtype: torch.dtype) -> None:
    from opentinker.services.rollout_worker.engines.shards import bit_sum, sent_sum, together

    torch.manual_seed(0)
    matrix, norm = torch.randn(8, 6), torch.randn(6)
    sent = sent_sum([("m", matrix), ("n", norm)], dtype)
    matrix, norm = matrix.to(dtype), norm.to(dtype)
    assert sent == bit_sum([norm, matrix.T]) != bit_sum([matrix])
    halves = matrix[:, :3], matrix[:, 3:]
    first, second = answer(halves[0], norm, sent=sent), answer(halves[1], norm)
    done = together([first, second])
    assert done["seconds"] == 0.1 and done["parts"] == [first["part"], second["part"]]
    changed = halves[1].clone()
    changed[0, 0] += 1
    assert "2 ranks together do not hold" in together([first, answer(changed, norm)])["error"]
    assert "rank 1 has not loaded" in together([first, answer(halves[1], norm + 1)])["error"]
    few = together([first, answer(halves[1][:4], norm)])["error"]
    assert "the 2 ranks together hold" in few and "rollout_gpus = 1" in few


def test_weights_that_came_under_other_names_are_not_counted() -> None:
    from opentinker.services.rollout_worker.engines.shards import held_sums, together

    shapes = {"norm": 3, "down": 8, "one": 2, "other": 4}
    sent = {f"layer.{name}.weight": [size, 2] for name, size in shapes.items()}

    def held(*more: str) -> dict[str, Any]:
        """Of a rank with all of `norm` and `both`, and half of `down`."""
        sizes = {"norm": 3, "down": 4, "both": 6, **dict.fromkeys(more, 2)}
        layer = torch.nn.ModuleDict({name: torch.nn.Linear(2, size, bias=False) for name, size in sizes.items()})
        model = torch.nn.ModuleDict({"layer": layer})
        model.packed_modules_mapping = {"both": ["one", "other"]}
        return held_sums(model, sent, torch.float32, 0)

    found = held()
    assert (found["part"][0], found["whole"][0]) == (8, 18), "what is joined and not divided is on each rank"
    unknown = held("tower")
    assert unknown == {"unchecked": "layer.tower.weight"}
    done = together([{"seconds": 0.1, **unknown, "sent": [34, 0]}, {"seconds": 0.1, **unknown}])
    assert "error" not in done and done["parts"] == [] and done["unchecked"] == "layer.tower.weight"


def test_the_answer_of_all_ranks_is_none_until_each_has_one() -> None:
    from opentinker.services.rollout_worker.engines.shards import together

    assert together([{"seconds": 1.0}, None]) is None
    assert together([{"seconds": 1.0, "place": "/x"}, {"seconds": 2.0}]) == {"seconds": 2.0, "place": "/x", "parts": []}
    assert together([{"seconds": 1.0}, {"error": "no"}]) == {"error": "rank 1: no"}
    assert together([{"error": "no"}, {"seconds": 1.0}]) == {"error": "no"}
