"""Reward models: right scores in any batch, a reward made of several, and errors that say what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Qwen3ForSequenceClassification,
)

from opentinker.services.reference_forward.required_models import REWARD, ModelKey
from opentinker.services.reference_forward.results import add_results
from opentinker.services.reference_forward.scorer import Scorer
from opentinker.services.trainer.batch.batch_metrics import batch_metrics
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import GROUP
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Message
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Group
from tests.integration.trainer.test_reference_forward import add_job, failed, of_job, passed, running, send
from tests.support.factories import V0, group_of, trajectory_of
from tests.unit.rollout_worker.scripted_episode import Env, Script, episode, reply, say

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{{ eos_token }}"
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}" + TEMPLATE


def make_judge(tiny: Path, made: Path, kind: str = "plain", labels: Sequence[str] = ("LABEL_0",)) -> Path:
    """A random classifier with the tiny model's tokenizer. `plain` names no padding token, `padded` does, with the
    template's last token; `encoder` looks both ways."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made)
    names: dict[str, Any] = {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
    torch.manual_seed(3)
    if kind == "encoder":
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        config: Any = BertConfig(vocab_size=64, max_position_embeddings=128, pad_token_id=0, **shape, **names)
        model: Any = BertForSequenceClassification(config)
    else:
        pad = tokenizer.eos_token_id if kind == "padded" else None
        config = AutoConfig.from_pretrained(tiny, pad_token_id=pad, **names)
        model = Qwen3ForSequenceClassification(config)
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def judge(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judge(small, tmp_path_factory.mktemp("judges") / "judge")


def said(*texts: str) -> list[Message]:
    return [Message(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(texts)]


def spoken(seq: int, *conversations: list[Message]) -> Group:
    made = [trajectory_of([5, 6, 7], [0, 1, 1], index=i, messages=chat) for i, chat in enumerate(conversations)]
    return group_of(made, seq)


GROUPS = [
    spoken(0, said("1 + 1?", "2"), said("1 + 1?", "three, i think"), said("1 + 1?", "2")),
    spoken(1, said("hello", "hi", "how are you?", "fine, and you?"), said("hello", "")),
]


def key(base: Path, label: str | None = None) -> ModelKey:
    return ModelKey(str(base), "float32", head="sequence", label=label)


def plain_score(base: Path, chat: list[Message], label: int) -> float:
    """One conversation alone, unpadded, in float64, by the Hugging Face model as it comes."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float64)
    text = tokenizer.apply_chat_template([msgspec.to_builtins(m) for m in chat], tokenize=False)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokenizer.encode(text, add_special_tokens=False)])).logits[0]
    return float(logits[0] if len(logits) == 1 else logits.softmax(-1)[label])


@pytest.mark.parametrize("tokens", [10_000, 60, 1])
@pytest.mark.parametrize(
    ("kind", "labels", "label"),
    [("plain", ["LABEL_0"], None), ("padded", ["good"], "good"), ("encoder", ["bad", "good"], "good")],
)
def test_scores_are_those_of_each_conversation_alone(
    small: Path, tmp_path: Path, kind: str, labels: list[str], label: str | None, tokens: int
) -> None:
    made = make_judge(small, tmp_path / "judge", kind, labels)
    scorer = Scorer(tokens_per_batch=tokens)
    found = scorer.score(scorer.load(key(made, label)), GROUPS, [1.0, 0.5])
    which = labels.index(label) if label else 0
    for group, scores in zip(GROUPS, found, strict=True):
        expected = [plain_score(made, t.messages or [], which) for t in group.trajectories]
        np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert found[0][0] == found[0][2] != found[0][1]


def test_its_size_is_known_before_it_is_loaded(judge: Path) -> None:
    scorer = Scorer()
    parameters = scorer.load(key(judge)).model.parameters()
    assert scorer.size(key(judge)) == sum(p.numel() * p.element_size() for p in parameters)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_what_is_no_reward_model_is_refused_with_advice(small: Path, judge: Path, tmp_path: Path) -> None:
    scorer = Scorer()
    causal = shutil.copytree(small, tmp_path / "causal")
    for step in (scorer.size, scorer.load):
        with pytest.raises(JobFailed, match=r"is no sequence classifier .*Qwen3ForCausalLM"):
            step(key(causal))
    headless = shutil.copytree(small, tmp_path / "headless")
    shutil.copy(judge / "config.json", headless / "config.json")
    with pytest.raises(JobFailed, match=r"lacks 1 tensors .* score\.weight"):
        scorer.load(key(headless))
    mute = shutil.copytree(judge, tmp_path / "mute")
    (mute / "chat_template.jinja").unlink()
    with pytest.raises(JobFailed, match=r"has no chat template.*chat_template\.jinja"):
        scorer.load(key(mute))
    with pytest.raises(JobFailed, match=r"has no label 'good'\. Set `label` to one of LABEL_0"):
        scorer.load(key(judge, "good"))
    several = make_judge(small, tmp_path / "several", labels=("bad", "good"))
    with pytest.raises(JobFailed, match=r"which label is the score.* bad, good"):
        scorer.load(key(several))


def test_unreadable_conversations_are_refused(small: Path, judge: Path, tmp_path: Path) -> None:
    scorer = Scorer()
    model = scorer.load(key(judge))
    with pytest.raises(JobFailed, match=r"conversation of 5\d\d\d tokens, and the reward model reads 4096"):
        scorer.score(model, [spoken(7, said("x" * 5000, "y"))], [1.0])
    with pytest.raises(JobFailed, match="group 7 came without its conversations"):
        scorer.score(model, [group_of([trajectory_of([5, 6], [0, 1])], 7)], [1.0])
    strict = shutil.copytree(judge, tmp_path / "strict")
    (strict / "chat_template.jinja").write_text(STRICT)
    turned = [Message(role="assistant", content="hi")]
    with pytest.raises(JobFailed, match=r"refused the roles \['assistant'\]: begin with a user"):
        scorer.score(scorer.load(key(strict)), [spoken(0, turned)], [1.0])
    with torch.no_grad():
        model.model.score.weight.fill_(float("nan"))
    with pytest.raises(JobFailed, match="no finite number"):
        scorer.score(model, GROUPS, [1.0, 1.0])


# --- the reward -----------------------------------------------------------------------------------------------------


def test_the_reward_is_the_environment_s_and_the_weighted_scores() -> None:
    ids, mask = [5, 6, 7, 8, 9], [0, 1, 0, 1, 1]
    two = trajectory_of(ids, mask, reward=[0.25, 0.5], messages=said("a", "b", "c", "d"))
    none = trajectory_of([5, 6], [0, 1], turns=[], index=1, reward=0.0, messages=said("a", "b"))
    found = {REWARD + "a": [2.0, -1.0], REWARD + "b": [0.5, 3.0]}
    group = add_results(group_of([two, none]), found, {"a": 0.1, "b": -2.0})
    group.check()
    first, second = group.trajectories
    assert first.reward == pytest.approx(0.75 + 0.2 - 1.0) and second.reward == pytest.approx(-0.1 - 6.0)
    assert [turn.reward for turn in first.turns] == [0.25, pytest.approx(0.5 + 0.2 - 1.0)]
    assert first.turns[1].components == {"reward_model/a": pytest.approx(0.2), "reward_model/b": pytest.approx(-1.0)}
    assert first.scores == {"a": 2.0, "b": 0.5} and first.messages is second.messages is None
    metrics = batch_metrics([group_of([first, msgspec.structs.replace(first, index=1)])], V0)
    assert metrics["reward_model/a/mean"] == 2.0 and metrics["reward_model/b/std"] == 0.0
    assert metrics["reward/own"] == pytest.approx(0.75) and metrics["reward/mean"] == pytest.approx(-0.05)
    assert "reward/own" not in batch_metrics([group_of([two])], V0)


async def test_an_episode_keeps_its_conversation_for_those_who_read_it() -> None:
    def play() -> tuple[Script, Env]:
        replies = [reply("hi"), reply("more", reward=0.25), reply("never seen", reward=1.0, done=True)]
        return Script([say("ab$"), say("c$")]), Env(replies)

    judged: dict[str, Any] = {"reward_models": [{"base": "some/judge"}], "train": {"steps": 1}}
    (trajectory,) = await episode(*play(), **judged).run()
    assert trajectory.messages == said("hi", "ab", "more", "c")
    (trajectory,) = await episode(*play()).run()
    assert trajectory.messages is None


async def test_a_bad_judge_fails_its_job_alone(bus: Bus, store: Store, small: Path, judge: Path) -> None:
    """Two reward models and a reference for one job; what is no reward model for another."""
    judges = [{"base": str(judge), "name": "a", "weight": 0.5}, {"base": str(judge), "name": "b", "weight": -1.0}]
    parts: dict[str, Any] = {"algorithm": {"kl_coef": 0.1}, "reward_models": judges}
    job = await add_job(store, str(small), parts=parts)
    bad = await add_job(store, str(small), parts={"reward_models": [{"base": str(small)}]})
    for name in (bad, job):
        for group in of_job(name, 2):
            chats = [msgspec.structs.replace(t, messages=said("1 + 1?", f"{t.index}")) for t in group.trajectories]
            await send(bus, msgspec.structs.replace(group, trajectories=chats))
    async with running(bus, store) as service:
        await passed(bus, job, 2)
        assert "is no sequence classifier" in await failed(store, bad)
        assert len(service.cache) == 2, "the judge once, and the reference"
    before = {group.seq: group for group in of_job(job, 2)}
    for group in await bus.stored(GROUP, job=job):
        group.check()
        for t, own in zip(group.trajectories, before[group.seq].trajectories, strict=True):
            expected = plain_score(judge, said("1 + 1?", f"{t.index}"), 0)
            assert t.scores == {"a": pytest.approx(expected, abs=1e-5), "b": pytest.approx(expected, abs=1e-5)}
            assert t.reward == pytest.approx(own.reward - 0.5 * expected, abs=1e-5)
            assert t.messages is None and t.ref_logprobs_T is not None
    assert (await store.job(job)).state is not JobState.FAILED


async def test_reward_models_score_the_policies_that_they_name(
    bus: Bus, store: Store, small: Path, judge: Path
) -> None:
    """One classifier in two roles: it raises the reward of one policy and lowers that of another."""
    judges = [
        {"base": str(judge), "name": "more", "weight": 0.5, "policies": ["a"]},
        {"base": str(judge), "name": "less", "weight": -2.0, "policies": ["b"]},
    ]
    policies: dict[str, Any] = {"a": {"algorithm": {"kl_coef": 0.1}}, "b": {}, "c": {}}
    seats = {name: name for name in policies}
    job = await add_job(store, str(small), {"policies": policies, "seats": seats, "reward_models": judges})
    (group,) = of_job(job, 1)
    rows = [
        msgspec.structs.replace(t, policy=name, messages=said("1 + 1?", name) if name in "ab" else None)
        for t, name in zip(group.trajectories, "abcb", strict=True)
    ]
    await send(bus, msgspec.structs.replace(group, trajectories=rows))
    async with running(bus, store) as service:
        await passed(bus, job, 1)
        assert len(service.cache) == 2, "the judge once, and the reference"
    (found,) = await bus.stored(GROUP, job=job)
    found.check()
    for row, t in zip(rows, found.trajectories, strict=True):
        judged = {"a": ("more", 0.5), "b": ("less", -2.0)}.get(t.policy)
        score = plain_score(judge, said("1 + 1?", t.policy), 0) if judged else 0.0
        assert t.scores == ({judged[0]: pytest.approx(score, abs=1e-5)} if judged else {})
        assert t.reward == pytest.approx(row.reward + (judged[1] * score if judged else 0.0), abs=1e-5)
        assert t.messages is None and (t.ref_logprobs_T is not None) == (t.policy == "a")


def test_the_template_of_a_judge_is_read_where_transformers_puts_it(judge: Path) -> None:
    """What the scheduler looks for at submission."""
    assert (judge / "chat_template.jinja").exists()
    assert json.loads((judge / "config.json").read_text())["architectures"] == ["Qwen3ForSequenceClassification"]
