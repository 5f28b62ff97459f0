"""On-policy distillation: the formula, its gradient, a student that comes to its teacher, and who may be a teacher."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.models.make_tiny import make_tiny
from opentinker.services.reference_forward.required_models import TEACHER, ModelKey
from opentinker.services.reference_forward.results import add_results
from opentinker.services.reference_forward.scorer import Scorer, check_same_tokens
from opentinker.services.trainer.algorithm import losses
from opentinker.services.trainer.algorithm.advantages import distillation, grpo
from opentinker.services.trainer.algorithm.credit_assignment import assign
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import GROUP
from opentinker.shared.spec import AlgorithmSpec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Group
from tests.integration.trainer.test_reference_forward import add_job, failed, of_job, passed, running, send
from tests.support.factories import group_of, trajectory_of
from tests.support.learning import Sampler, loaded, torch_spec

V0 = WeightVersion(1, 0)
DISTILL = {"name": "distill", "group_size": 4, "groups_per_batch": 2}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("student") / "s", hidden_size=64, layers=1, seed=1)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another architecture's worth of opinions: larger, and sure of itself."""
    return make_tiny(tmp_path_factory.mktemp("teacher") / "t", hidden_size=128, layers=2, norm_scale=12.0, seed=2)


def pair(seed: int) -> list[Group]:
    """A group of two trajectories, of 2 and 3 sampled tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for index, count in enumerate((2, 3)):
        mask = [0, 0] + [1] * count
        mu, q = (list(-rng.uniform(0.1, 5.0, len(mask)) * mask) for _ in range(2))
        ids = rng.integers(3, 30, len(mask)).tolist()
        made.append(trajectory_of(ids, mask, logprobs=mu, teacher=q, reward=float(index), index=index))
    group = group_of(made)
    group.check()
    return [group]


# --- the formula ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("alone", [True, False])
def test_the_teacher_is_added_to_the_advantage_of_each_token(alone: bool, weight: float) -> None:
    groups = pair(0)
    name = {"name": "distill"} if alone else {"name": "grpo"}
    credit = assign(groups, AlgorithmSpec.model_validate({**name, "distill_coef": weight}))
    outcome = [0.0, 0.0] if alone else grpo([0.0, 1.0]).tolist()
    total = squares = count = 0.0
    for t, base, found in zip(groups[0].trajectories, outcome, credit.advantages_S, strict=True):
        expected = []
        assert t.teacher_logprobs is not None
        for m, p, q in zip(t.mask, t.logprobs, t.teacher_logprobs, strict=True):
            if m:
                expected.append(base - weight * (float(p) - float(q)))
                total, count = total + float(p) - float(q), count + 1
                squares += np.exp(float(q) - float(p)) - 1 + float(p) - float(q)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert credit.metrics["teacher/kl"] == pytest.approx(total / count)
    assert credit.metrics["teacher/k3"] == pytest.approx(squares / count)
    assert credit.metrics["teacher/logprob"] < 0


@pytest.mark.parametrize("loss", ["cispo", "importance_sampling"])
def test_on_policy_its_gradient_is_that_of_the_exact_reverse_kl(loss: str) -> None:
    """All tokens of a vocabulary, each as often as the policy samples it, in float64."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(23, dtype=torch.float64, generator=rng, requires_grad=True)
    log_q = torch.randn(23, dtype=torch.float64, generator=rng).log_softmax(0)
    log_pi = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_pi.exp() * (log_pi - log_q)).sum(), logits, retain_graph=True)
    mu = log_pi.detach()
    advantages = torch.from_numpy(distillation(mu.numpy(), log_q.numpy()))
    if loss == "cispo":
        found = losses.cispo(log_pi, mu, advantages, clip_low=1.0, clip_high=4.0)
    else:
        found = losses.importance_sampling(log_pi, mu, advantages)
    (estimate,) = torch.autograd.grad((mu.exp() * found.loss_M).sum(), logits)
    torch.testing.assert_close(estimate, exact, atol=1e-12, rtol=0)


def test_trajectories_without_teacher_logprobs_fail_the_job() -> None:
    groups = pair(0)
    bare = [msgspec.structs.replace(t, teacher_logprobs_T=None) for t in groups[0].trajectories]
    with pytest.raises(JobFailed, match="without teacher logprobs"):
        assign([group_of(bare)], AlgorithmSpec.model_validate({"name": "distill"}))


# --- learning -------------------------------------------------------------------------------------------------------


def exact_kl(student: Any, teacher: Any, prompts: list[list[int]]) -> float:
    """Mean KL(student || teacher) of the next token, over the whole vocabulary, by plain forwards in float64."""
    found = []
    for prompt in prompts:
        with torch.no_grad():
            p, q = (
                model.double()(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].log_softmax(-1)
                for model in (student, teacher)
            )
        found.append(float((p.exp() * (p - q)).sum()))
    return float(np.mean(found))


def test_a_student_comes_to_its_teacher(student: Path, teacher: Path, tmp_path: Path) -> None:
    """Rewards are not looked at: the teacher copies no digits, and neither does the student afterwards."""
    spec = torch_spec(
        student,
        algorithm={**DISTILL, "group_size": 8, "groups_per_batch": 10},
        teacher={"base": str(teacher)},
        train={"steps": 100, "lr": 1e-2},
    )
    learner = loaded(RlLearner(spec))
    sampler = Sampler(learner.causal, learner.tokenizer, seed=0)
    scorer = Scorer()
    model = scorer.load(ModelKey(str(teacher), "float32"))
    kl: list[float] = []
    for step in range(40):
        version = WeightVersion(1, step)
        groups = sampler.copy_digit(10, 8, version)
        found = scorer.score(model, groups, [1.0] * 10)
        scored = [add_results(g, {TEACHER: results}, {}) for g, results in zip(groups, found, strict=True)]
        kl.append(learner.step(scored, version)["teacher/kl"])
    assert np.mean(kl[-3:]) < 0.25 * np.mean(kl[:3])
    learner.save(tmp_path / "after")
    plain = [AutoModelForCausalLM.from_pretrained(path) for path in (student, tmp_path / "after", teacher)]
    encode = AutoTokenizer.from_pretrained(student).encode
    prompts = [encode(f"{digit}=") for digit in range(10)]
    assert exact_kl(plain[1], plain[2], prompts) < 0.25 * exact_kl(plain[0], plain[2], prompts)


# --- who may be a teacher -------------------------------------------------------------------------------------------


def other_tokenizer(model: Path, made: Path) -> Path:
    """The same weights, two tokens with each other's ids."""
    shutil.copytree(model, made)
    path = made / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    path.write_text(json.dumps(content))
    return made


def test_a_teacher_with_another_vocabulary_is_refused_with_the_first_difference(teacher: Path, tmp_path: Path) -> None:
    number = AutoTokenizer.from_pretrained(teacher).get_vocab()["7"]
    other = other_tokenizer(teacher, tmp_path / "other")
    check_same_tokens(str(teacher), str(teacher), "teacher")
    with pytest.raises(JobFailed, match=f"id {number} is '7' for the model and '8' for the teacher"):
        check_same_tokens(str(teacher), str(other), "teacher")


def test_a_teacher_may_know_more_tokens_and_not_fewer(teacher: Path, tmp_path: Path) -> None:
    more = AutoTokenizer.from_pretrained(teacher)
    more.add_tokens(["<call>"])
    more.save_pretrained(tmp_path / "more")
    shutil.copy(teacher / "config.json", tmp_path / "more")
    check_same_tokens(str(teacher), str(tmp_path / "more"), "teacher")
    with pytest.raises(JobFailed, match="is '<call>' for the model and no token for the teacher"):
        check_same_tokens(str(tmp_path / "more"), str(teacher), "teacher")


async def test_groups_have_their_logprobs(bus: Bus, store: Store, student: Path, teacher: Path, tmp_path: Path) -> None:
    """One job with both; and one whose teacher speaks another language fails alone."""
    both = {"algorithm": {**DISTILL, "kl_coef": 0.1}, "teacher": {"base": str(teacher)}}
    job = await add_job(store, str(student), parts=both)
    other = other_tokenizer(teacher, tmp_path / "other")
    foreign = await add_job(store, str(student), parts={"algorithm": DISTILL, "teacher": {"base": str(other)}})
    await send(bus, *of_job(foreign, 2), *of_job(job, 2))
    async with running(bus, store) as service:
        await passed(bus, job, 2)
        assert "does not share the tokenizer" in await failed(store, foreign)
        assert len(service.cache) == 2
    scorer = Scorer()
    for group in await bus.stored(GROUP, job=job):
        for base, name in ((student, "ref_logprobs"), (teacher, "teacher_logprobs")):
            (expected,) = scorer.score(scorer.load(ModelKey(str(base), "float32")), [group], [1.0])
            for trajectory, logprobs_T in zip(group.trajectories, expected, strict=True):
                np.testing.assert_allclose(getattr(trajectory, name), logprobs_T, atol=1e-6)
                trajectory.check()
