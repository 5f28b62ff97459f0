"""GPUs: what NVML says of them, and who gets which. The binding is replaced: no machine of ours has one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opentinker.local import up
from opentinker.local.up import Plan, service_specs
from opentinker.services.scheduler.placement.gpu_matching import described
from opentinker.services.scheduler.placement.types import NO_GPUS, Gpus
from opentinker.shared.runtime import gpus
from opentinker.shared.types.workers import Gpu


class NvmlError(Exception):
    pass


def fake_nvml(count: int, *, linked: tuple[tuple[int, int], ...] = (), numa: bool = True, driver: bool = True) -> Any:
    def init() -> None:
        if not driver:
            raise NvmlError("Driver Not Loaded")

    def node(handle: int) -> int:
        if not numa:
            raise NvmlError("Not Supported")
        return handle // 2

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}{handle}{handle}",
        nvmlDeviceGetName=lambda handle: "NVIDIA X",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 << 30),
        nvmlDeviceGetNumaNodeId=node,
        nvmlDeviceGetP2PStatus=lambda a, b, what: 0 if (a, b) in linked or (b, a) in linked else 1,
    )


def install(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)


def test_gpus_are_described_with_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_nvml(4, linked=((0, 1), (2, 3))))
    found = gpus.visible()
    assert found[1] == Gpu(index=1, uuid="GPU-111", model="NVIDIA X", memory=80 << 30, numa=0, links=[0])
    assert [gpu.numa for gpu in found] == [0, 0, 1, 1] and found[2].links == [3]
    install(monkeypatch, fake_nvml(1, numa=False))
    assert gpus.visible()[0].numa == -1


def test_without_binding_or_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_nvml(4, driver=False))
    assert gpus.visible() == []
    install(monkeypatch, None)  # an import of it fails
    assert gpus.visible() == []


@pytest.mark.parametrize(
    ("environ", "indices"), [("2,0", [2, 0]), ("", []), ("GPU-333", [3]), ("1,9,2", [1]), ("-1", [])]
)
def test_only_those_that_cuda_sees_count(monkeypatch: pytest.MonkeyPatch, environ: str, indices: list[int]) -> None:
    install(monkeypatch, fake_nvml(4))
    assert [gpu.index for gpu in gpus.visible({gpus.VISIBLE: environ})] == indices


def test_gpus_are_split_between_trainers_and_rollout_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def given(count: int, **plan: Any) -> dict[str, str | None]:
        install(monkeypatch, fake_nvml(count))
        specs = service_specs(Plan(data_dir=tmp_path, **plan), 8080, "nats://n", "redis://r")
        return {spec.name: spec.env.get(gpus.VISIBLE) for spec in specs}

    found = given(4, rollout_workers=2)
    assert found == {
        **{"trainer-0": "0,1", "rollout-0": "2", "rollout-1": "3", "reference-0": "0,1"},
        **{"scheduler": "", "env-0": ""},
    }
    assert given(1, rollout_workers=2)["rollout-1"] == "0", "one for all"
    assert set(given(0).values()) == {None}, "nothing is said where there is none"


def test_reference_forward_uses_the_gpu_if_its_torch_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def device(torch: str) -> str | None:
        monkeypatch.setattr(up, "version", lambda _: torch)
        specs = service_specs(Plan(data_dir=tmp_path), 8080, "nats://n", "redis://r")
        return {spec.name: spec.env.get("OPENTINKER_REFERENCE_DEVICE") for spec in specs}["reference-0"]

    install(monkeypatch, fake_nvml(1))
    assert (device("2.13.0"), device("2.13.0+cu130"), device("2.13.0+cpu")) == ("cuda", "cuda", None)
    monkeypatch.setenv("OPENTINKER_REFERENCE_DEVICE", "cpu")
    assert device("2.13.0") is None, "it stays what the settings say"
    monkeypatch.delenv("OPENTINKER_REFERENCE_DEVICE")
    install(monkeypatch, fake_nvml(0))
    assert device("2.13.0") is None


def test_the_scheduler_has_what_it_starts_workers_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_nvml(2))
    plan = Plan(data_dir=tmp_path, trainers=0, rollout_workers=0)
    specs = {spec.name: spec for spec in service_specs(plan, 8080, "nats://n", "redis://r")}
    assert (specs["scheduler"].env[gpus.VISIBLE], specs["env-0"].env[gpus.VISIBLE]) == ("0,1", "")


def test_neighbours_of_the_first_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_nvml(4, linked=((0, 3),)))
    found = gpus.visible()
    assert [gpu.index for gpu in gpus.nearest(found)] == [0, 3, 1, 2]
    assert described(found) == Gpus((80 << 30,) * 4, linked=2, near=2)
    assert described([]) == NO_GPUS and gpus.nearest([]) == []


def test_where_there_are_fewer_than_workers_the_last_have_none() -> None:
    found = [Gpu(index=n, uuid="", model="", memory=1) for n in range(2)]
    parts = gpus.parted(found, ["a", "b", "c"])
    assert {name: gpus.pin_of(part) for name, part in parts.items()} == {"a": "0", "b": "1", "c": ""}
    assert gpus.pinned(found, ["a", "b", "c"])["c"] == "0"


def test_what_is_not_visible_to_up_is_not_given_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_nvml(8))
    monkeypatch.setenv(gpus.VISIBLE, "5,6")
    specs = {spec.name: spec for spec in service_specs(Plan(data_dir=tmp_path), 8080, "nats://n", "redis://r")}
    assert [specs[name].env[gpus.VISIBLE] for name in ("trainer-0", "rollout-0")] == ["5", "6"]
    assert specs["trainer-0"].env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
