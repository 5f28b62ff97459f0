"""A job on a bank makes the same steps, metrics and checkpoints as a job with a trainer to itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from opentinker.services.trainer.bank.adapter_bank import AdapterBank
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.job_adapter import JobAdapter
from opentinker.services.trainer.bank.limits import BankLimits
from opentinker.services.trainer.bank.shared_learners import (
    SharedDpoLearner,
    SharedPolicy,
    SharedRlLearner,
    SharedSftLearner,
)
from opentinker.services.trainer.data.chat import Tokens
from opentinker.services.trainer.data.examples import Example
from opentinker.services.trainer.learners.base import Interrupted, NonFinite, TooLong
from opentinker.services.trainer.learners.dpo import DpoLearner
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.services.trainer.learners.sft import SftLearner
from opentinker.shared.types.errors import JobFailed
from tests.samples.row_samples import chat_model, random_pairs, random_rows, row_spec
from tests.support.factories import V0
from tests.support.learning import LORA, loaded, random_groups, torch_spec
from tests.unit.trainer.bank.conftest import MakeBank, Serve, tensors

LIMITS = BankLimits(step_tokens=256, datum_tokens=128, command_tokens=512, waiting_tokens=1024, rank=16)
ALGORITHMS: dict[str, dict[str, Any]] = {
    "default": {},
    "recomputed": {"loss": "ppo", "proximal": "recomputed", "updates_per_batch": 2},
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean"},
    "cispo": {"loss": "cispo", "aggregation": "constant"},
    "dppo": {"loss": "dppo", "entropy_coef": 0.01},
    "sapo": {"loss": "sapo", "entropy_coef": 0.01},
    "importance_sampling": {"loss": "importance_sampling"},
    "tis": {"loss": "ppo", "proximal": "recomputed", "correction": "tis"},
    "icepop": {"loss": "ppo", "proximal": "recomputed", "correction": "icepop"},
    "geometric": {"loss": "ppo", "correction": "geometric", "updates_per_batch": 2},
    "kl": {"loss": "ppo", "kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k2"},
    "rae": {"advantage": "rae"},
}
WAITS = {"trainer/bank_wait_seconds", "trainer/bank_other_jobs_seconds"}
Share = Callable[..., SharedRlLearner]


@pytest.fixture
def share(make_bank: MakeBank, serve: Serve, small: Path) -> Share:
    """Return a function that makes learners on one bank."""
    loop = serve(make_bank(limits=LIMITS, slots=2))

    def make(name: str = "job", **parts: Any) -> SharedRlLearner:
        return SharedRlLearner(spec(small, **parts), JobAdapter(loop, name))

    return make


def spec(base: Path, **parts: Any) -> Any:
    parts = {"train": {}, **parts}
    parts["train"] = {"tokens_per_micro_batch": 40, "weight_decay": 0.1, "grad_clip": 0.5, **parts["train"]}
    return torch_spec(base, **{"model": {"lora": LORA}, **parts})


def test_torch_s_generators_are_left_to_adapters_that_are_created_meanwhile(share: Share, small: Path) -> None:
    """Other jobs draw their first weights in the bank's thread while this one makes a step."""
    games = {
        "environment": {"name": "gomoku", "config": {"opponent": "self"}},
        "policies": {"a": {}, "b": {}},
        "seats": {"black": "a", "white": "b"},
    }
    fixed = {"algorithm": {"max_staleness": 0}, "rollout": {"seed": 1}}
    learner = share(train={"deterministic": True, "tokens_per_micro_batch": 40}, **games, **fixed)
    with learner.random_state.held():
        torch.manual_seed(1)
    torch.manual_seed(2)
    with learner.random_state.held():
        drawn = torch.rand(3)
    torch.manual_seed(2)
    assert drawn.equal(torch.rand(3))


@pytest.fixture(scope="session")
def trained(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a job that trained alone, whose B is not 0."""
    place: Path = tmp_path_factory.mktemp("trained")
    learner = loaded(RlLearner(spec(small, train={"lr": 3e-3})))
    for number in range(2):
        learner.step(random_groups(90 + number), V0)
    learner.save(place)
    return place


def gap(found: dict[str, Tensor], expected: dict[str, Tensor], begins: str) -> float:
    names = [name for name in expected if name.startswith(begins)]
    one, other = (torch.cat([some[name].double().flatten() for name in names]) for some in (found, expected))
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_equals_that_of_a_trainer_of_its_own(
    share: Share, small: Path, trained: Path, tmp_path: Path, name: str
) -> None:
    """Gradients (by the first moments), weights and all metrics, for every kind of loss."""
    parts = {"algorithm": ALGORITHMS[name], "rollout": {"temperature": 0.7}}
    groups = random_groups(3, reference=name == "kl")
    found: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for learner, seen in ((share(**parts), found), (RlLearner(spec(small, **parts)), expected)):
        learner.start(trained, optimizer=False)
        seen["metrics"] = learner.step(groups, V0)
        seen["tensors"] = tensors(learner, tmp_path / str(type(learner).__name__))
    assert found["tensors"].keys() == expected["tensors"].keys()
    bound = 1e-6 if "updates_per_batch" not in ALGORITHMS[name] else 1e-4  # the second update is from other weights
    assert gap(found["tensors"], expected["tensors"], "exp_avg/") < bound
    assert gap(found["tensors"], expected["tensors"], "base_model") < 1e-5
    for metric, value in expected["metrics"].items():
        if not metric.endswith("_seconds"):
            assert found["metrics"].pop(metric) == pytest.approx(value, rel=1e-4, abs=1e-5), metric
    assert not [metric for metric in found["metrics"] if not metric.endswith("_seconds")]


def test_jobs_that_step_at_the_same_time_learn_what_each_would_alone(
    share: Share, serve: Serve, make_bank: MakeBank, small: Path, tmp_path: Path
) -> None:
    """Three on two slots; ranks, losses, temperatures and learning rates differ."""
    parts: list[dict[str, Any]] = [
        {"model": {"lora": LORA}},
        {"model": {"lora": {"rank": 8, "alpha": 4.0}}, "algorithm": {"loss": "cispo"}, "train": {"lr": 3e-3}},
        {"algorithm": {"loss": "sapo", "entropy_coef": 0.01}, "rollout": {"temperature": 0.7}},
    ]

    def run(number: int, learner: SharedRlLearner) -> dict[str, Tensor]:
        learner.load(None)
        for step in range(4):
            learner.step(random_groups(10 * number + step), V0)
        return tensors(learner, tmp_path / learner.adapter.name)

    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(lambda n: run(n, share(f"job{n}", **parts[n])), range(3)))
    for number, found in enumerate(together):
        loop = serve(make_bank(limits=LIMITS, slots=1))
        alone = run(number, SharedRlLearner(spec(small, **parts[number]), JobAdapter(loop, f"alone{number}")))
        assert gap(found, alone, "exp_avg/") < 1e-4 and gap(found, alone, "base_model") < 1e-4


def test_a_resumed_job_equals_an_unbroken_one_bit_for_bit(share: Share, tmp_path: Path) -> None:
    unbroken, first = share("a", train={"warmup_steps": 3}), share("b", train={"warmup_steps": 3})
    for learner, steps in ((unbroken, 4), (first, 2)):
        learner.load(None)
        for step in range(steps):
            learner.step(random_groups(step), V0)
    first.save(tmp_path / "half")
    first.close()
    second = share("c", train={"warmup_steps": 3})
    second.load(tmp_path / "half")
    for step in (2, 3):
        second.step(random_groups(step), V0)
    found, expected = tensors(second, tmp_path / "second"), tensors(unbroken, tmp_path / "unbroken")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_checkpoints_fit_a_trainer_of_its_own_and_back(share: Share, small: Path, tmp_path: Path) -> None:
    shared = share()
    shared.load(None)
    shared.step(random_groups(1), V0)
    expected = tensors(shared, tmp_path / "shared")
    alone = loaded(RlLearner(spec(small)), tmp_path / "shared")
    assert alone.steps == 1
    found = tensors(alone, tmp_path / "alone")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    again = share("again")
    again.load(tmp_path / "alone")
    back = tensors(again, tmp_path / "back")
    assert again.steps == 1 and all(torch.equal(back[name], expected[name]) for name in expected)
    assert {p.name for p in (tmp_path / "shared").iterdir()} == {p.name for p in (tmp_path / "alone").iterdir()}


def test_a_snapshot_has_the_adapter_and_a_probe_of_it(share: Share, small: Path, tmp_path: Path) -> None:
    learner = share()
    learner.load(None)
    learner.step(random_groups(1), V0)
    snapshot = learner.snapshot(V0)
    learner.save(tmp_path / "shared")
    alone = loaded(RlLearner(spec(small)), tmp_path / "shared")
    alone.probed = learner.probed
    expected = alone.snapshot(V0)
    assert snapshot.manifest == expected.manifest and 0 < snapshot.base_bytes < expected.base_bytes
    assert snapshot.fingerprints == expected.fingerprints
    assert snapshot.probe is not None and expected.probe is not None
    assert snapshot.probe.logprobs == pytest.approx(expected.probe.logprobs, abs=1e-5)


def test_a_refused_step_changes_nothing_and_harms_no_other_job(share: Share, tmp_path: Path) -> None:
    learner, other = share("bad", train={"lr": 1e-3}), share("good")
    for one in (learner, other):
        one.load(None)
        one.step(random_groups(1), V0)
    before = tensors(learner, tmp_path / "before")
    spoiled = [
        msgspec.structs.replace(
            group, trajectories=[msgspec.structs.replace(t, reward=float("nan")) for t in group.trajectories]
        )
        for group in random_groups(2)
    ]
    with pytest.raises(NonFinite, match="step refused after 1 steps"):
        learner.step(spoiled, V0)
    after = tensors(learner, tmp_path / "after")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert np.isfinite(other.step(random_groups(2), V0)["grad_norm"])
    assert np.isfinite(learner.step(random_groups(2), V0)["grad_norm"])


@pytest.mark.parametrize("kind", ["sft", "dpo", "dpo from another job"])
def test_rows_are_learned_as_by_a_trainer_of_its_own(serve: Serve, kind: str, tmp_path: Path) -> None:
    """Losses, metrics, evaluation and weights. The reference is the base, or another job's adapter."""
    base = chat_model(tmp_path / "m")
    parts: dict[str, Any] = {"model": {"lora": LORA}, "train": {"lr": 1e-3, "tokens_per_micro_batch": 60}}
    if started := kind.endswith("job"):
        loaded(SftLearner(row_spec(base, "unused.jsonl", **parts))).save(tmp_path / "start")
        parts["start"] = {"from": "j-0123456789@latest"}
    made = row_spec(base, "unused.jsonl", kind[:3], **parts)
    rows = [(random_rows if kind == "sft" else random_pairs)(seed, 6) for seed in range(4)]
    loop = serve(AdapterBank(BaseModel(str(base)), tmp_path / "bank", LIMITS, slots=2))
    shared = {"sft": SharedSftLearner, "dpo": SharedDpoLearner}[kind[:3]](made, JobAdapter(loop, "rows"))
    results = []
    for learner in ((SftLearner if kind == "sft" else DpoLearner)(made), shared):
        if started:
            learner.start(tmp_path / "start", optimizer=False)
        else:
            learner.load(None)
        learner.prepare([row for batch in rows for row in batch], tmp_path / type(learner).__name__)
        metrics = [learner.step(batch) for batch in rows[:3]] + [learner.evaluate(rows[3])]
        results.append((metrics, tensors(learner, tmp_path / f"saved-{type(learner).__name__}")))
    (expected, weights), (found, shared_weights) = results
    for one, other in zip(found, expected, strict=True):
        assert one.keys() - WAITS == other.keys()
        for name in other.keys() - {"step_seconds"}:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name
    assert gap(shared_weights, weights, "base_model") < 1e-4


def test_an_interrupted_step_changes_nothing_and_the_state_can_be_saved(share: Share, tmp_path: Path) -> None:
    learner = share()
    learner.load(None)
    learner.step(random_groups(1), V0)
    before = tensors(learner, tmp_path / "before")
    learner.interrupt()
    with pytest.raises(Interrupted):
        learner.step(random_groups(2), V0)
    after = tensors(learner, tmp_path / "after")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert learner.snapshot(V0).probe is not None


def test_a_trajectory_longer_than_a_pass_fails_the_job_before_its_step(share: Share) -> None:
    learner = share()
    learner.load(None)
    with pytest.raises(TooLong, match=r"a pass of this shared trainer takes 128 \(its bank_tokens\)"):
        learner.step(random_groups(1, answer=(200, 201)), V0)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_rows_longer_than_a_pass_fail_the_job_before_its_first_step(
    make_bank: MakeBank, serve: Serve, small: Path, tmp_path: Path, kind: str
) -> None:
    """The completions of a pair count together."""
    one, two = (Tokens(np.full(n, 5, np.int32), np.arange(n) > 5) for n in (70, 140))
    fits, too_long = Example((one,)), Example((one, one) if kind == "dpo" else (two,))
    made = row_spec(small, "unused.jsonl", kind, model={"lora": LORA})
    learner = {"sft": SharedSftLearner, "dpo": SharedDpoLearner}[kind](
        made, JobAdapter(serve(make_bank(limits=LIMITS)), "rows")
    )
    learner.prepare([fits], tmp_path)
    with pytest.raises(TooLong, match="has rows with 140 tokens, and a pass of this shared trainer takes 128"):
        learner.prepare([fits, too_long], tmp_path)


def test_a_checkpoint_of_another_rank_is_refused_by_name(share: Share, trained: Path) -> None:
    learner = share(model={"lora": {"rank": 2, "alpha": 8.0}})
    with pytest.raises(JobFailed, match=r"does not fit the job's model: .*lora_A"):
        learner.load(trained)


def test_an_interrupt_reaches_the_reference_of_a_job_that_started_from_another(
    make_bank: MakeBank,
    serve: Serve,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = row_spec(small, "unused.jsonl", "dpo", model={"lora": LORA}, start={"from": "j-0123456789@latest"})
    loaded(SftLearner(row_spec(small, "unused.jsonl", model={"lora": LORA}))).save(tmp_path / "start")
    learner = SharedDpoLearner(made, JobAdapter(serve(make_bank(limits=LIMITS)), "rows"))
    learner.load(None)
    learner.steps = 1
    interrupt_at, start = learner.interrupt, SharedPolicy.start

    def started(policy: SharedPolicy, *arguments: Any, **options: Any) -> None:
        start(policy, *arguments, **options)
        interrupt_at()

    monkeypatch.setattr(SharedPolicy, "start", started)
    with pytest.raises(Interrupted):
        learner._measure(random_pairs(1, 4), tmp_path / "start")
