"""A deterministic job on a bank has the bits of one with a trainer to itself, next to busy neighbours too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opentinker.services.trainer.bank.adapter_bank import AdapterBank, Rows
from opentinker.services.trainer.bank.bank_loop import BankLoop
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.job_adapter import JobAdapter
from opentinker.services.trainer.bank.limits import BankLimits
from opentinker.services.trainer.bank.mixed_batch import PieceResult
from opentinker.services.trainer.bank.shared_learners import LEARNERS, SharedRlLearner
from opentinker.services.trainer.learners.dpo import DpoLearner
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.services.trainer.learners.sft import SftLearner
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.errors import JobFailed
from tests.samples.row_samples import chat_model, random_pairs, random_rows, row_spec
from tests.support.factories import V0
from tests.support.learning import LORA, loaded, random_groups, torch_spec
from tests.unit.trainer.bank.conftest import Serve, tensors

LIMITS = BankLimits(step_tokens=96, datum_tokens=96, command_tokens=96, waiting_tokens=1024, rank=16)
STEPS = 3
OWN: dict[str, Any] = {"rl": RlLearner, "sft": SftLearner, "dpo": DpoLearner}
JOBS: dict[str, dict[str, Any]] = {
    "rl": {"rollout": {"temperature": 0.7}},
    "rl, two updates": {
        "algorithm": {"loss": "ppo", "proximal": "recomputed", "updates_per_batch": 2, "entropy_coef": 0.01}
    },
    "rl, bfloat16": {"model": {"dtype": "bfloat16"}},
    "sft": {},
    "dpo": {},
}


@pytest.fixture(autouse=True)
def usual_algorithms() -> Iterator[None]:
    """A trainer of one deterministic job changes torch's setting for its process."""
    yield
    torch.use_deterministic_algorithms(False)


def job_spec(base: Path, kind: str, *, deterministic: bool = True, **parts: Any) -> Any:
    """A job whose batches are several micro-batches, and more than one command of a bank."""
    train = {"lr": 3e-3, "tokens_per_micro_batch": 40, "weight_decay": 0.1, "grad_clip": 0.5, "warmup_steps": 2}
    parts = {**parts, "model": {"lora": LORA, **parts.get("model", {})}}
    parts["train"] = {**train, "deterministic": deterministic, **parts.get("train", {})}
    if kind != "rl":
        return row_spec(base, "unused.jsonl", kind, **parts)
    if deterministic:
        parts["algorithm"] = {"max_staleness": 0, **parts.get("algorithm", {})}
        parts["rollout"] = {"seed": 1, **parts.get("rollout", {})}
    return torch_spec(base, **parts)


def train(learner: Any, steps: Sequence[int], place: Path) -> dict[str, Tensor]:
    for step in steps:
        if isinstance(learner, RlLearner):
            learner.step(random_groups(step), V0)
        else:
            learner.step((random_rows if isinstance(learner, SftLearner) else random_pairs)(step, 6))
    return tensors(learner, place)


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@contextmanager
def busy(loop: BankLoop, base: Path) -> Iterator[Callable[[], int]]:
    """Two jobs step all the time; yields how many steps they have made."""
    over, steps = threading.Event(), list[int]()

    def run(number: int) -> None:
        parts: dict[str, Any] = {"train": {"tokens_per_micro_batch": 20 + 10 * number}}
        spec = job_spec(base, "rl", deterministic=False, **parts)
        learner = SharedRlLearner(spec, JobAdapter(loop, f"neighbour{number}"))
        learner.load(None)
        while not over.is_set():
            learner.step(random_groups(len(steps)), V0)
            steps.append(number)
        learner.close()

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(run, number) for number in range(2)]
        try:
            yield lambda: len(steps)
        finally:
            over.set()
    for one in running:
        one.result()


@pytest.mark.parametrize("job", JOBS)
def test_a_job_next_to_busy_ones_has_the_bits_of_a_trainer_to_itself(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    """Weights and moments, unbroken and resumed; the micro-batches of the job are passes of the bank."""
    kind, base = job.partition(",")[0], chat_model(tmp_path / "m", layers=2)
    spec = job_spec(base, kind, **JOBS[job])
    expected = train(loaded(OWN[kind](spec)), range(STEPS), tmp_path / "own")
    torch.use_deterministic_algorithms(False)
    bank = AdapterBank(BaseModel(str(base), spec.model.dtype), tmp_path / "bank", LIMITS, slots=3)
    passes, run_pass = list[list[str]](), bank.run_pass

    def recorded(rows: Sequence[Rows]) -> list[PieceResult]:
        passes.append([part.adapter for part in rows for _ in part.units])
        return run_pass(rows)

    monkeypatch.setattr(bank, "run_pass", recorded)
    loop = serve(bank)
    with busy(loop, base) as made:
        first = LEARNERS[kind](spec, JobAdapter(loop, "job"))
        first.load(None)
        found = train(first, range(STEPS), tmp_path / "found")
        first.close()
        require_equal(found, expected)
        second = LEARNERS[kind](spec, JobAdapter(loop, "half"))
        second.load(None)
        train(second, range(1), tmp_path / "half")
        second.close()
        third = LEARNERS[kind](spec, JobAdapter(loop, "resumed"))
        third.load(tmp_path / "half")
        require_equal(train(third, range(1, STEPS), tmp_path / "resumed"), expected)
        assert made() > 0
    own = [number for number, adapters in enumerate(passes) if "job" in adapters]
    assert len(own) > STEPS and all(passes[number] == ["job"] for number in own)
    assert len(own) < own[-1] - own[0]  # passes of others came in between
    assert not torch.are_deterministic_algorithms_enabled()


def test_micro_batches_above_a_pass_are_refused(serve: Serve, small: Path, base: BaseModel, tmp_path: Path) -> None:
    loop = serve(AdapterBank(base, tmp_path / "bank", LIMITS, slots=1))
    spec = job_spec(small, "rl", train={"tokens_per_micro_batch": 97})
    learner = SharedRlLearner(spec, JobAdapter(loop, "job"))
    with pytest.raises(JobFailed, match=r"tokens_per_micro_batch = 97: with train\.deterministic at most 96"):
        learner.load(None)


def test_a_deterministic_adapter_stays_one_in_files(base: BaseModel, tmp_path: Path) -> None:
    first = AdapterBank(base, tmp_path, LIMITS, slots=1)
    for name in ("exact", "mixed"):
        first.create(name, LoraSpec(rank=4), seed=0, deterministic=name == "exact")
    first.close()
    second = AdapterBank(base, tmp_path, LIMITS, slots=1)
    assert second.residency.deterministic == {"exact"}
    assert [second.read(name).deterministic for name in ("exact", "mixed")] == [True, False]
    second.remove("exact")
    assert not second.residency.deterministic
