"""Jobs of rows on two ranks do what they do on one: a learner of two processes for all tests here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opentinker.services.trainer.data.examples import Example
from opentinker.services.trainer.distributed import rank_processes
from opentinker.services.trainer.distributed.multi_rank_learner import MultiRankRowLearner
from opentinker.services.trainer.distributed.rank_main import LEARNERS
from opentinker.services.trainer.distributed.rank_protocol import examples_of, rows_of
from opentinker.services.trainer.learners.base import Interrupted, NonFinite
from tests.samples.row_samples import chat_model, random_pairs, random_rows, row_spec
from tests.support.learning import LORA, relative_gap

OF_TIME_OR_PLACE = {"step_seconds", "tokens/computed", "trainer/rank_imbalance"}
SMALL_PASSES = {"lr": 1e-3, "tokens_per_micro_batch": 40}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {"train": {**SMALL_PASSES, "schedule": "linear", "warmup_steps": 1, "steps": 3}}),
    "sft zero2 lora": ("sft", {"train": {"parallel": "zero2", **SMALL_PASSES}, "model": {"lora": LORA}}),
    "sft zero3": ("sft", {"train": {"parallel": "zero3", **SMALL_PASSES}}),
    "dpo": ("dpo", {"train": SMALL_PASSES}),
    "dpo lora": ("dpo", {"train": SMALL_PASSES, "model": {"lora": LORA}}),
    "dpo zero1 ipo": ("dpo", {"train": {"parallel": "zero1", **SMALL_PASSES}, "dpo": {"loss": "ipo"}}),
    "dpo zero3 lora": ("dpo", {"train": {"parallel": "zero3", **SMALL_PASSES}, "model": {"lora": LORA}}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="module")
def multi_rank(base: Path) -> Iterator[MultiRankRowLearner]:
    multi_rank = MultiRankRowLearner(two_ranks(base, "sft"), "cpu")
    yield multi_rank
    multi_rank.close()


def two_ranks(base: Path, kind: str, **parts: Any) -> Any:
    return row_spec(base, "unused.jsonl", kind, **{**parts, "resources": {"trainer_ranks": 2}})


def both(multi_rank: MultiRankRowLearner, base: Path, kind: str, checkpoint: Path | None = None, **parts: Any) -> Any:
    """Let the two ranks train this job from now on, and return a learner of one rank for it."""
    single = copy.deepcopy(parts)
    single.get("train", {}).pop("parallel", None)
    alone: Any = LEARNERS[kind](row_spec(base, "unused.jsonl", kind, **single))
    alone.load(checkpoint)
    multi_rank.spec = two_ranks(base, kind, **parts)
    multi_rank.load(checkpoint)
    return alone


def examples(kind: str, seed: int, count: int = 7) -> list[Example]:
    return random_rows(seed, count) if kind == "sft" else random_pairs(seed, count)


def assert_alike(found: dict[str, float], expected: dict[str, float]) -> None:
    assert expected.keys() <= found.keys() <= {*expected, "trainer/rank_imbalance"}
    tied = {"rewards/accuracy"} if abs(expected.get("rewards/margin", 1.0)) < 1e-4 else set()  # rounding decides then
    for name in expected.keys() - OF_TIME_OR_PLACE - tied:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


def weights_of(learner: Any, directory: Path) -> dict[str, torch.Tensor]:
    learner.save(directory)
    own = learner.own if isinstance(learner, MultiRankRowLearner) else learner
    fresh: Any = LEARNERS[own.spec.kind](own.spec)
    fresh.load(directory)
    return dict(fresh.named_weights())


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_learn_what_one_does(multi_rank: MultiRankRowLearner, base: Path, tmp_path: Path, name: str) -> None:
    kind, parts = JOBS[name]
    alone = both(multi_rank, base, kind, **parts)
    start = {name: weights.clone() for name, weights in alone.named_weights()}
    batches, validation = [examples(kind, seed) for seed in range(2)], examples(kind, 9, 5)
    known = [example for batch in (*batches, validation) for example in batch]
    alone.prepare(known, tmp_path / "alone")
    references = [example.reference for example in known]
    multi_rank.prepare(known, tmp_path / "multi_rank")
    for example, reference in zip(known, references, strict=True):
        assert example.reference == pytest.approx(reference, abs=1e-5)
    for batch in batches:
        assert_alike(multi_rank.step(batch), alone.step(batch))
        assert_alike(multi_rank.evaluate(validation), alone.evaluate(validation))
    expected, found = (weights_of(learner, tmp_path / type(learner).__name__) for learner in (alone, multi_rank))
    assert relative_gap(found, expected, start) < 1e-3


@pytest.mark.parametrize("parallel", ["data", "zero3"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_rank_may_have_nothing_to_do(
    multi_rank: MultiRankRowLearner, base: Path, tmp_path: Path, kind: str, parallel: str
) -> None:
    alone = both(multi_rank, base, kind, train={"lr": 1e-3, "parallel": parallel})
    batch = examples(kind, 3, 1)
    multi_rank.prepare(batch, tmp_path)
    assert_alike(multi_rank.step(batch), alone.step(batch))


def test_all_ranks_read_or_compute_the_reference(multi_rank: MultiRankRowLearner, base: Path, tmp_path: Path) -> None:
    """After a restart the weights are others; what was kept is not computed again."""
    both(multi_rank, base, "dpo", train={"lr": 1e-2})
    pairs = examples("dpo", 1)
    multi_rank.prepare(pairs, tmp_path)
    first = [pair.reference for pair in pairs]
    for _ in range(2):
        multi_rank.step(pairs)
    multi_rank.save(tmp_path / "checkpoint")
    both(multi_rank, base, "dpo", tmp_path / "checkpoint", train={"lr": 1e-2})
    multi_rank.prepare(pairs, tmp_path)
    assert [pair.reference for pair in pairs] == first
    (kept,) = tmp_path.glob("reference-*.npy")
    kept.unlink()
    multi_rank.prepare(pairs, tmp_path)  # by the model as it was at the start
    assert all(pair.reference == pytest.approx(was, abs=1e-5) for pair, was in zip(pairs, first, strict=True))


def test_ranks_stop_an_evaluation_together(multi_rank: MultiRankRowLearner, base: Path, tmp_path: Path) -> None:
    alone = both(multi_rank, base, "sft", train={"parallel": "zero3", **SMALL_PASSES})
    batch = examples("sft", 1)
    assert_alike(multi_rank.step(batch), alone.step(batch))
    multi_rank.interrupt()
    with pytest.raises(Interrupted) as given_up:
        multi_rank.evaluate(examples("sft", 5))
    assert given_up.value.alike
    expected, found = (weights_of(learner, tmp_path / type(learner).__name__) for learner in (alone, multi_rank))
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=1e-3, atol=1e-3)


def test_all_ranks_refuse_a_non_finite_step(multi_rank: MultiRankRowLearner, base: Path, tmp_path: Path) -> None:
    alone = both(multi_rank, base, "dpo", train={"lr": 1e-3})
    pairs = examples("dpo", 2)
    multi_rank.prepare(pairs, tmp_path)
    good = [pair.reference for pair in pairs]
    pairs[-1].reference = (float("nan"), 0.0)
    with pytest.raises(NonFinite, match="step refused after 0 steps"):
        multi_rank.step(pairs)
    for pair, reference in zip(pairs, good, strict=True):
        pair.reference = reference
    assert_alike(multi_rank.step(pairs), alone.step(pairs))


def test_rows_travel_whole() -> None:
    for example in (*examples("sft", 4), *examples("dpo", 4)):
        example.reference = (0.1, -2.5)
        (found,) = examples_of(rows_of([example]))
        assert found.reference == example.reference
        for part, expected in zip(found.parts, example.parts, strict=True):
            assert part.ids_T.tolist() == expected.ids_T.tolist()
            assert part.learned_T.tolist() == expected.learned_T.tolist()


@pytest.mark.nightly
def test_ranks_are_freed(multi_rank: MultiRankRowLearner, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both(multi_rank, base, "sft")
    monkeypatch.setattr(
        rank_processes, "GRACE_S", float("inf")
    )  # the others have nothing to say, and nobody waits for it
    multi_rank.interrupt()
    with pytest.raises(Interrupted):
        multi_rank.evaluate(examples("sft", 5))
    multi_rank.close()
    following = MultiRankRowLearner(two_ranks(base, "sft"), "cpu")
    try:
        alone = both(following, base, "sft")
        assert_alike(following.evaluate(examples("sft", 5)), alone.evaluate(examples("sft", 5)))
    finally:
        following.close()
