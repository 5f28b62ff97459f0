"""A whole episode with tools: what a model is told, says and sees, token by token, from the template to the reward."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest

from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.envs.runtime.tools.tool_factory import ToolFactory
from opentinker.services.rollout_worker.episode import Episode
from opentinker.services.rollout_worker.seat_map import SeatMap
from opentinker.shared.config import Settings
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import CloseSession, OpenSession, SessionReply, StepSession
from opentinker.shared.types.trajectories import Trajectory
from tests.support.factories import make_spec, make_ticket
from tests.unit.rollout_worker.scripted_episode import Script
from tests.unit.rollout_worker.test_tool_calls import renderer_of, spoken


class Near:
    """The environment side of an episode, without a bus."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions

    async def open(self, request: OpenSession, importing: object = None) -> SessionReply:
        return await self.sessions.open(msgspec.structs.replace(request, answer_within_s=60.0))

    async def step(self, worker: str, request: StepSession) -> SessionReply:
        return await self.sessions.step(msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=StepSession))

    async def close(self, *, worker: str, session: str) -> None:
        await self.sessions.close(CloseSession(session=session))


@pytest.fixture
async def near() -> AsyncIterator[Near]:
    shop = ToolFactory(Settings())
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=False), tool_factory=shop)
    yield Near(sessions)
    await sessions.drain(0.01)
    await shop.close()


async def play(near: Near, answers: list[str], **spec: Any) -> tuple[Trajectory, str, list[str]]:
    """The trajectory, all of it as text, and what was sampled."""
    renderer, tokenizer = renderer_of("hermes")
    engine: Any = Script([spoken(text) for text in answers], context_length=100_000)
    job = make_spec(rollout__max_tokens=10_000, rollout__max_turns=8, **spec)
    (trajectory,) = await Episode(job, make_ticket(), 0, SeatMap.single(job, engine, renderer), near).run()
    trajectory.check()
    starts = [turn.start for turn in trajectory.turns]
    assert [asked for asked, _ in engine.asked] == [list(trajectory.ids[:start]) for start in starts]
    sampled = [tokenizer.decode(trajectory.ids[turn.start : turn.end]) for turn in trajectory.turns]
    assert np.flatnonzero(trajectory.mask).tolist() == [
        place for turn in trajectory.turns for place in range(turn.start, turn.end)
    ]
    return trajectory, str(tokenizer.decode(trajectory.ids)), sampled


CALCULATE = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2 + 2"}}\n</tool_call>'


async def test_an_episode_with_the_environment_s_tool_has_exact_tokens_and_masks(near: Near) -> None:
    trajectory, text, sampled = await play(near, ["I count.\n" + CALCULATE, "4"], environment__name="tool_calc")
    assert sampled == [f"I count.\n{CALCULATE}<|im_end|>", "4<|im_end|>"]
    assert '"name": "calculate"' in text[: text.index("I count.")]
    between = text[text.index(sampled[0]) + len(sampled[0]) : -len(sampled[1])]
    assert between == ("\n<|im_start|>user<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.ending == Ending.ENV_DONE
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0]
    assert trajectory.metrics == {"exact": 0.0, "helped": 0.0, "tool_calls": 1.0, "tool_errors": 0.0}


async def test_words_before_a_call_are_told_beside_it(near: Near) -> None:
    told: list[StepSession] = []

    class Listening(Near):
        async def step(self, worker: str, request: StepSession) -> SessionReply:
            told.append(request)
            return await super().step(worker, request)

    await play(Listening(near.sessions), ["I count.\n" + CALCULATE, "4"], environment__name="tool_calc")
    assert [request.words for request in told] == ["I count.", ""]


PYTHON = '<tool_call>\n{"name": "python", "arguments": {"code": "%s"}}\n</tool_call>'


async def test_gsm8k_with_the_python_tool_takes_calls_and_mistakes_and_grades_the_answer(near: Near) -> None:
    answers = [PYTHON % "x = 48 // 2", PYTHON % "x + 48", "<tool_call>python(72)</tool_call>", "So it is #### 72"]
    trajectory, text, _ = await play(near, answers, environment__name="gsm8k", environment__tools=[{"type": "python"}])
    assert "<tool_response>\n72\n</tool_response>" in text
    assert "the tool call is not valid JSON" in text and "A tool is called like this: <tool_call>" in text
    assert (trajectory.reward, trajectory.ending) == (1.0, Ending.ENV_DONE)  # the first row's answer
    assert trajectory.metrics["exact"] == 1.0
    assert (trajectory.metrics["tool_calls"], trajectory.metrics["tool_errors"]) == (3.0, 1.0)


async def test_an_episode_that_only_calls_ends_with_its_tool_turns(near: Near) -> None:
    trajectory, text, sampled = await play(
        near, [CALCULATE] * 3, environment__name="tool_calc", environment__tool_turns=2
    )
    assert len(sampled) == 3 and trajectory.ending == Ending.ENV_DONE
    assert text.count("No more tools can be called in this episode") == 1
