"""A process that receives versions in a weight group and says whether every byte was right: see `weights.py`."""

from __future__ import annotations

import sys
from typing import get_args

import torch

from loadtest.gpu.weights import ADDRESS, TIMEOUT_S, contents
from opentinker.shared.nn.transport import WeightGroup
from opentinker.shared.types.swap import Transport


def main() -> None:
    rank, device, port, world, size, count, versions, proposed = sys.argv[1:]
    transports: list[Transport] = [one for one in proposed.split(",") if one in get_args(Transport)]  # type: ignore[misc]
    group = WeightGroup.join(
        address=ADDRESS, port=int(port), rank=int(rank), world=int(world), device=device, timeout_s=TIMEOUT_S,
        transports=transports,
    )  # fmt: skip
    buckets: list[torch.Tensor] | None = None
    wrong = []
    for version in range(int(versions)):
        buckets = group.receive([int(size)] * int(count), buckets)
        for number, bucket in enumerate(buckets):
            if not torch.equal(bucket, contents(int(size), version, number, str(bucket.device))):
                wrong.append(f"bucket {number} of version {version}")
    group.close()
    print("good" if not wrong else f"wrong: {', '.join(wrong)}", flush=True)


if __name__ == "__main__":
    main()
