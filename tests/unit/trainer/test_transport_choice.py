"""Which transport a member of a weight group has, by where it is, and NCCL's network interface."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from opentinker.services.trainer.weights.transport_choice import Place, place_of, transports
from opentinker.shared.nn.collective_link import NCCL_INTERFACE, CollectiveLink
from opentinker.shared.types.core import Pool
from opentinker.shared.types.workers import Gpu, WorkerInfo

ONE, TWO = "GPU-1", "GPU-2"


@pytest.mark.parametrize(
    ("trainer", "member", "expected"),
    [
        (Place("a", ONE), Place("a", ONE), "ipc"),
        (Place("", ONE), Place("", ONE), "ipc"),
        (Place("a", ONE), Place("a", TWO), "nccl"),
        (Place("a", ONE), Place("b", TWO), "nccl"),
        (Place("a", ONE), Place("a"), "shared"),
        (Place("a"), Place("a"), "gloo"),
        (Place("a"), Place("a", ONE), "gloo"),
        (Place("a", ONE), Place("b"), "gloo"),
        (Place("a"), Place("b", ONE), "gloo"),
        (Place(""), Place(""), "gloo"),
    ],
)
def test_place_decides(trainer: Place, member: Place, expected: str) -> None:
    assert transports(trainer, [member]) == [expected]


def test_mixed_group_has_a_transport_for_each_member() -> None:
    members = [Place("a", ONE), Place("a", TWO), Place("a"), Place("b", "GPU-3"), Place("b")]
    assert transports(Place("a", ONE), members) == ["ipc", "nccl", "shared", "nccl", "gloo"]


def test_second_member_on_another_gpu_is_not_in_nccl() -> None:
    """NCCL refuses two ranks on one GPU."""
    near, far = Place("a", TWO), Place("b", "GPU-3")
    assert transports(Place("a", ONE), [near, near, far, far]) == ["nccl", "shared", "nccl", "gloo"]


def test_several_members_share_the_gpu_of_the_trainer() -> None:
    assert transports(Place("a", ONE), [Place("a", ONE)] * 2) == ["ipc", "ipc"]


def test_place_of_a_worker_is_its_first_gpu_if_it_uses_it() -> None:
    gpus = [Gpu(index=n, uuid=uuid, model="X", memory=1) for n, uuid in enumerate((TWO, ONE))]
    worker = WorkerInfo(id="w", incarnation="i", pool=Pool.ROLLOUT, host="h", pid=1, machine="a", gpus=gpus)
    assert place_of(worker) == Place("a", TWO)
    assert place_of(worker, on_gpu=False) == Place("a")


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
