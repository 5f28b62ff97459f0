"""Turns that cannot be trained are left out alone, with a reason; forced calls are begun for the policy and trained."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from openai import AsyncOpenAI

from opentinker.services.rollout_worker.episode import Episode
from opentinker.services.rollout_worker.episode_protocol import EpisodeFailed
from opentinker.services.rollout_worker.seat_map import SeatMap
from opentinker.services.trainer.algorithm.credit_assignment import assign
from opentinker.services.trainer.batch.batch_metrics import batch_metrics
from opentinker.services.trainer.rollout_log import _view
from opentinker.shared.spec import AlgorithmSpec
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import Policy
from opentinker.shared.types.trajectories import Group, Trajectory
from tests.support.agents.agent_loops import SCHEMA, TOOL
from tests.support.agents.agent_talk import Direct, Scripted
from tests.support.factories import V0, make_spec, make_ticket
from tests.unit.rollout_worker.scripted_episode import Script
from tests.unit.rollout_worker.test_tool_calls import renderer_of, spoken

TOOLS: Any = [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
NO_SCHEMA = "it was sampled under a JSON schema, which the trainer does not know"


def turns_of(*texts: str, bad: Sequence[int] = ()) -> Script:
    """An engine that says these texts; those in `bad` with a token without a finite logprob."""
    said = [spoken(text, -math.inf if place in bad else -0.25) for place, text in enumerate(texts)]
    return Script(said, context_length=4000)


async def played(talk: Any, engine: Any, index: int = 0, *, is_trained: bool = True) -> list[Trajectory]:
    renderer, _ = renderer_of("hermes")
    agent: Any = Scripted(talk)
    agent.policy = Policy(model="m", context_length=4000)
    job = make_spec(rollout__max_turns=9, rollout__max_tokens=2000, rollout__transcripts=64)
    episode = Episode(job, make_ticket(), index, SeatMap.single(job, engine, renderer), Direct(agent))
    episode.is_trained = is_trained
    found = await episode.run()
    for trajectory in found:
        trajectory.check()
    return found


def sampled(trajectory: Trajectory) -> str:
    _, tokenizer = renderer_of("hermes")
    return str(tokenizer.decode([int(i) for i, m in zip(trajectory.ids, trajectory.mask, strict=True) if m]))


async def three(model: AsyncOpenAI, **second: Any) -> list[str]:
    """Three turns of one conversation; `second` are options of the second."""
    said: list[Any] = []
    for n, options in enumerate(({}, second, {})):
        said.append({"role": "user", "content": f"{n}?"})
        answer = await model.chat.completions.create(model="m", messages=said, **options)
        said.append({"role": "assistant", "content": answer.choices[0].message.content})
    return [message["content"] for message in said[1::2]]


async def test_a_turn_without_a_finite_logprob_is_left_out_alone() -> None:
    (one,) = await played(three, turns_of("one", "two", "three", bad=[1]))
    assert sampled(one) == "one<|im_end|>three<|im_end|>" and "two" in renderer_of("hermes")[1].decode(one.ids)
    reason = "the engine gave no finite logprob for one of its tokens"
    assert [turn.untrainable for turn in one.turns] == ["", reason, ""]
    assert [turn.end - turn.start for turn in one.turns] == [4, 0, 6] and one.reward == 1.0
    assert one.logprobs[one.mask == 1].tolist() == [-0.5] * 3 + [-0.25] + [-0.5] * 5 + [-0.25]
    assert not one.logprobs[one.mask == 0].any()


async def test_a_turn_under_a_schema_is_guided_and_left_out_with_the_reason_in_the_transcript() -> None:
    engine = turns_of("one", '{"a": 1}', "three")
    (one,) = await played(lambda model: three(model, response_format=FORMAT), engine)
    structures = [sampling.structure for _, sampling in engine.asked]
    assert [bool(structure) for structure in structures] == [False, True, False]
    assert json.loads(structures[1])["format"] == {"type": "json_schema", "json_schema": SCHEMA}
    assert sampled(one) == "one<|im_end|>three<|im_end|>"
    assert [turn.untrainable for turn in one.turns] == ["", NO_SCHEMA, ""]
    said = [message for message in _view(one, None)["messages"] if message["role"] == "assistant"]
    assert [(message["content"], message.get("untrainable")) for message in said] == [
        ("one", None),
        ('{"a": 1}', NO_SCHEMA),
        ("three", None),
    ]


async def test_what_a_stream_without_trained_tokens_has_earned_is_paid_to_the_seat_s_last_turn() -> None:
    async def talk(model: AsyncOpenAI) -> None:
        for text, options in (("a", {}), ("b", {"response_format": FORMAT})):
            said: Any = [{"role": "user", "content": text}]
            await model.chat.completions.create(model="m", messages=said, **options)

    (one,) = await played(talk, turns_of("one", '{"a": 1}'))
    assert (sampled(one), one.reward, [turn.reward for turn in one.turns]) == ("one<|im_end|>", 1.0, [1.0])


async def test_an_episode_of_untrainable_turns_alone_fails_with_the_reason() -> None:
    async def talk(model: AsyncOpenAI) -> None:
        said: Any = [{"role": "user", "content": "a"}]
        await model.chat.completions.create(model="m", messages=said, response_format=FORMAT)

    with pytest.raises(EpisodeFailed, match="no turn can be trained: it was sampled under a JSON schema") as failed:
        await played(talk, turns_of("{}"))
    assert failed.value.ending == Ending.UNTRAINABLE and failed.value.ending.failed
    (one,) = await played(talk, turns_of("{}"), is_trained=False)  # an evaluation's
    assert (sampled(one), one.turns[0].untrainable, one.reward) == ("{}<|im_end|>", "", 1.0)


@pytest.mark.parametrize(
    ("choice", "begun", "rest"),
    [
        ("required", '<tool_call>\n{"name": "', 'add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
        (
            {"type": "function", "function": {"name": "add"}},
            '<tool_call>\n{"name": "add", "arguments":',
            ' {"a": 1, "b": 2}}\n</tool_call>',
        ),
    ],
)
async def test_a_forced_call_is_begun_for_the_policy_and_what_it_samples_is_trained(
    choice: Any, begun: str, rest: str
) -> None:
    async def talk(model: AsyncOpenAI) -> Any:
        said: list[Any] = [{"role": "user", "content": "1+2"}]
        first = await model.chat.completions.create(model="m", messages=said, tools=TOOLS, tool_choice=choice)
        (call,) = first.choices[0].message.tool_calls or []
        said.append(first.choices[0].message.model_dump(include={"role", "content", "tool_calls"}))
        said.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        await model.chat.completions.create(model="m", messages=said, tools=TOOLS)
        return call

    engine = turns_of(rest, "It is 3.")
    (one,) = await played(talk, engine)
    _, tokenizer = renderer_of("hermes")
    assert tokenizer.decode(engine.asked[0][0]).endswith(f"<|im_start|>assistant\n{begun}")
    assert sampled(one) == f"{rest}<|im_end|>It is 3.<|im_end|>" and [t.untrainable for t in one.turns] == ["", ""]
    assert begun + rest in tokenizer.decode(one.ids) and engine.asked[0][1].structure == ""


async def test_advantages_of_a_group_with_an_untrainable_turn_are_those_of_its_other_turns() -> None:
    group_of = [await played(three, turns_of("one", "two", "three", bad=bad), n) for n, bad in enumerate(([1], []))]
    trajectories = [t for sample in group_of for t in sample]
    group = Group(job="j", seq=0, environment="e", worker="w", trajectories=trajectories)
    for advantage in ("grpo", "per_turn"):
        credit = assign([group], AlgorithmSpec(advantage=advantage))
        assert [len(values) for values in credit.advantages_S] == [10, 14]
    assert batch_metrics([group], V0)["turns/untrainable"] == 1 / 6
