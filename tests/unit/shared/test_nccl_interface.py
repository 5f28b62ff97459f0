"""The network interface that NCCL is told to use."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from opentinker.shared.nn.collective_link import NCCL_INTERFACE, CollectiveLink


@pytest.mark.parametrize(("named", "expected"), [(None, "=lo"), ("eth7", "eth7")])
def test_nccl_has_the_interface_by_which_members_meet_for_as_long_as_the_process_lives(
    monkeypatch: pytest.MonkeyPatch, named: str | None, expected: str
) -> None:
    monkeypatch.setenv(NCCL_INTERFACE, named or "")
    if named is None:
        del os.environ[NCCL_INTERFACE]  # restored at the end

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, *_: object) -> None:
            """It makes its connections with its first collective."""

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    (link,) = CollectiveLink.of(dist.HashStore(), 0, ["nccl"], "127.0.0.1", 1.0)
    assert link.kind == "nccl" and os.environ[NCCL_INTERFACE] == expected
