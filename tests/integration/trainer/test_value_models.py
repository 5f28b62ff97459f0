"""Value models: right values in any batch, GAE by them without a critic, and errors that say what to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForTokenClassification,
    Qwen3ForTokenClassification,
)

from opentinker.services.reference_forward.required_models import REFERENCE, VALUES, ModelKey, find_required_models
from opentinker.services.reference_forward.results import add_results
from opentinker.services.reference_forward.scorer import Scorer
from opentinker.services.trainer.algorithm.credit_assignment import assign
from opentinker.services.trainer.batch.micro_batch import micro_batches
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import GROUP
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import F32, JobState, WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import CRITIC
from opentinker.shared.types.trajectories import Group
from tests.integration.trainer.test_distill import other_tokenizer
from tests.integration.trainer.test_reference_forward import add_job, failed, of_job, passed, running, send
from tests.support.factories import V0, group_of, trajectory_of
from tests.support.learning import digest, loaded, random_groups, torch_learner, torch_spec


def make_value_model(tiny: Path, made: Path, *, labels: int = 1, kind: str = "causal") -> Path:
    """Random, with the tiny model's tokenizer and a head that says numbers of the size of a reward."""
    AutoTokenizer.from_pretrained(tiny).save_pretrained(made)
    torch.manual_seed(5)
    model: Any
    if kind == "encoder":
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        model = BertForTokenClassification(BertConfig(vocab_size=64, num_labels=labels, **shape))
        head = model.classifier
    else:
        model = Qwen3ForTokenClassification(AutoConfig.from_pretrained(tiny, num_labels=labels))
        head = model.score
    with torch.no_grad():
        head.weight.mul_(20)
        head.bias.fill_(0.25)
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def value_model(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_value_model(small, tmp_path_factory.mktemp("values") / "v")


def key(base: Path, dtype: str = "float32") -> ModelKey:
    return ModelKey(str(base), dtype, head="token")


def plain_values(base: Path, group: Group, dtype: torch.dtype = torch.float64) -> list[F32]:
    """By transformers' own forward, one trajectory at a time: what the head says at the token before a sampled one."""
    model = AutoModelForTokenClassification.from_pretrained(base, dtype=dtype)
    found = []
    for trajectory in group.trajectories:
        with torch.no_grad():
            logits_T = model(input_ids=torch.from_numpy(trajectory.ids.astype(np.int64))[None]).logits[0, :, 0]
        values_T = np.r_[0.0, logits_T[:-1].double().numpy()] * trajectory.mask
        found.append(values_T.astype(np.float32))
    return found


def with_values(scorer: Scorer, base: Path, groups: list[Group]) -> list[Group]:
    found = scorer.score(scorer.load(key(base)), groups, [1.0] * len(groups))
    return [add_results(group, {VALUES: results}, {}) for group, results in zip(groups, found, strict=True)]


def truncated(groups: list[Group]) -> list[Group]:
    """Every other trajectory was."""
    return [
        msgspec.structs.replace(
            group, trajectories=[msgspec.structs.replace(t, truncated=t.index % 2 == 0) for t in group.trajectories]
        )
        for group in groups
    ]


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_batch", [1, 20, 8192])
def test_values_are_those_of_a_plain_forward(small: Path, value_model: Path, tokens_per_batch: int) -> None:
    groups = random_groups(0, size=6)
    for group, before in zip(
        with_values(Scorer(tokens_per_batch=tokens_per_batch), value_model, groups), groups, strict=True
    ):
        group.check()
        for t, own, expected_T in zip(
            group.trajectories, before.trajectories, plain_values(value_model, group), strict=True
        ):
            assert t.values is not None and t.values.dtype == np.float32
            np.testing.assert_allclose(t.values, expected_T, atol=2e-5)
            assert np.abs(t.values[t.mask == 1]).min() > 0 and not t.values[t.mask == 0].any()
            assert (t.ids_T, t.logprobs_T, t.reward) == (own.ids_T, own.logprobs_T, own.reward)


@pytest.mark.parametrize("tokens_per_batch", [1, 8192])
def test_a_truncated_end_has_the_value_of_its_last_token(value_model: Path, tokens_per_batch: int) -> None:
    groups = truncated(random_groups(0, size=6))
    model = AutoModelForTokenClassification.from_pretrained(value_model, dtype=torch.float64)
    for group in with_values(Scorer(tokens_per_batch=tokens_per_batch), value_model, groups):
        group.check()
        for t, expected_T in zip(group.trajectories, plain_values(value_model, group), strict=True):
            assert t.values is not None
            np.testing.assert_allclose(t.values, expected_T, atol=2e-5)
            with torch.no_grad():
                last = model(input_ids=torch.from_numpy(t.ids.astype(np.int64))[None]).logits[0, -1, 0].item()
            assert t.end_value == pytest.approx(last if t.truncated else 0.0, abs=2e-5)


def test_equal_beginnings_are_computed_once_and_the_temperature_is_none_of_its_business(value_model: Path) -> None:
    scorer, (group, *_) = Scorer(), random_groups(1, size=6)
    model = scorer.load(key(value_model))
    (once,) = scorer.score(model, [group], [1.0])
    alone = scorer.computed
    twice = scorer.score(model, [group, group], [1.0, 0.3])
    assert scorer.computed == 2 * alone, "the second copy of the group costs nothing"
    for found in twice:
        assert all(np.array_equal(a, b) for a, b in zip(found, once, strict=True))


def test_its_size_is_known_before_it_is_loaded_and_bfloat16_is_half(value_model: Path) -> None:
    scorer, (group, *_) = Scorer(), random_groups(2)
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        model = scorer.load(key(value_model, dtype))
        parameters = list(model.model.parameters())
        assert {p.element_size() for p in parameters} == {width}
        assert scorer.size(key(value_model, dtype)) == sum(p.numel() * width for p in parameters)
    (narrow,) = scorer.score(model, [group], [1.0])
    for values_T, expected_T in zip(narrow, plain_values(value_model, group), strict=True):
        np.testing.assert_allclose(values_T, expected_T, atol=0.1)


# --- credit ---------------------------------------------------------------------------------------------------------


def by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Schulman et al., arXiv 1506.02438, as a sum over the temporal differences; and the returns A + V."""
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, [*values[1:], 0.0], strict=True)]
    advantages = [sum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, len(deltas))) for t in range(len(deltas))]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def test_gae_is_made_of_the_values_that_came_with_the_groups() -> None:
    options = {"name": "ppo", "gamma": 0.9, "lam": 0.7}
    spec = torch_spec("m", algorithm=options, value_model={"base": "v"})
    one = trajectory_of(
        [5, 6, 7, 8], [0, 1, 1, 1], reward=1.0, values_T=np.array([0, 0.5, 0.25, 2.0], dtype="<f4").tobytes()
    )
    two = trajectory_of(
        [5, 6, 7, 8],
        [0, 1, 0, 1],
        reward=[0.5, -1.0],
        index=1,
        values_T=np.array([0, -1.0, 0, 3.0], dtype="<f4").tobytes(),
    )
    group = group_of([one, two])
    group.check()
    first, returns = by_hand([0.0, 0.0, 1.0], [0.5, 0.25, 2.0], 0.9, 0.7)
    second, more = by_hand([0.5, -1.0], [-1.0, 3.0], 0.9, 0.7)
    joined, all_returns = np.array([*first, *second]), np.array([*returns, *more])
    credit = assign([group], spec.algorithm)
    whitened = (joined - joined.mean()) / joined.std()
    np.testing.assert_allclose(np.concatenate(credit.advantages_S), whitened, atol=1e-6)
    assert credit.returns_S is None, "nobody learns them"
    values = np.array([0.5, 0.25, 2.0, -1.0, 3.0])
    assert credit.metrics["value/mean"] == pytest.approx(values.mean())
    explained = 1 - (all_returns - values).var() / all_returns.var()
    assert credit.metrics["value/explained_variance"] == pytest.approx(explained)


def test_trajectories_without_values_fail_the_job() -> None:
    spec = torch_spec("m", algorithm={"name": "ppo"}, value_model={"base": "v"})
    with pytest.raises(JobFailed, match="without values"):
        assign(random_groups(0), spec.algorithm)


def test_the_learner_uses_given_values_without_a_critic(small: Path, value_model: Path, tmp_path: Path) -> None:
    """Other values, another step; and the checkpoint holds no critic."""
    spec = torch_spec(small, algorithm={"name": "ppo"}, value_model={"base": str(value_model)})
    scored = with_values(Scorer(), value_model, random_groups(0))
    other = [add_results(group, {VALUES: [t.mask * 0.5 for t in group.trajectories]}, {}) for group in random_groups(0)]
    after = []
    for groups in (scored, scored, other):
        learner = loaded(RlLearner(spec))
        assert learner.critic is None
        metrics = learner.step(groups, V0)
        assert {"value/mean", "value/explained_variance"} <= metrics.keys()
        assert not {"loss/value", "critic/grad_norm", "critic/explained_variance"} & metrics.keys()
        after.append(digest(learner))
    assert after[0] == after[1] != after[2]
    learner.save(tmp_path / "c")
    assert not (tmp_path / "c" / CRITIC).exists()


def test_a_trained_critic_and_a_frozen_copy_of_it_give_the_same_advantages(small: Path, tmp_path: Path) -> None:
    """A critic that was trained here, saved as a token classifier."""
    algorithm = {"name": "ppo", "critic_lr": 1e-3}
    learner = torch_learner(small, algorithm=algorithm, train={"lr": 0.0})
    for step in range(3):
        learner.step(random_groups(step), WeightVersion(1, step))
    critic = learner.critic
    assert critic is not None
    model: Any = Qwen3ForTokenClassification(AutoConfig.from_pretrained(small, num_labels=1))
    model.model.load_state_dict(critic.decoder.state_dict())
    model.score.load_state_dict(critic.head.state_dict())
    model.save_pretrained(tmp_path / "v")
    groups = truncated(random_groups(7))
    batches = micro_batches(groups, WeightVersion(1, 3), learner.spec, torch.device("cpu"), learner.process_group)
    trained = learner._give_credit(groups, [micro for update in batches for micro in update])
    frozen = assign(with_values(Scorer(), tmp_path / "v", groups), learner.spec.algorithm)
    for a, b in zip(trained.advantages_S, frozen.advantages_S, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


# --- who may be one -------------------------------------------------------------------------------------------------


def test_other_models_are_refused_with_the_reason(small: Path, value_model: Path, tmp_path: Path) -> None:
    scorer = Scorer()
    for ask in (scorer.load, scorer.size):
        with pytest.raises(JobFailed, match=r"is no token classifier \(its config.json says Qwen3ForCausalLM\)"):
            ask(key(small))
        with pytest.raises(JobFailed, match="has 2 labels: it must have one"):
            ask(key(make_value_model(small, tmp_path / ask.__name__, labels=2)))
    with pytest.raises(JobFailed, match="cannot be"):
        scorer.load(key(make_value_model(small, tmp_path / "encoder", kind="encoder")))
    pickled = shutil.copytree(value_model, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(JobFailed, match=r"no \*\.safetensors file"):
        scorer.load(key(pickled))


def test_a_value_that_is_no_number_fails_the_job(value_model: Path) -> None:
    scorer = Scorer()
    model = scorer.load(key(value_model))
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    with pytest.raises(JobFailed, match="no finite number"):
        scorer.score(model, random_groups(0), [1.0] * 4)


async def test_groups_have_values(bus: Bus, store: Store, small: Path, value_model: Path, tmp_path: Path) -> None:
    """One job with values and a reference; one whose value model means other tokens; one with what is none."""

    def parts(base: Path) -> dict[str, Any]:
        return {"algorithm": {"name": "ppo", "kl_coef": 0.1}, "value_model": {"base": str(base)}}

    job = await add_job(store, str(small), parts=parts(value_model))
    foreign = await add_job(store, str(small), parts=parts(other_tokenizer(value_model, tmp_path / "other")))
    none = await add_job(store, str(small), parts=parts(small))
    await send(bus, *(group for name in (foreign, none, job) for group in of_job(name, 3)))
    async with running(bus, store) as service:
        await passed(bus, job, 3)
        assert "value model" in (reason := await failed(store, foreign)) and "does not share the tokenizer" in reason
        assert "is no token classifier" in await failed(store, none)
        assert len(service.cache) == 2, "the value model, and the reference"
    spec = parse_spec((await store.job(job)).spec)
    stored = await bus.stored(GROUP, job=job)
    assert [sorted(roles) for roles in find_required_models(spec, tmp_path).values()] == [[REFERENCE], [VALUES]]
    for group in stored:
        group.check()
        for t, expected_T in zip(group.trajectories, plain_values(value_model, group), strict=True):
            assert t.values is not None and t.ref_logprobs is not None
            np.testing.assert_allclose(t.values, expected_T, atol=2e-5)
    assert "value/mean" in assign(stored, spec.algorithm).metrics
    assert (await store.job(job)).state is not JobState.FAILED


async def test_values_and_teachers_are_of_the_policies_that_have_them(
    bus: Bus, store: Store, small: Path, value_model: Path, tmp_path: Path
) -> None:
    """And a policy whose value model means other tokens fails its job."""
    ppo: dict[str, Any] = {"algorithm": {"name": "ppo"}}
    policies: dict[str, Any] = {
        "a": ppo,
        "b": {"algorithm": {"name": "distill"}, "teacher": {"base": str(small)}},
        "c": {**ppo, "trains_critic": True},
    }
    game = {"policies": policies, "seats": {name: name for name in policies}}
    job = await add_job(store, str(small), {**game, "value_model": {"base": str(value_model)}})
    other = {"base": str(other_tokenizer(value_model, tmp_path / "other"))}
    foreign = await add_job(store, str(small), {**game, "value_model": other})
    found = [of_job(name, 1)[0] for name in (foreign, job)]
    found = [
        msgspec.structs.replace(
            group,
            trajectories=[
                msgspec.structs.replace(t, policy=name) for t, name in zip(group.trajectories, "abca", strict=True)
            ],
        )
        for group in found
    ]
    await send(bus, *found)
    async with running(bus, store) as service:
        await passed(bus, job, 1)
        assert "value model" in (reason := await failed(store, foreign)) and "does not share the tokenizer" in reason
        assert len(service.cache) == 2, "the value model, and the teacher"
    (group,) = await bus.stored(GROUP, job=job)
    group.check()
    for t, expected_T in zip(group.trajectories, plain_values(value_model, group), strict=True):
        assert (t.values is not None, t.teacher_logprobs is not None) == (t.policy == "a", t.policy == "b")
        if t.values is not None:
            np.testing.assert_allclose(t.values, expected_T, atol=2e-5)
