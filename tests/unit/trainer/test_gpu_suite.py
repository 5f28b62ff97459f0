"""The GPU suite's own logic: what it starts with, what its table says, and its checks with tiny shapes on the CPU."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
import torch
from packaging.requirements import Requirement

from loadtest.gpu import __main__ as suite
from loadtest.gpu import bootstrap, job, speed, wheels
from loadtest.gpu._bench import Bench, Finding, Skipped, at_least, at_most
from loadtest.gpu._models import FOUR, HALF, ONE_AND_A_HALF, TINY, made
from loadtest.gpu.job import JOB_TIMEOUT_S
from loadtest.gpu.weights import TIMEOUT_S
from loadtest.gpu.wheels import LEFT_OUT
from opentinker.shared.data.gpu_memory import ModelSize, TrainingMemory, model_size, training_bytes
from opentinker.shared.data.model_files import parameters_in
from opentinker.shared.nn import attention
from opentinker.shared.spec import JobSpec, parse_spec
from tests.support.learning import torch_spec

QUICK = ("attention", "bank", "reference", "memory", "speed")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench("cpu", True, tmp_path)


def test_checks_pass_on_the_cpu(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    table = suite.run(bench, [*QUICK], 500.0)
    said = capsys.readouterr().out
    assert table.bad == 0, said
    assert "| attention | attention, bf16, 8/2 heads of 64: output |" in said
    assert "| bank | adapter 2 of 2 in a batch, bfloat16 base, gradient: difference from the adapter alone |" in said
    assert "memory is measured on GPUs alone" in said and "all good, 3 skipped" in said
    for name in ("0.5B", "1.5B", "4B"):
        assert name not in said, "no figure of a tiny model stands under a real one's name"


def test_wrong_attention_is_a_bad_line(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention._row_by_row
    monkeypatch.setattr(attention, "_row_by_row", lambda *given: real(*given) * 1.1)
    assert suite.run(bench, ["attention"], 500.0).bad


def test_what_raises_and_what_is_late_is_bad_and_the_rest_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Bench) -> Iterator[Finding]:
        yield at_most("first", 1.0, 2.0)
        raise RuntimeError("CUDA error: out of luck\nmore")

    def lacking(_: Bench) -> Iterator[Finding]:
        raise Skipped("a second GPU is needed")
        yield

    def fine(_: Bench) -> Iterator[Finding]:
        yield at_least("last", 3.0, 2.0)

    monkeypatch.setitem(suite.SUBJECTS, "weights", suite.Subject(60.0, (broken, lacking, fine)))
    table = suite.run(bench, ["weights"], 500.0)
    said = capsys.readouterr().out
    assert (table.bad, table.skipped) == (1, 1)
    assert "RuntimeError: CUDA error: out of luck" in said and "a second GPU is needed" in said and "| last |" in said
    assert suite.run(bench, ["weights"], -1.0).bad == 3


class AsOnGpu(Bench):
    on_gpu = True

    def forget(self) -> None:
        pass

    def now(self) -> float:
        return 0.0


def test_specs_of_jobs_on_a_gpu_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs: dict[str, JobSpec] = {}

    def submitted(argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        file = Path(argv[argv.index("run") + 1])
        specs[file.stem] = parse_spec(orjson.loads(file.read_bytes()))
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(subprocess, "run", submitted)
    monkeypatch.setattr(job, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: True)))
    for check in (job.services, job.sleeping, job.vllm):
        assert [*check(AsOnGpu("cuda", True, tmp_path))]
    asked = {name: (spec.resources.trainer_gpus, spec.resources.rollout_gpus) for name, spec in specs.items()}
    assert asked == {"services": (1, 0), "sleeping": (1, 0), "vllm": (1, 1)}


def test_a_check_begins_only_with_its_limit_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fine(_: Bench) -> Iterator[Finding]:
        yield Finding("it ran", "")

    monkeypatch.setattr(suite, "describe", lambda _: "")
    monkeypatch.setitem(suite.SUBJECTS, "weights", suite.Subject(100.0, (fine,)))
    bench = AsOnGpu("cuda", True, tmp_path)
    assert suite.run(bench, ["weights"], 99.0).bad == 1
    assert "not run: it may take 100 s, and 99 s are left" in capsys.readouterr().out
    assert suite.run(bench, ["weights"], 200.0).bad == 0 and "it ran" in capsys.readouterr().out


def test_limits_leave_time_for_the_checks_own() -> None:
    assert suite.SUBJECTS["job"].limit_s > JOB_TIMEOUT_S
    assert suite.SUBJECTS["weights"].limit_s > TIMEOUT_S
    assert all(subject.limit_s < suite.BUDGET_S / 2 for subject in suite.SUBJECTS.values())


def test_a_check_that_hangs_is_the_last_line_of_the_table(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def over_at_once(limit_s: float, place: Path, report: Callable[[], None]) -> Iterator[None]:
        assert 0 < limit_s <= 77.0 and place == bench.place
        report()
        raise SystemExit(1)
        yield

    monkeypatch.setattr(suite, "limited", over_at_once)
    with pytest.raises(SystemExit):
        suite.run(bench, ["attention"], 77.0)
    said = capsys.readouterr().out
    assert "| attention | kernel | hangs: it has not ended after 77 s" in said and "1 lines, 1 bad" in said


HANGS = """
import subprocess, sys, time
from pathlib import Path
from loadtest.gpu._watchdog import limited
from opentinker.shared.runtime.parent_death import adopt_orphans

adopt_orphans()
place = Path(sys.argv[1])
place.mkdir()
with limited(60.0, place, print):
    pass
with limited(2.0, place, lambda: print("reported", flush=True)):
    child = subprocess.Popen(["sh", "-c", "sleep 500 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    print(child.pid, child.stdout.readline().strip(), flush=True)
    child.wait()
print("went on")
"""


def test_a_check_that_hangs_ends_with_its_processes_and_its_files(tmp_path: Path) -> None:
    place = tmp_path / "place"
    argv = [sys.executable, "-c", HANGS, str(place)]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, cwd=bootstrap.ROOT)
    pids, *told = ran.stdout.splitlines()
    assert (ran.returncode, told) == (1, ["reported"]), ran.stderr
    assert len(pids.split()) == 2 and not any(Path("/proc", pid).exists() for pid in pids.split())
    assert not place.exists()


def test_numbers_that_are_none_are_bad() -> None:
    assert not at_most("x", float("nan"), 1.0).good and not at_least("x", float("nan"), 1.0).good


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing() -> None:
    ran = subprocess.run([sys.executable, bootstrap.__file__], capture_output=True, text=True, check=False)
    assert ran.returncode == bootstrap.NO_GPU
    assert "is a build without CUDA" in ran.stderr or "finds no GPU" in ran.stderr


def wheel(folder: Path, name: str, number: str) -> None:
    (folder / f"{name}-{number}-py3-none-any.whl").touch()


@pytest.mark.parametrize("package", ["peft", "safetensors", "structlog"])
def test_what_a_packed_package_cannot_be_imported_without_is_packed_too(package: str) -> None:
    wanted = [Requirement(line) for line in importlib.metadata.requires(package) or ()]
    needed = {bootstrap.normal(one.name) for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})}
    assert not {name for name in needed if LEFT_OUT.match(name)} - bootstrap.NOT_PACKED


def test_what_is_needed_and_neither_packed_nor_required_by_torch_is_named_and_can_be_packed() -> None:
    required = {bootstrap.normal(Requirement(line).name) for line in importlib.metadata.requires("torch") or ()}
    absent = {name for name in bootstrap.NEEDED if LEFT_OUT.match(name)} - required
    assert absent == bootstrap.NOT_PACKED
    assert {*wheels.EXTRA} == absent - {"torch"}


def test_what_is_lacking_says_how_to_pack_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for missing, said in ((["numpy", "msgspec"], "make gpu-wheels GPU_WITH=numpy,"), (["msgspec"], "make gpu-wheels,")):
        with pytest.raises(SystemExit) as stopped:
            bootstrap.add(missing, [], tmp_path, str(tmp_path))
        assert stopped.value.code == bootstrap.NO_GPU
        assert f"lacks {', '.join(missing)}" in (told := capsys.readouterr().err) and said in told


def test_a_python_without_pip_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path, "msgspec", "0.22.0")
    monkeypatch.setattr(bootstrap, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: None)))
    with pytest.raises(SystemExit) as stopped:
        bootstrap.add(["msgspec"], [*tmp_path.glob("*.whl")], tmp_path, str(tmp_path / "site"))
    assert stopped.value.code == bootstrap.NO_GPU
    assert "this Python has no pip" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = AsOnGpu("cuda", True, tmp_path)
    monkeypatch.setattr(AsOnGpu, "free_bytes", lambda _: 1000)
    with pytest.raises(Skipped, match="all weights of a tiny model need about"):
        list(speed.half(bench))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(Skipped, match="a tiny model takes"):
        made(bench, TINY)
    assert not list(tmp_path.iterdir())


def test_numpy_is_packed_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    found = "torch==2.11.0\nnumpy==2.5.5\nmsgspec==0.22.0\npillow==13.0.0\n"
    resolved = subprocess.CompletedProcess[str]([], 0, found, "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: resolved)
    assert wheels.requirements("3.12", ["pillow"]) == ["msgspec==0.22.0"]
    assert wheels.requirements("3.12", extra=["numpy"]) == ["numpy==2.5.5", "msgspec==0.22.0", "pillow==13.0.0"]


def test_only_missing_and_old_packages_come_from_the_wheels(tmp_path: Path) -> None:
    for name, number in (
        *(("numpy", "2.5.5"), ("msgspec", "0.22.0"), ("transformers", "5.19.0"), ("huggingface_hub", "2.4.0")),
        *(("pydantic", "2.14.4"), ("pydantic_core", "2.50.5"), ("idna", "3.20")),
    ):
        wheel(tmp_path, name, number)
    have = {
        **{"numpy": (2, 0), "transformers": (5, 2), "huggingface-hub": (2, 0), "pydantic": (2, 12)},
        **{"pydantic-core": (2, 41), "idna": (3, 1)},
    }
    chosen = [path.name.split("-")[0] for path in bootstrap.wheels_to_install(tmp_path, have)]
    assert chosen == ["huggingface_hub", "msgspec", "transformers"]
    assert "msgspec" in bootstrap.lacking(have) and "numpy" not in bootstrap.lacking(have)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.11.0+cu130", (2, 11, 0)), ("5.16.1", (5, 16, 1)), ("2.13.0a1", (2, 13, 0)), ("29", (29,))],
)
def test_versions_are_their_leading_numbers(text: str, expected: tuple[int, ...]) -> None:
    assert bootstrap.version(text) == expected


def test_shapes_have_the_size_that_they_are_named_for() -> None:
    for shape, billions in ((HALF, 0.5), (ONE_AND_A_HALF, 1.5), (FOUR, 4.0)):
        assert shape.matrix_parameters / 1e9 == pytest.approx(billions, rel=0.1)
    assert TINY.operations([10]) == 6 * 10 * TINY.matrix_parameters + 12 * 2 * 64 * 50


def test_memory_is_planned_from_the_config(bench: Bench) -> None:
    base = made(bench, TINY)
    size = model_size(orjson.loads((base / "config.json").read_bytes()))
    assert size == ModelSize(64, 128, 2, 64, 32, 64, True)
    count = parameters_in(base)
    assert count is not None and abs(size.parameters - count) < 0.02 * count, "a small file is 1.6 % header"
    full = training_bytes(torch_spec(base, model={"dtype": "bfloat16"}), size)
    assert full.weights == full.gradients == 4 * size.parameters and full.moments == 2 * full.weights
    assert full.casts == full.snapshot == 2 * size.parameters
    short = training_bytes(torch_spec(base, train={"gradient_checkpointing": True}), size)
    assert short.activations < training_bytes(torch_spec(base), size).activations
    lora = training_bytes(torch_spec(base, model={"lora": {"rank": 4}}), size)
    assert lora.weights > full.weights, "the base and the adapter"
    assert lora.moments < full.moments / 8 and lora.gradients < full.gradients / 8
    assert model_size({"hidden_size": 8}) is None
    experts = {**orjson.loads((base / "config.json").read_bytes()), "num_experts": 8, "num_experts_per_tok": 2}
    assert model_size(experts) is None, "its weights have not been counted"
    counted = model_size({**experts, "moe_intermediate_size": 32, "n_shared_experts": 1}, 10**6)
    assert counted is not None and (counted.parameters, counted.inner) == (10**6, 2 * (32 + 64) + 32)


def test_ranks_share_what_their_stage_of_zero_divides() -> None:
    size = ModelSize(3584, 18_944, 28, 3584, 512, 152_064, False)
    count, largest, ranks = size.parameters, 152_064 * 3584, 4

    def memory(parallel: str, ranks: int = ranks, lora: dict[str, int] | None = None, **model: str) -> TrainingMemory:
        resources = {"trainer_ranks": ranks}
        return training_bytes(
            torch_spec("b", model={"dtype": "bfloat16", "lora": lora} | model, resources=resources,
                       train={"parallel": parallel}),
            size,
        )  # fmt: skip

    whole = memory("data")
    assert whole == memory("data", 1), "every rank has everything"
    share, first, second, third = 4 * count // ranks, memory("zero1"), memory("zero2"), memory("zero3")
    assert first == whole._replace(moments=2 * share, shares=share), "its masters"
    assert second == first._replace(gradients=share + 4 * largest)
    weights = {"weights": share, "gradients": 4 * largest, "casts": 2 * count + 4 * largest}
    assert third == whole._replace(moments=2 * share, shares=share, **weights)
    assert third.rest == 4 * share + 2 * 2 * count < whole.rest
    assert third.total < second.total < first.total < whole.total
    adapter, divided = memory("data", lora={"rank": 8}), memory("zero3", lora={"rank": 8})
    assert divided.weights == adapter.weights // ranks and divided.casts == 2 * largest and not divided.gradients
    led = training_bytes(torch_spec("b", resources={"trainer_ranks": 2}), size, leads=False)
    assert led.snapshot == 0, "rank 0 alone sends versions"
